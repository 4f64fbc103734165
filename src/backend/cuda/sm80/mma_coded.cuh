// SPDX-License-Identifier: Apache-2.0
// Tiles of operand b where its elements are codes of a byte or a nibble: eight codes of a chunk
// wait in registers for the tile that their elements go to.
#pragma once

#include <type_traits>

#include "backend/cuda/device/codes.cuh"
#include "backend/cuda/sm80/mma_waiting.cuh"

namespace moec::cuda {

// Eight codes of E2M1. Their exponent and mantissa in the place of those of fp32 are 2^-126 of the
// number, 0.5 a subnormal.
__device__ __forceinline__ void widen_e2m1(uint32_t codes, float (&values)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int32_t at_top = int32_t(codes << (28 - 4 * i));
    values[i] = __int_as_float((at_top >> 6) & int32_t(0x81c00000u)) * 0x1p126f;
  }
}
// Eight nibbles, as widen() has bytes.
template <class Format>
__device__ __forceinline__ void widen_nibbles(uint32_t codes, float (&values)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i)
    values[i] =
        __uint_as_float((codes >> Format::nibble_of(i) * 4 & 15u) | 0x4b000000u) - 8388608.0f;
}

// Eight codes of E4M3, in the same way 2^-120 of the number; 0x7f and 0xff are NaN.
__device__ __forceinline__ void widen_e4m3(uint2 codes, float (&values)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t at_top = (i < 4 ? codes.x : codes.y) << (24 - i % 4 * 8);
    const float value = __int_as_float((int32_t(at_top) >> 4) & int32_t(0x87f00000u)) * 0x1p120f;
    values[i] = (at_top & 0x7f000000u) == 0x7f000000u ? quant::quiet_nan() : value;
  }
}

// Seldom called in the loop over k, whose registers it leaves alone.
template <class Format>
__device__ __noinline__ typename Format::Block block_of(const quant::CodedView* view, int64_t n,
                                                        int64_t k) {
  return Format::block(*view, n, k);
}

template <class Format>
__device__ __noinline__ int64_t entry_of(const quant::CodedView* view, int64_t n, int64_t k) {
  return Format::entry(*view, n, k);
}

// Formats whose scales are bytes that lie linearly, as their chunks do: a byte waits with its codes
// and becomes a block where they become numbers.
template <class Format>
constexpr bool kByteScales = std::is_base_of_v<quant::Fp4Codes, Format>;

template <class Format>
struct CodedTileLoader : WaitingChunks {
  static_assert(kHasChunks<Format>);
  const quant::CodedView* view;  // of the next part, in shared memory: registers do not hold it
  int parts;                     // those that follow
  bool transposed, along_n;      // the matrix; its chunks
  bool one_block;                // for all codes of a chunk
  unsigned inside = 0;           // bit j: chunk j along i
  int kept;                      // blocks are those of the k block before, unless k0 & kept is 0
  const char* from;              // of the first chunk of the k block at 0
  int64_t from_chunk, from_k;    // from one to the next chunk, k block
  const moec_dtype dtype;
  CodeChunk<Format> codes[kMmaChunks];
  typename Format::Block blocks[kMmaChunks];
  const uint8_t* scales;  // as from
  int64_t scales_chunk, scales_k;
  uint32_t scale_codes[kMmaChunks];
  float scale2 = 1;

  __device__ CodedTileLoader(const PortableGemm& p, const PortableTile& t, bool along_k)
      : WaitingChunks(t, along_k),
        parts(p.sum ? p.parts : 1),
        transposed(p.codes[0].transposed),
        along_n(along_k == transposed),
        dtype(p.a.dtype) {
    __shared__ alignas(quant::CodedView) char memory[2 * sizeof(quant::CodedView)];
    auto* const views = reinterpret_cast<quant::CodedView*>(memory);
    if (int(threadIdx.x) < parts) {
      const int i = int(threadIdx.x);
      views[i] = coded_view(p, t.part + i, t.group);
    }
    __syncthreads();
    view = views - 1;
#pragma unroll
    for (int j = 0; j < kMmaChunks; ++j) inside |= unsigned(i_of(j) < p.n) << j;
  }
  // Into the tile: what advance() has read for the k block at k0. One copy of the code decodes.
  __device__ void load(uint32_t tile, int k0, int k_end) {
#pragma unroll 1
    for (int j = 0; j < kMmaChunks; ++j) {
      const bool has = is_inside(j, k0, k_end);
      store(tile, j, dtype, [&](float (&v)[8]) { elements(j, k0, has, v); });
      rotate(codes);
      if constexpr (kByteScales<Format>)
        rotate(scale_codes);
      else
        rotate(blocks);
    }
  }
  // Reads the k block at k0, for 0 of the next part.
  __device__ void advance(int k0, int k_end) {
    if (k0 == 0) {
      if (parts-- == 0) return;  // nothing follows
      ++view;
      find_part();
    }
#pragma unroll
    for (int j = 0; j < kMmaChunks; ++j) {
      if (!is_inside(j, k0, k_end)) continue;
      codes[j].codes = *reinterpret_cast<const decltype(codes[j].codes)*>(from + from_chunk * j);
      if constexpr (kByteScales<Format>) scale_codes[j] = scales[scales_chunk * j];
    }
    from += from_k;
    if constexpr (kByteScales<Format>)
      scales += scales_k;
    else
      read_blocks(k0, k_end);
  }

