// SPDX-License-Identifier: Apache-2.0
// Epilogue of the gradient of the down projection. The accumulators are d_act before the routing
// weight. With g, u the saved pre-activations:
//   d_weight[r] += d_act . act(g, u)
//   out = weight * act(g, u),  d_pre = weight * d_act * act'(g, u)
//
// This is 10 bytes of traffic and some 25 instructions an element, more than the tensor cores may
// wait for. d_act waits, rounded to the element type, the first block in staging and the second in
// registers; 16 rows of it are finished behind each k-block of the next tile.
#pragma once

#include "backend/cuda/epilogue.cuh"

namespace moec::cuda {

// Eight values each -> eight pairs.
__device__ __forceinline__ void alternate(uint4& first, uint4& second) {
  const uint4 a = first, b = second;
  const auto low = [](uint32_t x, uint32_t y) { return __byte_perm(x, y, 0x5410); };
  const auto high = [](uint32_t x, uint32_t y) { return __byte_perm(x, y, 0x7632); };
  first = {low(a.x, b.x), high(a.x, b.x), low(a.y, b.y), high(a.y, b.y)};
  second = {low(a.z, b.z), high(a.z, b.z), low(a.w, b.w), high(a.w, b.w)};
}

template <typename Element, typename Activation>
class StoreGradient {
 public:
  static constexpr bool kGated = false, kBiased = false;
  static constexpr int kMaxRows = kMaxTileN, kStages = 4;
  static constexpr int kSlots = kMaxRows / kRowUnit, kPieces = 2 * kSlots;
  static constexpr int kStagingBytes = kBlockStaging<kMaxRows> + kMaxRows * int(sizeof(float));

  // Piece i is slot i % kSlots of block i / kSlots. Thread t has chunk t % 8 (8 features) of row
  // t / 8; what it needs from memory is asked for one piece earlier.
  __device__ void copy_piece(const RowGemmParams& p, const Group& group, int i) {
    if (i == kSlots) {
      group.sync();  // the first block has been read
      stage_packed<kMaxRows>(group, group.staging, tile_.rows, second_);
      group.sync();
    }
    if (i % kSlots * kRowUnit < tile_.rows) finish_slot(p, group, i);
    fetch(p, group, i + 1);
  }
  __device__ void finish(const RowGemmParams& p, const RowTile& tile, const Group& group,
                         const Accumulators& acc) {
    tile_ = tile;
    group.sync();  // the second block of the tile before has been read
    stage<Element, kMaxRows>(group, group.staging, tile.rows, acc.first);
    pack_block<Element>(second_, acc.second);
    group.sync();
    fetch(p, group, 0);
  }

 private:
  __device__ int row(const Group& group, int i) const {
    return i % kSlots * kRowUnit + (group.thread >> 3);
  }
  __device__ int feature(const Group& group, int i) const {
    return tile_.feature_tile * kTileM + group.index * 64 + i / kSlots * 128 +
           (group.thread & 7) * 8;
  }
  __device__ bool inside(const RowGemmParams& p, const Group& group, int i) const {
    return row(group, i) < tile_.rows && feature(group, i) < p.features;
  }
  __device__ int64_t pre_at(const RowGemmParams& p, const Group& group, int i) const {
    return int64_t(tile_.row_begin + row(group, i)) * 2 * p.features + feature(group, i);
  }

  __device__ void fetch(const RowGemmParams& p, const Group& group, int i) {
    if (i >= kPieces || !inside(p, group, i)) return;
    const auto* const from =
        reinterpret_cast<const uint4*>(static_cast<const Element*>(p.pre) + pre_at(p, group, i));
    gate_ = __ldcs(from);
    up_ = __ldcs(from + p.features / 8);
    weight_ = __ldg(p.row_weight + tile_.row_begin + row(group, i));
  }

  __device__ void finish_slot(const RowGemmParams& p, const Group& group, int i) const {
    float sum = 0;
    if (inside(p, group, i)) sum = finish_chunk(p, group, i);
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    sum += __shfl_xor_sync(~0u, sum, 4);
    if ((group.thread & 7) != 0 || row(group, i) >= tile_.rows) return;
    // The sum over this warpgroup's 128 features; the first block's waits in shared memory.
    float* const waiting =
        static_cast<float*>(__cvta_shared_to_generic(group.staging + kBlockStaging<kMaxRows>)) +
        row(group, i);
    if (i < kSlots) {
      *waiting = sum;
    } else if (tile_.feature_tile < p.feature_tiles) {
      p.d_weight_parts[(tile_.feature_tile * 2 + group.index) * p.max_rows + tile_.row_begin +
                       row(group, i)] = *waiting + sum;
    }
  }

  // Eight features of one row; returns their part of the routing weight's gradient.
  __device__ float finish_chunk(const RowGemmParams& p, const Group& group, int i) const {
    const Activation activation{p.activation};
    const uint4 d = ptx::shared_load(group.staging + swizzled(row(group, i), group.thread & 7));
    uint4 out, d_gate, d_up;
    float sum = 0;
    const auto pair = [&](uint32_t d_pair, uint32_t gate, uint32_t up, uint32_t& out_pair,
                          uint32_t& d_gate_pair, uint32_t& d_up_pair) {
      const float2 d2 = unpack<Element>(d_pair);
      const auto r = activation.gradients(unpack<Element>(gate), unpack<Element>(up),
                                          {d2.x * weight_, d2.y * weight_});
      sum = fmaf(d2.x, r.value.x, sum);
      sum = fmaf(d2.y, r.value.y, sum);
      out_pair = pack<Element>(weight_ * r.value.x, weight_ * r.value.y);
      d_gate_pair = pack<Element>(r.d_gate.x, r.d_gate.y);
      d_up_pair = pack<Element>(r.d_up.x, r.d_up.y);
    };
    pair(d.x, gate_.x, up_.x, out.x, d_gate.x, d_up.x);
    pair(d.y, gate_.y, up_.y, out.y, d_gate.y, d_up.y);
    pair(d.z, gate_.z, up_.z, out.z, d_gate.z, d_up.z);
    pair(d.w, gate_.w, up_.w, out.w, d_gate.w, d_up.w);
    auto* const d_pre = reinterpret_cast<uint4*>(
        static_cast<Element*>(p.d_pre) + pre_at(p, group, i) + (p.pairs ? feature(group, i) : 0));
    if (p.pairs) alternate(d_gate, d_up);
    d_pre[0] = d_gate;
    d_pre[p.pairs ? 1 : p.features / 8] = d_up;
    *reinterpret_cast<uint4*>(static_cast<Element*>(p.out) +
                              int64_t(tile_.row_begin + row(group, i)) * p.out_stride +
                              feature(group, i)) = out;
    return sum;
  }

  PackedBlock second_;
  RowTile tile_;
  uint4 gate_, up_;
  float weight_;
};

}  // namespace moec::cuda
