// SPDX-License-Identifier: Apache-2.0
// Values of codes whose columns have scales and zero points of their own, of some experts: a thread
// makes eight columns of eight lines, and stores 16 bytes a line. Neighbouring threads have
// neighbouring columns. What the columns have in common is read once for the lines of a group.
#include <algorithm>

#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/device/line_words.h"
#include "backend/cuda/device/ptx.cuh"
#include "backend/cuda/weights/decode_experts.h"

namespace moec::cuda {
namespace {

constexpr int kThreads = 256, kCtas = 4, kRun = 8;

struct ColumnsParams {
  ExpertMatrix from[2];
  int parts, first;
  uint32_t runs_of_line, strips;  // of a matrix; a strip has eight lines
  const int32_t* group_offsets;   // of the first expert
  uint4* to;
  int64_t matrix_runs;
  ProductCounters* counters;
};

// The nibble i of a word plus 2^23.
__device__ __forceinline__ float biased_nibble(uint32_t word, int i) {
  return __uint_as_float((word >> 4 * i & 15u) | 0x4b000000u);
}
__device__ __forceinline__ float real_of(uint32_t bits, moec_dtype dtype) {
  if (dtype == MOEC_BF16) return __uint_as_float(bits << 16);
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(uint16_t(bits)));
  return value;
}

// Scales and zero points of eight columns, as they are stored.
struct StoredBlocks {
  uint4 scales[2];
  uint32_t zeros;
  // row: of the bound matrix, a multiple of eight.
  __device__ __forceinline__ void load(const quant::CodedView& m, int64_t row, int64_t group) {
    const int64_t at = (row + group * m.scales.col_stride) * dtype_bytes(m.scales.dtype);
    const auto* const from =
        reinterpret_cast<const uint4*>(static_cast<const char*>(m.scales.data) + at);
    scales[0] = __ldg(from);
    if (m.scales.dtype == MOEC_F32) scales[1] = __ldg(from + 1);
    zeros = __ldg(static_cast<const uint32_t*>(m.zeros.data) + (row >> 3) * m.zeros.row_stride +
                  group * m.zeros.col_stride);
  }
};
template <class Format>
constexpr float kAddedZero = Format::kInfo.scheme == MOEC_SCHEME_GPTQ ? 1 : 0;

// Where code i, or zero point i, of eight neighbours along n is.
template <class Format>
__device__ constexpr int nibble_along_n(int i) {
  return std::is_same_v<Format, quant::Awq> ? quant::Awq::nibble_of(i) : i;
}

template <class Format>
struct ColumnBlocks {
  float scale[kRun], base[kRun];  // base: of the zero point, plus 2^23
  __device__ __forceinline__ void set(const StoredBlocks& from, moec_dtype dtype) {
    const uint32_t low[] = {from.scales[0].x, from.scales[0].y, from.scales[0].z, from.scales[0].w};
    const uint32_t high[] = {from.scales[1].x, from.scales[1].y, from.scales[1].z,
                             from.scales[1].w};
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      base[i] = biased_nibble(from.zeros, nibble_along_n<Format>(i)) + kAddedZero<Format>;
      if (dtype == MOEC_F32)
        scale[i] = __uint_as_float(i < 4 ? low[i] : high[i - 4]);
      else
        scale[i] = real_of(i % 2 ? low[i / 2] >> 16 : low[i / 2] & 0xffffu, dtype);
    }
  }
};

template <class Format>
constexpr bool kWordsOfColumns = Format::kInfo.storage == quant::Storage::kAlongK;

// The codes of a strip.
template <class Format>
struct StripCodes {  // a word of each line
  uint32_t words[kRun];
  __device__ __forceinline__ void load(const quant::CodedView& m, int64_t n, int64_t k) {
    const uint32_t* from = static_cast<const uint32_t*>(m.codes) + Format::place(m, n, k) / 8;
#pragma unroll
    for (int l = 0; l < kRun; ++l) words[l] = __ldcs(from + l * (m.col_stride / 8));
  }
  __device__ __forceinline__ float biased(int line, int i) const {
    return biased_nibble(words[line], nibble_along_n<Format>(i));
  }
};
template <class Format>
  requires(kWordsOfColumns<Format>)
struct StripCodes<Format> {  // a word of each column
  uint32_t words[kRun];
  __device__ __forceinline__ void load(const quant::CodedView& m, int64_t n, int64_t k) {
    const uint32_t* from =
        static_cast<const uint32_t*>(m.codes) + (k >> 3) * m.col_stride + m.rows.of(n);
#pragma unroll
    for (int i = 0; i < kRun; i += 4) {
      const uint4 four = __ldcs(reinterpret_cast<const uint4*>(from + i));
      words[i] = four.x;
      words[i + 1] = four.y;
      words[i + 2] = four.z;
      words[i + 3] = four.w;
    }
  }
  __device__ __forceinline__ float biased(int line, int i) const {
    return biased_nibble(words[i], line);
  }
};

