// SPDX-License-Identifier: Apache-2.0
#include "gpu/plain.h"

#include "gpu/device_memory.h"

namespace moec::test {
namespace {

__device__ float random_normal(uint64_t seed, uint64_t index) {
  uint64_t z = seed * 0x9e3779b97f4a7c15ull + index * 0xbf58476d1ce4e5b9ull + 0x94d049bb133111ebull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  z ^= z >> 31;
  const float u = (float(z >> 40) + 0.5f) * 0x1p-24f, v = float(z & 0xffffff) * 0x1p-24f;
  return sqrtf(-2.0f * logf(u)) * cospif(2.0f * v);
}

template <typename T>
__global__ void fill(T* out, int64_t count, float scale, uint64_t seed) {
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    out[i] = T(scale * random_normal(seed, i));
  }
}
template <typename T>
void launch_fill(T* out, int64_t count, float scale, uint64_t seed) {
  fill<<<1024, 256>>>(out, count, scale, seed);
  CHECK_CUDA(cudaGetLastError());
}

// The start of row r, or null for a row of zeros.
__device__ const Half* start(const PlainRows& rows, int r) {
  const int at = rows.tokens ? rows.tokens[r] : r;
  return at < 0 ? nullptr : rows.values + at * rows.stride;
}

__global__ void gemm(const int* rows, const int* experts, int64_t outputs, int features, int k_size,
                     PlainRows a, PlainMatrix w, float* out) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= outputs) return;
  const int64_t at = i / features;
  const Half* const row = start(a, rows[at]);
  const Half* const weights = w.values + experts[at] * w.expert + i % features * w.feature;
  float sum = 0;
  for (int k = 0; k < k_size && row; ++k) {
    sum += __bfloat162float(row[k]) * __bfloat162float(weights[k * w.k_step]);
  }
  out[i] = sum;
}

__global__ void grad(int begin, int end, int m_size, int n_size, PlainRows a, PlainRows x,
                     float* out) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= int64_t(m_size) * n_size) return;
  float sum = 0;
  for (int r = begin; r < end; ++r) {
    const Half* const n = start(x, r);
    if (!n) continue;
    sum += __bfloat162float(start(a, r)[i / n_size]) * __bfloat162float(n[i % n_size]);
  }
  out[i] = sum;
}

unsigned blocks_of(int64_t outputs) {
  return unsigned((outputs + 255) / 256);
}

}  // namespace

void fill_normal(Half* out, int64_t count, float scale, uint64_t seed) {
  launch_fill(out, count, scale, seed);
}
void fill_normal(float* out, int64_t count, float scale, uint64_t seed) {
  launch_fill(out, count, scale, seed);
}

void plain_gemm(const int* rows, const int* experts, int64_t count, int features, int k_size,
                const PlainRows& a, const PlainMatrix& w, float* out) {
  const int64_t outputs = count * features;
  if (outputs == 0) return;
  gemm<<<blocks_of(outputs), 256>>>(rows, experts, outputs, features, k_size, a, w, out);
  CHECK_CUDA(cudaGetLastError());
}

void plain_grad(int begin, int end, int m_size, int n_size, const PlainRows& a, const PlainRows& x,
                float* out) {
  grad<<<blocks_of(int64_t(m_size) * n_size), 256>>>(begin, end, m_size, n_size, a, x, out);
  CHECK_CUDA(cudaGetLastError());
}

}  // namespace moec::test
