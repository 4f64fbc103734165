// SPDX-License-Identifier: Apache-2.0
// Problems of given sizes that the kernel tests and the kernel benches share: random arrays, random
// routing, a plan on the device.
#pragma once

#include <moec/moec.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "backend/cuda/plan/plan.h"
#include "backend/cuda/rows/combine.h"
#include "backend/cuda/sm90/row_gemm.h"
#include "gpu/device_memory.h"
#include "gpu/plain.h"

namespace moec::test {

template <typename T>
DeviceArray<T> normal_array(int64_t count, float scale, uint64_t seed) {
  DeviceArray<T> array(count);
  fill_normal(array.data(), count, scale, seed);
  return array;
}

struct Shape {
  const char* name;
  int hidden, inter, experts, top_k;
};

// Expert ids of T tokens: the top_k largest of normal logits with a mild bias for each expert.
inline std::vector<int32_t> random_routing(const Shape& shape, int64_t tokens, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> bias(shape.experts), logits(shape.experts);
  for (float& b : bias) b = 0.3f * normal(random);
  std::vector<int32_t> order(shape.experts), ids(tokens * shape.top_k);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int e = 0; e < shape.experts; ++e) logits[e] = bias[e] + normal(random);
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + shape.top_k, order.end(),
                      [&](int a, int b) { return logits[a] > logits[b]; });
    std::copy_n(order.begin(), shape.top_k, ids.begin() + t * shape.top_k);
  }
  return ids;
}

// A plan and the memory it lies in.
class DevicePlan {
 public:
  DevicePlan(const std::vector<int32_t>& ids, const Shape& shape, int align = 1,
             int64_t capacity = 0)
      : ids_(ids.size()), ints_(0), floats_(0) {
    const int64_t tokens = int64_t(ids.size()) / shape.top_k, experts = shape.experts;
    const int64_t rows = int64_t(ids.size()) + (align > 1 ? experts * (align - 1) : 0);
    ids_.assign(ids);
    ints_ = DeviceArray<int32_t>(2 * experts + 1 + 2 * rows + 2 * ids.size() + 4);
    floats_ = DeviceArray<float>(rows + ids.size());
    given_ = normal_array<float>(ids.size(), 1.0f, 77);
    scratch_ = DeviceArray<char>(cuda::plan_scratch_bytes(shape.experts));
    int32_t* next = ints_.data();
    const auto take = [&](int64_t count) { return std::exchange(next, next + count); };
    plan.num_tokens = tokens;
    plan.max_rows = rows;
    plan.capacity = capacity;
    plan.num_experts = plan.num_local = shape.experts;
    plan.top_k = shape.top_k;
    plan.align = align;
    plan.drop = capacity > 0 ? MOEC_DROP_BY_POSITION : MOEC_DROP_NONE;
    plan.counts = take(experts);
    plan.group_offsets = take(experts + 1);
    plan.row_token = take(rows);
    plan.row_slot = take(rows);
    plan.assignment_row = take(ids.size());
    plan.expert_ids = take(ids.size());
    plan.totals = take(4);
    plan.row_weight = floats_.data();
    plan.routing_weights = floats_.data() + rows;
    plan.scratch = scratch_.data();
    source.expert_ids = {ids_.data(), MOEC_I32};
    source.routing_weights = given_.data();
  }
  void build(cudaStream_t stream = nullptr) const {
    CHECK_CUDA(cuda::launch_plan(source, plan, stream));
  }

  // A row GEMM of bf16 over its rows.
  cuda::RowGemmProblem row_gemm(cuda::RowGemm op, int64_t features, int64_t k_size) const {
    cuda::RowGemmProblem a = {};
    a.op = op;
    a.dtype = MOEC_BF16;
    a.features = features;
    a.k_size = k_size;
    a.parts = 1;
    a.row_token = plan.row_token;
    a.group_offsets = plan.group_offsets;
    a.num_experts = plan.num_experts;
    a.row_weight = plan.row_weight;
    a.max_rows = plan.max_rows;
    return a;
  }
  // The sum of a token's rows.
  cuda::CombineParams combine(int64_t hidden, const Half* rows, Half* y) const {
    cuda::CombineParams p = {};
    p.num_tokens = plan.num_tokens;
    p.hidden = hidden;
    p.num_experts = plan.num_experts;
    p.top_k = plan.top_k;
    p.rows = rows;
    p.assignment_row = plan.assignment_row;
    p.expert_ids = plan.expert_ids;
    p.routing_weights = plan.routing_weights;
    p.scale = 1.0f;
    p.y = y;
    return p;
  }

  // The routing weights that the plan is built from, and those that it holds.
  std::vector<float> given_weights() const { return given_.host(); }
  std::vector<float> routing_weights() const {
    return download(plan.routing_weights, int64_t(given_.size()));
  }

  PlanView plan;
  PlanSource source = {};

 private:
  DeviceArray<int32_t> ids_, ints_;
  DeviceArray<float> floats_, given_;
  DeviceArray<char> scratch_;
};

}  // namespace moec::test
