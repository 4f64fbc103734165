// SPDX-License-Identifier: Apache-2.0
// Elementary functions in fp32 with the same bits on every host and device: IEEE operations only,
// every fused multiply-add spelled out (compile with -ffp-contract=off, nvcc -fmad=false). No
// branches, so that loops over them vectorise. Errors below 2.5 ulp; subnormal results are kept,
// but for sigmoid's.
//
// Polynomials: Chebyshev interpolants of the stated remainder on the reduced range, coefficients
// rounded to fp32.
#pragma once

#include <math.h>
#include <stdint.h>

#include "core/portable.h"

namespace moec::math {

MOEC_HD uint32_t bits_of(float value) {
  return __builtin_bit_cast(uint32_t, value);
}
MOEC_HD float float_of(uint32_t bits) {
  return __builtin_bit_cast(float, bits);
}
MOEC_HD float magnitude(float x) {
  return float_of(bits_of(x) & 0x7fffffffu);
}
MOEC_HD float with_sign(float x, float sign) {
  return float_of((bits_of(x) & 0x7fffffffu) | (bits_of(sign) & 0x80000000u));
}

inline constexpr float kLog2E = 0x1.715476p+0f;
inline constexpr float kLn2High = 0x1.62e43p-1f, kLn2Low = -0x1.05c610p-29f;

// 2^n for n in [-126, 127]
MOEC_HD float power_of_two(int32_t n) {
  return float_of(uint32_t(n + 127) << 23);
}

// x = n ln 2 + r with |r| <= ln2/2;  e^r = 1 + r + r^2 Q(r)
MOEC_HD float exp(float x) {
  x = x < -105.0f ? -105.0f : x;        // below: rounds to 0; NaN passes both
  x = x > 89.0f ? 89.0f : x;            // above: overflows to infinity
  constexpr float kRound = 0x1.8p+23f;  // adding it rounds to an integer, held in the low bits
  const float shifted = fmaf(x, kLog2E, kRound);
  const float n = shifted - kRound;
  const float r = fmaf(n, -kLn2Low, fmaf(n, -kLn2High, x));
  float q = fmaf(0x1.6d1380p-10f, r, 0x1.120de4p-7f);
  q = fmaf(q, r, 0x1.555518p-5f);
  q = fmaf(q, r, 0x1.5554dap-3f);
  q = fmaf(q, r, 0.5f);
  const float y = fmaf(q, r * r, r) + 1.0f;
  // 2^n may be subnormal or overflow: two factors that are neither
  const int32_t whole = int32_t(bits_of(shifted) - bits_of(kRound)), half = whole >> 1;
  return y * power_of_two(half) * power_of_two(whole - half);
}

// x = 2^n m with m in [sqrt(1/2), sqrt(2));  log(1 + f) = f - f^2/2 + f^3 P(f)
MOEC_HD float log(float x) {
  const bool tiny = x < 0x1p-126f;
  const uint32_t bits = bits_of(tiny ? x * 0x1p+23f : x) + (0x3f800000u - 0x3f3504f3u);
  const float n = float(int32_t(bits >> 23) - (tiny ? 127 + 23 : 127));
  const float f = float_of((bits & 0x7fffffu) + 0x3f3504f3u) - 1.0f;
  float p = fmaf(0x1.1d8ea6p-4f, f, -0x1.d635bcp-4f);
  p = fmaf(p, f, 0x1.dea282p-4f);
  p = fmaf(p, f, -0x1.fcf4c6p-4f);
  p = fmaf(p, f, 0x1.23d21ap-3f);
  p = fmaf(p, f, -0x1.555b4ap-3f);
  p = fmaf(p, f, 0x1.999d5ap-3f);
  p = fmaf(p, f, -0x1.fffffcp-3f);
  p = fmaf(p, f, 0x1.555554p-2f);
  float y = fmaf(p * f, f * f, n * kLn2Low);
  y = fmaf(-0.5f * f, f, y);
  y = fmaf(n, kLn2High, f + y);
  y = x > 0x1.fffffep+127f ? x : y;              // infinity
  y = x == 0.0f ? float_of(0xff800000u) : y;     // -infinity
  return x >= 0.0f ? y : float_of(0x7fc00000u);  // NaN for x < 0 and NaN
}

// log(1 + x) for x >= 0: the rounding error of 1 + x comes back as a first-order term.
MOEC_HD float log1p(float x) {
  const float sum = 1.0f + x, lost = x - (sum - 1.0f);
  return log(sum) + (x < 0x1p+24f ? lost / sum : 0.0f);  // infinity has lost NaN
}

MOEC_HD float tanh(float x) {
  const float a = magnitude(x), s = a * a;
  float p = fmaf(0x1.2c83c0p-9f, s, -0x1.116a16p-7f);  // tanh(a) = a + a^3 P(a^2)
  p = fmaf(p, s, 0x1.64a976p-6f);
  p = fmaf(p, s, -0x1.ba08c4p-5f);
  p = fmaf(p, s, 0x1.1110eap-3f);
  p = fmaf(p, s, -0x1.555556p-2f);
  const float near = fmaf(a * s, p, a);
  const float far = 1.0f - 2.0f / (exp(2.0f * a) + 1.0f);
  return with_sign(a < 0.625f ? near : far, x);
}
MOEC_HD float tanh_slope(float value) {
  return fmaf(-value, value, 1.0f);
}  // from the value

MOEC_HD float sigmoid(float x) {
  return 1.0f / (1.0f + exp(-x));
}
MOEC_HD float sigmoid_slope(float value) {
  return value * (1.0f - value);
}  // from the value

// log(1 + e^x); its derivative is sigmoid(x)
MOEC_HD float softplus(float x) {
  return (x > 0.0f ? x : 0.0f) + log1p(exp(-magnitude(x)));
}

// x^p for x >= 0; the exponents that routers use are exact
MOEC_HD float power(float x, float p) {
  if (p == 0.0f) return 1.0f;
  if (p == 1.0f) return x;
  if (p == 2.0f) return x * x;
  if (p == 0.5f) return sqrtf(x);
  return exp(p * log(x));
}

}  // namespace moec::math
