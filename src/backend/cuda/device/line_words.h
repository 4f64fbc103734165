// SPDX-License-Identifier: Apache-2.0
// Elements of 16 bits from words of codes, the same bits as the format's value rounded once. Host
// and device compute alike.
//
//   ValueTable   nibbles of 16 values: the elements of a block, looked up by permutes of bytes
//   powers       E2M1 x power of two as bf16: exact but for a last product, which rounds once
//   integers     (nibble - 8) x scale of the elements' type: the product of exact numbers
//   bytes        E4M3 x scale: the fp32 product, rounded once
//   signed_bytes (byte - zero point) x scale: likewise
#pragma once

#include <bit>
#include <cstdint>

#include "quant/numbers.h"

namespace moec::cuda {

struct FourPairs {  // eight elements, two in a word, the first one in the low half
  uint32_t pair[4];
};

// Byte i of the result is byte (selector >> 4 * i & 7) of b : a, or, from 8 on, its sign.
MOEC_HD uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
#if defined(__CUDA_ARCH__)
  uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(a), "r"(b), "r"(selector));
  return bytes;
#else
  uint32_t bytes = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t from = selector >> 4 * i & 15u;
    uint32_t byte = uint32_t(((uint64_t(b) << 32 | a) >> (from & 7u) * 8) & 0xffu);
    if (from & 8u) byte = byte & 0x80u ? 0xffu : 0u;
    bytes |= byte << 8 * i;
  }
  return bytes;
#endif
}

// ---- two elements at a time: bf16, or f16 where kHalf -------------------------------------------
template <bool kHalf>
MOEC_HD uint32_t rounded_pair(float low, float high) {
#if defined(__CUDA_ARCH__)
  uint32_t pair;
  if constexpr (kHalf) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  }
  return pair;
#else
  using Element = std::conditional_t<kHalf, f16, bf16>;
  return from_float<Element>(low).bits | uint32_t(from_float<Element>(high).bits) << 16;
#endif
}
#if !defined(__CUDA_ARCH__)
template <bool kHalf>
MOEC_HD float element_of(uint32_t bits) {
  using Element = std::conditional_t<kHalf, f16, bf16>;
  return to_float(Element{uint16_t(bits)});
}
#endif
template <bool kHalf>
MOEC_HD uint32_t product_pair(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  uint32_t pair;
  if constexpr (kHalf) {
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  } else {
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  }
  return pair;
#else
  return rounded_pair<kHalf>(element_of<kHalf>(a) * element_of<kHalf>(b),
                             element_of<kHalf>(a >> 16) * element_of<kHalf>(b >> 16));
#endif
}
template <bool kHalf>
MOEC_HD uint32_t difference_pair(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  uint32_t pair;
  if constexpr (kHalf) {
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  } else {
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  }
  return pair;
#else
  return rounded_pair<kHalf>(element_of<kHalf>(a) - element_of<kHalf>(b),
                             element_of<kHalf>(a >> 16) - element_of<kHalf>(b >> 16));
#endif
}

// ---- nibbles, eight in a word -------------------------------------------------------------------
// 16 elements, their low and their high bytes apart. Three bits of a code select a byte of two
// words, the fourth one which two.
struct ValueTable {
  uint32_t low[4], high[4];

  // Four of them: 4 q and those behind.
  MOEC_HD void set(int q, uint32_t first, uint32_t second) {
    low[q] = permute(first, second, 0x6420);
    high[q] = permute(first, second, 0x7531);
  }
  // high_first: of two codes of a byte the first is the high nibble.
  MOEC_HD FourPairs look_up(uint32_t codes, bool high_first) const {
    FourPairs v = {};
    const uint32_t shifted = codes << 4, selectors = codes & 0x77777777u;
    const uint32_t even = high_first ? 0x4051 : 0x5140, odd = high_first ? 0x6273 : 0x7362;
    const auto four = [&](uint32_t selector, uint32_t signs, uint32_t& first, uint32_t& second) {
      const uint32_t upper = permute(shifted, codes, signs);  // the last eight of 16: the mask
      const auto of = [&](const uint32_t (&bytes)[4]) {
        const uint32_t below = permute(bytes[0], bytes[1], selector);
        return (below & ~upper) | (permute(bytes[2], bytes[3], selector) & upper);
      };
      const uint32_t l = of(low), h = of(high);
      first = permute(l, h, even);
      second = permute(l, h, odd);
    };
    four(selectors & 0xffffu, 0xd9c8, v.pair[0], v.pair[1]);
    four(selectors >> 16, 0xfbea, v.pair[2], v.pair[3]);
    return v;
  }
};

