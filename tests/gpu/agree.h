// SPDX-License-Identifier: Apache-2.0
// One call through the public API on a CPU context and on a CUDA one: the same inputs, outputs that
// start as NaN, and a comparison of each output bit for bit or by its worst row.
#pragma once

#include <moec/moec.h>

#include <deque>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "gpu/device_memory.h"
#include "gpu/harness.h"
#include "support/draw.h"
#include "support/guard.h"
#include "support/handles.h"
#include "support/tensors.h"

namespace moec::test {

struct Values {  // a tensor on the host, before it is rounded to its type
  moec_dtype dtype = 0;
  std::vector<int64_t> shape;
  std::vector<double> of;
};

// Random tensors of one case; a case is repeated by its number.
class TensorDraw : public Draw {
 public:
  using Draw::Draw;
  moec_dtype real() { return one_of<moec_dtype>({MOEC_F32, MOEC_BF16, MOEC_F16}); }
  // Normal values; step > 0 rounds them to its multiples, so that many are equal.
  Values normals(moec_dtype dtype, std::vector<int64_t> shape, double scale, double step = 0);
  // Integers in [low, high).
  Values integers(moec_dtype dtype, std::vector<int64_t> shape, int64_t low, int64_t high);
};

// By how much an output may differ. rows 0: bit for bit, but any NaN equals any other; else the
// error of each row as support/compare.h has it.
struct Bound {
  double rows = 0, floor = kRowFloor;
};
constexpr Bound kAnything = {std::numeric_limits<double>::infinity()};  // a test says more
struct Result {
  std::string name;
  moec_dtype dtype;
  std::vector<int64_t> shape;
  std::vector<uint8_t> bytes;
  Bound bound;

  std::vector<double> values() const { return decode(bytes, dtype); }
};

// One context and the memory of one call in it.
class Side {
 public:
  explicit Side(int32_t device, uint32_t flags = 0);

  const moec_context* context() const { return context_.get(); }
  moec_tensor in(const Values& values);
  // An output: NaN before the call, or `initial`.
  moec_tensor out(const std::string& name, moec_dtype dtype, const std::vector<int64_t>& shape,
                  Bound bound = {}, const Values* initial = nullptr);
  moec_buffer buffer(uint64_t bytes);  // NaN
  // A borrowed view, bit for bit.
  void record(const std::string& name, const moec_tensor& tensor);
  // Waits, reads every output, sees that nothing beside the buffers was written, and forgets the
  // memory of the call.
  std::vector<Result> results();
  void forget();

 private:
  struct Memory {  // of the CPU or of a GPU
    std::unique_ptr<GuardedBuffer> host;
    DeviceBytes device;
  };
  struct Output {
    std::string name;
    moec_tensor tensor;
    Bound bound;
  };
  void* allocate(size_t bytes);
  moec_tensor tensor(const std::vector<int64_t>& shape, moec_dtype dtype, const Values* values);
  void copy(void* to, const void* from, size_t bytes) const;

  int32_t device_;
  Context context_;
  std::deque<Memory> memory_;
  std::vector<Output> outputs_;
};

// Expects the same outputs.
void expect_agreement(const std::vector<Result>& cpu, const std::vector<Result>& gpu);

// The device that is compared with the CPU.
inline int32_t other_device() {
  return compares_cpu_with_itself() ? int32_t(MOEC_CPU) : int32_t(MOEC_CUDA);
}
// How many cases of a kind are drawn: MOEC_MIXED_CASES, or as many as it says.
inline int agree_cases(int otherwise) {
  return mixed_cases(is_small_run() ? otherwise / 10 : otherwise);
}

// Tests on both sides. The parameter is the number of a case.
class Agree : public testing::TestWithParam<int> {
 protected:
  static void SetUpTestSuite() {
    cpu_ = std::make_unique<Side>(MOEC_CPU);
    gpu_ = std::make_unique<Side>(other_device());
  }
  static void TearDownTestSuite() {
    cpu_.reset();
    gpu_.reset();
  }
  void TearDown() override {  // what a call that failed has left
    if (cpu_) cpu_->forget();
    if (gpu_) gpu_->forget();
  }
  uint64_t number() const { return uint64_t(GetParam()); }
  // What run(side) returns on both sides.
  template <typename Run>
  static void expect_same(const std::string& what, Run run) {
    SCOPED_TRACE(what);
    const auto cpu = run(*cpu_);
    expect_agreement(cpu, run(*gpu_));
  }

  static inline std::unique_ptr<Side> cpu_, gpu_;
};

}  // namespace moec::test
