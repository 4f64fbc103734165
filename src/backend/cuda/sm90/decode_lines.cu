// SPDX-License-Identifier: Apache-2.0
// Values of codes that lie in lines, of some experts (code_lines.h). A thread has eight neighbours
// of a line and of lines at equal distances behind it, and stores 16 bytes of each; neighbouring
// threads have neighbouring eights. The codes of the next kAhead lines are on their way meanwhile,
// each with its scale.
#include <algorithm>

#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/sm90/decode_lines.h"
#include "backend/cuda/sm90/line_runs.cuh"

namespace moec::cuda {
namespace {

constexpr int kThreads = 256, kCtas = 6, kAhead = 4;

struct LinesParams {
  LineSource source;
  int parts, first;
  uint32_t runs_of_line, num_lines, lines_at_once;  // of a matrix
  const int32_t* group_offsets;                     // of the first expert
  uint4* to;
  int64_t matrix_runs;
  ProductCounters* counters;
};

// Experts without a row are left out.
template <LineDecode kDecode, bool kHalf, bool kFloats>
__global__ __launch_bounds__(kThreads, kCtas) void decode_lines_kernel(
    const __grid_constant__ LinesParams p) {
  __shared__ alignas(64) float numbers[16];
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  const int part = int(blockIdx.y) % p.parts, expert = int(blockIdx.y) / p.parts;
  if (blockIdx.x + blockIdx.y + threadIdx.x == 0) *p.counters = {};
  if (p.group_offsets[expert] == p.group_offsets[expert + 1]) return;
  if constexpr (kDecode == LineDecode::kTable) {
    if (threadIdx.x < 16) {
      const float* const book = p.source.lines.codebooks[part];
      numbers[threadIdx.x] = book ? book[threadIdx.x] : p.source.lines.numbers[threadIdx.x];
    }
    __syncthreads();
  }
  const uint32_t thread = blockIdx.x * kThreads + threadIdx.x;
  const uint32_t line = thread / p.runs_of_line, place = thread - line * p.runs_of_line;
  if (line >= p.lines_at_once) return;
  uint32_t left = (p.num_lines - line + p.lines_at_once - 1) / p.lines_at_once;
  uint4* to = p.to + blockIdx.y * p.matrix_runs + thread;
  const uint32_t step = p.lines_at_once * p.runs_of_line;
  const uint32_t numbers_at = ptx::shared_address(numbers);
  const bool high_first = p.source.lines.high_first;
  Runs<kDecode, kFloats> runs(p.source, part, p.first + expert, line, place, p.lines_at_once);
  Run<kDecode> ahead[kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; ++i)
    if (uint32_t(i) < left) runs.load(ahead[i]);
  while (true) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i, --left, to += step) {
      if (left == 0) return;
      const Run<kDecode> run = ahead[i];
      if (left > kAhead) runs.load(ahead[i]);
      const FourPairs v =
          elements_of<kDecode, kHalf, kFloats>(run, runs.scale_type(), numbers_at, high_first);
      *to = uint4{v.pair[0], v.pair[1], v.pair[2], v.pair[3]};
    }
  }
}

using Kernel = void (*)(LinesParams);
// In the order of LineDecode. Powers are of bf16 (line_words.h).
template <bool kHalf, bool kFloats>
constexpr Kernel kKernels[] = {decode_lines_kernel<LineDecode::kTable, kHalf, kFloats>,
                               decode_lines_kernel<LineDecode::kPowers, false, false>,
                               decode_lines_kernel<LineDecode::kIntegers, kHalf, false>,
                               decode_lines_kernel<LineDecode::kBytes, kHalf, kFloats>,
                               decode_lines_kernel<LineDecode::kSigned, kHalf, kFloats>};

}  // namespace

cudaError_t launch_decode_lines(const DecodeArgs& a, const CodedLines& lines, int multiprocessors,
                                cudaStream_t stream) {
  LinesParams p = {};
  for (int i = 0; i < a.parts; ++i) {
    p.source.from[i] = a.from[i];
    p.source.places[i] = code_places(a.from[i], a.along_k);
  }
  p.source.lines = lines;
  p.parts = a.parts;
  p.first = a.first;
  p.runs_of_line = uint32_t((a.along_k ? a.k : a.n) / kRunCodes);
  p.num_lines = uint32_t(a.along_k ? a.n : a.k);
  p.group_offsets = a.group_offsets;
  p.to = static_cast<uint4*>(a.to);
  p.matrix_runs = a.n * a.k / kRunCodes;
  p.counters = a.counters;
  const uint32_t matrices = uint32_t(a.count * a.parts);
  const uint32_t share = uint32_t(multiprocessors) * kCtas / a.busy_matrices();
  const uint32_t of_line = (p.runs_of_line + kThreads - 1) / kThreads;
  const uint32_t ctas = std::max(share, of_line);
  p.lines_at_once = std::min(ctas * kThreads / p.runs_of_line, p.num_lines);
  bool floats = true;
  for (int i = 0; i < a.parts; ++i) floats = floats && lines.scales[i].dtype == MOEC_F32;
  const auto& kernels = a.dtype == MOEC_F16
                            ? (floats ? kKernels<true, true> : kKernels<true, false>)
                            : (floats ? kKernels<false, true> : kKernels<false, false>);
  const Kernel kernel = kernels[int(lines.decode)];
  return launch(kernel, dim3(ctas, matrices), kThreads, 0, stream, p);
}

}  // namespace moec::cuda
