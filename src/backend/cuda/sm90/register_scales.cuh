// SPDX-License-Identifier: Apache-2.0
// Scales of the codes that warps decode in their registers (register_decoder.cuh), of the two rows
// that a quad has of each of a group's two blocks. What a lane loads in front of a k-block is of
// the next one: nothing waits for memory.
//
//   begin(tile)        where the scales of a tile are, and those of its first k-block, or of all
//   take(kb)           those of a k-block, in its turn; fetches those of the next one
//   of<kBlock>(r, h)   that of row r, half h of a line
#pragma once

#include "backend/cuda/device/line_words.h"
#include "backend/cuda/sm90/row_gemm_config.cuh"
#include "backend/cuda/sm90/weight_decoder.cuh"

namespace moec::cuda {

// In the place where it stands: what comes early is asked for early.
template <int kBytes>
__device__ __forceinline__ uint32_t load_entry(const char* at) {
  uint32_t entry;
  if constexpr (kBytes == 4)
    asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(entry) : "l"(at));
  else if constexpr (kBytes == 2)
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=r"(entry) : "l"(at));
  else
    asm volatile("ld.global.nc.u8 %0, [%1];" : "=r"(entry) : "l"(at));
  return entry;
}

__device__ __forceinline__ uint32_t load_entry(const char* at, int bytes) {
  return bytes == 4 ? load_entry<4>(at) : bytes == 2 ? load_entry<2>(at) : load_entry<1>(at);
}

// The first of two rows of a block that a thread's quad has.
__device__ __forceinline__ int row_of(int thread) {
  return (thread >> 5 & 3) * 16 + (thread & 31) / 4;
}

// Of a pair of blocks of gate and up, of which a thread has a line each.
__device__ __forceinline__ int pair_line_of(int group, int thread) {
  return group * 32 + (thread >> 5 & 3) * 8 + (thread & 31) / 4;
}

// What lane t of the quad has.
__device__ __forceinline__ uint32_t of_quad(uint32_t word, int t) {
  return __shfl_sync(~0u, word, t, 4);
}

// last: of k_size. shift: of all scales.
template <typename C>
class RegisterScales {
 public:
  using Params = typename C::Params;
  __device__ RegisterScales(const Params& p, int group, int thread, int last, int shift)
      : p_(p), group_(group), thread_(thread), last_(last), shift_(shift) {}

  // Of a row of a block: 0, or 1 for that eight rows behind.
  struct Line {
    int part, line;
  };
  __device__ Line line_of(const RowTile& tile, int block, int row) const {
    if constexpr (C::kBlocks == Blocks::kPair) {  // the second row is of up
      const int own = first_feature(p_, tile.feature_tile) + pair_line_of(group_, thread_);
      return {row, min(own, p_.features - 1)};
    }
    const BlockPlace place =
        place_of<C::kBlocks>(0, first_feature(p_, tile.feature_tile), group_ + 2 * block);
    const int own = place.feature + row_of(thread_) + 8 * row;
    return {place.part, min(own, p_.features - 1)};  // what comes of others is never stored
  }

 protected:
  static constexpr LineDecode kDecode = C::Weights::kDecode;
  __device__ int quad_lane() const { return thread_ & 3; }
  // The first scale of a line.
  __device__ const char* first_of(const RowTile& tile, const Line& of, int entry_bytes) const {
    const ExpertScales& form = p_.lines.scales[0];
    const ExpertScales& scales = p_.lines.scales[of.part];
    const int64_t line = (scales.first_line + of.line * form.line_step) >> form.line_shift;
    const int64_t first = tile.expert * form.expert_stride + line * form.line_stride;
    return static_cast<const char*>(scales.base) + first * entry_bytes;
  }

  // In front of the load that takes the register of what it was made of: else that is moved, and
  // who moves it waits for memory.
  static __device__ __forceinline__ void settle(uint32_t& now) {
    if constexpr (C::kWide) ptx::settle(now);
  }

  // The entry of position k of a line; behind k_size are zeros.
  __device__ uint32_t entry(int k) const { return min(k, last_) >> shift_; }

  const Params& p_;
  const int group_, thread_, last_, shift_;
};

// Of whole lines (weight_operand.cuh): lane t of a quad loads that of row t / 2 of block t % 2.
template <typename C>
class WholeLineScales : public RegisterScales<C> {
  using Base = RegisterScales<C>;

 public:
  using Base::Base;
  static __device__ constexpr bool in_halves() { return false; }

  __device__ void begin(const RowTile& tile) {
    const int t = this->quad_lane();
    from_ = this->first_of(tile, this->line_of(tile, C::kWide ? 0 : t & 1, t >> 1), kBytes);
    fetch(0);
  }
  __device__ __forceinline__ void take(int kb) {
    now_ = kIntegers ? next_ | next_ << 16 : next_;
    this->settle(now_);
    fetch(kb + 1);
  }
  template <int kBlock>
  __device__ __forceinline__ uint32_t of(int row, int) const {
    return of_quad(now_, 2 * row + kBlock);
  }

