// SPDX-License-Identifier: Apache-2.0
// Tiles of operand b where its elements are codes of a byte or a nibble. Each thread copies the
// codes of its chunks, eight each, into the stage and reads them there itself.
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
// Eight codes of a book in shared memory.
template <class Format>
__device__ __forceinline__ void look_up(uint32_t codes, uint32_t book, float (&values)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int place = 4 * Format::nibble_of(i);
    const uint32_t offset = (place ? codes >> (place - 2) : codes << 2) & 60u;
    values[i] = std::bit_cast<float>(ptx::shared_load_word(book + offset));
  }
}
// Eight nibbles plus 2^23, as widen_biased() has bytes.
template <class Format>
__device__ __forceinline__ void widen_nibbles(uint32_t codes, float (&values)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i)
    values[i] = __uint_as_float((codes >> Format::nibble_of(i) * 4 & 15u) | 0x4b000000u);
}

__device__ __forceinline__ float of_half(uint32_t bits) {
  return __half2float(__ushort_as_half(uint16_t(bits)));
}
// Eight codes of fp8.
__device__ __forceinline__ void widen_e4m3(uint2 codes, float (&values)[8]) {
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    const uint32_t two = (i < 4 ? codes.x : codes.y) >> i % 4 * 8;
#if __CUDA_ARCH__ >= 890
    const uint32_t halves = ptx::e4m3_halves(uint16_t(two));
    values[i] = of_half(halves);
    values[i + 1] = of_half(halves >> 16);
#else
    // In the same way 2^-120 of the number; 0x7f and 0xff are NaN.
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint32_t at_top = two << (24 - 8 * j);
      const float value = __int_as_float((int32_t(at_top) >> 4) & int32_t(0x87f00000u)) * 0x1p120f;
      values[i + j] = (at_top & 0x7f000000u) == 0x7f000000u ? quant::quiet_nan() : value;
    }
#endif
  }
}
// Those of half precision without their lower byte.
__device__ __forceinline__ void widen_e5m2(uint2 codes, float (&values)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i)
    values[i] = quant::e5m2((i < 4 ? codes.x : codes.y) >> i % 4 * 8 & 0xffu);
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
constexpr bool kHasBook = std::is_same_v<Format, quant::Codebook4>;
template <class Format>
constexpr bool kHasZeros = std::is_base_of_v<quant::Shifted, Format>;
// What numbers() adds to codes, which their zero has, too: differences are exact.
template <class Format>
constexpr float kBias = std::is_base_of_v<quant::Int4Codes, Format> ? 8388608.0f : 0.0f;

// The bits of the next k block's scale wait in a register and become a block where codes become
// numbers: nothing waits for memory. So it is where entries lie linearly, as chunks do, with one
// for all codes of a chunk; blocks of others are made where bits are read.
template <class Format>
struct CodedTileLoader : MadeChunks {
  static_assert(kHasChunks<Format>);
  static constexpr bool kMayBePowers = std::is_same_v<Format, quant::Fp8>;  // scales
  using Codes = decltype(CodeChunk<Format>::codes);
  int fetched = 0, made = 0;  // parts
  const uint32_t own_codes = ptx::kept(uint32_t(threadIdx.x * sizeof(Codes)));
  bool transposed, along_n;    // the matrix; its chunks
  const char* from;            // the first chunk in the k block to be fetched
  int64_t from_k, from_chunk;  // to that of the next one; from chunk to chunk
  const int n_end;
  // Of what is made.
  int k0 = 0;
  uint32_t book = 0;             // in shared memory
  bool e5m2;                     // codes of fp8
  bool one_block;                // for all codes of a chunk
  bool linear;                   // entries of scales
  int kept;                      // scales are those of the k block before, unless k0 & kept is 0
  const char* scale;             // the next entry of the first chunk
  int64_t scale_k, scale_chunk;  // to the one behind it; from chunk to chunk
  moec_dtype scale_dtype;
  uint32_t scale_bits[kChunks], scale_words[kChunks];  // of up to two bytes, of four
  float zero[kChunks] = {}, scale2 = 1;

