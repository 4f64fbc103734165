// SPDX-License-Identifier: Apache-2.0
// Epilogue of the gradient of the down projection. The accumulators are d_act before the routing
// weight. With g, u the saved pre-activations:
//   d_weight[r] += d_act . act(g, u)
//   out = weight * act(g, u),  d_pre = weight * d_act * act'(g, u)
//
// This is 10 bytes of traffic and some 25 instructions an element, and a chain of them takes longer
// than the products that can be queued before it. So a fourth warpgroup does it: the consumers
// hand d_act over, rounded to the element type, through staging, 64 rows at a time, the first ones
// at the end of a tile and the others, kept in registers, while the next one is multiplied. Where
// that warpgroup's registers decode weights, d_act goes to `out` instead, and a kernel behind this
// one makes the same of it.
#pragma once

#include "backend/cuda/sm90/epilogue.cuh"

namespace moec::cuda {

// Staging of one consumer warpgroup: 64 rows of its two blocks of 64 features, and two barriers.
//   staged    one arrival of each of its warps     drained    one of each finishing warp
class HalfTiles {
 public:
  static constexpr int kRows = kMaxTileN / 2, kSlots = kRows / kRowUnit;  // slots of 16 rows
  static constexpr int kSlotBytes = kRowUnit * 128, kBlockBytes = kSlots * kSlotBytes;
  static constexpr int kBytes = 2 * kBlockBytes + 16;
  static constexpr int kWarps = 4;  // of a warpgroup

  __device__ explicit HalfTiles(uint32_t memory) : memory_(memory) {}

  __device__ void init() const {
    ptx::barrier_init(staged(), kWarps);
    ptx::barrier_init(drained(), kWarps);
  }
  // `half` counts the half tiles since the start.
  __device__ void wait_staged(unsigned half) const { ptx::barrier_wait(staged(), half & 1); }
  __device__ void wait_drained(unsigned half) const {
    ptx::barrier_wait(drained(), (half & 1) ^ 1);
  }
  __device__ void pass_staged() const { pass(staged()); }
  __device__ void pass_drained() const { pass(drained()); }

 private:
  static __device__ void pass(uint32_t barrier) {
    __syncwarp();
    if ((threadIdx.x & 31) == 0) ptx::barrier_arrive(barrier);
  }
  __device__ uint32_t staged() const { return memory_ + 2 * kBlockBytes; }
  __device__ uint32_t drained() const { return staged() + 8; }

  uint32_t memory_;
};

// ---- consumers ----------------------------------------------------------------------------------
template <typename Element>
class HandOver {
 public:
  static constexpr bool kGated = false, kBiased = false, kSkipsOutside = true;
  static constexpr int kMaxRows = kMaxTileN, kStages = 4, kPieces = 1;
  static constexpr int kStagingBytes = HalfTiles::kBytes;

  __device__ void copy_piece(const RowGemmParams&, const Group& group, int) {
    hand_over(group, rows_ - HalfTiles::kRows, [&](int s, uint32_t (&packed)[4]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) packed[i] = held_[s][i];
    });
  }
  __device__ void finish(const RowGemmParams&, const RowTile& tile, const Group& group,
                         const Accumulators& acc) {
    const auto pack = [&](int s, int first, uint32_t (&packed)[4]) {
      pack_slice<Element>(s < kSlots ? acc.first : acc.second, first + s % kSlots, packed);
    };
    rows_ = tile.rows;
    hand_over(group, rows_, [&](int s, uint32_t (&packed)[4]) { pack(s, 0, packed); });
#pragma unroll
    for (int s = 0; s < 2 * kSlots; ++s) pack(s, kSlots, held_[s]);
  }
  // In the place of a tile outside: the finishing warps wait for both groups.
  __device__ void hand_nothing(const Group& group) {
    rows_ = 0;
    hand_over(group, rows_, [](int, uint32_t (&)[4]) {});
  }

 private:
  static constexpr int kSlots = HalfTiles::kSlots;

  // slot(s, packed) gives slot s % kSlots of block s / kSlots.
  template <typename Slot>
  __device__ void hand_over(const Group& group, int rows, Slot slot) {
    const HalfTiles half(group.staging);
    half.wait_drained(halves_++);
#pragma unroll
    for (int s = 0; s < 2 * kSlots; ++s) {
      if (s % kSlots * kRowUnit >= rows) continue;
      uint32_t packed[4];
      slot(s, packed);
      ptx::store_matrix_transposed(group.matrix_row(group.staging, s), packed[0], packed[1],
                                   packed[2], packed[3]);
    }
    half.pass_staged();
  }

  unsigned halves_ = 0;
  uint32_t held_[2 * kSlots][4];
  int rows_;
};

// ---- the fourth warpgroup -----------------------------------------------------------------------

