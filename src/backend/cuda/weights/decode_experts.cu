// SPDX-License-Identifier: Apache-2.0
// Values of codes, of some experts: a thread makes strips of lines that lie side by side, eight
// neighbours of each, and stores 16 bytes a line. Neighbouring threads have neighbouring eights.
#include <algorithm>

#include "backend/cuda/device/codes.cuh"
#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/device/line_words.h"
#include "backend/cuda/device/ptx.cuh"
#include "backend/cuda/device/rotate.cuh"
#include "backend/cuda/weights/decode_experts.h"
#include "backend/cuda/weights/gguf_codes.cuh"

namespace moec::cuda {
namespace {

constexpr int kThreads = 256, kCtas = 3, kLines = 4, kRun = 8;

struct DecodeParams {
  ExpertMatrix from[2];
  CodeRuns runs[2];
  int parts, first;
  uint32_t runs_of_line, strips;  // of a matrix
  bool along_k, half;
  const int32_t* group_offsets;  // of the first expert
  char* to;
  int64_t line_bytes, matrix_bytes;
  ProductCounters* counters;
};

// Element (n, k), and those behind it along a line and across lines.
struct At {
  uint32_t n, k;
  bool along_k;
  __device__ At line(int i) const { return {along_k ? n + i : n, along_k ? k : k + i, along_k}; }
  __device__ At run(int i) const { return {along_k ? n : n + i, along_k ? k + i : k, along_k}; }
};

template <class Format>
constexpr bool kBlocksInCodes = Format::kInfo.scale_dtypes.size() == 0;  // along k

// The numbers of a strip's codes, line by line.
template <class Format>
struct StripNumbers {  // of blocks with their scales, along k
  GgufCodes<Format> chunks[kLines];
  __device__ void load(const quant::CodedView& m, const At& at) {
#pragma unroll
    for (int l = 0; l < kLines; ++l) chunks[l].load(m, at.line(l).n, at.line(l).k);
  }
  __device__ void next(const quant::CodedView&, const At&, float (&v)[kRun]) {
    chunks[0].numbers(v);
    rotate(chunks);
  }
};
template <class Format>
  requires(kHasChunks<Format>)
struct StripNumbers<Format> {
  CodeChunk<Format> chunks[kLines];
  __device__ void load(const quant::CodedView& m, const At& at) {
#pragma unroll
    for (int l = 0; l < kLines; ++l) chunks[l].load(m, at.line(l).n, at.line(l).k);
  }
  __device__ void next(const quant::CodedView& m, const At&, float (&v)[kRun]) {
    chunks[0].numbers(m, v);
    rotate(chunks);
  }
};

__device__ __forceinline__ void store(char* to, bool half, const float (&v)[kRun]) {
  uint4 words;
  uint32_t* const pair = &words.x;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    pair[i] = half ? rounded_pair<true>(v[2 * i], v[2 * i + 1])
                   : rounded_pair<false>(v[2 * i], v[2 * i + 1]);
  *reinterpret_cast<uint4*>(to) = words;
}

template <class Format>
__device__ void decode_one_block(const DecodeParams& p, const quant::CodedView& m, const At& at,
                                 char* to) {
  StripNumbers<Format> numbers;
  numbers.load(m, at);
  typename Format::Block blocks[kLines];
#pragma unroll
  for (int l = 0; l < kLines; ++l) blocks[l] = Format::block(m, at.line(l).n, at.line(l).k);
#pragma unroll 1
  for (int l = 0; l < kLines; ++l, to += p.line_bytes) {
    float v[kRun];
    numbers.next(m, at.line(l), v);
#pragma unroll
    for (float& value : v) value = Format::template decode<float>(value, blocks[0]);
    store(to, p.half, v);
    rotate(blocks);
  }
}

// Blocks of their own, which the lines of a strip may share.
template <class Format>
__device__ void decode_each_block(const DecodeParams& p, const quant::CodedView& m, const At& at,
                                  char* to) {
  constexpr bool kStream = Format::kInfo.storage == quant::Storage::kStream;
  StripNumbers<Format> numbers;
  numbers.load(m, at);
  typename Format::Block blocks[kRun] = {};
  int64_t shared = -1;
#pragma unroll 1
  for (int l = 0; l < kLines; ++l, to += p.line_bytes) {
    const At line = at.line(l);
    const int64_t entry = Format::entry(m, line.n, line.k);
    if (kStream || entry != shared) {
#pragma unroll 1
      for (int first = 0; first < kRun; first += kRun / 2) {
#pragma unroll
        for (int j = 0; j < kRun / 2; ++j) {
          blocks[j] = blocks[j + kRun / 2];
          const At one = line.run(first + j);
          blocks[j + kRun / 2] = Format::block(m, one.n, one.k);
        }
      }
      shared = entry;
    }
    float v[kRun];
    numbers.next(m, line, v);
#pragma unroll
    for (int j = 0; j < kRun; ++j) v[j] = Format::template decode<float>(v[j], blocks[j]);
    store(to, p.half, v);
  }
}

// Code by code.
template <class Format>
__device__ void decode_each_code(const DecodeParams& p, const quant::CodedView& m, const At& at,
                                 char* to) {
#pragma unroll 1
  for (int l = 0; l < kLines; ++l, to += p.line_bytes) {
    float v[kRun];
#pragma unroll 1
    for (int j = 0; j < kRun; ++j) {
      const At one = at.line(l).run(j);
      v[0] = quant::value<Format>(m, one.n, one.k);
      rotate(v);
    }
    store(to, p.half, v);
  }
}

// Experts without a row are left out.
template <class Format>
__global__ __launch_bounds__(kThreads, kCtas) void decode_experts_kernel(
    const __grid_constant__ DecodeParams p) {
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  const int part = int(blockIdx.y) % p.parts, expert = int(blockIdx.y) / p.parts;
  if (blockIdx.x + blockIdx.y + threadIdx.x == 0) *p.counters = {};
  if (p.group_offsets[expert] == p.group_offsets[expert + 1]) return;
  const quant::CodedView m = p.from[part].coded(p.first + expert);
  const CodeRuns runs = p.runs[part];
  char* const to = p.to + blockIdx.y * p.matrix_bytes;
  for (uint32_t strip = blockIdx.x * kThreads + threadIdx.x; strip < p.strips;
       strip += gridDim.x * kThreads) {
    const uint32_t lines = strip / p.runs_of_line, run = strip - lines * p.runs_of_line;
    const uint32_t line = lines * kLines, place = run * kRun;
    const At at = {p.along_k ? line : place, p.along_k ? place : line, p.along_k};
    char* const strip_to = to + line * p.line_bytes + place * 2;
    if constexpr (kBlocksInCodes<Format>)
      decode_one_block<Format>(p, m, at, strip_to);
    else if constexpr (!kHasChunks<Format>)
      decode_each_code<Format>(p, m, at, strip_to);
    else if (!runs.whole)
      decode_each_code<Format>(p, m, at, strip_to);
    else if (runs.one_block)
      decode_one_block<Format>(p, m, at, strip_to);
    else
      decode_each_block<Format>(p, m, at, strip_to);
  }
}

}  // namespace

cudaError_t launch_decode_experts(const DecodeArgs& a, int multiprocessors, cudaStream_t stream) {
  DecodeParams p = {};
  for (int i = 0; i < a.parts; ++i) {
    p.from[i] = a.from[i];
    p.runs[i] = a.runs[i];
  }
  p.parts = a.parts;
  p.first = a.first;
  p.along_k = a.along_k;
  p.half = a.dtype == MOEC_F16;
  p.group_offsets = a.group_offsets;
  const int64_t width = a.along_k ? a.k : a.n, lines = a.along_k ? a.n : a.k;
  p.runs_of_line = uint32_t(width / kRun);
  p.strips = uint32_t(lines / kLines) * p.runs_of_line;
  p.to = static_cast<char*>(a.to);
  p.line_bytes = 2 * width;
  p.matrix_bytes = 2 * a.n * a.k;
  p.counters = a.counters;
  const uint32_t matrices = uint32_t(a.count * a.parts);
  const uint32_t all = (p.strips + kThreads - 1) / kThreads;
  const uint32_t share = std::max(uint32_t(multiprocessors) * kCtas / a.busy_matrices(), 1u);
  cudaError_t error = cudaErrorInvalidValue;
  quant::Formats::with(a.from[0].scheme, [&]<class Format>() {
    error = launch(decode_experts_kernel<Format>, dim3(std::min(all, share), matrices), kThreads, 0,
                   stream, p);
  });
  return error;
}

}  // namespace moec::cuda