template <bool kHalf, class Format>
__device__ __forceinline__ uint4 line_of(const StripCodes<Format>& codes, int line,
                                         const ColumnBlocks<Format>& blocks) {
  float v[kRun];
#pragma unroll
  for (int i = 0; i < kRun; ++i) v[i] = (codes.biased(line, i) - blocks.base[i]) * blocks.scale[i];
  return uint4{rounded_pair<kHalf>(v[0], v[1]), rounded_pair<kHalf>(v[2], v[3]),
               rounded_pair<kHalf>(v[4], v[5]), rounded_pair<kHalf>(v[6], v[7])};
}

// Experts without a row are left out. kByLine: each line has a group of its own.
template <class Format, bool kHalf, bool kByLine>
__global__ __launch_bounds__(kThreads, kByLine ? 3 : kCtas) void decode_columns_kernel(
    const __grid_constant__ ColumnsParams p) {
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  const int part = int(blockIdx.y) % p.parts, expert = int(blockIdx.y) / p.parts;
  if (blockIdx.x + blockIdx.y + threadIdx.x == 0) *p.counters = {};
  if (p.group_offsets[expert] == p.group_offsets[expert + 1]) return;
  const quant::CodedView m = p.from[part].coded(p.first + expert);
  uint4* const matrix = p.to + blockIdx.y * p.matrix_runs;
  for (uint32_t strip = blockIdx.x * kThreads + threadIdx.x; strip < p.strips;
       strip += gridDim.x * kThreads) {
    const uint32_t lines = strip / p.runs_of_line, run = strip - lines * p.runs_of_line;
    const int64_t n = int64_t(run) * kRun, k = int64_t(lines) * kRun, row = m.rows.of(n);
    uint4* const to = matrix + uint64_t(lines) * kRun * p.runs_of_line + run;
    StripCodes<Format> codes;
    codes.load(m, n, k);
    ColumnBlocks<Format> blocks;
    StoredBlocks next;
    if constexpr (!kByLine) {
      next.load(m, row, m.scales.block_k.of(k));
      blocks.set(next, m.scales.dtype);
#pragma unroll
      for (int l = 0; l < kRun; ++l) to[l * p.runs_of_line] = line_of<kHalf>(codes, l, blocks);
    } else {
      next.load(m, row, quant::Int4Codes::block_along_k(m, k));
      int64_t group = quant::Int4Codes::block_along_k(m, k + 1);
#pragma unroll 1
      for (int l = 0; l < kRun; ++l) {
        blocks.set(next, m.scales.dtype);
        if (l + 1 < kRun) next.load(m, row, group);
        if (l + 2 < kRun) group = quant::Int4Codes::block_along_k(m, k + l + 2);
        to[l * p.runs_of_line] = line_of<kHalf>(codes, l, blocks);
      }
    }
  }
}

template <class Format, bool kHalf>
auto* kernel_of(bool by_line) {
  if constexpr (kWordsOfColumns<Format>)
    if (by_line) return decode_columns_kernel<Format, kHalf, true>;
  return decode_columns_kernel<Format, kHalf, false>;
}

}  // namespace

cudaError_t launch_decode_columns(const DecodeArgs& a, int multiprocessors, cudaStream_t stream) {
  ColumnsParams p = {};
  bool by_line = false;
  for (int i = 0; i < a.parts; ++i) {
    p.from[i] = a.from[i];
    by_line = by_line || !has_groups_of_runs(a.from[i]);
  }
  p.parts = a.parts;
  p.first = a.first;
  p.runs_of_line = uint32_t(a.n / kRun);
  p.strips = uint32_t(a.k / kRun) * p.runs_of_line;
  p.group_offsets = a.group_offsets;
  p.to = static_cast<uint4*>(a.to);
  p.matrix_runs = a.n * a.k / kRun;
  p.counters = a.counters;
  const uint32_t matrices = uint32_t(a.count * a.parts);
  const uint32_t all = (p.strips + kThreads - 1) / kThreads;
  const uint32_t share = std::max(uint32_t(multiprocessors) * kCtas / a.busy_matrices(), 1u);
  cudaError_t error = cudaErrorInvalidValue;
  ColumnFormats::with(a.from[0].scheme, [&]<class Format>() {
    const auto kernel =
        a.dtype == MOEC_F16 ? kernel_of<Format, true>(by_line) : kernel_of<Format, false>(by_line);
    error = launch(kernel, dim3(std::min(all, share), matrices), kThreads, 0, stream, p);
  });
  return error;
}

}  // namespace moec::cuda
