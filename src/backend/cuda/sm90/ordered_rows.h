// SPDX-License-Identifier: Apache-2.0
// Rows of x in the order of experts.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace moec::cuda {

// to[r] = x[row_token[r]], or zeros of a padding row, of 16-bit elements: k, a multiple of 8.
struct OrderedRows {
  const void* x;
  int64_t x_stride;  // elements
  const int32_t *row_token, *num_rows;
  void* to;
  int64_t k, max_rows;
};
// Why the kernel cannot take these, or null.
inline const char* ordered_rows_refuses(const OrderedRows& p) {
  const bool aligned = uint64_t(p.x) % 16 == 0 && p.x_stride % 8 == 0 && p.k % 8 == 0;
  return aligned ? nullptr : "rows of x are not aligned to 16 bytes";
}
cudaError_t launch_ordered_rows(const OrderedRows& args, int multiprocessors, cudaStream_t stream);

}  // namespace moec::cuda