  __device__ CodedTileLoader(const PortableGemm& p, const PortableTile& t, bool along_k)
      : MadeChunks(t, along_k),
        transposed(p.codes[0].transposed),
        along_n(along_k == transposed),
        n_end(int(p.n)) {
    if (int(threadIdx.x) < (p.sum ? p.parts : 1)) {
      const int part = int(threadIdx.x);
      views()[part] = coded_view(p, t.part + part, t.group);
    }
    __syncthreads();
    if constexpr (kHasBook<Format>) {  // read behind the barrier in front of the first make
      const int part = int(threadIdx.x) / 16, code = int(threadIdx.x) % 16;
      if (part < (p.sum ? p.parts : 1)) books()[part * 16 + code] = views()[part].codebook[code];
    }
  }
  // k0 of 0: of the next part.
  __device__ void fetch(uint32_t slot, int at_k0, int k_end) {
    if (at_k0 == 0) {
      from = chunk_at(0, 0);
      from_k = chunk_at(0, kMmaDepth) - from;
      from_chunk = chunk_at(1, 0) - from;
      ++fetched;
    }
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
      ptx::copy_async_few<sizeof(Codes)>(is_inside(c, at_k0, k_end), own(slot, c),
                                         from + c * from_chunk);
    from += from_k;
  }
  template <class Element>
  __device__ __forceinline__ void make(uint32_t tile, uint32_t slot, int k_end) {
    if (k0 == 0) {
      find_part();
      read_scale(k_end);
    }
    float v[kChunks][8];
    elements(slot, k_end, v);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) store<Element>(c, tile, k_of(c, k0) < k_end, v[c]);
    k0 += kMmaDepth;
    if (k0 < k_end) return read_scale(k_end);
    k0 = 0;
    ++made;
  }

 private:
  // Of each part, in shared memory: registers do not hold them.
  static __device__ quant::CodedView* views() {
    __shared__ alignas(quant::CodedView) char memory[2 * sizeof(quant::CodedView)];
    return reinterpret_cast<quant::CodedView*>(memory);
  }
  static __device__ float* books() {
    __shared__ float memory[2 * 16];
    return memory;
  }
  __device__ const quant::CodedView* view() const { return views() + made; }
  __device__ uint32_t own(uint32_t slot, int c) const {
    return slot + own_codes + c * kPortableThreads * int(sizeof(Codes));
  }
  __device__ void read_scale(int k_end) {
    if (k0 & kept) return;
    if (linear) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c)
        read_bits(c, is_inside(c, k0, k_end), scale + c * scale_chunk);
      scale += scale_k;
    } else if (one_block) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        if (!is_inside(c, k0, k_end)) continue;
        const auto block = block_of<Format>(view(), n_of(c, k0), k_of_matrix(c, k0));
        scale_words[c] = __float_as_uint(block.scale);
        if constexpr (kHasZeros<Format>) zero[c] = block.zero + kBias<Format>;
      }
    }
  }
  // Without branches. A load waits for one before it into the same register, even where it loads
  // nothing.
  __device__ void read_bits(int c, bool has, const char* at) {
    if constexpr (kByteScales<Format>) {
      ptx::load_bits_if<1>(has, scale_bits[c], at);
    } else {
      const int bytes = dtype_bytes(scale_dtype);
      if constexpr (kMayBePowers) ptx::load_bits_if<1>(has && bytes == 1, scale_bits[c], at);
      ptx::load_bits_if<2>(has && bytes == 2, scale_bits[c], at);
      ptx::load_bits_if<4>(has && bytes == 4, scale_words[c], at);
    }
  }
  __device__ float scale_of(int c) const {
    const uint32_t bits = scale_bits[c];
    if constexpr (kMayBePowers)
      if (dtype_bytes(scale_dtype) == 1) return quant::e8m0(bits);
    const uint32_t at_top = scale_dtype == MOEC_F32 ? scale_words[c] : bits << 16;
    return scale_dtype == MOEC_F16 ? of_half(bits) : __uint_as_float(at_top);
  }
  __device__ void find_part() {
    find_scales();
    if constexpr (kHasBook<Format>) book = ptx::shared_address(books() + 16 * made);
    e5m2 = view()->code_dtype == MOEC_F8_E5M2;
    scale_dtype = linear ? view()->scales.dtype : moec_dtype(MOEC_F32);
    if constexpr (kByteScales<Format>) {
      if (view()->scales2) scale2 = *view()->scales2;
    }
    if constexpr (kHasZeros<Format>)
      for (float& z : zero) z = Format::kZero + kBias<Format>;
    if (!linear) return;
    scale = scale_at(0, 0);
    scale_k = kept < 0 ? 0 : scale_at(0, kept + 1) - scale;
    scale_chunk = scale_at(1, 0) - scale;
  }
  __device__ void find_scales() {
    const quant::BlockView& of = view()->scales;
    constexpr bool kStream = Format::kInfo.storage == quant::Storage::kStream;
    const quant::BlockSize along_line = kStream || !along_n ? of.block_k : of.block_n;
    const quant::BlockSize over_lines = kStream   ? quant::BlockSize()
                                        : along_n ? of.block_k
                                                  : of.block_n;
    const quant::BlockSize over_k = along_n == transposed ? along_line : over_lines;
    one_block =
        kStream || ((along_line.is_all() || along_line.size() % 8 == 0) && !view()->group_index);
    const bool alone = !view()->zeros && !view()->group_index && !view()->scale_book;
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
      const quant::BlockSize block = view()->scales.block_k;
      const int64_t first = Format::place(*view(), 0, 0);
      const int64_t line = Format::place(*view(), !along_n, along_n) - first;
      const int64_t next = Format::place(*view(), along_n, !along_n) - first;
      return !block.is_all() && first % block.size() == 0 && line % block.size() == 0 && next == 1;
    } else {
      const quant::BlockSize rows = view()->scales.block_n;
      return rows.size() == 1 || rows.is_all() ||
             (view()->rows.step == 1 && view()->rows.first % rows.size() == 0);
    }
  }
  __device__ const char* scale_at(int c, int at_k0) const {
    return static_cast<const char*>(view()->scales.data) +
           entry_of<Format>(view(), n_of(c, at_k0), k_of_matrix(c, at_k0)) *
               dtype_bytes(scale_dtype);
  }
  // Of the part to be fetched, where chunks lie linearly.
  __device__ const char* chunk_at(int c, int at_k0) const {
    const int64_t n = n_of(c, at_k0), k = k_of_matrix(c, at_k0);
    const quant::CodedView& of = views()[fetched];
    const char* const first = static_cast<const char*>(of.codes);
    if constexpr (kHasNibbles<Format>)
      return first + Format::place(of, n, k) / 2;
    else
      return first + n * of.row_stride + k * of.col_stride;
  }
  __device__ bool is_inside(int c, int at_k0, int k_end) const {
    return int(i) + c * i_step < n_end && k_of(c, at_k0) < k_end;
  }
  __device__ int64_t n_of(int c, int at_k0) const { return transposed ? k_of(c, at_k0) : i_of(c); }
  __device__ int64_t k_of_matrix(int c, int at_k0) const {
    return transposed ? i_of(c) : k_of(c, at_k0);
  }

  __device__ typename Format::Block block(int c) const {
    if constexpr (kByteScales<Format>) {
      return Format::of_scale(*view(), scale_bits[c], scale2);
    } else {
      const float of_codes = scale_of(c);
      if constexpr (kHasZeros<Format>)
        return {of_codes, zero[c]};
      else
        return {of_codes};
    }
  }
  __device__ Codes codes_in(uint32_t slot, int c) const {
    if constexpr (sizeof(Codes) == 4)
      return ptx::shared_load_word(own(slot, c));
    else
      return ptx::shared_load_pair(own(slot, c));
  }
  // Of codes, and kBias more.
  __device__ void numbers(const CodeChunk<Format>& of, float (&v)[8]) const {
    if constexpr (kHasBook<Format>)
      look_up<Format>(of.codes, book, v);
    else if constexpr (std::is_base_of_v<quant::Fp4Codes, Format>)
      widen_e2m1(of.codes, v);
    else if constexpr (std::is_base_of_v<quant::Int4Codes, Format>)
      widen_nibbles<Format>(of.codes, v);
    else if constexpr (std::is_same_v<Format, quant::Fp8>)
      e5m2 ? widen_e5m2(of.codes, v) : widen_e4m3(of.codes, v);
    else
      of.numbers(*view(), v);
  }
  __device__ __forceinline__ void elements(uint32_t slot, int k_end, float (&v)[kChunks][8]) const {
    CodeChunk<Format> codes[kChunks];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) codes[c] = {codes_in(slot, c)};
#pragma unroll
    for (int c = 0; c < kChunks; ++c) numbers(codes[c], v[c]);
    if (kByteScales<Format> || one_block) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const auto of_codes = block(c);
        for (float& value : v[c]) value = Format::template decode<float>(value, of_codes);
      }
    } else {
#pragma unroll
      for (int c = 0; c < kChunks; ++c)
        if (is_inside(c, k0, k_end)) decode_each(c, v[c]);
    }
  }
  // Codes of blocks of their own.
  __device__ void decode_each(int c, float (&v)[8]) const {
    int64_t n = n_of(c, k0), k = k_of_matrix(c, k0);
#pragma unroll 1
    for (int at = 0; at < 8; ++at) {
      auto of_code = block_of<Format>(view(), n, k);
      if constexpr (kHasZeros<Format>) of_code.zero += kBias<Format>;
      v[0] = Format::template decode<float>(v[0], of_code);
      rotate(v);
      (along_n ? n : k) += 1;
    }
  }
};

}  // namespace moec::cuda
