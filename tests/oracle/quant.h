// SPDX-License-Identifier: Apache-2.0
// Values of quantised matrices from the bytes that checkpoints hold, one element at a time. Formats
// are those of the libraries that publish them; numbers of a few bits are computed from their
// fields, and nothing is shared with the library under test.
#pragma once

#include <cstdint>
#include <vector>

#include "moe_oracle.h"

namespace moec::oracle {

// Enumerators have the values of moec.h.
enum class Scheme {
  kNone,
  kInt8,
  kFp8,
  kCodebook4,
  kMxfp4,
  kNvfp4,
  kInt4,
  kAwq,
  kGptq,
  kGptqV2,
  kGgufQ8,
  kGgufQ4,
  kGgufQ4K,
  kGgufQ6K,
  kGgufMxfp4
};
enum class Number { kF32, kF16, kBf16, kI8, kU8, kE4m3, kE5m2, kE8m0 };

using Bytes = std::vector<uint8_t>;
// One number of a tensor.
double number_at(const Bytes& bytes, Number type, int64_t index);

// Tensors of `experts` matrices [N,K] in a row, as published. in_out: they lie as [K,N].
struct Quantised {
  Scheme scheme = Scheme::kNone;
  int64_t experts = 1, N = 0, K = 0;
  bool in_out = false;
  Bytes codes, scales, zeros, scales2, codebook, scale_book, scale_offset;
  Number code_type = Number::kI8, scale_type = Number::kF32;
  std::vector<int> group_index;      // [experts, K], or none
  int64_t block_n = 1, block_k = 1;  // of a stream: block_k, of 64 elements say
  int64_t scale_rows = 0;            // rows of n that scales have; 0: as many as they need
  int64_t scale_block = 256;         // nested scales that share one of scales2
  int64_t scales2_parts = 0;         // entries of scales2 an expert; 0: one for all
  bool alternating = false;          // of two parts: rows of both in turn, else one after the other
  bool part_of_first_is_second = false;  // UP_THEN_GATE
  bool divides = false;
};
// [experts,N,K]: in fp32 with the roundings of the format's formula, then rounded once.
Vec dequantise(const Quantised& matrices, Rounding rounding);

}  // namespace moec::oracle
