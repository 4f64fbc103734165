// SPDX-License-Identifier: Apache-2.0
// Expert weights as the backends read them, whatever layout they were bound in: plain values, or
// the codes of a format with scales and zero points.
#pragma once

#include <initializer_list>

#include "core/dtype.h"
#include "quant/coded.h"

namespace moec {

// Element (n, k) of a plain matrix at data + n * row_stride + k * col_stride (elements). One view
// covers both orientations, both concatenations, interleaved rows, and (strides exchanged) the
// transposed matrix.
struct MatrixView {
  void* data = nullptr;
  int64_t row_stride = 0, col_stride = 0;
  moec_dtype dtype = 0;
};

// One array of every local expert: that of expert e begins at base + e * expert_stride, or at
// pointers[e] + pointer_offset (elements).
struct ExpertArray {
  void* base = nullptr;
  void* const* pointers = nullptr;
  int64_t expert_stride = 0, pointer_offset = 0;
  moec_dtype dtype = 0;

  MOEC_HD bool present() const { return base || pointers; }
  MOEC_HD void* expert(int64_t e) const {
    char* const start = static_cast<char*>(pointers ? pointers[e] : base);
    return start + (pointers ? pointer_offset : e * expert_stride) * dtype_bytes(dtype);
  }
  // The same from element `first` of each expert on.
  ExpertArray from(int64_t first) const {
    ExpertArray shifted = *this;
    if (base) shifted.base = static_cast<char*>(base) + first * dtype_bytes(dtype);
    shifted.pointer_offset += first;
    return shifted;
  }
};

// What a block of elements has in common: its entry at (n / block_n) * row_stride + (k / block_k) *
// col_stride of the expert's array.
struct ExpertBlocks {
  ExpertArray array;
  int64_t row_stride = 0, col_stride = 0, block_n = 1, block_k = 1;

  MOEC_HD quant::BlockView expert(int64_t e) const {
    if (!array.present()) return {};
    return {array.expert(e), row_stride, col_stride, block_n, block_k, array.dtype};
  }
};

// One matrix (or its gradient) of every local expert.
struct ExpertMatrix {
  ExpertArray values;  // elements, or the codes of `scheme`
  int64_t row_stride = 0, col_stride = 0;
  moec_dtype dtype = 0;  // in which products read elements: that of `values`, or they are rounded
                         // once on the way; the type that codes stand for
  uint32_t scheme = MOEC_SCHEME_NONE;
  ExpertBlocks scales, zeros;
  ExpertArray bias;
  int64_t bias_stride = 1;
  bool aligned = false;  // every expert's values begin at 16 bytes: known to who has looked

  MOEC_HD bool present() const { return values.present(); }
  MOEC_HD bool has_bias() const { return bias.present(); }
  MOEC_HD bool is_coded() const { return scheme != MOEC_SCHEME_NONE; }
  bool is_rounded() const { return !is_coded() && present() && values.dtype != dtype; }
  // Plain values, as they are stored.
  MOEC_HD MatrixView expert(int64_t e) const {
    return {values.expert(e), row_stride, col_stride, values.dtype};
  }
  MOEC_HD quant::CodedView coded(int64_t e) const {
    return {values.expert(e), row_stride, col_stride, scheme, scales.expert(e), zeros.expert(e)};
  }
  // row_stride: distance of elements; col_stride unused.
  MOEC_HD MatrixView bias_of(int64_t e) const {
    return {bias.expert(e), bias_stride, 0, bias.dtype};
  }
};

// The matrices of a set of experts as the products want them.
struct WeightsView {
  int64_t hidden = 0, inter = 0;
  int32_t num_experts = 0;  // local
  bool gated = false;
  ExpertMatrix gate, up, down;   // gate absent for a plain MLP; [I,H], [I,H], [H,I]
  const void* packed = nullptr;  // not null: use this copy (in the layout of Backend::pack_weights)
  bool source_present = true;    // false: only `packed` may be read (biases are in it as well)
};

// As products read them beside rows of this type: fp32 is rounded to the rows' 16 bits, as a cast
// before the call would do; every other type is read as it is.
inline WeightsView beside_rows(WeightsView weights, moec_dtype rows) {
  for (ExpertMatrix* m : {&weights.gate, &weights.up, &weights.down})
    if (m->dtype == MOEC_F32) m->dtype = rows;
  return weights;
}

}  // namespace moec
