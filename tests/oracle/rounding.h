// SPDX-License-Identifier: Apache-2.0
// Number formats: values rounded to one, and powers of two. Inline, since every test takes many.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace moec::oracle {

enum class Rounding { kNone, kFp32, kBf16, kFp16 };

inline double power_of_two(int exponent) {  // -1022 to 1023
  return std::bit_cast<double>(static_cast<uint64_t>(exponent + 1023) << 52);
}

// Nearest value with `digits` significant bits, ties to even; normal numbers start at
// 2^(min_exponent - 1) in frexp's counting. A sum with 1.5 * 2^52 quanta keeps whole quanta.
inline double round_bits(double value, int digits, int min_exponent, double largest) {
  if (!std::isfinite(value) || value == 0) return value;
  const int exponent = static_cast<int>(std::bit_cast<uint64_t>(value) >> 52 & 0x7FF) - 1022;
  const int last = std::clamp(exponent, min_exponent, 200) - digits;  // the last bit's
  const double shift = 1.5 * power_of_two(last + 52);
  const double rounded = std::copysign(value + shift - shift, value);
  return std::fabs(rounded) > largest
             ? std::copysign(std::numeric_limits<double>::infinity(), value)
             : rounded;
}

inline double round_to(Rounding rounding, double value) {
  switch (rounding) {
    case Rounding::kNone:
      return value;
    case Rounding::kFp32:
      return static_cast<double>(static_cast<float>(value));
    case Rounding::kBf16:
      return round_bits(value, 8, -125, 0x1.fep127);
    case Rounding::kFp16:
      return round_bits(value, 11, -13, 65504);
  }
  return value;
}

}  // namespace moec::oracle