 private:
  __device__ void read_blocks(int k0, int k_end) {
    if (!one_block || (k0 & kept)) return;
#pragma unroll 1
    for (int j = 0; j < kMmaChunks; ++j) {
      if (is_inside(j, k0, k_end))
        blocks[0] = block_of<Format>(view, n_of(j, k0), k_of_matrix(j, k0));
      rotate(blocks);
    }
  }
  __device__ void find_part() {
    from = chunk_at(0, 0);
    from_chunk = chunk_at(1, 0) - from;
    from_k = chunk_at(0, kMmaDepth) - from;
    if constexpr (kByteScales<Format>) {
      scales = scale_at(0, 0);
      scales_chunk = scale_at(1, 0) - scales;
      scales_k = scale_at(0, kMmaDepth) - scales;
      if (view->scales2) scale2 = *view->scales2;
    } else {
      find_blocks();
    }
  }
  __device__ const uint8_t* scale_at(int j, int k0) const {
    return static_cast<const uint8_t*>(view->scales.data) +
           entry_of<Format>(view, n_of(j, k0), k_of_matrix(j, k0));
  }
  // Of the first chunk that waits.
  __device__ typename Format::Block first_block() const {
    if constexpr (std::is_same_v<Format, quant::Mxfp4>)
      return {quant::e8m0(scale_codes[0])};
    else if constexpr (std::is_same_v<Format, quant::Nvfp4>)
      return {nvfp4_scale(quant::e4m3(scale_codes[0]))};
    else
      return blocks[0];
  }
  __device__ float nvfp4_scale(float scale) const {
    return view->flags & MOEC_QUANT_SCALES2_DIVIDES ? scale / scale2 : scale * scale2;
  }
  __device__ void find_blocks() {
    const quant::BlockView& of = view->scales;
    const quant::BlockSize along = along_n ? of.block_n : of.block_k;
    const quant::BlockSize across = transposed ? of.block_n : of.block_k;
    const bool stream = Format::kInfo.storage == quant::Storage::kStream;
    one_block = stream || ((along.is_all() || along.size() % 8 == 0) && !view->group_index);
    kept = 0;
    if (!stream && across.is_all())
      kept = -1;
    else if (!stream && !transposed && across.size() % kMmaDepth == 0 &&
             (across.size() & (across.size() - 1)) == 0)
      kept = int(across.size()) - 1;
  }
  // Chunks lie linearly in both of their indices.
  __device__ const char* chunk_at(int j, int k0) const {
    const int64_t n = n_of(j, k0), k = k_of_matrix(j, k0);
    const char* const first = static_cast<const char*>(view->codes);
    if constexpr (kHasNibbles<Format>)
      return first + Format::place(*view, n, k) / 2;
    else
      return first + n * view->row_stride + k * view->col_stride;
  }
  __device__ bool is_inside(int j, int k0, int k_end) const {
    return (inside >> j & 1) && k_of(j, k0) < k_end;
  }
  __device__ int64_t n_of(int j, int k0) const { return transposed ? k_of(j, k0) : i_of(j); }
  __device__ int64_t k_of_matrix(int j, int k0) const { return transposed ? i_of(j) : k_of(j, k0); }
  __device__ void numbers(float (&v)[8]) const {
    if constexpr (std::is_base_of_v<quant::Fp4Codes, Format>)
      widen_e2m1(codes[0].codes, v);
    else if constexpr (std::is_base_of_v<quant::Int4Codes, Format>)
      widen_nibbles<Format>(codes[0].codes, v);
    else if constexpr (std::is_same_v<Format, quant::Fp8>)
      fp8_numbers(v);
    else
      codes[0].numbers(*view, v);
  }
  __device__ void fp8_numbers(float (&v)[8]) const {
    if (view->code_dtype == MOEC_F8_E4M3) return widen_e4m3(codes[0].codes, v);
    const uint32_t words[2] = {codes[0].codes.x, codes[0].codes.y};
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = quant::e5m2(words[i / 4] >> i % 4 * 8 & 0xffu);
  }
  // Those of the first chunk that waits, which is chunk j.
  __device__ void elements(int j, int k0, bool has, float (&v)[8]) const {
    if (!has) {
#pragma unroll
      for (float& value : v) value = 0;
      return;
    }
    numbers(v);
    if (kByteScales<Format> || one_block) {
      const auto block = first_block();
#pragma unroll
      for (float& value : v) value = Format::template decode<float>(value, block);
    } else {
      int64_t n = n_of(j, k0), k = k_of_matrix(j, k0);
#pragma unroll 1
      for (int c = 0; c < 8; ++c) {
        v[0] = Format::template decode<float>(v[0], block_of<Format>(view, n, k));
        rotate(v);
        (along_n ? n : k) += 1;
      }
    }
  }
};

}  // namespace moec::cuda
