// SPDX-License-Identifier: Apache-2.0
// Chunks of operand b that wait in registers, as something else, until the tile that their elements
// go to is free. Their loaders serve both orders of operand b and both types of elements.
#pragma once

#include "backend/cuda/sm80/mma.cuh"

namespace moec::cuda {

// Which chunks of a tile a thread has, and where they go.
struct WaitingChunks {
  int64_t i_first;
  int k_first, i_step, k_step;  // steps: from chunk to chunk
  uint32_t to;                  // of the first

  __device__ WaitingChunks(const PortableTile& t, bool along_k) {
    const int row_chunks = along_k ? kMmaDepth / 8 : kPortableTile / 8;
    const int chunk = int(threadIdx.x) % row_chunks, row = int(threadIdx.x) / row_chunks;
    const int rows = kPortableThreads / row_chunks;  // a multiple of eight: one swizzle a thread
    i_first = t.n0 + (along_k ? row : 8 * chunk);
    k_first = along_k ? 8 * chunk : row;
    i_step = along_k ? rows : 0;
    k_step = along_k ? 0 : rows;
    to = row * row_chunks * 16 + ((chunk ^ (along_k ? row / 2 & 3 : row & 7)) * 16);
  }
  // Extents along a chunk are multiples of eight: its first element tells whether it is inside.
  __device__ int64_t i_of(int j) const { return i_first + i_step * j; }
  __device__ int k_of(int j, int k0) const { return k0 + k_first + k_step * j; }

  // make(v): the eight values of chunk j.
  template <class Make>
  __device__ __forceinline__ void store(uint32_t tile, int j, moec_dtype dtype,
                                        const Make& make) const {
    float v[8];
    make(v);
    uint4 packed;
    with_element(dtype, [&]<class Element>() {
      packed = {pack<Element>(v[0], v[1]), pack<Element>(v[2], v[3]), pack<Element>(v[4], v[5]),
                pack<Element>(v[6], v[7])};
    });
    ptx::shared_store(tile + to + j * (kMmaTileBytes / kMmaChunks), packed);
  }
};
static_assert(kPortableThreads / (kPortableTile / 8) % 8 == 0);

}  // namespace moec::cuda
