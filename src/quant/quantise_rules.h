// SPDX-License-Identifier: Apache-2.0
// How each family of formats is made: the scale of a block, from the spread of its values, and the
// code of a value under it. The operations and their order are those of the format's library, so
// that the bytes are its bytes.
//
//   block(spread, expert)   what the codes of a block have in common; `expert`: the spread of the
//                           whole expert, where kOfExpert
//   code(x, block)          code of x
//   padding()               code that fills what is left of a byte or word
//   kHighFirst              the first of two codes is in the high nibble of a byte
//
// A value that is not finite makes the block's scale NaN: the tile then has the codes of 0.
#pragma once

#include "quant/nearest.h"

namespace moec::quant {

// Of a block; 0 is always within.
struct Spread {
  float low = 0, high = 0;
  uint32_t bits = 0;  // of the largest magnitude; NaN is more than infinity
  MOEC_HD void add(float x) {
    low = x < low ? x : low;
    high = x > high ? x : high;
    const uint32_t size = magnitude_bits(x);
    bits = size > bits ? size : bits;
  }
  MOEC_HD void add(const Spread& other) {
    low = other.low < low ? other.low : low;
    high = other.high > high ? other.high : high;
    bits = other.bits > bits ? other.bits : bits;
  }
  MOEC_HD float amax() const { return std::bit_cast<float>(bits); }
  MOEC_HD bool finite() const { return bits < kInfinityBits; }
};

// `scale` as it is stored; `divisor` of values; `finite`: all is.
struct ScaledBlock {
  float scale, divisor, zero = 0;
  uint8_t byte = 0;  // the scale of formats whose scales are bytes
  bool finite = true;
};
MOEC_HD ScaledBlock spoilt_block(uint8_t byte) {
  return {quiet_nan(), 1, 0, byte, false};
}
// compressed-tensors computes in the type of the scales, and has no scale of 0.
MOEC_HD float library_scale(moec_dtype dtype, float scale) {
  if (scale != 0) return scale;
  return dtype == MOEC_BF16 ? 0x1p-7f : dtype == MOEC_F16 ? 0x1p-10f : 0x1p-23f;
}
// Rounded to a type, where that holds it.
MOEC_HD float round_where_finite(moec_dtype dtype, float x) {
  const float rounded = round_real(dtype, x);
  return magnitude_bits(rounded) < kInfinityBits ? rounded : x;
}

// ---- NF4 and FP4 of bitsandbytes: the nearest of 16 values times the largest magnitude
struct CodebookRule {
  static constexpr int kCodeBits = 4;
  static constexpr bool kHighFirst = true, kOfExpert = false;
  Search16 search;
  MOEC_HD ScaledBlock block(const Spread& spread, const Spread&) const {
    if (!spread.finite()) return spoilt_block(0);
    return {spread.amax(), spread.bits ? 1.0f / spread.amax() : 0.0f};
  }
  // x times the reciprocal; that of a subnormal scale may be no number.
  MOEC_HD static float scaled(float x, const ScaledBlock& block) {
    return magnitude_bits(block.divisor) < kInfinityBits ? x * block.divisor : x / block.scale;
  }
  MOEC_HD uint32_t code(float x, const ScaledBlock& block) const {
    return search.nearest(scaled(x, block));
  }
  MOEC_HD uint32_t padding() const { return search.nearest(0); }
};

// ---- INT8 and INT4 of compressed-tensors
template <int kBits>
struct IntegerRule {
  static constexpr int kCodeBits = kBits;
  static constexpr bool kHighFirst = false, kOfExpert = false;
  static constexpr float kLeast = -(1 << (kBits - 1)), kMost = (1 << (kBits - 1)) - 1;
  moec_dtype arithmetic;
  bool asymmetric;
  MOEC_HD float rounded(float x) const { return round_real(arithmetic, x); }
  MOEC_HD ScaledBlock block(const Spread& spread, const Spread&) const {
    constexpr float kSteps = kMost - kLeast;
    const float range =
        asymmetric ? round_where_finite(arithmetic, spread.high - spread.low) : spread.amax();
    const float scale =
        library_scale(arithmetic, rounded(range / (asymmetric ? kSteps : kSteps / 2)));
    if (!spread.finite() || magnitude_bits(scale) >= kInfinityBits) return spoilt_block(0);
    if (!asymmetric || range == 0) return {scale, scale};
    return {scale, scale, round_even(within(rounded(kLeast - rounded(spread.low / scale))))};
  }
  MOEC_HD static float within(float x) { return x < kLeast ? kLeast : x > kMost ? kMost : x; }
  MOEC_HD uint32_t code(float x, const ScaledBlock& block) const {
    const float q = rounded(x / block.divisor);
    const int whole = int(round_even(within(asymmetric ? rounded(q + block.zero) : q)));
    return kBits == 8 ? uint8_t(whole) : uint32_t(whole - int(kLeast));
  }
  MOEC_HD uint32_t padding() const { return 0; }
};

// ---- FP8 (E4M3) of compressed-tensors and DeepSeek: whole tensors, channels or blocks
struct Fp8Rule {
  static constexpr int kCodeBits = 8;
  static constexpr bool kHighFirst = false, kOfExpert = false;
  moec_dtype arithmetic;
  MOEC_HD ScaledBlock block(const Spread& spread, const Spread&) const {
    if (!spread.finite()) return spoilt_block(0);
    const float scale = round_real(arithmetic, spread.amax() / 448.0f);
    return {library_scale(arithmetic, scale), library_scale(arithmetic, scale)};
  }
  MOEC_HD uint32_t code(float x, const ScaledBlock& block) const {
    return e4m3_code(round_real(arithmetic, x / block.divisor) + 0.0f);  // -0 becomes 0
  }
  MOEC_HD uint32_t padding() const { return 0; }
};

// ---- MXFP4 and MXFP8 of compressed-tensors: a power of two for 32 values. The magnitude is
// rounded up to the next power when it is at least 1.75 of one.
template <int kBits>
struct MxRule {
  static constexpr int kCodeBits = kBits;
  static constexpr bool kHighFirst = false, kOfExpert = false;
  static constexpr uint32_t kTop = kBits == 4 ? 2 : 8;  // exponent of the largest code
  MOEC_HD ScaledBlock block(const Spread& spread, const Spread&) const {
    if (!spread.finite()) return spoilt_block(255);
    const uint32_t exponent = (spread.bits + 0x200000u) >> 23;
    const uint32_t code = exponent > kTop ? exponent - kTop : 0;
    return {e8m0(code), e8m0(code), 0, uint8_t(code)};
  }
  MOEC_HD uint32_t code(float x, const ScaledBlock& block) const {
    const float q = x / block.divisor + 0.0f;
    return kBits == 4 ? e2m1_code(q) : e4m3_code(q);
  }
  MOEC_HD uint32_t padding() const { return 0; }
};

// ---- NVFP4: E2M1 with an E4M3 scale for 16 values and a scale for the expert, which multiplies in
// modelopt and divides in compressed-tensors
struct Nvfp4Rule {
  static constexpr int kCodeBits = 4;
  static constexpr bool kHighFirst = false, kOfExpert = true;
  static constexpr float kMost = 6, kMostScale = 448;  // of E2M1 and E4M3
  moec_dtype arithmetic;                               // where it divides
  bool divides;
  MOEC_HD float expert_scale(const Spread& expert) const {
    if (!expert.finite()) return quiet_nan();
    if (!divides) return expert.amax() / (kMost * kMostScale);
    if (!expert.bits) return 1;
    constexpr float kLargest = 0x1.fffffep127f;  // reciprocals of subnormal numbers are more
    const float whole = kMost * kMostScale / expert.amax();
    return round_where_finite(arithmetic, whole < kLargest ? whole : kLargest);
  }
  MOEC_HD ScaledBlock block(const Spread& spread, const Spread& expert) const {
    if (!expert.finite()) return spoilt_block(0x7f);
    const float whole = expert_scale(expert), largest = spread.amax() / kMost;
    uint32_t code = 0;
    if (divides) {
      code = e4m3_code(whole * round_real(arithmetic, largest));
      if (code == 0) code = 0x20;  // 0.125
    } else {
      code = e4m3_code(largest == 0 || whole == 0 ? 1.0f : largest / whole);
    }
    const float scale = e4m3(code);
    return {scale, divides ? scale / whole : scale * whole, 0, uint8_t(code)};
  }
  MOEC_HD uint32_t code(float x, const ScaledBlock& block) const {
    return block.divisor == 0 ? 0 : e2m1_code(x / block.divisor + 0.0f);
  }
  MOEC_HD uint32_t padding() const { return 0; }
};

struct RuleChoice {
  uint32_t kind = 0, flags = 0;  // moec_quantise_kind, moec_quantise_flags
  moec_dtype arithmetic = 0;
};
// body(rule) with the rule of a kind.
template <class Body>
void with_rule(const RuleChoice& choice, Body&& body) {
  const bool asymmetric = choice.flags & MOEC_QUANTISE_ASYMMETRIC;
  switch (choice.kind) {
    case MOEC_QUANTISE_INT8:
      return body(IntegerRule<8>{choice.arithmetic, asymmetric});
    case MOEC_QUANTISE_INT4:
      return body(IntegerRule<4>{choice.arithmetic, asymmetric});
    case MOEC_QUANTISE_FP8:
      return body(Fp8Rule{choice.arithmetic});
    case MOEC_QUANTISE_MXFP8:
      return body(MxRule<8>{});
    case MOEC_QUANTISE_MXFP4:
      return body(MxRule<4>{});
    case MOEC_QUANTISE_NVFP4:
      return body(
          Nvfp4Rule{choice.arithmetic, (choice.flags & MOEC_QUANTISE_SCALES2_DIVIDES) != 0});
    case MOEC_QUANTISE_NF4:
      return body(CodebookRule{Search16(kNf4)});
    case MOEC_QUANTISE_FP4:
      return body(CodebookRule{Search16(kFp4)});
  }
}

}  // namespace moec::quant
