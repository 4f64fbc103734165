// SPDX-License-Identifier: Apache-2.0
// Epilogue of the up projection whose weights have columns of gate and up in turn: accumulator m is
// gate of pair m / 2 where m is even, up where it is odd. Lanes exchange them, one shuffle for each
// accumulator, so that gate and up of a pair meet in a thread; then as StoreActivated.
#pragma once

#include "backend/cuda/activation.cuh"
#include "backend/cuda/epilogue.cuh"

namespace moec::cuda {

// Afterwards a warp has two runs of 8 of the 64 features of a group, a thread one of each.
struct PairGroup : GroupBase {
  __device__ uint32_t matrix_row(uint32_t buffer, int slice) const {
    const int lane = thread & 31, warp = thread >> 5;
    return buffer + swizzled(16 * slice + (lane >> 4) * 8 + (lane & 7), warp + 4 * (lane >> 3 & 1));
  }
  __device__ int low_feature() const { return (thread >> 5) * 8 + (thread & 31) / 4; }
};

// The 16 accumulators of a warp and a row are eight pairs; m is in lanes 4 m % 8 .. + 3, lanes
// 4 q .. + 3 want pair q. Each lane sends one of its two values a round: gates of low pairs and ups
// of high ones, then the others.
class PairExchange {
 public:
  __device__ PairExchange() {
    int lane;  // volatile: nothing of this may wait in registers while the tensor cores work
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    const int q = lane / 4, column = lane & 3;
    odd_ = q & 1;
    low_ = q < 4;
    from1_ = (low_ ? 2 * q : 2 * q - 7) * 4 + column;
    from2_ = (low_ ? 2 * q + 1 : 2 * q - 8) * 4 + column;
  }
  // a, b: of m = lane / 4 and 8 more -> gate, up
  __device__ float2 operator()(float a, float b) const {
    const float x = __shfl_sync(~0u, odd_ ? b : a, from1_);
    const float y = __shfl_sync(~0u, odd_ ? a : b, from2_);
    return low_ ? float2{x, y} : float2{y, x};
  }

 private:
  bool odd_, low_;
  int from1_, from2_;
};

template <typename Element, bool kKeepsPre>
class StorePairs : public HeldActivations<kKeepsPre> {
  using Held = HeldActivations<kKeepsPre>;
  using Held::rows_, Held::up_, Held::value_;

 public:
  static constexpr bool kBiased = false;
  static constexpr bool kSkipsOutside = false;  // its registers would spill

  __device__ void finish(const RowGemmParams& p, const RowTile& tile, const PairGroup& group,
                         const Accumulators& acc) {
    const SigmoidGated activation{p.form};
    const PairExchange exchange;
    Bias bias[2];
    const int low = group_feature(p, tile, group.index) + group.low_feature();
    load_bias(p, tile.expert, low, bias[0]);
    load_bias(p, tile.expert, low + 32, bias[1]);
    if constexpr (kKeepsPre) PieceBarriers(group.index).wait_free();
#pragma unroll
    for (int slice = 0; slice < kMaxTileN / 16; ++slice) {
      uint32_t gate[4];  // leaves at once
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = 8 * slice + 4 * half, to = 4 * slice + 2 * half;
        float2 even[2], odd[2];  // {gate, up} of two features of one row, and of the next
#pragma unroll
        for (int f = 0; f < 2; ++f) {
          const float (&from)[kMaxTileN / 2] = f ? acc.second : acc.first;
          even[f] = add(exchange(from[at], from[at + 2]), bias[f]);
          odd[f] = add(exchange(from[at + 1], from[at + 3]), bias[f]);
          gate[2 * half + f] = pack<Element>(even[f].x, odd[f].x);
          if constexpr (kKeepsPre) up_[to + f] = pack<Element>(even[f].y, odd[f].y);
        }
        const float2 first = activation.values({even[0].x, even[1].x}, {even[0].y, even[1].y});
        const float2 second = activation.values({odd[0].x, odd[1].x}, {odd[0].y, odd[1].y});
        value_[to] = pack<Element>(first.x, second.x);
        value_[to + 1] = pack<Element>(first.y, second.y);
      }
      if (kKeepsPre && 16 * slice < tile.rows) {
        ptx::store_matrix_transposed(group.matrix_row(group.staging, slice), gate[0], gate[1],
                                     gate[2], gate[3]);
      }
    }
    rows_ = tile.rows;
    if constexpr (kKeepsPre) PieceBarriers(group.index).staged();
  }

 private:
  struct Bias {
    float gate, up;
  };
  static __device__ float2 add(float2 v, const Bias& bias) {
    return {v.x + bias.gate, v.y + bias.up};
  }
  static __device__ float one_bias(const ExpertBias& bias, int expert, int feature, int features) {
    if (!bias.base || feature >= features) return 0.0f;
    const int64_t at = expert * bias.expert_stride + feature * bias.stride;
    return bias.f32 ? static_cast<const float*>(bias.base)[at]
                    : float(static_cast<const Element*>(bias.base)[at]);
  }
  static __device__ void load_bias(const RowGemmParams& p, int expert, int feature, Bias& bias) {
    bias = {one_bias(p.bias[0], expert, feature, p.features),
            one_bias(p.bias[1], expert, feature, p.features)};
  }
};

}  // namespace moec::cuda
