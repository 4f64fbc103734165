// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/sm80/row_product.h"

#include <utility>

#include "backend/cuda/sm80/row_product_params.h"
#include "core/dtype.h"

namespace moec::cuda {
namespace {

bool is_aligned(const void* pointer, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % uint64_t(bytes) == 0;
}
bool is_aligned(const DeviceMatrix& matrix) {
  return matrix.aligned &&
         (matrix.view.values.pointers || matrix.view.values.expert_stride % 8 == 0);
}

// The index over rows is i or k; the other one is contiguous.
Operand rows_operand(const RowOperand& rows, bool rows_along_k) {
  Operand o = {};
  o.base = rows.data.data;
  o.dtype = rows.data.dtype;
  o.i_stride = rows_along_k ? 1 : rows.stride;
  o.k_stride = rows_along_k ? rows.stride : 1;
  o.gather = rows.gather;
  return o;
}

Operand operand_of(const ExpertArray& array) {
  Operand o = {};
  o.base = array.base;
  o.pointers = array.pointers;
  o.group_stride = array.expert_stride;
  o.pointer_offset = array.pointer_offset;
  o.dtype = array.dtype;
  return o;
}

Operand matrix_operand(const ExpertMatrix& matrix, bool transposed) {
  Operand o = operand_of(matrix.values);
  o.i_stride = transposed ? matrix.col_stride : matrix.row_stride;
  o.k_stride = transposed ? matrix.row_stride : matrix.col_stride;
  return o;
}

Operand bias_operand(const ExpertMatrix& matrix) {
  Operand o = operand_of(matrix.bias);
  o.i_stride = matrix.bias_stride;
  return o;
}

void launch(const Op& op, const PortableGemm& gemm, bool weight_gradient, bool aligned) {
  if (mma_takes(gemm, weight_gradient, aligned))
    mma_product(op, gemm, weight_gradient);
  else
    plain_product(op, gemm, weight_gradient);
}

}  // namespace

void row_product(const Op& op, const RowProduct& product) {
  if (product.groups.max_rows == 0) return;
  PortableGemm g = {};
  g.groups = product.groups;
  g.n = product.n;
  g.k = product.k;
  g.parts = product.parts;
  g.sum = product.sum;
  g.a = rows_operand(product.a, false);
  g.a_part = product.sum ? product.k : 0;
  bool aligned = is_aligned(product.a.data.data, 16);
  for (int i = 0; i < product.parts; ++i) {
    g.b[i] = matrix_operand(product.b[i]->view, product.transposed);
    if (product.biased) g.bias[i] = bias_operand(product.b[i]->view);
    aligned = aligned && is_aligned(*product.b[i]);
  }
  g.bias_weight = product.bias_weight;
  g.c = rows_operand({product.c, product.c_stride, nullptr}, false);
  g.c_part = product.n;
  g.spans = product.c_stride % 4 == 0 && product.n % 4 == 0 &&
            is_aligned(product.c.data, 4 * dtype_bytes(product.c.dtype));
  launch(op, g, false, aligned);
}

void weight_product(const Op& op, const WeightProduct& product) {
  const ExpertMatrix& d = product.d->view;
  PortableGemm g = {};
  g.groups = product.groups;
  g.m = product.n;
  g.n = product.k;
  g.parts = 1;
  g.a = rows_operand(product.g, true);
  g.b[0] = rows_operand(product.x, true);
  g.c = matrix_operand(d, false);
  if (g.c.k_stride != 1) {  // neighbouring threads write neighbours: the same sums, turned
    std::swap(g.m, g.n);
    std::swap(g.a, g.b[0]);
    std::swap(g.c.i_stride, g.c.k_stride);
  }
  g.accumulate = product.accumulate;
  g.spans = g.c.k_stride == 1 && g.c.i_stride % 4 == 0 && g.n % 4 == 0 &&
            d.values.expert_stride % 4 == 0 && product.d->aligned;
  const bool aligned = is_aligned(g.a.base, 16) && is_aligned(g.b[0].base, 16);
  launch(op, g, true, aligned);
}

}  // namespace moec::cuda
