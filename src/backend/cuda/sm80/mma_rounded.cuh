// SPDX-License-Identifier: Apache-2.0
// Tiles of operand b where its elements are fp32, which products read rounded.
#pragma once

#include "backend/cuda/sm80/mma_waiting.cuh"

namespace moec::cuda {

struct RoundedElements {};  // in the place of a format

struct RoundedTileLoader : WaitingChunks {
  const PortableGemm& p;
  const int group;
  int part, parts;  // the one before the next, and how many follow
  int64_t i_stride, k_stride;
  const float* from;  // of this part, the first chunk of the k block at 0
  float4 values[kMmaChunks][2];

  __device__ RoundedTileLoader(const PortableGemm& gemm, const PortableTile& t, bool along_k)
      : WaitingChunks(t, along_k),
        p(gemm),
        group(t.group),
        part(t.part - 1),
        parts(gemm.sum ? gemm.parts : 1) {}
  // Into the tile: what advance() has read.
  __device__ void load(uint32_t tile, int, int) const {
#pragma unroll
    for (int j = 0; j < kMmaChunks; ++j)
      store(tile, j, p.a.dtype, [&](float (&v)[8]) {
        *reinterpret_cast<float4*>(v) = values[j][0];
        *reinterpret_cast<float4*>(v + 4) = values[j][1];
      });
  }
  // Reads the k block at k0, for 0 of the next part.
  __device__ void advance(int k0, int k_end) {
    if (k0 == 0) {
      if (parts-- == 0) return;  // nothing follows
      const Operand& b = p.b[++part];
      i_stride = b.i_stride;
      k_stride = b.k_stride;
      from = reinterpret_cast<const float*>(b.of_group(group)) + i_first * i_stride +
             k_first * k_stride;
    }
#pragma unroll
    for (int j = 0; j < kMmaChunks; ++j) {
      const bool loads = i_of(j) < p.n && k_of(j, k0) < k_end;
      const float* const chunk = from + i_step * j * i_stride + (k0 + k_step * j) * k_stride;
      const auto* const at = reinterpret_cast<const float4*>(chunk);
      values[j][0] = loads ? at[0] : float4{};
      values[j][1] = loads ? at[1] : float4{};
    }
  }
};

}  // namespace moec::cuda
