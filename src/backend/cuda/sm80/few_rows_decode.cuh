// SPDX-License-Identifier: Apache-2.0
// Pieces of codes, 16 bytes with one block, as elements of 16 bits in registers: the format's value
// rounded once.
//
//   elements(piece, run)   eight neighbours from 8 * run on
#pragma once

#include "backend/cuda/device/codes.cuh"
#include "backend/cuda/device/element.cuh"
#include "backend/cuda/device/line_words.h"
#include "backend/cuda/device/ptx.cuh"
#include "backend/cuda/sm80/instructions.cuh"

namespace moec::cuda {

__device__ __forceinline__ int few_warp() {
  return int(threadIdx.x) / 32;
}
__device__ __forceinline__ int few_lane() {
  return int(threadIdx.x) & 31;
}

struct FewBlock {
  float scale;
  int zero;  // of nibbles less 8
};

__device__ __forceinline__ uint32_t word_of(const uint4& piece, int i) {
  return i == 0 ? piece.x : i == 1 ? piece.y : i == 2 ? piece.z : piece.w;
}

// Values times a scale, rounded.
template <class Element, int kValues>
__device__ __forceinline__ void round_products(const float (&v)[kValues], float scale,
                                               uint32_t (&pairs)[kValues / 2]) {
#pragma unroll
  for (int i = 0; i < kValues / 2; ++i)
    pairs[i] = pack<Element>(quant::product(v[2 * i], scale), quant::product(v[2 * i + 1], scale));
}

// By an instruction that every architecture from 8.0 on has.
template <class Element>
__device__ __forceinline__ uint32_t fused_pair(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t pair;
  if constexpr (std::is_same_v<Element, __half>)
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(a), "r"(b), "r"(c));
  else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(a), "r"(b), "r"(c));
  return pair;
}

// What elements are made of besides codes and blocks.
struct FewContext {
  uint32_t book;  // 32 numbers in shared memory, which lie in different banks
  int first;      // that of nibble 0, with no zero point
  int turn;       // bits, to the left, that take the first nibble of a byte to bit 2
  bool e5m2;
};

// How a kernel decodes; a format has one of these.
template <class Element>
struct FewBook {  // nibbles of any 16 numbers
  static constexpr int kRuns = 4;
  uint32_t book;
  int turn;
  uint32_t firsts;  // the last bytes of addresses
  float scale;
  __device__ __forceinline__ FewBook(const FewContext& of, const FewBlock& block)
      : book(of.book),
        turn(of.turn),
        firsts((of.book + 4u * uint32_t(of.first - block.zero) & 0xffu) * 0x01010101u),
        scale(block.scale) {}
  __device__ __forceinline__ FourPairs elements(const uint4& piece, int run) const {
    const uint32_t codes = word_of(piece, run);
    const uint32_t of_first = (__funnelshift_l(codes, codes, turn) & 0x3c3c3c3cu) + firsts;
    const uint32_t of_second = (__funnelshift_r(codes, codes, turn) & 0x3c3c3c3cu) + firsts;
    const auto number = [&](uint32_t addresses, int i) {
      return std::bit_cast<float>(ptx::shared_load_word(permute(addresses, book, 0x7650u + i)));
    };
    float v[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) v[2 * i] = number(of_first, i), v[2 * i + 1] = number(of_second, i);
    FourPairs to;
    round_products<Element>(v, scale, to.pair);
    return to;
  }
};

template <class Element>
struct FewE2m1 {
  static constexpr int kRuns = 4;
  MagnitudeTable table;
  __device__ __forceinline__ FewE2m1(const FewContext& of, const FewBlock& block) {
    float v[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    uint32_t pairs[4];
    round_products<Element>(v, block.scale, pairs);
    table.set(0, pairs[0], pairs[1]);
    table.set(1, pairs[2], pairs[3]);
  }
  __device__ __forceinline__ FourPairs elements(const uint4& piece, int run) const {
    return table.look_up(word_of(piece, run));
  }
};

// Nibbles as integers, with scales of the type of elements. A nibble in the lowest bits of 128 as
// bf16, or of 1024 as f16, adds its value: the difference to the zero point is exact, and so is,
// before it is rounded, the product.
template <class Element>
struct FewIntegers {
  static constexpr int kRuns = 4;
  static constexpr bool kHalf = std::is_same_v<Element, __half>;
  static constexpr uint32_t kBase = kHalf ? 0x64006400u : 0x43004300u,
                            kOne = kHalf ? 0x3c003c00u : 0x3f803f80u;
  uint32_t minus_zero, scale;
  __device__ __forceinline__ FewIntegers(const FewContext&, const FewBlock& block) {
    minus_zero = (kBase | 0x80088008u) + uint32_t(block.zero) * 0x00010001u;
    scale = pack<Element>(block.scale, block.scale);
  }
  __device__ __forceinline__ FourPairs elements(const uint4& piece, int run) const {
    const uint32_t codes = word_of(piece, run), shifted = codes >> 4;
    FourPairs v;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v.pair[i] = scaled(permute(codes, shifted, 0x4400 + 0x1111 * i) & 0x000f000f);
    }
    return v;
  }
  // Of two nibbles in the lowest bits of halves.
  __device__ __forceinline__ uint32_t scaled(uint32_t nibbles) const {
    return fused_pair<Element>(fused_pair<Element>(nibbles | kBase, kOne, minus_zero), scale,
                               0x80008000u);
  }
};

