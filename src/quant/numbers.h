// SPDX-License-Identifier: Apache-2.0
// Numbers of a few bits as fp32, exactly, and products that no compiler fuses with a sum.
#pragma once

#include <type_traits>

#include "quant/coded.h"

namespace moec::quant {

// Rounded on its own, then added to something: one instruction would round once.
template <class Real>
MOEC_HD Real product(Real a, std::type_identity_t<Real> b) {
#if defined(__CUDA_ARCH__)
  if constexpr (std::is_same_v<Real, float>) return __fmul_rn(a, b);
#endif
  return a * b;
}

MOEC_HD float quiet_nan() {
  return std::bit_cast<float>(0x7fc00000u);
}

// 4 bits: sign, 2 of exponent, 1 of mantissa; 8 is -0.
MOEC_HD float e2m1(uint32_t code) {
  const uint32_t doubled = 0xc8643210u >> (code & 7u) * 4 & 15u;  // 0 1 2 3 4 6 8 12
  const float magnitude = float(int32_t(doubled)) * 0.5f;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | (code & 8u) << 28);
}
// e4m3fn: 0x7f and 0xff are NaN, nothing is infinite.
MOEC_HD float e4m3(uint32_t code) {
  const uint32_t rest = code & 0x7fu;
  float magnitude = std::bit_cast<float>((rest << 20) + 0x3c000000u);
  if (rest < 8) magnitude = float(int32_t(rest)) * 0x1p-9f;
  if (rest == 0x7fu) magnitude = quiet_nan();
  return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | (code & 0x80u) << 24);
}
MOEC_HD float e5m2(uint32_t code) {
  return to_float(f16{uint16_t(code << 8)});
}
// 2^(code - 127); 255 is NaN.
MOEC_HD float e8m0(uint32_t code) {
  if (code == 0xffu) return quiet_nan();
  return std::bit_cast<float>(code ? code << 23 : 0x00400000u);
}

// The stored bits of a scale, of a real type or a power of two.
MOEC_HD float scale_of(uint32_t bits, moec_dtype dtype) {
  if (dtype == MOEC_F32) return std::bit_cast<float>(bits);
  if (dtype == MOEC_BF16) return to_float(bf16{uint16_t(bits)});
  if (dtype == MOEC_F16) return to_float(f16{uint16_t(bits)});
  return e8m0(bits);
}

MOEC_HD uint32_t byte_at(const void* base, int64_t index) {
  return static_cast<const uint8_t*>(base)[index];
}
MOEC_HD float half_at(const void* base, int64_t byte) {  // at any byte
  return to_float(f16{uint16_t(byte_at(base, byte) | byte_at(base, byte + 1) << 8)});
}
MOEC_HD uint32_t low_nibble_first(const void* base, int64_t index) {
  return byte_at(base, index >> 1) >> ((index & 1) * 4) & 15u;
}
MOEC_HD uint32_t high_nibble_first(const void* base, int64_t index) {
  return low_nibble_first(base, index ^ 1);
}

// An entry of scales; u8 are powers of two, as e8m0.
MOEC_HD float load_scale(const BlockView& scales, int64_t at) {
  if (is_real(scales.dtype)) return load_real(scales.data, scales.dtype, at);
  const uint32_t code = byte_at(scales.data, at);
  return scales.dtype == MOEC_F8_E4M3 ? e4m3(code) : e8m0(code);
}

// What the codes of a block have in common; as vectors, one block for each element.
template <class Real>
struct ScaleOf {
  Real scale;
};
template <class Real>
struct ScaleAndZeroOf {
  Real scale, zero;
};

// Formats whose value is code x scale.
struct Scaled {
  template <class Real>
  using BlockOf = ScaleOf<Real>;
  using Block = BlockOf<float>;
  template <class Real>
  MOEC_HD static Real decode(const std::type_identity_t<Real>& code, const BlockOf<Real>& block) {
    return code * block.scale;
  }
};
// Formats whose value is (code - zero point) x scale.
struct Shifted {
  template <class Real>
  using BlockOf = ScaleAndZeroOf<Real>;
  using Block = BlockOf<float>;
  template <class Real>
  MOEC_HD static Real decode(const std::type_identity_t<Real>& code, const BlockOf<Real>& block) {
    return (code - block.zero) * block.scale;
  }
};

}  // namespace moec::quant
