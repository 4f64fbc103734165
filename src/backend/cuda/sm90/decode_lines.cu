// SPDX-License-Identifier: Apache-2.0
// Values of codes that lie in lines, of some experts (code_lines.h). A thread has eight neighbours
// of a line and of lines at equal distances behind it, and stores 16 bytes of each; neighbouring
// threads have neighbouring eights. The codes of the next kAhead lines are on their way meanwhile,
// each with its scale.
#include <algorithm>
#include <type_traits>

#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/device/line_words.h"
#include "backend/cuda/device/ptx.cuh"
#include "backend/cuda/sm90/decode_lines.h"

namespace moec::cuda {
namespace {

constexpr int kThreads = 256, kCtas = 6, kAhead = 4, kRun = 8;

struct LinesParams {
  ExpertMatrix from[2];
  CodedLines lines;
  CodePlaces places[2];
  int parts, first;
  uint32_t runs_of_line, num_lines, lines_at_once;  // of a matrix
  const int32_t* group_offsets;                     // of the first expert
  uint4* to;
  int64_t matrix_runs;
  ProductCounters* counters;
};

template <LineDecode kDecode>
constexpr bool kOfNibbles = kDecode != LineDecode::kBytes && kDecode != LineDecode::kSigned;
template <LineDecode kDecode>
using EightCodes = std::conditional_t<kOfNibbles<kDecode>, uint32_t, uint2>;

// How scales are stored: one byte or two, as `decode` has them, fp32, or as their type says.
template <LineDecode kDecode, bool kFloats>
constexpr int kScaleBytes = kDecode == LineDecode::kPowers     ? 1
                            : kDecode == LineDecode::kIntegers ? 2
                            : kFloats                          ? 4
                                                               : 0;

// The eight codes of a line and the bits of their scale.
template <LineDecode kDecode>
struct Run {
  EightCodes<kDecode> codes;
  uint32_t scale;
};

// Keeps an address in one register pair: a sum of its parts would be made at each use.
__device__ __forceinline__ void settle(const char*& address) {
  asm("" : "+l"(address));
}

// Runs of a matrix at the same place of lines at equal distances.
template <LineDecode kDecode, bool kFloats>
class Runs {
 public:
  __device__ Runs(const LinesParams& p, int part, int expert, uint32_t line, uint32_t place) {
    constexpr int kCodesOfByte = kOfNibbles<kDecode> ? 2 : 1;
    const ExpertScales& form = p.lines.scales[part];
    const CodePlaces& places = p.places[part];
    const quant::CodedView m = p.from[part].coded(expert);
    codes_ = static_cast<const char*>(m.codes) +
             (m.first + places.first + line * places.line + int64_t(place) * kRun) / kCodesOfByte;
    step_ = p.lines_at_once * places.line / kCodesOfByte;
    scale_type_ = form.dtype;
    const int bytes = int(dtype_bytes(form.dtype));
    const int64_t of_stream = m.first >> form.shift;  // without one, 0
    const int64_t along = uint32_t(form.first + int(place) * kRun) >> form.shift;
    scales_ = static_cast<const char*>(m.scales.data) + (of_stream + along) * bytes;
    line_ = uint32_t(form.first_line) + line * uint32_t(form.line_step);
    line_step_ = p.lines_at_once * uint32_t(form.line_step);
    line_shift_ = form.line_shift;
    line_bytes_ = uint32_t(form.line_stride * bytes);
    settle(codes_);
    settle(scales_);
  }

  __device__ __forceinline__ void load(Run<kDecode>& to) {
    constexpr int kBytes = kScaleBytes<kDecode, kFloats>;
    to.codes = __ldcs(reinterpret_cast<const EightCodes<kDecode>*>(codes_));
    const char* const scale = scales_ + uint64_t(line_ >> line_shift_) * line_bytes_;
    const int bytes = kBytes ? kBytes : int(dtype_bytes(scale_type_));
    if (bytes == 4)
      to.scale = __ldg(reinterpret_cast<const uint32_t*>(scale));
    else if (bytes == 2)
      to.scale = __ldg(reinterpret_cast<const uint16_t*>(scale));
    else
      to.scale = __ldg(reinterpret_cast<const uint8_t*>(scale));
    codes_ += step_;
    line_ += line_step_;
  }
  __device__ __forceinline__ float scale_of(const Run<kDecode>& run) const {
    return kFloats ? __uint_as_float(run.scale) : quant::scale_of(run.scale, scale_type_);
  }

 private:
  const char *codes_, *scales_;
  int64_t step_;  // bytes of codes
  uint32_t line_, line_step_, line_bytes_;
  int line_shift_;
  moec_dtype scale_type_;
};

// Low and high nibbles of each byte exchanged.
__device__ __forceinline__ uint32_t low_first(uint32_t codes) {
  return (codes & 0x0f0f0f0fu) << 4 | (codes >> 4 & 0x0f0f0f0fu);
}

// numbers: 16 floats in shared memory, at a multiple of 64.
template <bool kHalf>
__device__ __forceinline__ FourPairs look_up(uint32_t codes, uint32_t numbers, float scale) {
  float v[kRun];
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    const uint32_t byte = i ? codes >> (4 * i - 2) : codes << 2;
    v[i] = __uint_as_float(ptx::shared_load_word((byte & 60u) | numbers));
  }
  FourPairs to;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    to.pair[i] =
        rounded_pair<kHalf>(quant::product(v[2 * i], scale), quant::product(v[2 * i + 1], scale));
  return to;
}

template <LineDecode kDecode, bool kHalf, bool kFloats>
__device__ __forceinline__ FourPairs elements_of(const Run<kDecode>& run,
                                                 const Runs<kDecode, kFloats>& runs,
                                                 uint32_t numbers, bool high_first) {
  if constexpr (kDecode == LineDecode::kPowers)
    return powers(run.codes, power_pair(run.scale));
  else if constexpr (kDecode == LineDecode::kIntegers)
    return integers<kHalf>(run.codes, run.scale | run.scale << 16);
  else if constexpr (kDecode == LineDecode::kBytes)
    return bytes<kHalf>(run.codes.x, run.codes.y, runs.scale_of(run));
  else if constexpr (kDecode == LineDecode::kSigned)
    return signed_bytes<kHalf>(run.codes.x, run.codes.y, runs.scale_of(run), signed_base(0));
  else
    return look_up<kHalf>(high_first ? low_first(run.codes) : run.codes, numbers,
                          runs.scale_of(run));
}

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
      const float* const book = p.lines.codebooks[part];
      numbers[threadIdx.x] = book ? book[threadIdx.x] : p.lines.numbers[threadIdx.x];
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
  const bool high_first = p.lines.high_first;
  Runs<kDecode, kFloats> runs(p, part, p.first + expert, line, place);
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
      const FourPairs v = elements_of<kDecode, kHalf, kFloats>(run, runs, numbers_at, high_first);
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
    p.from[i] = a.from[i];
    p.places[i] = code_places(a.from[i], a.along_k);
  }
  p.lines = lines;
  p.parts = a.parts;
  p.first = a.first;
  p.runs_of_line = uint32_t((a.along_k ? a.k : a.n) / kRun);
  p.num_lines = uint32_t(a.along_k ? a.n : a.k);
  p.group_offsets = a.group_offsets;
  p.to = static_cast<uint4*>(a.to);
  p.matrix_runs = a.n * a.k / kRun;
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
