// SPDX-License-Identifier: Apache-2.0
// Chunks of operand b whose elements are made of something else. Their loaders serve both orders of
// operand b. Elements behind the end of k are 0. Those of columns outside of the matrix may be
// anything: they reach no other column.
//
//   fetch(slot, k0, k_end)            copies what the k block at k0 is made of, or nothing
//   make<Element>(tile, slot, k_end)  the elements of one k block after the other
#pragma once

#include "backend/cuda/sm80/mma.cuh"

namespace moec::cuda {

// Elements that are made serve 256 rows: that takes longer than to copy them.
using MadeShape = MmaShape<256, true>;

// The chunks of a tile that a thread has, half a tile apart, and where they go.
struct MadeChunks {
  static constexpr int kChunks = kThreadChunks<kPortableTile>;
  int64_t i;
  int k_first;
  int i_step, k_step;  // from chunk to chunk
  uint32_t to;

  __device__ MadeChunks(const PortableTile& t, bool along_k) {
    const int row_chunks = along_k ? kMmaDepth / 8 : kPortableTile / 8;
    const int chunk = int(threadIdx.x) % row_chunks, row = int(threadIdx.x) / row_chunks;
    i = t.n0 + (along_k ? row : 8 * chunk);
    k_first = along_k ? 8 * chunk : row;
    i_step = along_k ? kPortableTile / kChunks : 0;
    k_step = along_k ? 0 : kMmaDepth / kChunks;
    to = row * row_chunks * 16 + ((chunk ^ (along_k ? row / 2 & 3 : row & 7)) * 16);
  }
  // Extents along a chunk are multiples of eight: its first element tells whether it is inside.
  __device__ int64_t i_of(int chunk) const { return i + chunk * i_step; }
  __device__ int k_of(int chunk, int k0) const { return k0 + k_first + chunk * k_step; }

  // The eight values of a chunk.
  template <class Element>
  __device__ __forceinline__ void store(int chunk, uint32_t tile, bool inside,
                                        const float (&v)[8]) const {
    const auto packed = [&](int i) { return inside ? pack<Element>(v[i], v[i + 1]) : 0u; };
    ptx::shared_store(tile + to + chunk * (MadeShape::kBytesOfB / kChunks),
                      uint4{packed(0), packed(2), packed(4), packed(6)});
  }
};

}  // namespace moec::cuda
