// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/row_math.h"

#include <algorithm>

#include "backend/cpu/gemm.h"
#include "backend/cpu/vectorised.h"
#include "core/dtype.h"
#include "math/activation.h"

namespace moec::cpu {
namespace {

template <class T>
struct RoundAs {
  float operator()(float value) const { return to_float(from_float<T>(value)); }
};

template <class Kind, class Round>
void value_loop(const moec_activation* act, const float* g, const float* u, float* out, int64_t n) {
  const moec_activation params = *act;
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i)
    out[i] = Kind::value(params, Kind::kInfo.gated ? g[i] : 0.0f, u[i], Round());
}

template <class Kind>
void slopes_loop(const moec_activation* act, float* g, float* u, float* h, int64_t n) {
  const moec_activation params = *act;
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const float gate = Kind::kInfo.gated ? g[i] : 0.0f, up = u[i];
    const math::Slopes slopes = Kind::slopes(params, gate, up);
    h[i] = Kind::value(params, gate, up, math::NoRounding());
    if constexpr (Kind::kInfo.gated) g[i] = slopes.gate;
    u[i] = slopes.up;
  }
}

void add_loop(float* y, const float* x, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) y[i] += x[i];
}
void scale_loop(float* y, float a, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] *= a;
}
void add_scaled_loop(float* y, float a, const float* x, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) y[i] += a * x[i];
}
void multiply_scaled_loop(float* y, float a, const float* x, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) y[i] *= a * x[i];
}

void dot_loop(const float* a, const float* b, int64_t n, float* result) {
  constexpr int kSums = 16;
  float sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums <= n; i += kSums)
    for (int j = 0; j < kSums; ++j) sums[j] += a[i + j] * b[i + j];
  for (int j = 0; i + j < n; ++j) sums[j] += a[i + j] * b[i + j];
  for (int width = kSums / 2; width > 0; width /= 2)
    for (int j = 0; j < width; ++j) sums[j] += sums[j + width];
  *result = sums[0];
}

using ValueFn = void (*)(const moec_activation*, const float*, const float*, float*, int64_t);
using SlopesFn = void (*)(const moec_activation*, float*, float*, float*, int64_t);

template <class Kind, class Round>
constexpr ValueFn kValue = [](auto... args) { vectorised<value_loop<Kind, Round>>(args...); };
template <class Kind>
constexpr SlopesFn kSlopes = [](auto... args) { vectorised<slopes_loop<Kind>>(args...); };

struct Table {
  ValueFn value[math::Activations::kCount][kStepRoundings] = {};
  SlopesFn slopes[math::Activations::kCount] = {};

  constexpr Table() {
    math::Activations::for_each([this]<class Kind>() {
      ValueFn* const row = value[Kind::kInfo.kind];
      row[int(StepRounding::kNone)] = kValue<Kind, math::NoRounding>;
      row[int(StepRounding::kBf16)] = kValue<Kind, RoundAs<bf16>>;
      row[int(StepRounding::kF16)] = kValue<Kind, RoundAs<f16>>;
      slopes[Kind::kInfo.kind] = kSlopes<Kind>;
    });
  }
};
constexpr Table kTable;

}  // namespace

void activate(const moec_activation& act, StepRounding rounding, const float* g, const float* u,
              float* out, int64_t n) {
  kTable.value[act.kind][int(rounding)](&act, g, u, out, n);
}
void activation_slopes(const moec_activation& act, float* g, float* u, float* h, int64_t n) {
  kTable.slopes[act.kind](&act, g, u, h, n);
}

void add(float* y, const float* x, int64_t n) {
  vectorised<add_loop>(y, x, n);
}
void scale(float* y, float a, int64_t n) {
  vectorised<scale_loop>(y, a, n);
}
void add_scaled(float* y, float a, const float* x, int64_t n) {
  vectorised<add_scaled_loop>(y, a, x, n);
}
void multiply_scaled(float* y, float a, const float* x, int64_t n) {
  vectorised<multiply_scaled_loop>(y, a, x, n);
}
void scale_or_zero(float* y, float a, int64_t n) {
  if (a == 0.0f)
    std::fill_n(y, n, 0.0f);
  else if (a != 1.0f)
    scale(y, a, n);
}
void round_to(moec_dtype dtype, float* y, int64_t n) {
  if (dtype == MOEC_F32) return;
  constexpr int64_t kPiece = 256;
  uint16_t rounded[kPiece];
  for (int64_t i = 0; i < n; i += kPiece) {
    const int64_t count = std::min(kPiece, n - i);
    convert_from_f32(y + i, dtype, rounded, count);
    convert_to_f32(rounded, dtype, y + i, count);
  }
}
float dot(const float* a, const float* b, int64_t n) {
  float result;
  vectorised<dot_loop>(a, b, n, &result);
  return result;
}

}  // namespace moec::cpu
