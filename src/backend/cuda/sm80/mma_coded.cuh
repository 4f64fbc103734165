// SPDX-License-Identifier: Apache-2.0
// Tiles of operand b where its elements are codes of a byte or a nibble: eight codes of a chunk
// wait in registers for the tile that their elements go to.
#pragma once

#include "backend/cuda/device/codes.cuh"
#include "backend/cuda/sm80/mma.cuh"

namespace moec::cuda {

template <typename Element, class Format, bool kAlongK>
struct CodedTileLoader {
  static constexpr int kRowChunks = kAlongK ? kMmaDepth / 8 : kPortableTile / 8;
  static constexpr int kRowStep = kPortableThreads / kRowChunks, kRowBytes = kRowChunks * 16;
  static_assert(kHasChunks<Format> && kRowStep % 8 == 0);
  const PortableGemm& p;
  const int64_t i0;
  const int group, chunk, first;  // chunk: of a row; first: row of the tile
  int part;
  bool one_block;  // for all codes of a chunk
  quant::CodedView view;
  CodeChunk<Format> codes[kMmaChunks];

  __device__ CodedTileLoader(const PortableGemm& gemm, const PortableTile& t)
      : p(gemm),
        i0(t.n0),
        group(t.group),
        chunk(threadIdx.x % kRowChunks),
        first(threadIdx.x / kRowChunks),
        part(t.part) {
    find_part();
    fetch(0, int(t.k_end));
  }
  // Into the tile: what advance() has read for the k block at k0.
  __device__ void load(uint32_t tile, int k0, int k_end) const {
    const uint32_t swizzle = kAlongK ? first / 2 & 3 : first & 7;
    const uint32_t to = tile + first * kRowBytes + ((chunk ^ swizzle) * 16);
#pragma unroll
    for (int j = 0; j < kMmaChunks; ++j)
      ptx::shared_store(to + kRowStep * j * kRowBytes, elements(j, k0, k_end));
  }
  __device__ void advance(int k0, int k_end, int64_t) {
    if (k0 == 0) {
      if (!p.sum || ++part == p.parts) return;  // nothing follows
      find_part();
    }
    fetch(k0, k_end);
  }
  static __device__ int64_t part_step(int64_t, int) { return 0; }

 private:
  __device__ void find_part() {
    view = coded_view(p, part, group);
    const bool along_n = kAlongK == p.codes[part].transposed;
    const quant::BlockSize size = along_n ? view.scales.block_n : view.scales.block_k;
    const bool stream = Format::kInfo.storage == quant::Storage::kStream;
    one_block = stream || ((size.is_all() || size.size() % 8 == 0) && !view.group_index);
  }
  __device__ int64_t i_of(int j) const { return i0 + (kAlongK ? first + kRowStep * j : 8 * chunk); }
  __device__ int64_t k_of(int j, int k0) const {
    return k0 + (kAlongK ? 8 * chunk : first + kRowStep * j);
  }
  // Extents along a chunk are multiples of eight.
  __device__ bool inside(int j, int k0, int k_end) const {
    return i_of(j) < p.n && k_of(j, k0) < k_end;
  }
  __device__ bool transposed() const { return p.codes[0].transposed; }
  __device__ int64_t n_of(int j, int k0) const { return transposed() ? k_of(j, k0) : i_of(j); }
  __device__ int64_t k_of_matrix(int j, int k0) const {
    return transposed() ? i_of(j) : k_of(j, k0);
  }
  __device__ void fetch(int k0, int k_end) {
#pragma unroll
    for (int j = 0; j < kMmaChunks; ++j)
      if (inside(j, k0, k_end)) codes[j].load(view, n_of(j, k0), k_of_matrix(j, k0));
  }
  __device__ uint4 elements(int j, int k0, int k_end) const {
    if (!inside(j, k0, k_end)) return {};
    const int64_t n = n_of(j, k0), k = k_of_matrix(j, k0);
    float v[8];
    codes[j].numbers(view, v);
    if (one_block) {
      const auto block = Format::block(view, n, k);
#pragma unroll
      for (float& value : v) value = Format::template decode<float>(value, block);
    } else {
      const bool along_n = kAlongK == transposed();
#pragma unroll
      for (int c = 0; c < 8; ++c)
        v[c] = Format::template decode<float>(
            v[c], Format::block(view, n + (along_n ? c : 0), k + (along_n ? 0 : c)));
    }
    return {pack<Element>(v[0], v[1]), pack<Element>(v[2], v[3]), pack<Element>(v[4], v[5]),
            pack<Element>(v[6], v[7])};
  }
};

}  // namespace moec::cuda
