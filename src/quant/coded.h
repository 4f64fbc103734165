// SPDX-License-Identifier: Apache-2.0
// One matrix of codes [N,K] with its scales and zero points, as a format reads it.
#pragma once

#include "core/dtype.h"

namespace moec::quant {

// Entry of element (n, k): data[(n / block_n) * row_stride + (k / block_k) * col_stride].
struct BlockView {
  const void* data = nullptr;
  int64_t row_stride = 0, col_stride = 0;  // elements
  int64_t block_n = 1, block_k = 1;
  moec_dtype dtype = 0;

  MOEC_HD explicit operator bool() const { return data != nullptr; }
  MOEC_HD int64_t at(int64_t n, int64_t k) const {
    return quotient(n, block_n) * row_stride + quotient(k, block_k) * col_stride;
  }

 private:
  // A division takes longer than loading a value, and most indices need none.
  MOEC_HD static int64_t quotient(int64_t index, int64_t by) {
    return by == 1 ? index : index < by ? 0 : index / by;
  }
};

struct CodedView {
  const void* codes = nullptr;             // in units of the format: FormatInfo::code_dtype
  int64_t row_stride = 0, col_stride = 0;  // elements of codes
  uint32_t scheme = 0;                     // moec_scheme
  BlockView scales, zeros;
};

// What binding and memory need to know of a format.
struct FormatInfo {
  uint32_t scheme;
  const char* name;
  int code_bits;           // of one element
  moec_dtype code_dtype;   // of the codes' tensor
  moec_dtype zeros_dtype;  // of zero points; 0: the format has none
  // Elements along N and K that share a scale; 0 = the whole extent.
  int64_t block_n, block_k;
};

}  // namespace moec::quant
