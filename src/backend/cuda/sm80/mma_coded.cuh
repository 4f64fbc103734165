// SPDX-License-Identifier: Apache-2.0
// Tiles of operand b where its elements are codes of a byte or a nibble. Each thread copies the
// eight codes of its chunk into the stage and reads them there itself.
#pragma once

#include <type_traits>

#include "backend/cuda/device/codes.cuh"
#include "backend/cuda/sm80/mma_made.cuh"

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

// Formats whose scales are bytes; others have numbers.
template <class Format>
constexpr bool kByteScales = std::is_base_of_v<quant::Fp4Codes, Format>;
template <class Format>
constexpr bool kHasZeros = std::is_base_of_v<quant::Shifted, Format>;

// The bits of the next k block's scale wait in a register and become a block where codes become
// numbers: nothing waits for memory. So it is where entries lie linearly, as chunks do, with one
// for all codes of a chunk; blocks of others are made where bits are read.
template <class Format>
struct CodedTileLoader : MadeChunk {
  static_assert(kHasChunks<Format>);
  using Codes = decltype(CodeChunk<Format>::codes);
  static_assert(sizeof(Codes) <= MadeShape::kOfThread);
  int fetched = 0, made = 0;  // parts
  bool transposed, along_n;   // the matrix; its chunks
  bool within;                // i is
  const char* from;           // the chunk in the k block to be fetched
  int64_t from_k;             // to that of the next one
  // Of what is made.
  int k0 = 0;
  const quant::CodedView* view;  // in shared memory: registers do not hold it
  bool one_block;                // for all codes of a chunk
  bool linear;                   // entries of scales
  int kept;                      // scales are those of the k block before, unless k0 & kept is 0
  const char* scale;             // the next entry
  int64_t scale_k;               // to the one behind it
  const moec_dtype dtype;
  moec_dtype scale_dtype;
  uint32_t scale_bits;
  float zero = 0, scale2 = 1;

  __device__ CodedTileLoader(const PortableGemm& p, const PortableTile& t, bool along_k)
      : MadeChunk(t, along_k),
        transposed(p.codes[0].transposed),
        along_n(along_k == transposed),
        within(i < p.n),
        dtype(p.a.dtype) {
    if (int(threadIdx.x) < (p.sum ? p.parts : 1)) {
      const int part = int(threadIdx.x);
      views()[part] = coded_view(p, t.part + part, t.group);
    }
    __syncthreads();
  }
  // k0 of 0: of the next part.
  __device__ void fetch(uint32_t slot, int at_k0, int k_end) {
    if (at_k0 == 0) {
      view = views() + fetched++;
      from = chunk_at(0);
      from_k = chunk_at(kMmaDepth) - from;
    }
    if (is_inside(at_k0, k_end)) ptx::copy_async_few<sizeof(Codes)>(own(slot), from);
    from += from_k;
  }
  __device__ void make(uint32_t tile, uint32_t slot, int k_end) {
    view = views() + made;
    if (k0 == 0) {
      find_part();
      read_scale(k_end);
    }
    store(tile, dtype, [&](float (&v)[8]) { elements(slot, is_inside(k0, k_end), v); });
    k0 += kMmaDepth;
    if (k0 < k_end) return read_scale(k_end);
    k0 = 0;
    ++made;
  }

