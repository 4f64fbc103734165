// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/sm90/fast_products.h"

#include "backend/cuda/device/check.h"
#include "core/dtype.h"

namespace moec::cuda {

void FastProducts::use(WorkCounters* counters) {
  counters_ = counters->gemms;
  done_ = mlp_.rows.groups.count <= WorkCounters::kExperts ? counters->done : nullptr;
  queue([&] {
    check(clear_work_counters(counters, op_.stream), "work counters");
    op_.count(1);
  });
}

void FastProducts::up(const void* x, void* pre, void* act) {
  const WeightsView& w = *mlp_.weights;
  RowGemmArgs args = base(RowGemm::kUp, mlp_.inter, mlp_.hidden);
  args.params.pairs = pairs_;
  set_weights(args, w.gate, &w.up, false);
  args.params.bias[0] = bias(w.gate);
  args.params.bias[1] = bias(w.up);
  if (w.gate.has_bias() != w.up.has_bias()) refuse("a bias of only one of gate and up");
  args.params.x = x;
  args.params.x_stride = mlp_.hidden;
  args.params.pre = pre;
  args.params.out = act;
  args.params.done = done_;
  run(args);
}

void FastProducts::down(const void* act, void* rows, Early early) {
  RowGemmArgs args = base(RowGemm::kDown, mlp_.hidden, mlp_.inter);
  set_weights(args, mlp_.weights->down, nullptr, false);
  args.params.bias[0] = bias(mlp_.weights->down);
  args.rows = act;
  args.params.out = rows;
  args.params.early = early;
  args.params.done = early == Early::kWeights ? done_ : nullptr;
  run(args);
}

void FastProducts::grad_down(const void* d_y, const GradDown& step) {
  RowGemmArgs args = base(RowGemm::kGradDown, mlp_.inter, mlp_.hidden);
  set_weights(args, mlp_.weights->down, nullptr, true);
  bias(mlp_.weights->down);  // read for the routing weights' gradient: refused as in down
  args.params.pairs = pairs_;
  args.params.x = d_y;
  args.params.x_stride = mlp_.hidden;
  args.params.pre = const_cast<void*>(step.pre);
  args.params.d_pre = step.d_pre;
  args.params.out = step.weighted;
  args.params.row_weight = step.factor;
  args.params.d_weight_parts = step.d_weight_parts;
  run(args);
}

void FastProducts::grad_up(const void* d_pre, void* rows, Early early) {
  const WeightsView& w = *mlp_.weights;
  RowGemmArgs args = base(RowGemm::kGradUp, mlp_.hidden, pairs_ ? 2 * mlp_.inter : mlp_.inter);
  set_weights(args, w.gate, &w.up, true);
  args.parts = pairs_ ? 1 : 2;
  args.rows = d_pre;
  args.params.out = rows;
  args.params.early = early;
  run(args);
}

void FastProducts::grad_weights(const void* rows, const void* gathered, const ExpertMatrix& first,
                                const ExpertMatrix* second, bool accumulate, Early early) {
  WeightGradArgs args = {};
  const Orientation out = orientation(first, second);
  const bool inter_is_k = second == nullptr;  // down: [H,I]
  args.dtype = mlp_.dtype;
  args.out_f32 = first.dtype == MOEC_F32;
  if (!args.out_f32 && first.dtype != mlp_.dtype) refuse("weight gradients of this type");
  if (second && second->dtype != first.dtype) refuse("gradients of gate and up of two types");
  args.out_m_contiguous = out.k_contiguous == inter_is_k;
  const bool pairs = second && pairs_;
  if (second && alternate(first, *second) != pairs_) refuse("gradients of another layout");
  args.parts = second && !pairs ? 2 : 1;
  args.m_size = pairs ? 2 * mlp_.inter : mlp_.inter;
  args.n_size = mlp_.hidden;
  args.max_rows = mlp_.rows.groups.max_rows;
  args.rows = rows;
  args.out[0] = first.values.base;
  args.out[1] = second ? second->values.base : nullptr;
  args.out_stride = out.stride;
  args.out_expert_stride = first.values.expert_stride;
  args.params.x = gathered;
  args.params.x_stride = mlp_.hidden;
  args.params.row_token = mlp_.rows.row_token;
  args.params.group_offsets = mlp_.rows.groups.offsets;
  args.params.num_experts = mlp_.rows.groups.count;
  args.params.accumulate = accumulate;
  args.params.early = early;
  if (counters_) args.params.work_counter = &counters_++->work;
  if (!refused) refuse(weight_grad_refuses(args));
  queue([&] {
    check(launch_weight_grad(args, op_.multiprocessors, op_.stream), "weight gradient");
    op_.count(1);
  });
}

void FastProducts::grad_biases(const WeightsView& d, const void* d_pre, const void* d_y,
                               const float* factor, bool accumulate) {
  const int64_t inter = mlp_.inter, size = dtype_bytes(mlp_.dtype);
  ColumnSums of_inter = {}, of_hidden = {};
  of_inter.rows = of_hidden.rows = mlp_.rows;
  of_inter.accumulate = of_hidden.accumulate = accumulate;
  of_inter.from = {const_cast<void*>(d_pre), mlp_.dtype};
  of_inter.stride = 2 * inter;
  of_inter.width = pairs_ ? 2 * inter : inter;
  if (pairs_) {
    ExpertMatrix both = d.gate;
    const char* const next =
        static_cast<const char*>(both.bias.base) + dtype_bytes(both.bias.dtype);
    if (both.has_bias() != d.up.has_bias() ||
        (both.has_bias() && (both.bias_stride != 2 || d.up.bias.base != next)))
      refuse("gradients of biases of another layout");
    both.bias_stride = 1;
    grad_bias(both, of_inter);
  } else {
    grad_bias(d.gate, of_inter);
    of_inter.from.data = static_cast<char*>(of_inter.from.data) + inter * size;
    grad_bias(d.up, of_inter);
  }
  of_hidden.of_tokens = true;
  of_hidden.from = {const_cast<void*>(d_y), mlp_.dtype};
  of_hidden.stride = of_hidden.width = mlp_.hidden;
  of_hidden.weight = factor;
  grad_bias(d.down, of_hidden);
}

void FastProducts::grad_bias(const ExpertMatrix& matrix, const ColumnSums& sums) {
  if (!matrix.has_bias()) return;
  if (matrix.bias.pointers) refuse("biases that are separate tensors");
  ColumnSums all = sums;
  all.out = &matrix;
  queue([&] { column_sums(op_, all); });
}

void FastProducts::combine(const CombineParams& params) {
  refuse(combine_refuses(params, mlp_.dtype));
  queue([&] {
    check(launch_combine(params, mlp_.dtype, op_.multiprocessors, op_.stream), "combine");
    op_.count(1);
  });
}

bool FastProducts::alternate(const ExpertMatrix& gate, const ExpertMatrix& up) {
  const char* const next = static_cast<const char*>(gate.values.base) + dtype_bytes(gate.dtype);
  return gate.row_stride == 2 && up.row_stride == 2 && gate.col_stride > 1 &&
         up.values.base == next;
}

FastProducts::Orientation FastProducts::orientation(const ExpertMatrix& matrix,
                                                    const ExpertMatrix* other) {
  for (const ExpertMatrix* m : {&matrix, other}) {
    if (m && m->values.pointers) refuse("experts that are separate tensors");
    if (m && (m->row_stride != matrix.row_stride || m->col_stride != matrix.col_stride ||
              m->values.expert_stride != matrix.values.expert_stride))
      refuse("gate and up of different layouts");
  }
  if (matrix.col_stride == 1) return {true, matrix.row_stride};
  if (matrix.row_stride != 1 && !(other && alternate(matrix, *other)))
    refuse("columns that are not contiguous");
  return {false, matrix.col_stride};
}

ExpertBias FastProducts::bias(const ExpertMatrix& matrix) {
  if (!matrix.has_bias()) return {};
  if (matrix.bias.pointers) refuse("biases that are separate tensors");
  const bool f32 = matrix.bias.dtype == MOEC_F32;
  if (!f32 && matrix.bias.dtype != mlp_.dtype) refuse("biases of this type");
  return {matrix.bias.base, matrix.bias.expert_stride, matrix.bias_stride, f32};
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
  args.params.shares = row_gemm_shares(mlp_.rows.groups.max_rows, mlp_.hidden, mlp_.inter);
  args.params.out_stride = features;
  args.params.activation = mlp_.activation;
  return args;
}

void FastProducts::set_weights(RowGemmArgs& args, const ExpertMatrix& first,
                               const ExpertMatrix* second, bool transposed) {
  const Orientation o = orientation(first, second);
  for (const ExpertMatrix* matrix : {&first, second})
    if (matrix && matrix->dtype != mlp_.dtype) refuse("weights of another type than x");
  args.weights[0] = first.values.base;
  args.weights[1] = second ? second->values.base : nullptr;
  args.weights_mn_major = o.k_contiguous == transposed;
  args.weight_stride = o.stride;
  args.expert_stride = first.values.expert_stride;
}

void FastProducts::run(RowGemmArgs& args) {
  if (counters_) take_work(args, counters_++);
  if (!refused) refuse(row_gemm_refuses(args));
  queue([&] {
    check(launch_row_gemm(args, op_.multiprocessors, op_.stream), "row GEMM");
    op_.count(1);
  });
}

}  // namespace moec::cuda
