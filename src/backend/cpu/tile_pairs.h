// SPDX-License-Identifier: Apache-2.0
// Codes times rows of bf16, in pairs: the table of these kernels.
#pragma once

#include "backend/cpu/tile_pair_bytes.h"
#include "backend/cpu/tile_pair_nibbles.h"

// Offsets within a chunk are small:
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)
namespace moec::cpu {
namespace {

// `to` has whole chunks.
inline void arrange_pairs(const PairRow& row) {
  const auto line = [&](int64_t from) {
    const int64_t left = row.count - from;
    if (left <= 0) return _mm512_setzero_ps();
    return _mm512_maskz_loadu_ps(Avx512Ops::mask(smaller(left, kLanes)),
                                 row.from + from / kLanes * row.step);
  };
  for (int64_t at = 0; at < row.count; at += kPairsChunk) {
    __m512i words[kOfWord];
    for (int i = 0; i < kOfWord; ++i) {
      const int64_t from = at + i * kWords;
      words[i] = rounded_words(line(from), line(from + kLanes));
    }
    if (are_nibbles(row.codes)) order_as_nibbles(row.codes == LineCodes::kHighNibble, words);
    for (int i = 0; i < kOfWord; ++i) _mm512_storeu_si512(row.to + at + i * kWords, words[i]);
  }
}

template <int kRows = kLinesRows>
constexpr void fill_pair_dots(PairKernels& t) {
  if constexpr (kRows > 0) {
    const auto at = [&](LineCodes codes) -> DotRunFn& { return t.dot[int(codes)][kRows - 1]; };
    at(LineCodes::kLowNibble) = dot_nibble_pairs<false, kRows>;
    at(LineCodes::kHighNibble) = dot_nibble_pairs<true, kRows>;
    at(LineCodes::kI8) = dot_byte_pairs<WholeTable, kRows>;
    at(LineCodes::kE4m3) = dot_byte_pairs<SignedTable, kRows>;
    fill_pair_dots<kRows - 1>(t);
  }
}
constexpr PairKernels make_pair_kernels() {
  PairKernels t = {};
  fill_pair_dots(t);
  t.arrange = arrange_pairs;
  t.decode[int(LineCodes::kLowNibble)] = decode_nibble_pairs<false>;
  t.decode[int(LineCodes::kHighNibble)] = decode_nibble_pairs<true>;
  t.decode[int(LineCodes::kI8)] = decode_byte_pairs<WholeTable>;
  t.decode[int(LineCodes::kE4m3)] = decode_byte_pairs<SignedTable>;
  return t;
}

}  // namespace
}  // namespace moec::cpu
// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