// The same, of eight neighbours those four apart in a pair.
template <class Element>
struct FewApartIntegers : FewIntegers<Element> {
  using Base = FewIntegers<Element>;
  using Base::Base;
  __device__ __forceinline__ FourPairs elements(const uint4& piece, int run) const {
    const uint32_t codes = word_of(piece, run);
    FourPairs v;
#pragma unroll
    for (int i = 0; i < 4; ++i) v.pair[i] = Base::scaled(codes >> 4 * i & 0x000f000fu);
    return v;
  }
};

// E2M1 of one block as bf16, of eight neighbours those four apart in a pair. Their exponent and
// mantissa are those of a bf16 of exponents 0 to 3: the code x 2^-126. A product with 2^126 and the
// power of two is exact, or rounds once; where both have no place in one bf16, there are two.
template <bool kLarge>
struct FewApartE2m1 {
  uint32_t scale;
  // power: as it is stored.
  static __device__ __forceinline__ bool is_large(uint32_t power) { return power > 128; }
  __device__ __forceinline__ explicit FewApartE2m1(uint32_t power) {
    constexpr uint32_t kOne = 1u << 7 | 1u << 23;  // of the exponents of two bf16
    scale = kLarge ? power_pair(power) : power * kOne + 126 * kOne;
  }
  __device__ __forceinline__ FourPairs elements(const uint4& piece, int run) const {
    const uint32_t codes = word_of(piece, run), upper = codes >> 8;
    FourPairs v;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // Sign to bit 15, the others from bit 6 on, in one product.
      const uint32_t own = (i < 2 ? codes : upper) & (i % 2 ? 0x00f000f0u : 0x000f000fu);
      const uint32_t bits = own * (i % 2 ? 0x104u : 0x1040u) & 0x81c081c0u;
      constexpr uint32_t kMinusZero = 0x80008000u;
      v.pair[i] = fused_pair<__nv_bfloat16>(bits, kLarge ? 0x7e807e80u : scale, kMinusZero);
      if (kLarge) v.pair[i] = fused_pair<__nv_bfloat16>(v.pair[i], scale, kMinusZero);
    }
    return v;
  }
};

template <class Element>
struct FewBytes {  // signed
  static constexpr int kRuns = 2;
  float scale, base;
  __device__ __forceinline__ FewBytes(const FewContext&, const FewBlock& block)
      : scale(block.scale), base(std::bit_cast<float>(0x4b000080u + block.zero)) {}
  __device__ __forceinline__ FourPairs elements(const uint4& piece, int run) const {
    float v[8];
    widen_biased({word_of(piece, 2 * run), word_of(piece, 2 * run + 1)}, v);
#pragma unroll
    for (float& number : v) number -= base;
    FourPairs to;
    round_products<Element>(v, scale, to.pair);
    return to;
  }
};

// Two e4m3 in the bytes of `two` as half precision. Their exponent and mantissa in the place of
// those of half precision are 2^-8 of the number; 0x7f and 0xff are NaN.
__device__ __forceinline__ uint32_t e4m3_pair(uint32_t two) {
#if __CUDA_ARCH__ >= 890
  return ptx::e4m3_halves(uint16_t(two));
#else
  const uint32_t at_top = permute(two, 0, 0x1404);
  const uint32_t magnitude = at_top >> 1 & 0x3f803f80u;
  const uint32_t nan = (magnitude + 0x00800080u) & 0x40004000u;
  const uint32_t scaled = fused_pair<__half>(magnitude, 0x5c005c00u, 0);  // 2^8
  return (at_top & 0x80008000u) | scaled | ((nan << 1) - (nan >> 4));
#endif
}

template <class Element>
struct FewFp8 {
  static constexpr int kRuns = 2;
  bool e5m2;
  float scale;
  __device__ __forceinline__ FewFp8(const FewContext& of, const FewBlock& block)
      : e5m2(of.e5m2), scale(block.scale) {}
  __device__ __forceinline__ FourPairs elements(const uint4& piece, int run) const {
    uint32_t halves[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t word = word_of(piece, 2 * run + i / 2);
      // e5m2 is half precision without its lower byte.
      halves[i] = e5m2 ? permute(word, 0, i % 2 ? 0x3424 : 0x1404) : e4m3_pair(word >> i % 2 * 16);
    }
    float v[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 two = unpack<__half>(halves[i]);
      v[2 * i] = two.x, v[2 * i + 1] = two.y;
    }
    FourPairs to;
    round_products<Element>(v, scale, to.pair);
    return to;
  }
};

}  // namespace moec::cuda
