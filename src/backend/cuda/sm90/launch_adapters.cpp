// SPDX-License-Identifier: Apache-2.0
// What adapters add to a list of launches: narrow rows, a term of a product, gradients of factors.
#include "backend/cuda/sm90/launch_list.h"

namespace moec::cuda {
namespace {

NarrowGroups groups_of(const Mlp& mlp) {
  return {mlp.groups.offsets, mlp.groups.count, mlp.groups.max_rows};
}

bool same_layout(const ExpertMatrix& a, const ExpertMatrix& b) {
  return a.row_stride == b.row_stride && a.col_stride == b.col_stride &&
         a.values.expert_stride == b.values.expert_stride;
}

// Of [n,k], where n or k is i.
FactorOut out_of(const ExpertMatrix& d, bool i_is_k) {
  return {d.values.base, d.values.expert_stride, i_is_k ? d.col_stride : d.row_stride,
          i_is_k ? d.row_stride : d.col_stride};
}

}  // namespace

void LaunchList::refuse_adapters(const Mlp& mlp) {
  const LowRank& gate_up = mlp.gate_up_adapters;
  for (const LowRank* ranks : {&gate_up, &mlp.down_adapters}) {
    if (!*ranks) continue;
    if (ranks->count > 1) refuse("several adapters at once");
    if (ranks->ids) refuse("an adapter for each token");
    if (ranks->rank > kMostNarrow) refuse("adapters of a rank above 128");
  }
  if (gate_up && !(gate_up.b[0].present() && gate_up.b[1].present()))
    refuse("an adapter of only one of gate and up");
}

void LaunchList::add_term(RowGemmProblem& problem, const LowRank& ranks, const void* narrow,
                          const ExpertMatrix& first, const ExpertMatrix* second) {
  if (narrow && !refused_) refuse(set_factors(problem, ranks.rank, narrow, first, second));
}

void LaunchList::operator()(const NarrowRows& s) {
  const Mlp& mlp = *s.mlp;
  const RowProduct& product = s.product;
  const ProductTerm &first = product.terms[0], &last = product.terms[product.num_terms - 1];
  // Where columns of gate and up alternate, both are one term.
  const bool in_turn = product.num_terms == 2 && alternating(mlp);
  if (in_turn && !columns_alternate(*first.b, *last.b))
    refuse("factors that do not alternate as the columns of gate and up do");
  if (!same_layout(*first.b, *last.b)) refuse("factors of gate and up of different layouts");
  NarrowRowsArgs args = {};
  args.dtype = mlp.dtype;
  args.groups = groups_of(mlp);
  args.row_token = first.a.gather;
  args.row_stride = first.a.stride;
  args.k = in_turn ? 2 * first.k : first.k;
  args.num_terms = in_turn ? 1 : product.num_terms;
  for (int i = 0; i < args.num_terms; ++i)
    args.terms[i] = {product.terms[i].a.data.data, product.terms[i].b->values.base};
  const ExpertMatrix& factor = *first.b;
  const int64_t of_j = first.transposed ? factor.col_stride : factor.row_stride;
  const int64_t of_k = first.transposed ? factor.row_stride : factor.col_stride;
  args.along_k = in_turn || of_k == 1;
  if (!args.along_k && of_j != 1) refuse("factors that are not contiguous");
  args.factor_stride = args.along_k ? of_j : of_k;
  args.factor_expert_stride = factor.values.expert_stride;
  args.rank = s.adapters->rank;
  args.scale = s.adapters->only_scale;
  args.to = s.to;
  args.early = fresh_.has(args.terms[0].rows) ? Early::kWeights : Early::kAll;
  if (!fresh_.settled) {
    args.early = Early::kNothing;
    fresh_.wait();
  }
  if (!refused_) refuse(narrow_refuses(args));
  fresh_.add(args.to);
  add(args, &mlp, "narrow");
}

void LaunchList::operator()(const FactorGrads& s) {
  const Mlp& mlp = *s.mlp;
  const bool in_turn = s.d_out[1].data.data && alternating(mlp);
  FactorGradArgs args = {};
  args.dtype = mlp.dtype;
  args.groups = groups_of(mlp);
  args.narrow_stride = s.rank;
  for (const Factors& f : *s.to) {
    args.rank = f.rank;
    args.early = f.one_for_all ? Early::kNothing : Early::kAll;  // they write `sums` in turn
    args.accumulate = s.accumulate;
    args.alternating = in_turn;
    if (in_turn && f.b[0].present()) {
      args.out[0] = out_of(f.b[0], false);
      args.out[1] = out_of(f.b[1], false);
      args.out_dtype = f.b[0].values.dtype;
      add_factor_grad(args, mlp, s.d_out[0], 2 * s.out, s.narrow);
    }
    args.alternating = false;
    for (int i = 0; i < 2 && !in_turn; ++i) {
      if (!f.b[i].present()) continue;
      args.out[0] = out_of(f.b[i], false);
      args.out_dtype = f.b[i].values.dtype;
      add_factor_grad(args, mlp, s.d_out[i], s.out, s.narrow);
    }
    if (!f.a.present()) continue;
    args.out[0] = out_of(f.a, true);
    args.out_dtype = f.a.values.dtype;
    if (f.one_for_all) {
      args.out[0] = {s.sums, f.rank * s.in, 1, s.in};
      args.out_dtype = MOEC_F32;
      args.accumulate = false;
    }
    add_factor_grad(args, mlp, s.x, s.in, s.d_narrow);
    if (f.one_for_all)
      add(ExpertSums{s.sums, mlp.groups.count, f.rank, s.in, f.a.expert(0), s.accumulate});
  }
}

void LaunchList::add_factor_grad(FactorGradArgs args, const Mlp& mlp, const RowOperand& wide,
                                 int64_t width, const void* narrow) {
  args.wide = wide.data.data;
  args.wide_stride = wide.stride;
  args.wide_token = wide.gather;
  args.width = width;
  args.narrow = narrow;
  if (!fresh_.settled || fresh_.has(args.wide) || fresh_.has(args.narrow))
    args.early = Early::kNothing;
  if (args.early == Early::kNothing) fresh_.wait();
  if (!refused_) refuse(narrow_refuses(args));
  add(args, &mlp, "grad_factors");
}

}  // namespace moec::cuda
