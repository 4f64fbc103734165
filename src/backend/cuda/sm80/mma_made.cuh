// SPDX-License-Identifier: Apache-2.0
// Chunks of operand b whose elements are made of something else. Their loaders serve both orders of
// operand b and both types of elements.
//
//   fetch(slot, k0, k_end)   copies what the k block at k0 is made of, or nothing
//   make(tile, slot, k_end)  the elements of one k block after the other
#pragma once

#include "backend/cuda/sm80/mma.cuh"

namespace moec::cuda {

// Elements that are made serve 256 rows: that takes longer than to copy them.
using MadeShape = MmaShape<256, true>;
static_assert(kPortableTile * kMmaDepth / 8 == MadeShape::kThreads);

// The chunk of a tile that a thread has, and where it goes.
struct MadeChunk {
  int64_t i;
  int k_first;
  uint32_t to;

  __device__ MadeChunk(const PortableTile& t, bool along_k) {
    const int row_chunks = along_k ? kMmaDepth / 8 : kPortableTile / 8;
    const int chunk = int(threadIdx.x) % row_chunks, row = int(threadIdx.x) / row_chunks;
    i = t.n0 + (along_k ? row : 8 * chunk);
    k_first = along_k ? 8 * chunk : row;
    to = row * row_chunks * 16 + ((chunk ^ (along_k ? row / 2 & 3 : row & 7)) * 16);
  }
  // Extents along a chunk are multiples of eight: its first element tells whether it is inside.
  __device__ int k_of(int k0) const { return k0 + k_first; }

  // make(v): the eight values.
  template <class Make>
  __device__ __forceinline__ void store(uint32_t tile, moec_dtype dtype, const Make& make) const {
    float v[8];
    make(v);
    uint4 packed;
    with_element(dtype, [&]<class Element>() {
      packed = {pack<Element>(v[0], v[1]), pack<Element>(v[2], v[3]), pack<Element>(v[4], v[5]),
                pack<Element>(v[6], v[7])};
    });
    ptx::shared_store(tile + to, packed);
  }
};

}  // namespace moec::cuda
