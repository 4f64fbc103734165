// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/fast_products.h"

#include "backend/cuda/check.h"

namespace moec::cuda {

void FastProducts::up(const void* x, void* pre, void* act) {
  const WeightsView& w = *mlp_.weights;
  RowGemmArgs args = base(RowGemm::kUp, mlp_.inter, mlp_.hidden);
  set_weights(args, w.gate, &w.up, false);
  args.params.bias[0] = bias(w.gate);
  args.params.bias[1] = bias(w.up);
  if (w.gate.has_bias() != w.up.has_bias()) refuse("a bias of only one of gate and up");
  args.params.x = x;
  args.params.x_stride = mlp_.hidden;
  args.params.pre = pre;
  args.params.out = act;
  run(args);
}

void FastProducts::down(const void* act, void* rows) {
  RowGemmArgs args = base(RowGemm::kDown, mlp_.hidden, mlp_.inter);
  set_weights(args, mlp_.weights->down, nullptr, false);
  args.params.bias[0] = bias(mlp_.weights->down);
  args.rows = act;
  args.params.out = rows;
  run(args);
}

void FastProducts::grad_down(const void* d_y, const GradDown& step) {
  RowGemmArgs args = base(RowGemm::kGradDown, mlp_.inter, mlp_.hidden);
  set_weights(args, mlp_.weights->down, nullptr, true);
  args.params.x = d_y;
  args.params.x_stride = mlp_.hidden;
  args.params.pre = const_cast<void*>(step.pre);
  args.params.d_pre = step.d_pre;
  args.params.out = step.weighted;
  args.params.row_weight = step.factor;
  args.params.d_weight_parts = step.d_weight_parts;
  run(args);
}

void FastProducts::grad_up(const void* d_pre, void* rows) {
  const WeightsView& w = *mlp_.weights;
  RowGemmArgs args = base(RowGemm::kGradUp, mlp_.hidden, mlp_.inter);
  set_weights(args, w.gate, &w.up, true);
  args.parts = 2;
  args.rows = d_pre;
  args.params.out = rows;
  run(args);
}

void FastProducts::grad_weights(const void* rows, const void* gathered, const ExpertMatrix& first,
                                const ExpertMatrix* second, bool accumulate) {
  WeightGradArgs args = {};
  const Orientation out = orientation(first, second);
  const bool inter_is_k = second == nullptr;  // down: [H,I]
  args.dtype = mlp_.dtype;
  args.out_f32 = first.dtype == MOEC_F32;
  if (!args.out_f32 && first.dtype != mlp_.dtype) refuse("weight gradients of this type");
  if (second && second->dtype != first.dtype) refuse("gradients of gate and up of two types");
  args.out_m_contiguous = out.k_contiguous == inter_is_k;
  args.parts = second ? 2 : 1;
  args.m_size = mlp_.inter;
  args.n_size = mlp_.hidden;
  args.max_rows = mlp_.rows.groups.max_rows;
  args.rows = rows;
  args.out[0] = first.base;
  args.out[1] = second ? second->base : nullptr;
  args.out_stride = out.stride;
  args.out_expert_stride = first.expert_stride;
  args.params.x = gathered;
  args.params.x_stride = mlp_.hidden;
  args.params.row_token = mlp_.rows.row_token;
  args.params.group_offsets = mlp_.rows.groups.offsets;
  args.params.num_experts = mlp_.rows.groups.count;
  args.params.accumulate = accumulate;
  if (!refused) refuse(weight_grad_refuses(args));
  queue([&] {
    check(launch_weight_grad(args, op_.multiprocessors, op_.stream), "weight gradient");
    op_.count(1);
  });
}

void FastProducts::grad_bias(const ExpertMatrix& matrix, ColumnSums sums) {
  if (!matrix.has_bias()) return;
  if (matrix.bias_pointers) refuse("biases that are separate tensors");
  sums.rows = mlp_.rows;
  sums.out = &matrix;
  queue([&] { column_sums(op_, sums); });
}

void FastProducts::combine(const CombineParams& params) {
  refuse(combine_refuses(params, mlp_.dtype));
  queue([&] {
    check(launch_combine(params, mlp_.dtype, op_.multiprocessors, op_.stream), "combine");
    op_.count(1);
  });
}

FastProducts::Orientation FastProducts::orientation(const ExpertMatrix& matrix,
                                                    const ExpertMatrix* other) {
  for (const ExpertMatrix* m : {&matrix, other}) {
    if (m && m->pointers) refuse("experts that are separate tensors");
    if (m && (m->row_stride != matrix.row_stride || m->col_stride != matrix.col_stride ||
              m->expert_stride != matrix.expert_stride))
      refuse("gate and up of different layouts");
  }
  if (matrix.col_stride == 1) return {true, matrix.row_stride};
  if (matrix.row_stride != 1) refuse("interleaved gate and up columns");
  return {false, matrix.col_stride};
}

ExpertBias FastProducts::bias(const ExpertMatrix& matrix) {
  if (!matrix.has_bias()) return {};
  if (matrix.bias_pointers) refuse("biases that are separate tensors");
  const bool f32 = matrix.bias_dtype == MOEC_F32;
  if (!f32 && matrix.bias_dtype != mlp_.dtype) refuse("biases of this type");
  return {matrix.bias_base, matrix.bias_expert_stride, matrix.bias_stride, f32};
}

RowGemmArgs FastProducts::base(RowGemm operation, int64_t features, int64_t k_size) const {
  RowGemmArgs args = {};
  args.op = operation;
  args.dtype = mlp_.dtype;
  args.features = features;
  args.k_size = k_size;
  args.parts = 1;
  args.params.row_token = mlp_.rows.row_token;
  args.params.group_offsets = mlp_.rows.groups.offsets;
  args.params.num_experts = mlp_.rows.groups.count;
  args.params.max_rows = mlp_.rows.groups.max_rows;
  args.params.out_stride = features;
  args.params.activation = mlp_.activation;
  return args;
}

void FastProducts::set_weights(RowGemmArgs& args, const ExpertMatrix& first,
                               const ExpertMatrix* second, bool transposed) {
  const Orientation o = orientation(first, second);
  for (const ExpertMatrix* matrix : {&first, second})
    if (matrix && matrix->dtype != mlp_.dtype) refuse("weights of another type than x");
  args.weights[0] = first.base;
  args.weights[1] = second ? second->base : nullptr;
  args.weights_mn_major = o.k_contiguous == transposed;
  args.weight_stride = o.stride;
  args.expert_stride = first.expert_stride;
}

void FastProducts::run(const RowGemmArgs& args) {
  if (!refused) refuse(row_gemm_refuses(args));
  queue([&] {
    check(launch_row_gemm(args, op_.multiprocessors, op_.stream), "row GEMM");
    op_.count(1);
  });
}

}  // namespace moec::cuda