// Eight elements of either sign, whose codes have the sign in their fourth bit.
struct MagnitudeTable {
  uint32_t low[2], high[2];

  MOEC_HD void set(int q, uint32_t first, uint32_t second) {
    low[q] = permute(first, second, 0x6420);
    high[q] = permute(first, second, 0x7531);
  }
  MOEC_HD FourPairs look_up(uint32_t codes) const {
    FourPairs v = {};
    const uint32_t shifted = codes << 4, selectors = codes & 0x77777777u;
    const auto four = [&](uint32_t selector, uint32_t signs, uint32_t& first, uint32_t& second) {
      const uint32_t l = permute(low[0], low[1], selector);
      const uint32_t h =
          permute(high[0], high[1], selector) | (permute(shifted, codes, signs) & 0x80808080u);
      first = permute(l, h, 0x5140);
      second = permute(l, h, 0x7362);
    };
    four(selectors & 0xffffu, 0xd9c8, v.pair[0], v.pair[1]);
    four(selectors >> 16, 0xfbea, v.pair[2], v.pair[3]);
    return v;
  }
};
// E2M1's magnitudes times a power of two, as power_pair has it: the same bits as `powers`.
MOEC_HD MagnitudeTable powers_of(uint32_t scale) {
  MagnitudeTable table = {};
  table.set(0, product_pair<false>(0x3f000000u, scale), product_pair<false>(0x3fc03f80u, scale));
  table.set(1, product_pair<false>(0x40404000u, scale), product_pair<false>(0x40c04080u, scale));
  return table;
}

// E2M1's exponent and mantissa are those of a bf16 of exponents 0 to 3: the code x 2^-126.
// magnitudes: of two codes, there; signs: those of both in their highest bits; scale: of each, as
// bf16.
MOEC_HD uint32_t power_elements(uint32_t signs, uint32_t magnitudes, uint32_t scale) {
  const uint32_t bits = (signs & 0x80008000u) | (magnitudes & 0x01c001c0u);
  return product_pair<false>(product_pair<false>(bits, 0x7e807e80u), scale);  // 2^126
}
// Of two codes, in the highest bits of either half of a word.
MOEC_HD uint32_t power_elements(uint32_t codes, uint32_t scale) {
  return power_elements(codes, codes >> 6, scale);
}
// scale: twice the power of two as bf16.
MOEC_HD FourPairs powers(uint32_t codes, uint32_t scale) {
  FourPairs v = {};
  const uint32_t shifted = codes << 4;
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int i = 0; i < 4; ++i) {
    const uint32_t at = permute(shifted, codes, 0x4400 + 0x1111 * i);  // bits 12 and 28 on
    v.pair[i] = power_elements(at, at << 2, scale);                    // as at >> 6
  }
  return v;
}

