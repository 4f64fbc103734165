// SPDX-License-Identifier: Apache-2.0
// Consumers of weights whose columns of gate and up alternate: accumulators of even columns are
// gate, of odd ones up. Neighbours exchange half of theirs, so that gate and up of a pair meet in a
// thread, in the places where weights with gate in front of up have them; all that follows is the
// same.
#pragma once

#include "backend/cuda/sm90/epilogue.cuh"

namespace moec::cuda {

// Accumulators of a thread are of columns t / 4 % 8 and 8 more of its warp's 16, then of those 64
// columns behind.
struct AlternatingGroup : GroupBase {
  static constexpr int kNextFeature = 4;
  template <bool>
  __device__ int2 bias_of(int block) const {
    const int column = (thread & 31) / 4;
    return {column & 1, (thread >> 5) * 8 + column / 2 + 32 * block};
  }
  // 8 accumulators each: afterwards of gates and of ups, of a pair and of the one 32 behind. A lane
  // of an even column keeps the pair of its lower columns, of an odd one that of the higher ones.
  __device__ void meet(float* first, float* second) const {
    const bool odd = lane() & 4;
#pragma unroll
    for (int at = 0; at < 8; at += 1 + at % 2 * 2) {
      const float2 low = exchange(odd, first[at], first[at + 2]);
      const float2 high = exchange(odd, second[at], second[at + 2]);
      first[at] = low.x;
      first[at + 2] = high.x;
      second[at] = low.y;
      second[at + 2] = high.y;
    }
  }
  // Lanes of column c have pairs 0, 4, 1, 5, 2, 6, 3, 7 of 8: into the order of the pairs.
  __device__ void sort(uint32_t (&packed)[4]) const {
    const int mine = lane();
    const int from = (2 * mine & 24) + (mine >> 2 & 4) + (mine & 3);
#pragma unroll
    for (uint32_t& word : packed) word = __shfl_sync(~0u, word, from);
  }
  // Of a group's 64 features a warp has two runs of 8.
  __device__ uint32_t matrix_row(uint32_t buffer, int slice) const {
    const int lane = thread & 31, warp = thread >> 5;
    return buffer + swizzled(16 * slice + (lane >> 4) * 8 + (lane & 7), warp + 4 * (lane >> 3 & 1));
  }

 private:
  static __device__ int lane() {
    int lane;  // volatile: nothing of this may wait in registers while the tensor cores work
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
  }
  static __device__ float2 exchange(bool odd, float a, float b) {
    const float other = __shfl_xor_sync(~0u, odd ? a : b, 4);
    return odd ? float2{other, b} : float2{a, other};
  }
};

// Without pre-activations. The first slice is held as accumulators and activated behind the next
// tile; with more of them a stage is given back too late where memory decides.
template <typename Element, typename Activation>
class StoreAlternating {
 public:
  static constexpr bool kGated = true, kSkipsOutside = true, kBiased = true;
  static constexpr int kMaxRows = kMaxTileN, kStages = 4, kSends = 1, kPieces = kCopySteps;
  static constexpr int kStagingBytes = kBlockStaging<kMaxRows>;

  static __device__ Piece piece(const RowGemmParams& p, const RowTile& tile, int group, int) {
    return activations_piece(p, tile, group);
  }
  static __device__ bool find_rows(const RowGemmParams&, int, RowTile&) { return true; }
  __device__ void copy_piece(const RowGemmParams& p, const AlternatingGroup& group, int i) const {
    copy_slices(i, group, rows_, [&](int s, uint32_t (&packed)[4]) {
      if (s == 0) return activate_first(p, group, packed);
#pragma unroll
      for (int j = 0; j < 4; ++j) packed[j] = held_[s - 1][j];
    });
  }
  __device__ void finish(const RowGemmParams& p, const RowTile& tile, const AlternatingGroup& group,
                         Accumulators& acc) {
    hold(acc.first, acc.second, first_, second_);
#pragma unroll
    for (int s = 1; s < kSlices; ++s) {
      if (s % kThird == 0 && 16 * s >= tile.rows) break;
      activate(p, group, acc.first + 8 * s, acc.second + 8 * s, held_[s - 1]);
    }
    rows_ = tile.rows;
  }

 private:
  static constexpr int kSlices = kMaxTileN / 16, kThird = 3;

  // Opaque, or ptxas serialises all products, for which accumulators are read beside others.
  static __device__ void hold(const float* from, const float* from_second, float (&first)[8],
                              float (&second)[8]) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      first[j] = from[j];
      second[j] = from_second[j];
      asm volatile("" : "+f"(first[j]), "+f"(second[j]));
    }
  }
  static __device__ void activate(const RowGemmParams& p, const AlternatingGroup& group,
                                  float* first, float* second, uint32_t (&packed)[4]) {
    group.meet(first, second);
    activate_slice<Element>(Activation{p.form}, first, second, packed);
  }
  __device__ void activate_first(const RowGemmParams& p, const AlternatingGroup& group,
                                 uint32_t (&packed)[4]) const {
    float first[8], second[8];
    hold(first_, second_, first, second);
    activate(p, group, first, second, packed);
  }

  float first_[8], second_[8];
  uint32_t held_[kSlices - 1][4];
  int rows_;
};

}  // namespace moec::cuda
