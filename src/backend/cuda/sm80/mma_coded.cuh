// SPDX-License-Identifier: Apache-2.0
// Tiles of operand b where its elements are codes of a byte or a nibble: eight codes of a chunk
// wait in registers for the tile that their elements go to.
#pragma once

#include "backend/cuda/device/codes.cuh"
#include "backend/cuda/sm80/mma_waiting.cuh"

namespace moec::cuda {

template <class Format>
struct CodedTileLoader : WaitingChunks {
  static_assert(kHasChunks<Format>);
  const PortableGemm& p;
  const int group;
  int part, parts;           // the one before the next, and how many follow
  bool transposed, along_n;  // the matrix; its chunks
  bool one_block;            // for all codes of a chunk
  quant::CodedView view;
  CodeChunk<Format> codes[kMmaChunks];
  typename Format::Block blocks[kMmaChunks];

  __device__ CodedTileLoader(const PortableGemm& gemm, const PortableTile& t, bool along_k)
      : WaitingChunks(t, along_k),
        p(gemm),
        group(t.group),
        part(t.part - 1),
        parts(gemm.sum ? gemm.parts : 1),
        transposed(gemm.codes[0].transposed),
        along_n(along_k == transposed) {}
  // Into the tile: what advance() has read for the k block at k0. One copy of the code decodes.
  __device__ void load(uint32_t tile, int k0, int k_end) {
#pragma unroll 1
    for (int j = 0; j < kMmaChunks; ++j) {
      const bool has = i_of(j) < p.n && k_of(j, k0) < k_end;
      store(tile, j, p.a.dtype, [&](float (&v)[8]) { elements(j, k0, has, v); });
      rotate(codes);
      rotate(blocks);
    }
  }
  // Reads the k block at k0, for 0 of the next part.
  __device__ void advance(int k0, int k_end) {
    if (k0 == 0) {
      if (parts-- == 0) return;  // nothing follows
      find_part(++part);
    }
#pragma unroll
    for (int j = 0; j < kMmaChunks; ++j) {
      if (i_of(j) >= p.n || k_of(j, k0) >= k_end) continue;
      codes[j].load(view, n_of(j, k0), k_of_matrix(j, k0));
      if (one_block) blocks[j] = Format::block(view, n_of(j, k0), k_of_matrix(j, k0));
    }
  }

 private:
  __device__ void find_part(int of) {
    view = coded_view(p, of, group);
    const quant::BlockSize size = along_n ? view.scales.block_n : view.scales.block_k;
    const bool stream = Format::kInfo.storage == quant::Storage::kStream;
    one_block = stream || ((size.is_all() || size.size() % 8 == 0) && !view.group_index);
  }
  __device__ int64_t n_of(int j, int k0) const { return transposed ? k_of(j, k0) : i_of(j); }
  __device__ int64_t k_of_matrix(int j, int k0) const { return transposed ? i_of(j) : k_of(j, k0); }
  // Those of the first chunk that waits, which is chunk j.
  __device__ void elements(int j, int k0, bool has, float (&v)[8]) const {
    if (!has) {
#pragma unroll
      for (float& value : v) value = 0;
      return;
    }
    codes[0].numbers(view, v);
    if (one_block) {
#pragma unroll
      for (float& value : v) value = Format::template decode<float>(value, blocks[0]);
    } else {
      int64_t n = n_of(j, k0), k = k_of_matrix(j, k0);
#pragma unroll 1
      for (int c = 0; c < 8; ++c) {
        v[0] = Format::template decode<float>(v[0], Format::block(view, n, k));
        rotate(v);
        (along_n ? n : k) += 1;
      }
    }
  }
};

}  // namespace moec::cuda