// A nibble in the lowest bits of 128 as bf16, or of 1024 as f16, adds its value. lowest: kLowest,
// which may be in a register, since an instruction has room for one of the two constants.
constexpr uint32_t kLowest = 0x000f000f;
// Of two codes, in the lowest bits of either half of a word; scale: of each.
template <bool kHalf>
MOEC_HD uint32_t integer_elements(uint32_t codes, uint32_t scale, uint32_t lowest = kLowest) {
  constexpr uint32_t kBase = kHalf ? 0x64006400u : 0x43004300u;
  const uint32_t bits = (codes & lowest) | kBase;
  return product_pair<kHalf>(difference_pair<kHalf>(bits, kBase | 0x00080008u), scale);
}
template <bool kHalf>
MOEC_HD FourPairs integers(uint32_t codes, uint32_t scale, uint32_t lowest = kLowest) {
  FourPairs v = {};
  const uint32_t shifted = codes >> 4;
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int i = 0; i < 4; ++i) {
    const uint32_t two = permute(codes, shifted, 0x4400 + 0x1111 * i);
    v.pair[i] = integer_elements<kHalf>(two, scale, lowest);
  }
  return v;
}

// ---- bytes, four in a word ----------------------------------------------------------------------
struct FourFloats {
  float v[4];
};
MOEC_HD FourFloats e4m3_numbers(uint32_t codes) {
  FourFloats numbers;
#if defined(__CUDA_ARCH__)
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32_t halves;
    asm("{\n"
        ".reg .b16 low, high;\n"
        "mov.b32 {low, high}, %1;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\n"
        "}"
        : "=r"(halves)
        : "r"(i ? codes >> 16 : codes));
    asm("{\n"
        ".reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.f32.f16 %0, low;\n"
        "cvt.f32.f16 %1, high;\n"
        "}"
        : "=f"(numbers.v[2 * i]), "=f"(numbers.v[2 * i + 1])
        : "r"(halves));
  }
#else
  for (int i = 0; i < 4; ++i) numbers.v[i] = quant::e4m3(codes >> 8 * i & 0xffu);
#endif
  return numbers;
}
template <bool kHalf>
MOEC_HD FourPairs bytes(uint32_t first, uint32_t second, float scale) {
  const FourFloats low = e4m3_numbers(first), high = e4m3_numbers(second);
  using quant::product;
  return {{rounded_pair<kHalf>(product(low.v[0], scale), product(low.v[1], scale)),
           rounded_pair<kHalf>(product(low.v[2], scale), product(low.v[3], scale)),
           rounded_pair<kHalf>(product(high.v[0], scale), product(high.v[1], scale)),
           rounded_pair<kHalf>(product(high.v[2], scale), product(high.v[3], scale))}};
}

// A byte in the lowest bits of 2^23 adds its value; with the sign bit turned that is 128 more than
// the code. base: of the code 0, that is, of the zero point.
MOEC_HD float signed_base(float zero) {
  return 8388608.0f + 128.0f + zero;
}
// Of a byte of a word whose sign bits are turned.
MOEC_HD float signed_number(uint32_t turned, uint32_t byte, float base) {
  return std::bit_cast<float>(permute(turned, 0x4b000000u, 0x7440u | byte)) - base;
}
MOEC_HD FourFloats signed_numbers(uint32_t codes, float base) {
  FourFloats numbers = {};
  const uint32_t turned = codes ^ 0x80808080u;
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (uint32_t i = 0; i < 4; ++i) numbers.v[i] = signed_number(turned, i, base);
  return numbers;
}
template <bool kHalf>
MOEC_HD FourPairs signed_bytes(uint32_t first, uint32_t second, float scale, float base) {
  FourPairs v = {};
  const uint32_t words[2] = {first ^ 0x80808080u, second ^ 0x80808080u};
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int i = 0; i < 4; ++i) {
    const auto value = [&](uint32_t byte) {
      return quant::product(signed_number(words[i / 2], byte, base), scale);
    };
    const uint32_t byte = 2u * (i % 2);
    v.pair[i] = rounded_pair<kHalf>(value(byte), value(byte + 1));
  }
  return v;
}

// ---- scales -------------------------------------------------------------------------------------
// A power of two as bf16, twice: 255 is NaN.
MOEC_HD uint32_t power_pair(uint32_t code) {
  const uint32_t bits = code == 0 ? 0x0040u : code == 255 ? 0x7fc0u : code << 7;
  return bits | bits << 16;
}

}  // namespace moec::cuda
