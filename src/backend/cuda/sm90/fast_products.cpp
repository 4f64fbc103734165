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
  RowGemmProblem p = problem(RowGemm::kUp, mlp_.inter, mlp_.hidden, w.gate, &w.up);
  p.x = x;
  p.x_stride = mlp_.hidden;
  p.pre = pre;
  p.out = act;
  p.done = done_;
  run(p);
}

void FastProducts::down(const void* act, void* rows, Early early) {
  const ExpertMatrix& matrix = mlp_.weights->down;
  RowGemmProblem p = problem(RowGemm::kDown, mlp_.hidden, mlp_.inter, matrix, nullptr);
  p.rows = act;
  p.out = rows;
  p.early = early;
  p.done = early == Early::kWeights ? done_ : nullptr;
  run(p);
}

void FastProducts::grad_down(const void* d_y, const GradDown& step) {
  const ExpertMatrix& matrix = mlp_.weights->down;
  RowGemmProblem p = problem(RowGemm::kGradDown, mlp_.hidden, mlp_.inter, matrix, nullptr);
  p.alternating = pairs_;
  p.x = d_y;
  p.x_stride = mlp_.hidden;
  p.pre = const_cast<void*>(step.pre);
  p.d_pre = step.d_pre;
  p.out = step.weighted;
  p.row_weight = step.factor;
  p.d_weight_parts = step.d_weight_parts;
  run(p);
}

void FastProducts::grad_up(const void* d_pre, void* rows, Early early) {
  const WeightsView& w = *mlp_.weights;
  RowGemmProblem p = problem(RowGemm::kGradUp, mlp_.inter, mlp_.hidden, w.gate, &w.up);
  p.rows = d_pre;
  p.out = rows;
  p.early = early;
  run(p);
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
  if (second && columns_alternate(first, *second) != pairs_) refuse("gradients of another layout");
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

FastProducts::Orientation FastProducts::orientation(const ExpertMatrix& matrix,
                                                    const ExpertMatrix* other) {
  for (const ExpertMatrix* m : {&matrix, other}) {
    if (m && m->values.pointers) refuse("experts that are separate tensors");
    if (m && (m->row_stride != matrix.row_stride || m->col_stride != matrix.col_stride ||
              m->values.expert_stride != matrix.values.expert_stride))
      refuse("gate and up of different layouts");
  }
  if (matrix.col_stride == 1) return {true, matrix.row_stride};
  if (matrix.row_stride != 1 && !(other && columns_alternate(matrix, *other)))
    refuse("columns that are not contiguous");
  return {false, matrix.col_stride};
}

RowGemmProblem FastProducts::problem(RowGemm operation, int64_t n, int64_t k,
                                     const ExpertMatrix& first, const ExpertMatrix* second) {
  RowGemmProblem p = {};
  p.op = operation;
  p.dtype = mlp_.dtype;
  refuse(set_matrices(p, n, k, first, second));
  p.row_token = mlp_.rows.row_token;
  p.group_offsets = mlp_.rows.groups.offsets;
  p.num_experts = mlp_.rows.groups.count;
  p.max_rows = mlp_.rows.groups.max_rows;
  p.out_stride = p.features;
  p.activation = mlp_.activation;
  return p;
}

void FastProducts::run(RowGemmProblem& problem) {
  if (counters_) {
    problem.work_counter = &counters_->work;
    problem.steps = &counters_++->steps;
  }
  if (!refused) refuse(row_gemm_refuses(problem));
  queue([&] {
    const RowGemmChoice choice = choose(problem, {op_.multiprocessors});
    check(launch_row_gemm(problem, choice, op_.stream), "row GEMM");
    op_.count(1);
  });
}

}  // namespace moec::cuda