 private:
  static constexpr bool kIntegers = Base::kDecode == LineDecode::kIntegers;
  static constexpr int kBytes = kIntegers ? 2 : 4;
  __device__ __forceinline__ void fetch(int kb) {
    next_ = load_entry<kBytes>(from_ + uint64_t(this->entry(kb * kTileK)) * kBytes);
  }
  const char* from_;
  uint32_t now_, next_;
};

// Of any type, nested ones, and of blocks of 32: lane t of a quad has those of half t % 2 of the
// quad's first row, or of its second.
template <typename C>
class LineScales : public RegisterScales<C> {
  using Base = RegisterScales<C>;
  using Base::kDecode;
  using Base::p_;

 public:
  using Base::Base;
  __device__ bool in_halves() const { return kTileK >> this->shift_ > 1; }

  __device__ void begin(const RowTile& tile) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
      from_[block] =
          this->first_of(tile, this->line_of(tile, block, this->quad_lane() >> 1), entry_bytes());
    fetch(0);
  }
  __device__ __forceinline__ void take(int kb) {
    now_[0] = converted<0>(kb);
    if constexpr (kBlocks > 1) now_[1] = converted<1>(kb);
    this->settle(now_[0]);
    fetch(kb + 1);
  }
  template <int kBlock>
  __device__ __forceinline__ uint32_t of(int row, int half) const {
    return of_quad(now_[kBlock], 2 * row + half);
  }

 private:
  // Powers and integers have scales of one type: exponents, or the weights'.
  __device__ int entry_bytes() const {
    if constexpr (kDecode == LineDecode::kPowers) return 1;
    if constexpr (kDecode == LineDecode::kIntegers) return 2;
    return dtype_bytes(p_.lines.scales[0].dtype);
  }
  __device__ uint32_t own_entry(int kb) const {
    return this->entry(kb * kTileK + (this->quad_lane() & 1) * kLineRun);
  }
  __device__ __forceinline__ void fetch(int kb) {
    const int bytes = entry_bytes();
    const uint64_t at = uint64_t(own_entry(kb)) * bytes;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
      next_[block] = load_entry(from_[block] + at, bytes);
  }
  template <int kBlock>
  __device__ __forceinline__ uint32_t converted(int kb) const {
    const uint32_t scale = next_[kBlock];
    if constexpr (kDecode == LineDecode::kPowers) return power_pair(scale);
    if constexpr (kDecode == LineDecode::kIntegers) return scale | scale << 16;
    return std::bit_cast<uint32_t>(p_.lines.nested[0].book
                                       ? looked_up<kBlock>(scale, kb)
                                       : quant::scale_of(scale, p_.lines.scales[0].dtype));
  }
  template <int kBlock>
  __device__ __forceinline__ float looked_up(uint32_t code, int kb) const {
    const int part = C::kBlocks == Blocks::kGated  ? kBlock
                     : C::kBlocks == Blocks::kPair ? this->quad_lane() >> 1
                                                   : 0;
    const NestedScales& nested = p_.lines.nested[part];
    const auto* const base = static_cast<const char*>(p_.lines.scales[part].base);
    const int64_t at = from_[kBlock] - base + own_entry(kb);
    return nested_scale(nested, __ldg(nested.offset), code, at);
  }

  static constexpr int kBlocks = C::kWide ? 1 : 2;
  const char* from_[kBlocks];
  uint32_t now_[kBlocks], next_[kBlocks];
};

// Of a channel, which has one for both halves: a base is in the place of the second.
template <typename C>
class ChannelScales : public RegisterScales<C> {
  using Base = RegisterScales<C>;

 public:
  using Base::Base;
  static __device__ constexpr bool in_halves() { return true; }
  // Scales in the even lanes of a quad, bases in the odd ones.
  __device__ void begin(const RowTile& tile) {
    const int t = this->quad_lane();
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const auto of = this->line_of(tile, block, t >> 1);
      const auto channel =
          channel_of<quant::Int8>(this->p_.channels[of.part], tile.expert, of.line);
      now_[block] = std::bit_cast<uint32_t>(t & 1 ? signed_base(channel.zero) : channel.scale);
    }
  }
  __device__ void take(int) const {}
  template <int kBlock>
  __device__ __forceinline__ uint32_t of(int row, int half) const {
    return of_quad(now_[kBlock], 2 * row + half);
  }

 private:
  static constexpr int kBlocks = C::kWide ? 1 : 2;
  uint32_t now_[kBlocks];
};

template <typename C>
using ScalesOf = std::conditional_t<
    C::Weights::kDecode == LineDecode::kSigned, ChannelScales<C>,
    std::conditional_t<C::Weights::kWholeLines, WholeLineScales<C>, LineScales<C>>>;

}  // namespace moec::cuda
