// SPDX-License-Identifier: Apache-2.0
// Epilogue of the gradient of the down projection. The accumulators are d_act before the routing
// weight. With g, u the saved pre-activations:
//   d_weight[r] += d_act . act(g, u)
//   out = weight * act(g, u),  d_pre = weight * d_act * act'(g, u)
//
// This is 10 bytes of traffic and some 30 instructions an element, more than the tensor cores may
// wait for. d_act waits, rounded to the element type, in slots of 16 rows and 64 features; one of
// them is finished behind every second k-block of the next tile, or so. What a slot needs from
// memory is copied to shared memory while the one before is finished: a load into registers would
// be waited for where the next k-block starts, before its products are issued.
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

// Slot i holds rows i % kSlots * 16 and on of block i / kSlots. Thread t has chunk t % 8 (8
// features) of row t / 8 of each.
template <typename Element, typename Activation>
class StoreGradient {
  static constexpr int kSlots = kMaxTileN / kRowUnit, kSlotBytes = kRowUnit * 128;
  static constexpr int kStaged = 6;  // slots in staging at a time; the rest are in registers
  // Offsets in staging: pre-activations of one slot, sums and routing weights of all rows.
  static constexpr int kPre = kStaged * kSlotBytes, kSums = kPre + 2 * kSlotBytes,
                       kWeights = kSums + kMaxTileN * int(sizeof(float));

 public:
  static constexpr bool kGated = false, kBiased = false;
  static constexpr bool kLongPieces = true, kSkipsOutside = false;
  static constexpr int kMaxRows = kMaxTileN, kStages = 4, kPieces = 2 * kSlots;
  static constexpr int kStagingBytes = kWeights + kMaxTileN * int(sizeof(float));

  __device__ void copy_piece(const RowGemmParams& p, const Group& group, int piece) {
    const unsigned i = piece;
    ptx::copy_async_wait<0>();
    if (i == 0) __syncwarp();  // the weights of a row are copied by the lanes that use them
    if (i == kStaged) stage_held<kStaged, 2 * kStaged>(group);
    if (i == 2 * kStaged) stage_held<2 * kStaged, kPieces>(group);
    if (row_of(i) < rows_) finish_slot(p, group, i);
    if (i + 1 == kPieces) return;
    const int slot = kRowUnit * 4 * p.features;  // bytes
    at_ += i + 1 == kSlots ? 128 * 2 - (kSlots - 1) * slot : slot;
    fetch(p, group, i + 1);
  }
  __device__ void finish(const RowGemmParams& p, const RowTile& tile, const Group& group,
                         const Accumulators& acc) {
    const int row = group.thread / 8, chunk = group.thread % 8;
    const int feature = tile.feature_tile * kTileM + group.index * 64 + chunk * 8;
    rows_ = tile.rows;
    first_row_ = tile.row_begin + row;
    rows_left_ = tile.rows - row;
    features_left_ = p.features - feature;
    part_ = tile.feature_tile * 2 + group.index;
    at_ = (int64_t(first_row_) * 2 * p.features + feature) * 2;
    out_ = static_cast<Element*>(p.out) + (first_row_ * p.out_stride + feature);
    group.sync();  // what was staged of the tile before has been read
    const int weight = row + chunk * kRowUnit;
    if (weight < tile.rows) {
      ptx::copy_async_word(group.staging + kWeights + weight * 4,
                           p.row_weight + tile.row_begin + weight);
    }
    fetch(p, group, 0);
    const auto slot = [&](int s, uint32_t (&packed)[4]) {
      pack_slice<Element>(s < kSlots ? acc.first : acc.second, s % kSlots, packed);
    };
    stage_slots<0, kStaged>(group, slot);
#pragma unroll
    for (int s = kStaged; s < kPieces; ++s) slot(s, held_[s - kStaged]);
    group.sync();
  }

 private:
  static __device__ int row_of(unsigned i) { return int(i % kSlots * kRowUnit); }
  static __device__ int feature_of(unsigned i) { return int(i / kSlots * 128); }
  __device__ bool inside(unsigned i) const {
    return row_of(i) < rows_left_ && feature_of(i) < features_left_;
  }

