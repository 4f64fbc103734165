// SPDX-License-Identifier: Apache-2.0
// One matrix product of any element types and strides, accumulated in fp32: the router's gate and
// its gradients.
#pragma once

#include "backend/cuda/device/op.h"

namespace moec::cuda {

struct Dense {  // c [m,n] = sum over k of a(m,k) b(k,n); all three extents are at least 1
  int64_t m, n, k;
  Array a, b;  // f32, bf16, f16
  int64_t a_row, a_col, b_row, b_col;
};

// By cuBLASLt where it has a kernel, else by our own, which makes it in parts over k that the
// reader adds up in their order: parts [parts(), m, n]. Which, and how many, is a function of the
// extents and types alone.
class DenseProduct {
 public:
  // c: where the result may go at once, if there is one part and its type can be written.
  DenseProduct(const Op& op, const Dense& dense, const Array& c = {});

  int64_t parts() const { return parts_; }
  bool is_direct() const;  // into c
  // `scratch` is scratch_bytes() long. Returns the parts in it, or null: the result is in c.
  uint64_t scratch_bytes() const;
  const float* run(const Op& op, char* scratch) const;

  // Most scratch of a product of this extent, whatever k.
  static uint64_t most_scratch(uint64_t m, uint64_t n);

 private:
  Dense dense_;
  Array c_;
  bool vendor_;
  int64_t parts_;
};

// Three bf16 values whose sum is the fp32 one: a product of them on tensor cores loses nothing.
// to [rows, 3, columns] from [rows, columns].
inline constexpr int kPieces = 3;
void split_to_bf16(const Op& op, const float* from, int64_t rows, int64_t columns, void* to);
// to [3, count] from bf16 [count].
void repeat_bf16(const Op& op, const void* from, int64_t count, void* to);
// Whether a product of these two types gains from that.
inline bool splits(moec_dtype real, moec_dtype other) {
  return real == MOEC_F32 && other == MOEC_BF16;
}

}  // namespace moec::cuda