 private:
  // Of each part.
  static __device__ quant::CodedView* views() {
    __shared__ alignas(quant::CodedView) char memory[2 * sizeof(quant::CodedView)];
    return reinterpret_cast<quant::CodedView*>(memory);
  }
  static __device__ uint32_t own(uint32_t slot) {
    return slot + threadIdx.x * MadeShape::kOfThread;
  }
  __device__ void read_scale(int k_end) {
    if (k0 & kept) return;
    const bool has = is_inside(k0, k_end);
    if (linear) {
      if (has) scale_bits = bits_at(scale);
      scale += scale_k;
    } else if (one_block && has) {
      const auto block = block_of<Format>(view, n_of(k0), k_of_matrix(k0));
      scale_bits = __float_as_uint(block.scale);
      if constexpr (kHasZeros<Format>) zero = block.zero;
    }
  }
  __device__ uint32_t bits_at(const char* at) const {
    const int bytes = kByteScales<Format> ? 1 : dtype_bytes(scale_dtype);
    if (bytes == 4) return *reinterpret_cast<const uint32_t*>(at);
    if (bytes == 2) return *reinterpret_cast<const uint16_t*>(at);
    return *reinterpret_cast<const uint8_t*>(at);
  }
  __device__ void find_part() {
    find_scales();
    scale_dtype = linear ? view->scales.dtype : moec_dtype(MOEC_F32);
    if constexpr (kByteScales<Format>) {
      if (view->scales2) scale2 = *view->scales2;
    }
    if constexpr (kHasZeros<Format>) zero = Format::kZero;
    if (!linear) return;
    scale = scale_at(0);
    scale_k = kept < 0 ? 0 : scale_at(kept + 1) - scale;
  }
  __device__ void find_scales() {
    const quant::BlockView& of = view->scales;
    constexpr bool kStream = Format::kInfo.storage == quant::Storage::kStream;
    const quant::BlockSize along_line = kStream || !along_n ? of.block_k : of.block_n;
    const quant::BlockSize over_lines = kStream   ? quant::BlockSize()
                                        : along_n ? of.block_k
                                                  : of.block_n;
    const quant::BlockSize over_k = along_n == transposed ? along_line : over_lines;
    one_block =
        kStream || ((along_line.is_all() || along_line.size() % 8 == 0) && !view->group_index);
    const bool alone = !view->zeros && !view->group_index && !view->scale_book;
    linear = kByteScales<Format> || (one_block && alone && along_line.is_power() &&
                                     over_lines.is_power() && begins_blocks());
    kept = 0;
    if (over_k.is_all())
      kept = -1;
    else if (over_k.is_power() && (linear || (!kStream && !transposed)))
      kept = int(max(over_k.size(), int64_t(kMmaDepth))) - 1;
  }
  // Whether blocks begin with the first row and, of a stream, with every line.
  __device__ bool begins_blocks() const {
    if constexpr (Format::kInfo.storage == quant::Storage::kStream) {
      const quant::BlockSize block = view->scales.block_k;
      const int64_t first = Format::place(*view, 0, 0);
      const int64_t line = Format::place(*view, !along_n, along_n) - first;
      const int64_t next = Format::place(*view, along_n, !along_n) - first;
      return !block.is_all() && first % block.size() == 0 && line % block.size() == 0 && next == 1;
    } else {
      const quant::BlockSize rows = view->scales.block_n;
      return rows.size() == 1 || rows.is_all() ||
             (view->rows.step == 1 && view->rows.first % rows.size() == 0);
    }
  }
  __device__ const char* scale_at(int at_k0) const {
    return static_cast<const char*>(view->scales.data) +
           entry_of<Format>(view, n_of(at_k0), k_of_matrix(at_k0)) * dtype_bytes(scale_dtype);
  }
  // Chunks lie linearly.
  __device__ const char* chunk_at(int at_k0) const {
    const int64_t n = n_of(at_k0), k = k_of_matrix(at_k0);
    const char* const first = static_cast<const char*>(view->codes);
    if constexpr (kHasNibbles<Format>)
      return first + Format::place(*view, n, k) / 2;
    else
      return first + n * view->row_stride + k * view->col_stride;
  }
  __device__ bool is_inside(int at_k0, int k_end) const { return within && k_of(at_k0) < k_end; }
  __device__ int64_t n_of(int at_k0) const { return transposed ? k_of(at_k0) : i; }
  __device__ int64_t k_of_matrix(int at_k0) const { return transposed ? i : k_of(at_k0); }

  __device__ typename Format::Block block() const {
    if constexpr (kByteScales<Format>) {
      return Format::of_scale(*view, scale_bits, scale2);
    } else {
      const float of_codes = quant::scale_of(scale_bits, scale_dtype);
      if constexpr (kHasZeros<Format>)
        return {of_codes, zero};
      else
        return {of_codes};
    }
  }
  static __device__ Codes codes_in(uint32_t slot) {
    if constexpr (sizeof(Codes) == 4)
      return ptx::shared_load_word(own(slot));
    else
      return ptx::shared_load_pair(own(slot));
  }
  __device__ void numbers(const CodeChunk<Format>& of, float (&v)[8]) const {
    if constexpr (std::is_base_of_v<quant::Fp4Codes, Format>)
      widen_e2m1(of.codes, v);
    else if constexpr (std::is_base_of_v<quant::Int4Codes, Format>)
      widen_nibbles<Format>(of.codes, v);
    else if constexpr (std::is_same_v<Format, quant::Fp8>)
      fp8_numbers(of.codes, v);
    else
      of.numbers(*view, v);
  }
  __device__ void fp8_numbers(uint2 codes, float (&v)[8]) const {
    if (view->code_dtype == MOEC_F8_E4M3) return widen_e4m3(codes, v);
    const uint32_t words[2] = {codes.x, codes.y};
#pragma unroll
    for (int c = 0; c < 8; ++c) v[c] = quant::e5m2(words[c / 4] >> c % 4 * 8 & 0xffu);
  }
  __device__ void elements(uint32_t slot, bool has, float (&v)[8]) const {
    if (!has) {
#pragma unroll
      for (float& value : v) value = 0;
      return;
    }
    numbers({codes_in(slot)}, v);
    if (kByteScales<Format> || one_block) {
      const auto of_codes = block();
#pragma unroll
      for (float& value : v) value = Format::template decode<float>(value, of_codes);
    } else {
      int64_t n = n_of(k0), k = k_of_matrix(k0);
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
