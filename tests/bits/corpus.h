// SPDX-License-Identifier: Apache-2.0
// A fixed corpus of calls through moec.h. Each case draws its inputs from its own name, starts
// every output and every workspace as poison, and prints `CASE NAME HASH` for each output, so that
// two libraries, or two paths of one, are compared by diff.
#pragma once

#include <moec/moec.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "support/device.h"

namespace moec::bits {

using Shape = std::vector<int64_t>;

template <typename Struct>
Struct sized() {
  Struct s;
  moec_struct_init(&s, sizeof(s));
  return s;
}

inline int64_t elements(const Shape& shape) {
  int64_t count = 1;
  for (const int64_t extent : shape) count *= extent;
  return count;
}

// The call that a library refuses, and its status: both belong to the corpus.
struct Refusal : std::runtime_error {
  Refusal(const char* call, moec_status code) : std::runtime_error(call), status(code) {}
  moec_status status;
};
inline void require(const char* call, moec_status status) {
  if (status != MOEC_OK) throw Refusal(call, status);
}

template <auto Free>
struct Deleter {
  template <typename T>
  void operator()(T* handle) const {
    Free(handle);
  }
};
using Context = std::unique_ptr<moec_context, Deleter<moec_context_free>>;
using Router = std::unique_ptr<moec_router, Deleter<moec_router_free>>;
using Plan = std::unique_ptr<moec_plan, Deleter<moec_plan_free>>;
using Weights = std::unique_ptr<moec_weights, Deleter<moec_weights_free>>;
using Experts = std::unique_ptr<moec_experts, Deleter<moec_experts_free>>;
using Layer = std::unique_ptr<moec_layer, Deleter<moec_layer_free>>;

template <typename Owner, typename Create, typename... Arguments>
Owner make(const char* call, Create create, Arguments... arguments) {
  typename Owner::pointer handle = nullptr;
  require(call, create(arguments..., &handle));
  return Owner(handle);
}

// splitmix64 (Steele, Lea, Flood 2014), seeded by a name.
class Draw {
 public:
  explicit Draw(const std::string& name);
  uint64_t bits();
  int64_t below(int64_t n) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(n)); }
  // Triangular on (-1,1), exact in a double.
  double value() {
    const uint64_t z = bits();
    return (static_cast<double>(z >> 32) - static_cast<double>(z & 0xFFFFFFFF)) * 0x1p-32;
  }

 private:
  uint64_t state_;
};

struct Numbers {  // how an input is drawn
  double scale = 1, offset = 0;
  double step = 0;  // above 0: multiples of it, so that many are equal
};

class Case {
 public:
  Case(const moec_context* context, std::string name);
  const moec_context* context() const { return context_; }
  Draw& draw() { return draw_; }

  moec_tensor input(moec_dtype dtype, const Shape& shape, const Numbers& numbers = {});
  moec_tensor input_ids(moec_dtype dtype, const Shape& shape, const std::vector<int64_t>& ids);
  // Drawn integers in [low, high).
  moec_tensor input_ids(moec_dtype dtype, const Shape& shape, int64_t low, int64_t high);
  moec_tensor output(const std::string& name, moec_dtype dtype, const Shape& shape);
  // An output that holds drawn numbers before the call.
  moec_tensor sum(const std::string& name, moec_dtype dtype, const Shape& shape);
  moec_buffer output_bytes(const std::string& name, uint64_t bytes);
  moec_buffer workspace(uint64_t bytes);

  void number(const std::string& name, uint64_t value) const;
  // A size, base and per token.
  void number(const std::string& name, const moec_size& size) const;
  void refused(const Refusal& refusal) const;
  // Waits, then prints a line for each output.
  void finish();

 private:
  moec_tensor hold(moec_dtype dtype, const Shape& shape, const void* from);
  void line(const std::string& name, const char* text) const;

  const moec_context* context_;
  std::string name_;
  Draw draw_;
  std::deque<test::DeviceBuffer> held_;
  std::vector<std::pair<std::string, const test::DeviceBuffer*>> outputs_;
};

// Runs `body(case)` and prints what it gave, or where it was refused.
template <typename Body>
void run_case(const moec_context* context, const std::string& name, Body body) {
  Case c(context, name);
  try {
    body(c);
  } catch (const Refusal& refusal) {
    c.refused(refusal);
    c.finish();
  }
}

struct DtypeName {
  const char* name;
  moec_dtype dtype;
};
constexpr DtypeName kReals[] = {{"f32", MOEC_F32}, {"f16", MOEC_F16}, {"bf16", MOEC_BF16}};

inline uint64_t bytes_for(const moec_size& size, int64_t tokens) {
  return size.base + static_cast<uint64_t>(tokens) * size.per_token;
}

void gate_cases(const moec_context* context);
void route_cases(const moec_context* context);
void plan_cases(const moec_context* context);
void loss_cases(const moec_context* context);
void experts_cases(const moec_context* context, bool is_cuda);
void layer_cases(const moec_context* context);

}  // namespace moec::bits