  template <int kFirst, int kLast, typename Slot>
  __device__ void stage_slots(const Group& group, Slot slot) const {
#pragma unroll
    for (int s = kFirst; s < kLast; ++s) {
      if (row_of(s) >= rows_) continue;
      uint32_t packed[4];
      slot(s, packed);
      ptx::store_matrix_transposed(group.matrix_row(group.staging, s - kFirst), packed[0],
                                   packed[1], packed[2], packed[3]);
    }
  }
  template <int kFirst, int kLast>
  __device__ void stage_held(const Group& group) const {
    group.sync();  // the slots before have been read
    stage_slots<kFirst, kLast>(group, [&](int s, uint32_t (&packed)[4]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) packed[i] = held_[s - kStaged][i];
    });
    group.sync();
  }

  // A thread copies what it reads itself.
  __device__ void fetch(const RowGemmParams& p, const Group& group, unsigned i) const {
    if (inside(i)) {
      const char* const from = static_cast<const char*>(p.pre) + at_;
      const uint32_t to = group.staging + kPre + group.thread * 16;
      ptx::copy_async(to, from, 16);
      ptx::copy_async(to + kSlotBytes, from + unsigned(p.features * 2), 16);
    }
    ptx::copy_async_commit();
  }

  __device__ void finish_slot(const RowGemmParams& p, const Group& group, unsigned i) const {
    float sum = inside(i) ? finish_chunk(p, group, i) : 0.0f;
#pragma unroll
    for (int lanes = 1; lanes < 8; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    if (group.thread % 8 != 0 || row_of(i) >= rows_left_) return;
    // The sum over this warpgroup's 128 features; the first block's waits in shared memory.
    const uint32_t waiting = group.staging + kSums + (row_of(i) + group.thread / 8) * 4;
    if (i < kSlots) {
      ptx::shared_store(waiting, sum);
    } else if (part_ < 2 * p.feature_tiles) {
      p.d_weight_parts[part_ * p.max_rows + first_row_ + row_of(i)] =
          __uint_as_float(ptx::shared_load_word(waiting)) + sum;
    }
  }

  // Eight features of one row; returns their part of the routing weight's gradient.
  __device__ float finish_chunk(const RowGemmParams& p, const Group& group, unsigned i) const {
    const Activation activation{p.activation};
    const uint32_t mine = group.staging + kPre + group.thread * 16;
    const uint4 d = ptx::shared_load(group.staging + i % kStaged * kSlotBytes +
                                     swizzled(group.thread / 8, group.thread % 8)),
                gate = ptx::shared_load(mine), up = ptx::shared_load(mine + kSlotBytes);
    const float weight = __uint_as_float(
        ptx::shared_load_word(group.staging + kWeights + (row_of(i) + group.thread / 8) * 4));
    uint4 out, d_gate, d_up;
    float sum = 0;
    const auto pair = [&](uint32_t d_pair, uint32_t gate_pair, uint32_t up_pair, uint32_t& out_pair,
                          uint32_t& d_gate_pair, uint32_t& d_up_pair) {
      const float2 d2 = unpack<Element>(d_pair);
      const auto r = activation.gradients(unpack<Element>(gate_pair), unpack<Element>(up_pair),
                                          {d2.x * weight, d2.y * weight});
      sum = fmaf(d2.x, r.value.x, sum);
      sum = fmaf(d2.y, r.value.y, sum);
      out_pair = pack<Element>(weight * r.value.x, weight * r.value.y);
      d_gate_pair = pack<Element>(r.d_gate.x, r.d_gate.y);
      d_up_pair = pack<Element>(r.d_up.x, r.d_up.y);
    };
    pair(d.x, gate.x, up.x, out.x, d_gate.x, d_up.x);
    pair(d.y, gate.y, up.y, out.y, d_gate.y, d_up.y);
    pair(d.z, gate.z, up.z, out.z, d_gate.z, d_up.z);
    pair(d.w, gate.w, up.w, out.w, d_gate.w, d_up.w);
    char* d_pre = static_cast<char*>(p.d_pre) + at_;
    unsigned apart = p.features * 2;  // bytes
    if (p.pairs) {
      d_pre += (p.features - features_left_ + feature_of(i)) * 2;
      apart = sizeof(uint4);
      alternate(d_gate, d_up);
    }
    *reinterpret_cast<uint4*>(d_pre) = d_gate;
    *reinterpret_cast<uint4*>(d_pre + apart) = d_up;
    *reinterpret_cast<uint4*>(out_ + row_of(i) * p.out_stride + feature_of(i)) = out;
    return sum;
  }

  uint32_t held_[kPieces - kStaged][4];
  int rows_;                                   // of the tile
  int rows_left_, features_left_, first_row_;  // from this thread's first element on
  int part_;                                   // of the routing weight's gradient
  int64_t at_;    // offset in pre and d_pre, bytes: the slot that was asked for last
  Element* out_;  // this thread's first element
};

}  // namespace moec::cuda
