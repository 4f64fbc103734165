// SPDX-License-Identifier: Apache-2.0
// Tiles of operand b where its elements are fp32, which products read rounded.
#pragma once

#include "backend/cuda/sm80/mma_made.cuh"

namespace moec::cuda {

struct RoundedElements {};  // in the place of a format

// The values of the next k block wait in registers.
struct RoundedTileLoader : MadeChunks {
  const PortableGemm& p;
  const int group;
  int part, parts;  // of the next k block, and how many follow
  int k0 = 0;       // of the next k block
  int64_t i_stride, k_stride;
  const float* from;  // of this part, in the k block at 0
  alignas(float4) float values[kChunks][8];

  __device__ RoundedTileLoader(const PortableGemm& gemm, const PortableTile& t, bool along_k)
      : MadeChunks(t, along_k),
        p(gemm),
        group(t.group),
        part(t.part),
        parts(gemm.sum ? gemm.parts - 1 : 0) {
    find_part();
    read(int(t.k_end));
  }
  __device__ void fetch(uint32_t, int, int) const {}
  template <class Element>
  __device__ __forceinline__ void make(uint32_t tile, uint32_t, int k_end) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) store<Element>(c, tile, true, values[c]);
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
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const bool loads = i_of(c) < p.n && k_of(c, k0) < k_end;
      const auto* const at = reinterpret_cast<const float4*>(from + c * (i_step * i_stride) +
                                                             (k0 + c * k_step) * k_stride);
      auto* const to = reinterpret_cast<float4*>(values[c]);
      to[0] = loads ? at[0] : float4{};
      to[1] = loads ? at[1] : float4{};
    }
  }
};

}  // namespace moec::cuda
