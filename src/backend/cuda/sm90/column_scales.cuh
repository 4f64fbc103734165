// SPDX-License-Identifier: Apache-2.0
// Scales of codes that lie along the features (column_decoder.cuh). The features of a warp are in
// one block of each line, so that a k-block has 64 scales for it. A lane loads those of two
// neighbouring lines, of the next k-block: nothing waits for memory. The warp's shared memory deals
// them out.
//
//   begin(tile)     where the scales of a tile are, and those of its first k-block
//   take(kb)        those of a k-block, in its turn; fetches those of the next one
//   of_step(step)   what a lane wants of them for 16 k: of its first two k, and of those eight on
#pragma once

#include <type_traits>

#include "backend/cuda/sm90/register_scales.cuh"

namespace moec::cuda {

template <typename C>
class ColumnScales {
  static constexpr LineDecode kDecode = C::Weights::kDecode;
  static constexpr bool kOfChannels = kDecode == LineDecode::kSigned;
  // Scales of the elements' type, of two lines in a word: else they are fp32.
  static constexpr bool kWords = kDecode == LineDecode::kPowers || kDecode == LineDecode::kIntegers;

 public:
  using Params = typename C::Params;
  using Pair = std::conditional_t<kWords, uint32_t, float2>;  // of two neighbouring lines
  static constexpr int kWarpBytes = 32 * sizeof(Pair), kBytes = kConsumerWarps * kWarpBytes;
  struct Step {
    Pair of[2];
  };

  // last: of k_size.
  __device__ ColumnScales(const Params& p, uint32_t memory, int group, int thread, int last)
      : p_(p),
        memory_(memory + (4 * group + (thread >> 5)) * kWarpBytes),
        lane_(thread & 31),
        feature_(kBlockFeatures * group +
                 (C::Weights::kNibbles ? 32 * (thread >> 6) : 16 * (thread >> 5))),
        last_pair_(last - 1) {}

  __device__ int part(int kb) const { return kb >= p_.k_blocks_of_part; }

  __device__ void begin(const RowTile& tile) {
    expert_ = tile.expert;
    tile_feature_ = min(first_feature(p_, tile.feature_tile) + feature_, p_.features - 1);
    start();
    fetch(0);
  }
  __device__ __forceinline__ void take(int kb) {
    Pair now = converted(kb);
    __syncwarp();  // all have those of the k-block before
    store(now);
    __syncwarp();
    fetch(kb + 1);
  }
  __device__ __forceinline__ Step of_step(int step) const {
    const int quad_lane = lane_ & 3;
    if constexpr (kWords) {
      const uint2 v = load_eight_bytes(memory_ + 64 * (step / 2) + 16 * quad_lane + 8 * (step & 1));
      return {v.x, v.y};
    } else {
      const float4 v =
          std::bit_cast<float4>(ptx::shared_load(memory_ + 64 * step + 16 * quad_lane));
      return {{{v.x, v.y}, {v.z, v.w}}};
    }
  }

 private:
  // Lines 8 g + 2 c and the one behind it are of lane 4 g + c, for lane c of each quad.
  __device__ void store(const Pair& now) const {
    const int group = lane_ / 4, quad_lane = lane_ & 3;
    if constexpr (kWords)
      ptx::shared_store(memory_ + 64 * (group / 4) + 16 * quad_lane + 4 * (group & 3),
                        std::bit_cast<float>(now));
    else
      ptx::shared_store(memory_ + 64 * (group / 2) + 16 * quad_lane + 8 * (group & 1), now);
  }
  // Those of channels are as those of lines, of which each has one.
  __device__ int entry_bytes() const {
    if constexpr (kDecode == LineDecode::kPowers) return 1;
    if constexpr (kDecode == LineDecode::kIntegers) return 2;
    if constexpr (C::Weights::kF32Scales) return 4;
    return dtype_bytes(p_.lines.scales[0].dtype);
  }
  __device__ const char* base(int part) const {
    return static_cast<const char*>(kOfChannels ? p_.channels[part].scales.base
                                                : p_.lines.scales[part].base);
  }
  __device__ void start() {
    const ExpertScales& form = p_.lines.scales[0];
    if constexpr (kOfChannels)
      from_ = base(0) + expert_ * p_.channels[0].scales.expert_stride * entry_bytes();
    else
      from_ = base(0) + (expert_ * form.expert_stride + (uint32_t(tile_feature_) >> form.shift)) *
                            entry_bytes();
  }
  // The first of this lane's two lines: those behind the end of k have the scales of the last two.
  __device__ int line_of(int kb, int part) const {
    return min((kb - part * p_.k_blocks_of_part) * kTileK + 2 * lane_, last_pair_);
  }
  __device__ uint32_t entry_of(int line, int part) const {
    if constexpr (kOfChannels) return uint32_t(line) * uint32_t(p_.channels[0].scales.stride);
    const ExpertScales& form = p_.lines.scales[0];
    const int first = part ? p_.lines.scales[1].first_line : form.first_line;
    return uint32_t(first + line * form.line_step >> form.line_shift) * uint32_t(form.line_stride);
  }
  // Behind the last k-block are those of the last one.
  __device__ __forceinline__ void fetch(int kb) {
    kb = min(kb, p_.narrow_from - 1);
    const int of = part(kb), line = line_of(kb, of), bytes = entry_bytes();
    const char* const from = of ? from_ + (base(1) - base(0)) : from_;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      next_[i] = load_entry(from + uint64_t(entry_of(line + i, of)) * bytes, bytes);
  }
  __device__ __forceinline__ Pair converted(int kb) const {
    if constexpr (kDecode == LineDecode::kPowers)
      return permute(power_pair(next_[0]), power_pair(next_[1]), 0x5410);
    else if constexpr (kDecode == LineDecode::kIntegers)
      return next_[0] | next_[1] << 16;
    else if constexpr (C::Weights::kF32Scales)
      return {std::bit_cast<float>(next_[0]), std::bit_cast<float>(next_[1])};
    else
      return {number_of(next_[0], kb, 0), number_of(next_[1], kb, 1)};
  }
  __device__ float number_of(uint32_t stored, int kb, int i) const {
    const int of = part(kb);
    const NestedScales& nested = p_.lines.nested[of];
    if (!nested.book) return quant::scale_of(stored, p_.lines.scales[0].dtype);
    return nested_scale(nested, __ldg(nested.offset), stored,
                        from_ - base(0) + entry_of(line_of(kb, of) + i, of));
  }

  const Params& p_;
  const uint32_t memory_;
  const int lane_, feature_, last_pair_;
  int expert_, tile_feature_;
  const char* from_;
  uint32_t next_[2];
};

}  // namespace moec::cuda
