// SPDX-License-Identifier: Apache-2.0
// Tiles of operand b where its elements are fp32, which products read rounded.
#pragma once

#include "backend/cuda/sm80/mma_made.cuh"

namespace moec::cuda {

struct RoundedElements {};  // in the place of a format

// The values of the next k block wait in registers.
struct RoundedTileLoader : MadeChunk {
  const PortableGemm& p;
  const int group;
  int part, parts;  // of the next k block, and how many follow
  int k0 = 0;       // of the next k block
  int64_t i_stride, k_stride;
  const float* from;  // of this part, in the k block at 0
  float4 values[2];

  __device__ RoundedTileLoader(const PortableGemm& gemm, const PortableTile& t, bool along_k)
      : MadeChunk(t, along_k),
        p(gemm),
        group(t.group),
        part(t.part),
        parts(gemm.sum ? gemm.parts - 1 : 0) {
    find_part();
    read(int(t.k_end));
  }
  __device__ void fetch(uint32_t, int, int) const {}
  __device__ void make(uint32_t tile, uint32_t, int k_end) {
    store(tile, p.a.dtype, [&](float (&v)[8]) {
      *reinterpret_cast<float4*>(v) = values[0];
      *reinterpret_cast<float4*>(v + 4) = values[1];
    });
    k0 += kMmaDepth;
    if (k0 >= k_end) {
      if (parts-- == 0) return;  // nothing follows
      k0 = 0;
      ++part;
      find_part();
    }
    read(k_end);
  }

 private:
  __device__ void find_part() {
    const Operand& b = p.b[part];
    i_stride = b.i_stride;
    k_stride = b.k_stride;
    from = reinterpret_cast<const float*>(b.of_group(group)) + i * i_stride + k_first * k_stride;
  }
  __device__ void read(int k_end) {
    const bool loads = i < p.n && k_of(k0) < k_end;
    const auto* const at = reinterpret_cast<const float4*>(from + k0 * k_stride);
    values[0] = loads ? at[0] : float4{};
    values[1] = loads ? at[1] : float4{};
  }
};

}  // namespace moec::cuda
