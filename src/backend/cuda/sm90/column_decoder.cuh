// SPDX-License-Identifier: Apache-2.0
// Elements of coded weights as wgmma's A operand, made by the warps that multiply, where codes lie
// along the features: in the gradients of what a forward has along k. A block of 64 x 64 codes has
// a line for each k. A warp reads it as 8x8 matrices of 16 bits, transposed: a lane gets of two
// neighbours along k the codes of the same features, and so a pair of an operand's elements without
// moving any. Which two features a lane has follows from that (column_feature).
//
//   numbers   as of FragmentDecoder
//   scales    for each warp: of the 64 lines of a k-block, for its features
#pragma once

#include "backend/cuda/sm90/column_scales.cuh"
#include "backend/cuda/sm90/register_decoder.cuh"

namespace moec::cuda {

template <typename C>
class ColumnDecoder {
 public:
  using Params = typename C::Params;
  using Weights = typename C::Weights;

  __device__ ColumnDecoder(const Params& p, uint32_t memory, int group)
      : ColumnDecoder(p, memory, group, ptx::shared_load(memory + FragmentNumbers::kUnknown)) {}

  __device__ int lane() const { return thread_ & 31; }
  __device__ void begin(const RowTile& tile) { scales_.begin(tile); }

  struct Codes {
    uint32_t words[2][4];  // of eight k each: two k of two bytes, or of four nibbles

    __device__ void settle() {
#pragma unroll
      for (auto& half : words)
#pragma unroll
        for (uint32_t& word : half) ptx::settle(word);
    }
  };
  __device__ __forceinline__ void load(uint32_t stage, Codes& codes) const {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      ptx::load_matrix_transposed(stage + at_ + half * 32 * Weights::kLineBytes, codes.words[half]);
  }
  // As of FragmentDecoder.
  __device__ __forceinline__ uint32_t zero_of(const Codes& codes) const {
    uint32_t all = 0;
#pragma unroll
    for (const auto& half : codes.words)
#pragma unroll
      for (const uint32_t word : half) all ^= word;
    return (all & uint32_t(thread_)) >> 31;
  }
  // In front of a k-block.
  __device__ __forceinline__ void take_scales(int kb) {
    scales_.take(kb);
    if constexpr (kDecode == LineDecode::kTable)
      number_ = std::bit_cast<float>(
          ptx::shared_load_word(numbers_ + scales_.part(kb) * kNumbersBytes + 4 * (lane() & 15)));
  }
  // A quarter of a k-block's elements: those of a step.
  __device__ __forceinline__ void make(int step, const Codes& codes, Fragments& f) const {
    const auto scales = scales_.of_step(step);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      elements(codes.words[step / 2][step % 2 * 2 + j], scales.of[j], f[step][2 * j],
               f[step][2 * j + 1]);
      ptx::settle(f[step][2 * j]);
      ptx::settle(f[step][2 * j + 1]);
    }
  }
  // Of an adapter's factors, as they lie; k: of them, from this k-block on.
  __device__ __forceinline__ void take_factors(const RowTile& tile, int k, Fragments& f) const {
    const int feature = min(first_feature(p_, tile.feature_tile) + own_, p_.features - 2);
    const auto* const from = static_cast<const uint32_t*>(p_.factors.base[0]) +
                             (tile.expert * p_.factors.expert_stride + feature) / 2;
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i) {
      const int at = k + 8 * i + 2 * (lane() & 3);
      const auto load = [&](int k) {
        return k < p_.rank ? __ldg(from + k * p_.factors.line_stride / 2) : 0;
      };
      const uint32_t first = load(at), second = load(at + 1);
      f[i / 2][2 * (i & 1)] = permute(first, second, 0x5410);
      f[i / 2][2 * (i & 1) + 1] = permute(first, second, 0x7632);
    }
  }

 private:
  static constexpr LineDecode kDecode = Weights::kDecode;
  static constexpr bool kF16 = std::is_same_v<typename C::Element, __half>;
  using Pair = typename ColumnScales<C>::Pair;

  __device__ ColumnDecoder(const Params& p, uint32_t memory, int group, const uint4& unknown)
      : p_(p),
        numbers_(memory),
        lowest_(unknown.x),
        thread_((int(threadIdx.x) & 127) + int(unknown.w)),
        own_(kBlockFeatures * group + column_feature<Weights>(thread_)),
        at_(group * Weights::kBlockStride + row_of_matrix(thread_)),
        first_shift_(8 * (thread_ >> 5 & 1) + (p.lines.high_first ? 4 : 0)),
        scales_(p, memory + FragmentNumbers::kBytes, group, thread_, int(unknown.y)) {}

  // Of the line that a lane gives to ldmatrix, under the swizzle of a row of codes.
  static __device__ uint32_t row_of_matrix(int thread) {
    const uint32_t line = thread & 31, warp = thread >> 5 & 3;
    const uint32_t chunk = Weights::kNibbles ? warp / 2 ^ (line >> 2 & 1) : warp ^ (line >> 1 & 3);
    return line * Weights::kLineBytes + 16 * chunk;
  }

  // first, second: of this thread's two features, two k each.
  __device__ __forceinline__ void elements(uint32_t word, const Pair& scale, uint32_t& first,
                                           uint32_t& second) const {
    if constexpr (kDecode == LineDecode::kTable) {
      // Of 16 lanes each has a number; what is above four bits of a code is not looked at.
      const auto of = [&](int shift) {
        const auto value = [&](int by, float scale) {
          return quant::product(__shfl_sync(~0u, number_, int(word >> by), 16), scale);
        };
        return rounded_pair<kF16>(value(shift, scale.x), value(shift + 16, scale.y));
      };
      first = of(first_shift_);
      second = of(first_shift_ ^ 4);
    } else if constexpr (kDecode == LineDecode::kPowers) {
      first = power_elements(word << (12 - first_shift_), scale);
      second = power_elements(word << (8 - first_shift_), scale);
    } else if constexpr (kDecode == LineDecode::kIntegers) {
      first = integer_elements<kF16>(word >> first_shift_, scale, lowest_);
      second = integer_elements<kF16>(word >> first_shift_ >> 4, scale, lowest_);
    } else {
      const FourFloats v = kDecode == LineDecode::kSigned ? signed_numbers(word, signed_base(0))
                                                          : e4m3_numbers(word);
      using quant::product;
      first = rounded_pair<kF16>(product(v.v[0], scale.x), product(v.v[2], scale.y));
      second = rounded_pair<kF16>(product(v.v[1], scale.x), product(v.v[3], scale.y));
    }
  }

  const Params& p_;
  const uint32_t numbers_, lowest_;
  const int thread_;
  const int own_;      // its first feature in a tile
  const uint32_t at_;  // of this lane's line in a stage
  const int first_shift_;
  ColumnScales<C> scales_;
  float number_ = 0;  // of a nibble's 16 numbers that of this lane
};

}  // namespace moec::cuda
