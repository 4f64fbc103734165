// SPDX-License-Identifier: Apache-2.0
// The plain loops that the kernels are compared with, and how: relative L2 error of each row.
#pragma once

#include <cmath>
#include <cstdio>
#include <string>

#include "gpu/device_problem.cuh"

using namespace moec;
using namespace moec::test;

namespace {

int failures = 0;
uint64_t seed = 1;

void report(const std::string& what, double worst, double bound, const std::string& note = "") {
  const bool good = worst <= bound;  // false for NaN
  if (!good) ++failures;
  std::printf("%-4s %-58s worst row %.2e (<= %.0e) %s\n", good ? "ok" : "FAIL", what.c_str(), worst,
              bound, note.c_str());
}

// ---- plain kernels ---------------------------------------------------------------------------
// out[i][f] = sum_k a[source(rows[i])][k] * w[expert(rows[i])][f * fs + k * ks]
__global__ void plain_gemm(const int* rows, const int* experts, const int* source, int count,
                           int features, int k_size, const Half* a, int64_t lda, const Half* w,
                           int64_t es, int64_t fs, int64_t ks, float* out) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= int64_t(count) * features) return;
  const int at = int(i / features), f = int(i % features), row = rows[at];
  const int from = source ? source[row] : row;
  float sum = 0;
  for (int k = 0; k < k_size && from >= 0; ++k) {
    sum += __bfloat162float(a[from * lda + k]) *
           __bfloat162float(w[experts[at] * es + f * fs + k * ks]);
  }
  out[i] = sum;
}
// out[m][n] = sum over rows [begin, end) a[r][m] * x[token[r]][n]
__global__ void plain_grad(int begin, int end, const int* token, int m_size, int n_size,
                           const Half* a, int64_t lda, const Half* x, float* out) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= int64_t(m_size) * n_size) return;
  const int m = int(i / n_size), n = int(i % n_size);
  float sum = 0;
  for (int r = begin; r < end; ++r) {
    if (token[r] < 0) continue;
    sum += __bfloat162float(a[r * lda + m]) * __bfloat162float(x[int64_t(token[r]) * n_size + n]);
  }
  out[i] = sum;
}

template <typename T>
double row_error(const float* reference, const T* got, int64_t got_step, int count) {
  double diff = 0, norm = 0;
  for (int i = 0; i < count; ++i) {
    const double g = float(got[i * got_step]), d = g - reference[i];
    diff += d * d;
    norm += double(reference[i]) * reference[i];
  }
  return std::sqrt(diff / (norm + 1e-30));
}
float bf16(float v) {
  return __bfloat162float(__float2bfloat16(v));
}

}  // namespace
