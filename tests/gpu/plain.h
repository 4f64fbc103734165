// SPDX-License-Identifier: Apache-2.0
// What kernels are compared with: plain loops on the device, one thread an output. And random data.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <vector>

namespace moec::test {

using Half = __nv_bfloat16;

// Values of any type of the device, and a value as bf16 holds it.
template <typename T>
std::vector<float> floats(const std::vector<T>& values) {
  std::vector<float> out(values.size());
  for (size_t i = 0; i < values.size(); ++i) out[i] = static_cast<float>(values[i]);
  return out;
}
inline float bf16(float value) {
  return __bfloat162float(__float2bfloat16(value));
}

// Normal values times `scale`, the same for the same seed.
void fill_normal(Half* out, int64_t count, float scale, uint64_t seed);
void fill_normal(float* out, int64_t count, float scale, uint64_t seed);

// Row r is at values + stride * r, or, with tokens, at values + stride * tokens[r]; a negative
// token is a row of zeros. Elements.
struct PlainRows {
  const Half* values;
  int64_t stride;
  const int* tokens = nullptr;
};

// Element (feature f, k) of expert e is at values + e * expert + f * feature + k * k_step.
// Elements.
struct PlainMatrix {
  const Half* values;
  int64_t expert, feature, k_step;

  PlainMatrix transposed() const { return {values, expert, k_step, feature}; }
  bool features_are_contiguous() const { return feature < k_step; }
  int64_t far_step() const { return feature < k_step ? k_step : feature; }
};

// out[i][f] = row rows[i] of `a` . feature f of expert experts[i]
void plain_gemm(const int* rows, const int* experts, int64_t count, int features, int k_size,
                const PlainRows& a, const PlainMatrix& w, float* out);
// out[m][n] = sum over rows r of [begin, end): a[r][m] * x[r][n], without rows of no token in x
void plain_grad(int begin, int end, int m_size, int n_size, const PlainRows& a, const PlainRows& x,
                float* out);

}  // namespace moec::test
