// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/sm80/row_product.h"

#include <utility>

#include "backend/cuda/sm80/few_rows.h"
#include "backend/cuda/sm80/row_product_params.h"
#include "core/dtype.h"

namespace moec::cuda {
namespace {

bool is_aligned(const void* pointer, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % uint64_t(bytes) == 0;
}
bool is_aligned(const ExpertMatrix& matrix) {
  return matrix.aligned && (matrix.values.pointers || matrix.values.expert_stride % 8 == 0);
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

OperandCodes operand_codes(const ExpertMatrix& matrix, bool transposed) {
  return {matrix, matrix.dtype, transposed};
}

Operand bias_operand(const ExpertMatrix& matrix) {
  Operand o = operand_of(matrix.bias);
  o.i_stride = matrix.bias_stride;
  return o;
}

struct Problem {
  PortableGemm gemm;
  bool is_weight_gradient, aligned;

  bool has_few_rows() const { return !is_weight_gradient && few_rows_takes(gemm, aligned); }
  bool uses_mma() const { return mma_takes(gemm, is_weight_gradient, aligned); }
  ProductKernel kernel() const {
    if (has_few_rows()) return {ProductKernel::kFewRows, "portable few rows", few_tile(gemm)};
    if (!uses_mma()) return {ProductKernel::kPlain, "portable plain", "128x128x16"};
    return {ProductKernel::kMma, "portable mma",
            makes_b(gemm, is_weight_gradient) ? "256x128x32" : "128x128x32"};
  }
  void launch(const Op& op) const {
    if (has_few_rows())
      few_rows_product(op, gemm);
    else if (uses_mma())
      mma_product(op, gemm, is_weight_gradient);
    else
      plain_product(op, gemm, is_weight_gradient);
  }
};

Problem problem_of(const RowProduct& product, const ProductOutput& output) {
  Problem problem = {};
  problem.gemm = gemm_of(product, output, problem.aligned);
  return problem;
}

Problem problem_of(const WeightProduct& product) {
  const ExpertMatrix& d = *product.d;
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
            d.values.expert_stride % 4 == 0 && d.aligned;
  return {g, true, is_aligned(g.a.base, 16) && is_aligned(g.b[0].base, 16)};
}

}  // namespace

PortableGemm gemm_of(const RowProduct& product, const ProductOutput& output, bool& aligned) {
  const ProductTerm& first = product.terms[0];
  PortableGemm g = {};
  g.groups = product.groups;
  g.n = product.n;
  g.k = first.k;
  g.parts = product.num_terms;
  g.sum = product.outputs == 1 && product.num_terms > 1;
  g.a = rows_operand(first.a, false);
  aligned = true;
  for (int i = 0; i < product.num_terms; ++i) {
    const ProductTerm& term = product.terms[i];
    g.b[i] = matrix_operand(*term.b, term.transposed);
    g.codes[i] = operand_codes(*term.b, term.transposed);
    if (output.biased) g.bias[i] = bias_operand(*term.b);
    aligned = aligned && is_aligned(*term.b) && is_aligned(term.a.data.data, 16);
  }
  const ProductTerm& last = product.terms[product.num_terms - 1];
  if (g.sum)
    g.a_part =
        (static_cast<const char*>(last.a.data.data) - static_cast<const char*>(first.a.data.data)) /
        dtype_bytes(first.a.data.dtype);
  g.bias_weight = output.bias_weight;
  g.accumulate = output.accumulate;
  g.groups_made = output.groups_made;
  if (const LowRank* ranks = output.ranks)
    g.column_scales = {ranks->scale, ranks->adapter, ranks->ids, output.row_token};
  g.c = rows_operand({output.c, output.stride, nullptr}, false);
  g.c_part = product.n;
  g.spans = output.stride % 4 == 0 && product.n % 4 == 0 &&
            is_aligned(output.c.data, 4 * dtype_bytes(output.c.dtype));
  return g;
}

void row_product(const Op& op, const RowProduct& product, const ProductOutput& output) {
  if (product.groups.max_rows > 0) problem_of(product, output).launch(op);
}
ProductKernel kernel_of(const RowProduct& product, const ProductOutput& output) {
  return problem_of(product, output).kernel();
}

void weight_product(const Op& op, const WeightProduct& product) {
  problem_of(product).launch(op);
}
ProductKernel kernel_of(const WeightProduct& product) {
  return problem_of(product).kernel();
}

}  // namespace moec::cuda
