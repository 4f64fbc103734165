// SPDX-License-Identifier: Apache-2.0
// One call through the public API on a CPU context and on a CUDA one: the same inputs, outputs that
// start as NaN, and a comparison of each output bit for bit or by its worst row.
#pragma once

#include <cuda_runtime_api.h>
#include <moec/moec.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace moec::test {

[[noreturn]] void fail_call(moec_status status, const char* call);
#define MOEC_CHECK_CALL(call)                        \
  do {                                               \
    const moec_status status = (call);               \
    if (status != MOEC_OK) fail_call(status, #call); \
  } while (0)

template <class T>
T sized() {
  T value;
  moec_struct_init(&value, sizeof value);
  return value;
}

inline int64_t numel(const std::vector<int64_t>& shape) {
  int64_t count = 1;
  for (const int64_t extent : shape) count *= extent;
  return count;
}
inline int64_t size_of(moec_dtype dtype) {
  return int64_t((dtype >> 8) & 0xffu) / 8;
}

struct Values {  // a tensor on the host
  moec_dtype dtype = 0;
  std::vector<int64_t> shape;
  std::vector<char> bytes;
  double get(int64_t index) const;
  void set(int64_t index, double value);
};

// Random numbers of one case; a case is repeated by its seed.
class Draw {
 public:
  explicit Draw(uint64_t seed) : random_(seed) {}
  int64_t below(int64_t end) { return int64_t(random_() % uint64_t(end)); }
  bool chance(double p) { return double(random_() >> 11) * 0x1p-53 < p; }
  template <class T>
  T of(std::initializer_list<T> list) {
    return list.begin()[below(int64_t(list.size()))];
  }
  double normal() { return normal_(random_); }
  moec_dtype real() { return of<moec_dtype>({MOEC_F32, MOEC_BF16, MOEC_F16}); }
  // Normal values; step > 0 rounds them to its multiples, so that many are equal.
  Values normals(moec_dtype dtype, std::vector<int64_t> shape, double scale, double step = 0);
  // Integers in [low, high).
  Values integers(moec_dtype dtype, std::vector<int64_t> shape, int64_t low, int64_t high);

 private:
  std::mt19937_64 random_;
  std::normal_distribution<double> normal_;
};

struct Result {
  std::string name;
  Values values;
  double bound;  // 0: bit for bit (any NaN equals any other); else relative L2 error of each row
};

// One context and the memory of one call in it.
class Side {
 public:
  explicit Side(int32_t device, uint32_t flags = 0);
  ~Side();
  Side(const Side&) = delete;
  Side& operator=(const Side&) = delete;

  moec_context* context() const { return context_; }
  bool is_cuda() const { return device_ == MOEC_CUDA; }
  moec_tensor in(const Values& values);
  // An output: NaN before the call, or `initial`.
  moec_tensor out(const std::string& name, moec_dtype dtype, std::vector<int64_t> shape,
                  double bound = 0, const Values* initial = nullptr);
  // A borrowed view, bit for bit.
  void record(const std::string& name, const moec_tensor& tensor);
  // Waits, reads every output, and forgets the memory of the call.
  std::vector<Result> results();

 private:
  struct Output {
    std::string name;
    moec_tensor tensor;
    double bound;
  };
  void* allocate(int64_t bytes, const void* from);
  int32_t device_;
  moec_context* context_ = nullptr;
  std::vector<void*> memory_;
  std::vector<Output> outputs_;
};

// Prints what differs; true if nothing does.
bool agree(const std::string& what, const std::vector<Result>& cpu, const std::vector<Result>& gpu);

// Sets of cases: each returns the number of cases that failed.
int check_routers(Side& cpu, Side& gpu, uint64_t seed, int cases);
int check_gates(Side& cpu, Side& gpu, uint64_t seed, int cases);
int check_plans(Side& cpu, Side& gpu, uint64_t seed, int cases);
int check_choice_plans(Side& cpu, Side& gpu, uint64_t seed, int cases);
int check_rows(Side& cpu, Side& gpu, uint64_t seed, int cases);
int check_losses(Side& cpu, Side& gpu, uint64_t seed, int cases);
int check_wrong_ids(int32_t device);

}  // namespace moec::test
