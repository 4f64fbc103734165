// SPDX-License-Identifier: Apache-2.0
// Tiles of operand b where its elements are fp32, which products read rounded: the eight of a chunk
// wait in registers until the tile that they go to is free.
#pragma once

#include "backend/cuda/sm80/mma.cuh"

namespace moec::cuda {

struct RoundedElements {};  // in the place of a format

template <typename Element, bool kAlongK>
struct RoundedTileLoader {
  static constexpr int kRowChunks = kAlongK ? kMmaDepth / 8 : kPortableTile / 8;
  static constexpr int kRowStep = kPortableThreads / kRowChunks, kRowBytes = kRowChunks * 16;
  static_assert(kRowStep % 8 == 0);  // the same swizzle in all rows of a thread
  const int chunk, first;            // chunk: of a row; first: row of the tile
  int parts;                         // that are not read to the end
  unsigned inside = 0;               // bit j: row j, or its chunk, lies inside of n
  const float* from;                 // the first chunk of the next k block
  int64_t row_step, block_step;      // elements: from row to row of a thread, from block to block
  float4 values[kMmaChunks][2];

  __device__ RoundedTileLoader(const PortableGemm& p, const PortableTile& t)
      : chunk(threadIdx.x % kRowChunks),
        first(threadIdx.x / kRowChunks),
        parts(p.sum ? p.parts : 1) {
    const Operand& b = p.b[t.part];
    const int64_t i = t.n0 + (kAlongK ? first : 8 * chunk);
    from = reinterpret_cast<const float*>(b.of_group(t.group));
    from += kAlongK ? i * b.i_stride + 8 * chunk : i + first * b.k_stride;
    row_step = kRowStep * (kAlongK ? b.i_stride : b.k_stride);
    block_step = kMmaDepth * (kAlongK ? 1 : b.k_stride);
#pragma unroll
    for (int j = 0; j < kMmaChunks; ++j)
      inside |= unsigned(i + (kAlongK ? kRowStep * j : 0) < p.n) << j;
    fetch(0, int(t.k_end));
  }
  // Into the tile: what the constructor or advance() has read.
  __device__ void load(uint32_t tile, int, int) const {
    const uint32_t swizzle = kAlongK ? first / 2 & 3 : first & 7;
    const uint32_t to = tile + first * kRowBytes + ((chunk ^ swizzle) * 16);
#pragma unroll
    for (int j = 0; j < kMmaChunks; ++j) {
      const float4 low = values[j][0], high = values[j][1];
      ptx::shared_store(to + kRowStep * j * kRowBytes,
                        uint4{pack<Element>(low.x, low.y), pack<Element>(low.z, low.w),
                              pack<Element>(high.x, high.y), pack<Element>(high.z, high.w)});
    }
  }
  __device__ void advance(int k0, int k_end, int64_t part) {
    if (k0 == 0 && --parts == 0) return;  // nothing follows
    from += k0 > 0 ? block_step : part;
    fetch(k0, k_end);
  }
  // What advance adds to come to the next part, `bytes` from this one.
  __device__ int64_t part_step(int64_t bytes, int k_end) const {
    return bytes / int64_t(sizeof(float)) - (k_end - 1) / kMmaDepth * block_step;
  }

 private:
  // Extents along a chunk are multiples of eight.
  __device__ void fetch(int k0, int k_end) {
#pragma unroll
    for (int j = 0; j < kMmaChunks; ++j) {
      const int k = k0 + (kAlongK ? 8 * chunk : first + kRowStep * j);
      const bool loads = (inside >> j & 1) && k < k_end;
      const auto* const at = reinterpret_cast<const float4*>(from + row_step * j);
      values[j][0] = loads ? at[0] : float4{};
      values[j][1] = loads ? at[1] : float4{};
    }
  }
};

}  // namespace moec::cuda