// Eight values each -> eight pairs.
__device__ __forceinline__ void alternate(uint4& first, uint4& second) {
  const uint4 a = first, b = second;
  const auto low = [](uint32_t x, uint32_t y) { return __byte_perm(x, y, 0x5410); };
  const auto high = [](uint32_t x, uint32_t y) { return __byte_perm(x, y, 0x7632); };
  first = {low(a.x, b.x), high(a.x, b.x), low(a.y, b.y), high(a.y, b.y)};
  second = {low(a.z, b.z), high(a.z, b.z), low(a.w, b.w), high(a.w, b.w)};
}

// What is made of eight features of one row, and their part of the routing weight's gradient.
struct GradientPiece {
  uint4 out, d_gate, d_up;
  float sum = 0;
};
// All sigmoids come first: they are the long steps of the chain.
template <typename Element, typename Activation>
__device__ __forceinline__ GradientPiece gradient_piece(const Activation& activation, float weight,
                                                        uint4 d, uint4 gate, uint4 up) {
  const auto sigmoids = [&](uint32_t pair) { return activation.sigmoids(unpack<Element>(pair)); };
  const float2 s[] = {sigmoids(gate.x), sigmoids(gate.y), sigmoids(gate.z), sigmoids(gate.w)};
  GradientPiece piece;
  const auto pair = [&](uint32_t d_pair, uint32_t gate_pair, uint32_t up_pair, float2 s_pair,
                        uint32_t& out_pair, uint32_t& d_gate_pair, uint32_t& d_up_pair) {
    const float2 d2 = unpack<Element>(d_pair);
    const auto r = activation.gradients(unpack<Element>(gate_pair), unpack<Element>(up_pair),
                                        {d2.x * weight, d2.y * weight}, s_pair);
    piece.sum = fmaf(d2.x, r.value.x, piece.sum);
    piece.sum = fmaf(d2.y, r.value.y, piece.sum);
    out_pair = pack<Element>(weight * r.value.x, weight * r.value.y);
    d_gate_pair = pack<Element>(r.d_gate.x, r.d_gate.y);
    d_up_pair = pack<Element>(r.d_up.x, r.d_up.y);
  };
  pair(d.x, gate.x, up.x, s[0], piece.out.x, piece.d_gate.x, piece.d_up.x);
  pair(d.y, gate.y, up.y, s[1], piece.out.y, piece.d_gate.y, piece.d_up.y);
  pair(d.z, gate.z, up.z, s[2], piece.out.z, piece.d_gate.z, piece.d_up.z);
  pair(d.w, gate.w, up.w, s[3], piece.out.w, piece.d_gate.w, piece.d_up.w);
  return piece;
}
// d_pre: of gate, where columns of gate and up do not alternate.
template <typename Element>
__device__ __forceinline__ void store_gradients(const RowGemmParams& p, Element* d_pre, int feature,
                                                GradientPiece piece) {
  if (p.alternating) {
    alternate(piece.d_gate, piece.d_up);
    ptx::global_store(d_pre + feature, piece.d_gate);
    ptx::global_store(d_pre + feature + 8, piece.d_up);
  } else {
    ptx::global_store(d_pre, piece.d_gate);
    ptx::global_store(d_pre + unsigned(p.features), piece.d_up);
  }
}

// Thread t has chunk t % 8 (8 features) of row t / 8 of each slot. Piece k of a slot is block k % 2
// of consumer warpgroup k / 2. What is read from memory is asked for a slot ahead: all of a slot's
// loads are waited for together.
template <typename Element, typename Activation>
class GradientFinisher {
 public:
  static __device__ void init(uint32_t staging) {
    for (int group = 0; group < 2; ++group) HalfTiles(staging + group * HalfTiles::kBytes).init();
  }
  static __device__ void run(const RowGemmParams& p, TileQueue& queue, uint32_t staging,
                             int thread) {
    const HalfTiles of_group[2] = {HalfTiles(staging), HalfTiles(staging + HalfTiles::kBytes)};
    unsigned halves = 0;
    RowTile tile;
    while (queue.take(tile)) {
      GradientFinisher finisher(p, tile, thread);
      for (int first_row = 0; first_row < kMaxTileN; first_row += HalfTiles::kRows, ++halves) {
        for (const HalfTiles& half : of_group) half.wait_staged(halves);
        finisher.finish_half(staging, min(tile.rows - first_row, HalfTiles::kRows));
        for (const HalfTiles& half : of_group) half.pass_drained();
      }
    }
  }

 private:
  struct Pre {
    uint4 gate, up;
  };

