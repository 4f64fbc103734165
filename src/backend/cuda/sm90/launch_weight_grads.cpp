// SPDX-License-Identifier: Apache-2.0
// The gradients of weights and of biases in a list of launches.
#include "backend/cuda/sm90/launch_list.h"

namespace moec::cuda {
namespace {

// Which axis of a gradient is contiguous, and the stride of the other one. Columns of gate and up
// may alternate, too.
struct Orientation {
  const char* refused;
  bool k_contiguous;
  int64_t stride;
};
Orientation orientation(const ExpertMatrix& first, const ExpertMatrix* second) {
  for (const ExpertMatrix* m : {&first, second}) {
    if (!m) continue;
    if (m->values.pointers) return {"experts that are separate tensors", false, 0};
    if (m->row_stride != first.row_stride || m->col_stride != first.col_stride ||
        m->values.expert_stride != first.values.expert_stride)
      return {"gate and up of different layouts", false, 0};
  }
  if (first.col_stride == 1) return {nullptr, true, first.row_stride};
  const bool contiguous = first.row_stride == 1 || (second && columns_alternate(first, *second));
  return {contiguous ? nullptr : "columns that are not contiguous", false, first.col_stride};
}

}  // namespace

void LaunchList::operator()(const WeightGrads& s) {
  const Mlp& mlp = *s.mlp;
  const WeightsView& d = *mlp.gradients;
  if (d.gate.present() != d.up.present()) refuse("the gradient of only one of gate and up");
  if (d.down.present()) add_weight_grad(mlp, s.weighted, s.d_y.data, d.down, nullptr, s.accumulate);
  if (d.gate.present())
    add_weight_grad(mlp, s.d_pre.gate, mlp.x.data.data, d.gate, &d.up, s.accumulate);
  add_bias_grads(s);
}

void LaunchList::add_weight_grad(const Mlp& mlp, const void* rows, const void* gathered,
                                 const ExpertMatrix& first, const ExpertMatrix* second,
                                 bool accumulate) {
  const Orientation out = orientation(first, second);
  refuse(out.refused);
  const bool inter_is_k = second == nullptr;  // down: [H,I]
  const bool in_turn = second && alternating(mlp);
  if (second && columns_alternate(first, *second) != alternating(mlp))
    refuse("gradients of another layout");
  WeightGradArgs args = {};
  args.dtype = mlp.dtype;
  args.out_f32 = first.dtype == MOEC_F32;
  if (!args.out_f32 && first.dtype != mlp.dtype) refuse("weight gradients of this type");
  if (second && second->dtype != first.dtype) refuse("gradients of gate and up of two types");
  args.out_m_contiguous = out.k_contiguous == inter_is_k;
  args.parts = second && !in_turn ? 2 : 1;
  args.m_size = in_turn ? 2 * mlp.inter : mlp.inter;
  args.n_size = mlp.hidden;
  args.max_rows = mlp.groups.max_rows;
  args.rows = rows;
  args.out[0] = first.values.base;
  args.out[1] = second ? second->values.base : nullptr;
  args.out_stride = out.stride;
  args.out_expert_stride = first.values.expert_stride;
  args.params.x = gathered;
  args.params.x_stride = mlp.hidden;
  args.params.row_token = mlp.row_token;
  args.params.group_offsets = mlp.groups.offsets;
  args.params.num_experts = mlp.groups.count;
  args.params.accumulate = accumulate;
  args.params.early = after_grad_down(mlp);
  if (counters_ && is_routed(mlp)) args.params.work_counter = &counters_++->work;
  if (!refused_) refuse(weight_grad_refuses(args));
  add(args, &mlp, second ? "grad_weights_gate_up" : "grad_weights_down");
}

// Sums of columns of d_pre, and of d_y times factor.
void LaunchList::add_bias_grads(const WeightGrads& s) {
  const Mlp& mlp = *s.mlp;
  const WeightsView& d = *mlp.gradients;
  ColumnSums sums = {};
  sums.rows = rows_of(mlp);
  sums.accumulate = s.accumulate;
  sums.from = {s.d_pre.gate, mlp.dtype};
  sums.stride = 2 * mlp.inter;
  sums.width = mlp.inter;
  if (alternating(mlp)) {
    ExpertMatrix both = d.gate;
    const void* const next = both.bias.from(1).base;
    if (both.has_bias() != d.up.has_bias() ||
        (both.has_bias() && (both.bias_stride != 2 || d.up.bias.base != next)))
      refuse("gradients of biases of another layout");
    both.bias_stride = 1;
    sums.width = 2 * mlp.inter;
    add_bias_grad(both, sums);
  } else {
    add_bias_grad(d.gate, sums);
    sums.from.data = s.d_pre.up;
    add_bias_grad(d.up, sums);
  }
  ColumnSums of_down = {};
  of_down.rows = rows_of(mlp);
  of_down.accumulate = s.accumulate;
  of_down.of_tokens = true;
  of_down.from = s.d_y;
  of_down.stride = of_down.width = mlp.hidden;
  of_down.weight = s.factor;
  add_bias_grad(d.down, of_down);
}

void LaunchList::add_bias_grad(const ExpertMatrix& matrix, ColumnSums sums) {
  if (!matrix.has_bias()) return;
  if (matrix.bias.pointers) refuse("biases that are separate tensors");
  sums.out = matrix.bias;
  sums.out_stride = matrix.bias_stride;
  add(sums);
}

}  // namespace moec::cuda
