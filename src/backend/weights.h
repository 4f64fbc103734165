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

// What a block of elements has in common: its entry at block_n.of(n) * row_stride + block_k.of(k) *
// col_stride of the expert's array.
struct ExpertBlocks {
  ExpertArray array;
  int64_t row_stride = 0, col_stride = 0;
  quant::BlockSize block_n, block_k;

  MOEC_HD quant::BlockView expert(int64_t e) const {
    if (!array.present()) return {};
    return {array.expert(e), row_stride, col_stride, block_n, block_k, array.dtype};
  }
};

// What makes values of the codes of every local expert's matrix, and which rows they are of the
// bound one.
struct ExpertQuant {
  uint32_t scheme = MOEC_SCHEME_NONE;
  uint32_t flags = 0;  // moec_quant_flags
  quant::RowMap rows;
  ExpertBlocks scales, zeros;
  ExpertArray scales2, scale_offset, group_index;
  const float *codebook = nullptr, *scale_book = nullptr;
  quant::BlockSize scale_block;
  int64_t blocks_along_k = 0;
  int64_t expert_codes = 0;  // of a stream of all experts: codes of one

  MOEC_HD bool is_coded() const { return scheme != MOEC_SCHEME_NONE; }
  MOEC_HD quant::CodedView view(int64_t e, const MatrixView& codes) const {
    quant::CodedView to;
    to.codes = codes.data;
    to.row_stride = codes.row_stride;
    to.col_stride = codes.col_stride;
    to.code_dtype = codes.dtype;
    to.scheme = scheme;
    to.flags = flags;
    to.rows = rows;
    to.scales = scales.expert(e);
    to.zeros = zeros.expert(e);
    to.first = e * expert_codes;
    to.blocks_along_k = blocks_along_k;
    to.codebook = codebook;
    to.scale_book = scale_book;
    to.scale_block = scale_block;
    if (scales2.present()) to.scales2 = static_cast<const float*>(scales2.expert(e));
    if (scale_offset.present()) to.scale_offset = static_cast<const float*>(scale_offset.expert(e));
    if (group_index.present()) to.group_index = static_cast<const int32_t*>(group_index.expert(e));
    return to;
  }
};

// One matrix (or its gradient) of every local expert.
struct ExpertMatrix : ExpertQuant {
  ExpertArray values;  // elements, or codes
  int64_t row_stride = 0, col_stride = 0;
  moec_dtype dtype = 0;  // in which products read elements: that of `values`, or they are rounded
                         // once on the way; the type that codes stand for
  ExpertArray bias;
  int64_t bias_stride = 1;
  // Every expert's values, and scales, begin at 16 bytes: known to who has looked.
  bool aligned = false, scales_aligned = false;

  MOEC_HD bool present() const { return values.present(); }
  MOEC_HD bool has_bias() const { return bias.present(); }
  bool is_rounded() const { return !is_coded() && present() && values.dtype != dtype; }
  // Plain values, as they are stored.
  MOEC_HD MatrixView expert(int64_t e) const {
    return {values.expert(e), row_stride, col_stride, values.dtype};
  }
  MOEC_HD quant::CodedView coded(int64_t e) const {
    return view(e, {values.expert(e), row_stride, col_stride, values.dtype});
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