  __device__ GradientFinisher(const RowGemmParams& p, const RowTile& tile, int thread) : p_(p) {
    const int row = thread / 8, chunk = thread % 8;
    const int feature = first_feature(p, tile.feature_tile) + chunk * 8;
    const int first_row = tile.row_begin + row;
    const int64_t at = int64_t(first_row) * 2 * p.features + feature;
    place_ = swizzled(row, chunk);
    rows_left_ = tile.rows - row;
    features_left_ = feature_end(p, tile) - feature;
    pre_at_ = static_cast<const Element*>(p.pre) + at;
    d_pre_ = static_cast<Element*>(p.d_pre) + at + (p.alternating ? feature : 0);
    out_ = static_cast<Element*>(p.out) + (first_row * p.out_stride + feature);
    weight_at_ = p.row_weight + first_row;
    sum_at_ = p.d_weight_parts + (2 * tile.feature_tile * p.max_rows + first_row);
    sums_ = chunk == 0 && tile.feature_tile < p.feature_tiles;
    fetch_weight();
    fetch<0>();
    fetch<1>();
    fetch<2>();
    fetch<3>();
  }

  static constexpr int feature_of(int k) { return k / 2 * 64 + k % 2 * 128; }
  template <int k>
  __device__ bool inside() const {
    return feature_of(k) < features_left_;
  }
  // Two pieces of one warpgroup, then what the next slot needs in their place.
  template <int k>
  __device__ float finish_pieces(uint32_t place) {
    float sum = finish_piece<k>(place);
    fetch<k>();
    sum += finish_piece<k + 1>(place);
    fetch<k + 1>();
    return sum;
  }
  __device__ void fetch_weight() {
    if (rows_left_ > 0) next_weight_ = __ldg(weight_at_);
  }
  template <int k>
  __device__ void fetch() {
    if (rows_left_ <= 0 || !inside<k>()) return;
    const auto load = [](const Element* from) {
      return __ldcs(reinterpret_cast<const uint4*>(from + feature_of(k)));
    };
    pre_[k] = {load(pre_at_), load(pre_at_ + unsigned(p_.features))};
  }

  __device__ void finish_half(uint32_t staging, int rows) {
    uint32_t place = staging + place_;
    for (int row = 0; row < rows; row += kRowUnit, place += HalfTiles::kSlotBytes) {
      live_ = rows_left_ > 0;
      weight_ = next_weight_;
      rows_left_ -= kRowUnit;
      pre_at_ += 2 * kRowUnit * p_.features;
      weight_at_ += kRowUnit;
      fetch_weight();
      stores_ = live_ && weight_ != 0.0f;
      send_sum(finish_pieces<0>(place), 0);
      send_sum(finish_pieces<2>(place), p_.max_rows);
      if (live_ && !stores_) {
        clear_piece<0>();
        clear_piece<1>();
        clear_piece<2>();
        clear_piece<3>();
      }
      d_pre_ += 2 * kRowUnit * p_.features;
      out_ += kRowUnit * p_.out_stride;
      sum_at_ += kRowUnit;
    }
  }
  // Over the eight lanes of a row: 128 features.
  __device__ void send_sum(float sum, int64_t part) const {
#pragma unroll
    for (int lanes = 1; lanes < 8; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    if (sums_ && live_) sum_at_[part] = sum;
  }

  // Eight features of one row; returns their part of the routing weight's gradient.
  template <int k>
  __device__ float finish_piece(uint32_t place) const {
    const Activation activation{p_.form};
    const uint4 d =
        ptx::shared_load(place + k / 2 * HalfTiles::kBytes + k % 2 * HalfTiles::kBlockBytes);
    const GradientPiece piece =
        gradient_piece<Element>(activation, weight_, d, pre_[k].gate, pre_[k].up);
    if (!inside<k>()) return 0.0f;
    if (stores_) store_piece<k>(piece);
    return piece.sum;
  }
  template <int k>
  __device__ void store_piece(const GradientPiece& piece) const {
    store_gradients(p_, d_pre_ + feature_of(k), feature_of(k), piece);
    ptx::global_store(out_ + feature_of(k), piece.out);
  }
  // A row of weight 0 is no expert's, whatever it holds. Its weight has a gradient, though.
  template <int k>
  __device__ void clear_piece() const {
    if (inside<k>()) store_piece<k>({});
  }

  const RowGemmParams& p_;
  uint32_t place_;  // in a slot
  // From this thread's first element of the slot on.
  int rows_left_, features_left_;
  const Element* pre_at_;
  Element *d_pre_, *out_;
  const float* weight_at_;
  float* sum_at_;
  bool sums_;    // this thread writes them
  bool live_;    // its row is one of the tile
  bool stores_;  // what it computes of it
  Pre pre_[4];
  float weight_, next_weight_;
};

template <typename Element, typename Activation>
struct StoreGradient : HandOver<Element> {
  using Finisher = GradientFinisher<Element, Activation>;
};

}  // namespace moec::cuda
