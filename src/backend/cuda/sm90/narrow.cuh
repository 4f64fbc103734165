// SPDX-License-Identifier: Apache-2.0
// What the kernels of narrow.h share. Operands come by cp.async into a ring of stages and are
// multiplied by mma.sync: the tensor cores have nearly nothing to do.
#pragma once

#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/sm80/mma.cuh"
#include "backend/cuda/sm90/narrow.h"
#include "backend/cuda/sm90/tile_ring.cuh"

namespace moec::cuda {

constexpr int kNarrowThreads = 128, kNarrowStages = 4;

// A chunk of eight ranks of a tile whose lines hold kRank of them: the eight lines that ldmatrix
// reads at once lie in different banks.
template <int kRank>
__device__ __forceinline__ uint32_t rank_chunk(uint32_t line, uint32_t chunk) {
  return line * (2 * kRank) + ((chunk ^ (line / (64 / kRank) & (kRank / 8 - 1))) << 4);
}

// Copies `lines` lines of a tile [lines, kRank] whose ranks are contiguous: line i is at from + i *
// stride (bytes). Zeros past `ranks` of them, and from line `end` on.
template <int kRank, int kLines>
__device__ __forceinline__ void copy_ranks(uint32_t to, const char* from, int64_t stride, int ranks,
                                           int end) {
  constexpr int kChunks = kRank / 8, kAll = kLines * kChunks;
#pragma unroll
  for (int first = 0; first < kAll; first += kNarrowThreads) {
    const int i = first + int(threadIdx.x), line = i / kChunks, chunk = i % kChunks;
    if (kAll % kNarrowThreads != 0 && i >= kAll) continue;
    ptx::copy_async(to + rank_chunk<kRank>(line, chunk), from + line * stride + 16 * chunk,
                    line < end && 8 * chunk < ranks ? 16 : 0);
  }
}

// The operand b of 16 k, lines, and 16 ranks from 16 * n on.
template <int kRank>
__device__ __forceinline__ void load_ranks(uint32_t tile, int step, int n, uint32_t (&b)[4]) {
  const int lane = threadIdx.x & 31, line = 16 * step + (lane & 7) + (lane >> 3 & 1) * 8;
  ptx::load_matrix_transposed(tile + rank_chunk<kRank>(line, 2 * n + (lane >> 4)), b);
}

// A kernel for the tile of these ranks, with CTAs in y for what one tile does not hold.
template <typename Args, typename Kernel>
cudaError_t launch_narrow(Kernel* kernel, int64_t ctas, int64_t rank, int bytes,
                          std::atomic<uint64_t>& allowed, cudaStream_t stream, const Args& args) {
  if (cudaError_t error = allow_shared_memory(kernel, bytes, allowed)) return error;
  const int tile = narrow_tile(rank);
  return launch(kernel, dim3(unsigned(ctas), unsigned((rank + tile - 1) / tile)), kNarrowThreads,
                bytes, stream, args);
}

// body<Element, kRank>() of a dtype and the tile of a rank.
template <class Body>
cudaError_t with_narrow(moec_dtype dtype, int64_t rank, const Body& body) {
  const auto of_element = [&]<class Element>() {
    switch (narrow_tile(rank)) {
      case 16:
        return body.template operator()<Element, 16>();
      case 32:
        return body.template operator()<Element, 32>();
      default:
        return body.template operator()<Element, 64>();
    }
  };
  return dtype == MOEC_BF16 ? of_element.template operator()<__nv_bfloat16>()
                            : of_element.template operator()<__half>();
}

inline bool in_chunks(const void* pointer, int64_t stride) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && stride % 8 == 0;
}

}  // namespace moec::cuda
