// SPDX-License-Identifier: Apache-2.0
// From a number to the code of the nearest value of a set: the thresholds of each set, scalar, for
// host and device. Ties go where the library of the format sends them.
#pragma once

#include "quant/numbers.h"

namespace moec::quant {

MOEC_HD constexpr float float_of(uint32_t bits) {
  return std::bit_cast<float>(bits);
}
MOEC_HD uint32_t magnitude_bits(float x) {
  return std::bit_cast<uint32_t>(x) & 0x7fffffffu;
}
inline constexpr uint32_t kInfinityBits = 0x7f800000u;

// To the nearest integer, halves to even; |x| < 2^22.
MOEC_HD float round_even(float x) {
  constexpr float kUnits = 0x1.8p23f;  // floats are integers here
  return (x + kUnits) - kUnits;
}

// ---- 16 values in ascending order, the thresholds between them, and the code of each
struct Set16 {
  float value[16];
  uint8_t code[16];
  constexpr float between(int i) const { return (value[i] + value[i + 1]) / 2; }
};
inline constexpr Set16 kNf4 = {
    {-1.0f, float_of(0xbf3239b1), float_of(0xbf066b30), float_of(0xbeca32a0), float_of(0xbe91a24d),
     float_of(0xbe3d353f), float_of(0xbdba7871), 0.0f, float_of(0x3da2faff), float_of(0x3e24cae3),
     float_of(0x3e7c04dd), float_of(0x3ead033a), float_of(0x3ee1a4b8), float_of(0x3f1007ab),
     float_of(0x3f3913b3), 1.0f},
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}};
// bitsandbytes' own FP4, which is not E2M1. Its two zeros are neighbours: the threshold between
// them is 0, so that what is a little more than 0 has code 8.
inline constexpr Set16 kFp4 = {
    {-1.0f, -float_of(0x3f2aaaab), -0.5f, -float_of(0x3eaaaaab), -0.25f, -float_of(0x3e2aaaab),
     -float_of(0x3baaaaab), 0.0f, 0.0f, float_of(0x3baaaaab), float_of(0x3e2aaaab), 0.25f,
     float_of(0x3eaaaaab), 0.5f, float_of(0x3f2aaaab), 1.0f},
    {11, 10, 13, 12, 15, 14, 9, 0, 8, 1, 6, 7, 4, 5, 2, 3}};

// Value of each code: a codebook.
constexpr float code_value(const Set16& set, int code) {
  for (int i = 0; i < 16; ++i)
    if (set.code[i] == code) return set.value[i];
  return 0;
}

// How many thresholds lie below x, by four comparisons: `threshold(i)` for i in [0, 15) ascends.
template <class Threshold>
MOEC_HD int count_below(float x, Threshold threshold) {
  int count = x > threshold(7) ? 8 : 0;
  count += x > threshold(count + 3) ? 4 : 0;
  count += x > threshold(count + 1) ? 2 : 0;
  count += x > threshold(count) ? 1 : 0;
  return count;
}

// The thresholds and codes of a set, where a kernel reads them fast.
struct Search16 {
  float threshold[15] = {};
  uint8_t code[16] = {};
  constexpr explicit Search16(const Set16& set) {
    for (int i = 0; i < 15; ++i) threshold[i] = set.between(i);
    for (int i = 0; i < 16; ++i) code[i] = set.code[i];
  }
  MOEC_HD uint32_t nearest(float x) const {
    return code[count_below(x, [this](int i) { return threshold[i]; })];
  }
};

// ---- E2M1: sign, then 0 0.5 1 1.5 2 3 4 6; halves to the even code, more than 6 is 6
MOEC_HD uint32_t e2m1_code(float x) {
  const uint32_t size = magnitude_bits(x);
  uint32_t code = 0;
  // A half that goes up passes a threshold one ulp below it.
  code += size > 0x3e800000u;      // 0.25
  code += size > 0x3f400000u - 1;  // 0.75
  code += size > 0x3fa00000u;      // 1.25
  code += size > 0x3fe00000u - 1;  // 1.75
  code += size > 0x40200000u;      // 2.5
  code += size > 0x40600000u - 1;  // 3.5
  code += size > 0x40a00000u;      // 5
  return code | (std::bit_cast<uint32_t>(x) >> 31) << 3;
}

// ---- E4M3 (no infinity): halves to even, more than 448 is 448; NaN is 0x7f
MOEC_HD uint32_t e4m3_code(float x) {
  constexpr uint32_t kMost = 0x43e00000u, kLeastNormal = 0x3c800000u;  // 448, 2^-6
  const uint32_t sign = (std::bit_cast<uint32_t>(x) >> 24) & 0x80u, bits = magnitude_bits(x);
  if (bits > kInfinityBits) return 0x7fu;
  const uint32_t size = bits < kMost ? bits : kMost;
  if (size < kLeastNormal)  // 2^14 more is a multiple of 2^-9, the least E4M3
    return sign | (std::bit_cast<uint32_t>(std::bit_cast<float>(size) + 0x1p14f) - 0x46800000u);
  const uint32_t rounded = size + 0x7ffffu + ((size >> 20) & 1u);
  return sign | ((rounded - 0x3c000000u) >> 20);
}

// ---- bitsandbytes' 8-bit dynamic map, ascending, as torch's vectorised linspace makes it: for i
// in 0..6 the midpoints of 2^i intervals of [0.1, 1], times 10^(i-6), of both signs; 0; and 1.
struct DynamicMap {
  float value[256] = {};
  constexpr DynamicMap() {
    constexpr double kTens[] = {1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1};
    int at = 128;
    for (int i = 0; i < 7; ++i)
      for (int j = 0; j < 1 << i; ++j, ++at) {
        const float middle = (point(j, 1 << i) + point(j + 1, 1 << i)) / 2;
        value[at] = float(kTens[i]) * middle;
        value[254 - at] = -value[at];
      }
    value[255] = 1;
  }

 private:
  // Point i of n + 1: from the nearer end, with one rounding.
  static constexpr float point(int i, int n) {
    const float step = (1.0f - 0.1f) / float(n);
    return i < (n + 1) / 2 ? float(double(step) * i + double(0.1f))
                           : float(1.0 - double(step) * (n - i));
  }
};
// A place in the map by eight comparisons with the midpoints; a tie is the lower one.
template <class Value>
MOEC_HD uint32_t dynamic_code(float x, Value value) {
  uint32_t code = 0;
  for (uint32_t step = 128; step; step /= 2) {
    const uint32_t i = code + step - 1;  // is it more than the threshold between i and i + 1?
    if (x > (value(i) + value(i + 1)) / 2) code += step;
  }
  return code;
}

}  // namespace moec::quant
