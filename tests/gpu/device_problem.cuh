// SPDX-License-Identifier: Apache-2.0
// What the stand-alone kernel check and kernel bench share: device memory, random data, routing.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <vector>

#include "backend/cuda/plan/plan.h"
#include "backend/cuda/rows/combine.h"
#include "backend/cuda/sm90/row_gemm.h"

#define CHECK_CUDA(call)                                                                    \
  do {                                                                                      \
    const cudaError_t error_ = (call);                                                      \
    if (error_ != cudaSuccess) {                                                            \
      std::printf("%s:%d %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(error_)); \
      std::exit(3);                                                                         \
    }                                                                                       \
  } while (0)

namespace moec::test {

using Half = __nv_bfloat16;

// Where arrays lie.
struct DeviceMemory {
  cudaError_t (*take)(void** pointer, size_t bytes);
  cudaError_t (*give)(void* pointer);
};
inline DeviceMemory device_memory = {
    [](void** pointer, size_t bytes) { return cudaMalloc(pointer, bytes); }, cudaFree};

// `guard` bytes of 0xff (NaN in every float type) lie before and after the data.
template <typename T>
class DeviceArray {
 public:
  static constexpr size_t kGuard = 4096;
  DeviceArray() = default;
  explicit DeviceArray(size_t count) : count_(count) {
    void* base = nullptr;
    CHECK_CUDA(device_memory.take(&base, count * sizeof(T) + 2 * kGuard));
    base_ = static_cast<unsigned char*>(base);
    poison();
  }
  DeviceArray(DeviceArray&& other) noexcept { *this = std::move(other); }
  DeviceArray& operator=(DeviceArray&& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(count_, other.count_);
    return *this;
  }
  ~DeviceArray() { device_memory.give(base_); }

  T* data() const { return reinterpret_cast<T*>(base_ + kGuard); }
  size_t size() const { return count_; }
  void poison() { CHECK_CUDA(cudaMemset(base_, 0xff, count_ * sizeof(T) + 2 * kGuard)); }
  bool guards_intact() const {
    std::vector<unsigned char> bytes(2 * kGuard);
    CHECK_CUDA(cudaMemcpy(bytes.data(), base_, kGuard, cudaMemcpyDefault));
    CHECK_CUDA(cudaMemcpy(bytes.data() + kGuard, base_ + kGuard + count_ * sizeof(T), kGuard,
                          cudaMemcpyDefault));
    return std::all_of(bytes.begin(), bytes.end(), [](unsigned char b) { return b == 0xff; });
  }
  std::vector<T> host() const {
    std::vector<T> values(count_);
    CHECK_CUDA(cudaMemcpy(values.data(), data(), count_ * sizeof(T), cudaMemcpyDefault));
    return values;
  }
  void assign(const std::vector<T>& values) {
    CHECK_CUDA(cudaMemcpy(data(), values.data(), values.size() * sizeof(T), cudaMemcpyDefault));
  }

 private:
  unsigned char* base_ = nullptr;
  size_t count_ = 0;
};

__device__ inline float random_normal(uint64_t seed, uint64_t index) {
  uint64_t z = seed * 0x9e3779b97f4a7c15ull + index * 0xbf58476d1ce4e5b9ull + 0x94d049bb133111ebull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  z ^= z >> 31;
  const float u = (float(z >> 40) + 0.5f) * 0x1p-24f, v = float(z & 0xffffff) * 0x1p-24f;
  return sqrtf(-2.0f * logf(u)) * cospif(2.0f * v);
}

template <typename T>
__global__ void fill_normal(T* out, int64_t count, float scale, uint64_t seed) {
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    out[i] = T(scale * random_normal(seed, i));
  }
}
template <typename T>
DeviceArray<T> normal_array(int64_t count, float scale, uint64_t seed) {
  DeviceArray<T> array(count);
  fill_normal<<<1024, 256>>>(array.data(), count, scale, seed);
  CHECK_CUDA(cudaGetLastError());
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
  cuda::RowGemmArgs row_gemm(cuda::RowGemm op, int64_t features, int64_t k_size) const {
    cuda::RowGemmArgs a = {};
    a.op = op;
    a.dtype = MOEC_BF16;
    a.features = features;
    a.k_size = k_size;
    a.parts = 1;
    a.params.row_token = plan.row_token;
    a.params.group_offsets = plan.group_offsets;
    a.params.num_experts = plan.num_experts;
    a.params.row_weight = plan.row_weight;
    a.params.max_rows = plan.max_rows;
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

  PlanView plan;
  PlanSource source = {};

 private:
  DeviceArray<int32_t> ids_, ints_;
  DeviceArray<float> floats_, given_;
  DeviceArray<char> scratch_;
};

template <typename T>
std::vector<T> download(const T* from, int64_t count) {
  std::vector<T> values(count);
  CHECK_CUDA(cudaMemcpy(values.data(), from, count * sizeof(T), cudaMemcpyDefault));
  return values;
}

}  // namespace moec::test
