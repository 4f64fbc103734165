// SPDX-License-Identifier: Apache-2.0
// Weights of four bits as register operands of wgmma: bf16 or f16 fragments of codes that lie in a
// stage as they do in memory, a block of 64 x 64 in lines of 32 bytes.
//
// A fragment of 16 features x 16 k is four matrices of 8 x 8, two neighbouring k in a register of
// each thread. Where k is contiguous, a byte is such a pair as it is: thread t reads byte t % 4 of
// each 8 of its features' lines. Where features are contiguous, the same bytes of lines of k give
// the transposed matrices, and movmatrix turns each.
//
//   table   the values of codes, once for each lane, so that no two lanes meet in a bank: of bytes,
//           256 pairs of 16-bit elements; or of codes, 16 floats
//   scales  of a k-block and block are loaded a k-block early
#pragma once

#include "backend/cuda/device/element.cuh"
#include "backend/cuda/sm90/epilogue.cuh"
#include "backend/cuda/sm90/weight_operand.cuh"
#include "quant/numbers.h"

namespace moec::cuda {

template <typename C>
class NibbleFragments {
 public:
  using Params = typename C::Params;
  static constexpr bool kPairs = C::Weights::kPairs;
  static constexpr int kTableBytes = (kPairs ? 256 : 16) * 128;

  // By all threads, before the first decode.
  static __device__ void fill_table(const NibbleOperand& from, uint32_t memory) {
    const auto value = [&](int code) {
      return from.codebook ? from.codebook[code] : from.values[code];
    };
    for (int i = int(threadIdx.x); i < kTableBytes / 4; i += int(blockDim.x)) {
      const int code = i / 32, low = code & 15, high = code >> 4;
      const uint32_t word =
          !kPairs ? __float_as_uint(value(code))
          : from.high_first ? pack<Element>(value(high), value(low))
                            : pack<Element>(value(low), value(high));
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(memory + 4 * i), "r"(word) : "memory");
    }
  }

  __device__ NibbleFragments(const Params& p, uint32_t table, int group)
      : p_(p),
        table_(table + 4 * (threadIdx.x & 31)),
        line_(int(threadIdx.x & 31) / 4),
        warp_(int(threadIdx.x) / 32 % 4),
        group_(group) {
    // A table entry is 128 bytes: the code's bits end up from bit 7 on.
    const uint32_t byte = 8 * (threadIdx.x & 3);
    const uint32_t second = p.nibbles.high_first ? 0 : 4;
    turn_[0] = byte + (kPairs ? 0 : 4 - second) - 7;
    turn_[1] = byte + second - 7;
  }

  __device__ void begin(const RowTile& tile) {
    expert_ = tile.expert;
    feature_ = first_feature(p_, tile.feature_tile);
    fetch<0>(0);
    fetch<1>(0);
  }

