// SPDX-License-Identifier: Apache-2.0
// Codes of quantised weights as numbers.
#pragma once

#include <cstdint>

#include "quant/format.h"

namespace moec::cuda {

// Eight signed bytes. A byte in the lowest bits of 2^23 adds its value to it; with the sign bit
// turned it is 128 more than the code. The instructions that convert integers are far slower.
__device__ __forceinline__ void widen(uint2 codes, float (&values)[8]) {
  const uint32_t words[2] = {codes.x ^ 0x80808080u, codes.y ^ 0x80808080u};
#pragma unroll
  for (int i = 0; i < 8; ++i)
    values[i] = __uint_as_float(__byte_perm(words[i / 4], 0x4b000000u, 0x7440 | (i % 4))) -
                (8388608.0f + 128.0f);
}

// The same blocks, whose sizes the compiler knows.
template <class Format>
__device__ __forceinline__ quant::BlockView known_blocks(quant::BlockView blocks) {
  constexpr quant::FormatInfo kInfo = Format::kInfo;
  if (kInfo.block_n == 0) blocks.row_stride = 0;
  if (kInfo.block_k == 0) blocks.col_stride = 0;
  blocks.block_n = kInfo.block_n ? kInfo.block_n : 1;
  blocks.block_k = kInfo.block_k ? kInfo.block_k : 1;
  return blocks;
}
template <class Format>
__device__ __forceinline__ quant::CodedView known_view(quant::CodedView view) {
  view.scales = known_blocks<Format>(view.scales);
  view.zeros = known_blocks<Format>(view.zeros);
  return view;
}

// Whether the codes of a format are such bytes.
template <class Format>
constexpr bool kSignedBytes =
    Format::kInfo.code_bits == 8 && Format::kInfo.code_dtype == moec_dtype(MOEC_I8);

}  // namespace moec::cuda
