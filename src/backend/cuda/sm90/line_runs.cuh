// SPDX-License-Identifier: Apache-2.0
// Codes in lines (code_lines.h), eight neighbours of a line at a time, and the elements they stand
// for.
#pragma once

#include <type_traits>

#include "backend/cuda/device/line_words.h"
#include "backend/cuda/device/ptx.cuh"
#include "backend/cuda/sm90/row_gemm.h"

namespace moec::cuda {

constexpr int kRunCodes = 8;

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
  Runs() = default;
  // The first one is the run at `place` of line `line`; step: lines from one to the next.
  __device__ Runs(const LineSource& p, int part, int expert, uint32_t line, uint32_t place,
                  uint32_t step) {
    constexpr int kCodesOfByte = kOfNibbles<kDecode> ? 2 : 1;
    const ExpertScales& form = p.lines.scales[part];
    const CodePlaces& places = p.places[part];
    const quant::CodedView m = p.from[part].coded(expert);
    codes_ =
        static_cast<const char*>(m.codes) +
        (m.first + places.first + line * places.line + int64_t(place) * kRunCodes) / kCodesOfByte;
    step_ = step * places.line / kCodesOfByte;
    scale_type_ = form.dtype;
    const int bytes = int(dtype_bytes(form.dtype));
    const int64_t of_stream = m.first >> form.shift;  // without one, 0
    const int64_t along = uint32_t(form.first + int(place) * kRunCodes) >> form.shift;
    scales_ = static_cast<const char*>(m.scales.data) + (of_stream + along) * bytes;
    line_ = uint32_t(form.first_line) + line * uint32_t(form.line_step);
    line_step_ = step * uint32_t(form.line_step);
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
  // Codes and scales to L2, by a warp whose lanes have neighbouring places: of as many lines as each
  // lane has runs.
  __device__ __forceinline__ void prefetch(int lane, int runs) const {
    const auto to_l2 = [](const char* from) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
    };
    const auto of_first = [](const char* from) {
      return reinterpret_cast<const char*>(
          __shfl_sync(~0u, reinterpret_cast<unsigned long long>(from), 0));
    };
    constexpr int kBytes = kOfNibbles<kDecode> ? 128 : 256;  // of 32 places
    const char *const codes = of_first(codes_), *const scales = of_first(scales_);
    const int lines = __shfl_sync(~0u, runs, 0), of_other_half = __shfl_sync(~0u, runs, 16);
    for (int i = lane; i < lines; i += 32) {
      to_l2(codes + i * step_);
      if (kBytes > 128 && of_other_half > 0) to_l2(codes + i * step_ + 128);
      to_l2(scales + uint64_t(line_ + i * line_step_ >> line_shift_) * line_bytes_);
    }
  }
  __device__ moec_dtype scale_type() const { return scale_type_; }

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
  float v[kRunCodes];
#pragma unroll
  for (int i = 0; i < kRunCodes; ++i) {
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
__device__ __forceinline__ FourPairs elements_of(const Run<kDecode>& run, moec_dtype scale_type,
                                                 uint32_t numbers, bool high_first) {
  const float scale = kFloats ? __uint_as_float(run.scale) : quant::scale_of(run.scale, scale_type);
  if constexpr (kDecode == LineDecode::kPowers)
    return powers(run.codes, power_pair(run.scale));
  else if constexpr (kDecode == LineDecode::kIntegers)
    return integers<kHalf>(run.codes, run.scale | run.scale << 16);
  else if constexpr (kDecode == LineDecode::kBytes)
    return bytes<kHalf>(run.codes.x, run.codes.y, scale);
  else if constexpr (kDecode == LineDecode::kSigned)
    return signed_bytes<kHalf>(run.codes.x, run.codes.y, scale, signed_base(0));
  else
    return look_up<kHalf>(high_first ? low_first(run.codes) : run.codes, numbers, scale);
}

}  // namespace moec::cuda