  // 32 k, the first or the second ones of k-block kb, of block `group` (kBlock 0) or 2 + `group`
  // (1): four registers for each 16 k.
  template <int kBlock, int kHalf>
  __device__ __forceinline__ void decode(uint32_t operand, int kb, uint32_t (&to)[8]) {
    Scale scales[4];
    make_scales<kBlock, kHalf>(kb, scales);
    if constexpr (kHalf == 1) fetch<kBlock>(kb + 1);
    const uint32_t block = operand + (group_ + 2 * kBlock) * C::Weights::kBlockStride;
    if constexpr (C::kMajor == Major::kK) {
      const uint32_t line = block + (16 * warp_ + line_) * kLineBytes + 16 * kHalf;
#pragma unroll
      for (int more = 0; more < 2; ++more) {  // 8 more features
        const uint4 words = ptx::shared_load(line + 8 * more * kLineBytes);
        to[more] = pair(words.x, scales[2 * more]);
        to[2 + more] = pair(words.y, scales[2 * more]);
        to[4 + more] = pair(words.z, scales[2 * more + 1]);
        to[6 + more] = pair(words.w, scales[2 * more + 1]);
      }
    } else {
      const uint32_t line = block + (32 * kHalf + line_) * kLineBytes + 8 * warp_;
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // eight lines of k
        const uint2 words = load_two(line + 8 * i * kLineBytes);
        to[2 * i] = turned(pair(words.x, scales[i]));
        to[2 * i + 1] = turned(pair(words.y, scales[i]));
      }
    }
  }

 private:
  using Element = typename C::Element;
  using Scale = std::conditional_t<kPairs, uint32_t, float>;  // both halves of the word, or one
  static constexpr int kLineBytes = 32;
  static constexpr int kScales = 8;  // of a block and k-block: of two features, or of lines of k

  static __device__ __forceinline__ uint2 load_two(uint32_t address) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address)
                 : "memory");
    return v;
  }
  static __device__ __forceinline__ uint32_t turned(uint32_t matrix) {
    uint32_t v;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(v) : "r"(matrix));
    return v;
  }
  __device__ __forceinline__ uint32_t look_up(uint32_t word, uint32_t turn, uint32_t mask) const {
    return ptx::shared_load_word(table_ + (__funnelshift_r(word, word, turn) & mask));
  }
  __device__ __forceinline__ uint32_t pair(uint32_t word, Scale scale) const {
    if constexpr (kPairs) {
      const uint32_t values = look_up(word, turn_[0], 255 << 7);
      uint32_t product;
      if constexpr (is_bf16<Element>()) {
        asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(values), "r"(scale));
      } else {
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(values), "r"(scale));
      }
      return product;
    } else {
      const float first = __uint_as_float(look_up(word, turn_[0], 15 << 7));
      const float second = __uint_as_float(look_up(word, turn_[1], 15 << 7));
      return pack<Element>(first * scale, second * scale);
    }
  }

  // body(i, line, at): entry i of a block is that of element `at` of a strip; none outside of the
  // matrix.
  template <int kBlock, class Body>
  __device__ __forceinline__ void each_entry(int kb, Body body) const {
    const int part = kb >= p_.k_blocks_of_part;
    const int k = (kb - part * p_.k_blocks_of_part) * kTileK;
    const BlockPlace place = place_of<C::kBlocks>(part, feature_, group_ + 2 * kBlock);
    const int features = C::kBlocks == Blocks::kAlternating ? 2 * p_.features : p_.features;
    const ScaleStrips& strips = p_.nibbles.strips[place.part];
    const int64_t expert = expert_ * strips.expert_stride;
    if constexpr (C::kMajor == Major::kK) {
      const int entries = p_.nibbles.shift == 4 ? 4 : p_.nibbles.shift == 5 ? 2 : 1;
#pragma unroll
      for (int more = 0; more < 2; ++more) {
        const int feature = place.feature + 16 * warp_ + line_ + 8 * more;
        const int64_t from = expert + feature * strips.stride;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = k + 16 * i;
          if (i % (4 / entries) == 0)
            body(4 * more + i, from + (at >> p_.nibbles.shift), feature < features && at < p_.k_size);
        }
      }
    } else {
      const int feature = place.feature + 16 * warp_;
      const int64_t from = expert + (feature >> p_.nibbles.shift);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int line = k + line_ + 8 * i;
        body(i, from + line * strips.stride, feature < features && line < p_.k_size);
      }
    }
  }
  template <int kBlock, class Stored>
  __device__ __forceinline__ void fetch_as(int kb) {
    const int part = kb >= p_.k_blocks_of_part;
    const int of = C::kBlocks == Blocks::kGated ? kBlock : part;
    const auto* const entries = static_cast<const Stored*>(p_.nibbles.strips[of].base);
    each_entry<kBlock>(kb, [&](int i, int64_t at, bool inside) {
      raw_[kBlock][i] = inside ? uint32_t(__ldg(entries + at)) : 0;
    });
  }
  template <int kBlock>
  __device__ __forceinline__ void fetch(int kb) {
    if (kb >= p_.k_blocks) return;
    switch (dtype_bytes(p_.nibbles.dtype)) {
      case 1: return fetch_as<kBlock, uint8_t>(kb);
      case 2: return fetch_as<kBlock, uint16_t>(kb);
      default: return fetch_as<kBlock, uint32_t>(kb);
    }
  }

  // K-major: of two features each two 16 k; else of four times a line of k. An entry outside of the
  // matrix is 0 bits, and its codes are multiplied by zeros: whatever finite number it becomes.
  template <int kBlock, int kHalf>
  __device__ __forceinline__ void make_scales(int kb, Scale (&scales)[4]) const {
    const float factor = kPairs ? 1.0f : scales2<kBlock>(kb);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (C::kMajor == Major::kK) {
        const int k16 = 2 * kHalf + i % 2, shift = p_.nibbles.shift;
        const uint32_t* const raw = raw_[kBlock] + 4 * (i / 2);
        scales[i] = scale(shift == 4 ? raw[k16] : shift == 5 ? raw[k16 & 2] : raw[0], factor);
      } else {
        scales[i] = scale(raw_[kBlock][4 * kHalf + i], factor);
      }
    }
  }
  __device__ __forceinline__ Scale scale(uint32_t raw, float factor) const {
    const moec_dtype dtype = p_.nibbles.dtype;
    if constexpr (kPairs) {
      const uint32_t of_power = raw == 0 ? 0x40 : raw == 255 ? 0x7fc0 : raw << 7;
      const uint32_t bits = dtype_bytes(dtype) == 1 ? of_power : raw;
      return bits | bits << 16;
    } else {
      if (dtype == MOEC_F32) return __uint_as_float(raw);
      if (dtype == MOEC_BF16) return __uint_as_float(raw << 16);
      if (dtype == MOEC_F16) return __half2float(__ushort_as_half(uint16_t(raw)));
      if (dtype != MOEC_F8_E4M3) return quant::e8m0(raw);
      return p_.nibbles.divides ? quant::e4m3(raw) / factor : quant::e4m3(raw) * factor;
    }
  }
  template <int kBlock>
  __device__ __forceinline__ float scales2(int kb) const {
    const int part = C::kBlocks == Blocks::kGated ? kBlock : kb >= p_.k_blocks_of_part;
    const ScaleStrips& strips = p_.nibbles.strips[part];
    return strips.scales2 ? __ldg(strips.scales2 + expert_ * strips.scales2_stride) : 1.0f;
  }

  const Params& p_;
  const uint32_t table_;
  const int line_, warp_, group_;  // line_: of the eight of a matrix
  uint32_t turn_[2];
  int expert_ = 0, feature_ = 0;
  uint32_t raw_[2][kScales];
};

}  // namespace moec::cuda
