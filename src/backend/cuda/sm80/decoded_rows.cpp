// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/sm80/decoded_rows.h"

#include <algorithm>

#include "backend/cuda/device/check.h"

namespace moec::cuda {
namespace {

constexpr int64_t kUnit = 8;  // of both extents of a matrix

void shift(ExpertArray& array, int64_t experts) {
  if (array.pointers)
    array.pointers += experts;
  else if (array.base)
    array.base = array.expert(experts);
}

}  // namespace

DecodedRows::DecodedRows(const RowProduct& product, const ProductOutput& output,
                         const RowsScratch& scratch)
    : product_(product), output_(output), scratch_(scratch) {
  const ProductTerm& term = product.terms[0];
  const ExpertMatrix* const second = product.num_terms > 1 ? product.terms[1].b : nullptr;
  const RowGroups& groups = product.groups;
  if (!scratch.bytes || !groups.offsets || !may_be_decoded(*term.b, second)) return;
  if (product.n % kUnit || term.k % kUnit) return;
  if (kernel_of(product, output).by != ProductKernel::kPlain) return;
  const int64_t n = term.transposed ? term.k : product.n, k = term.transposed ? product.n : term.k;
  DecodedExperts experts = decoded_experts(n, k, *term.b, second, false, term.b->dtype);
  experts.values = scratch.values;
  experts.at_once = experts_at_once(groups.choice_rows, groups.count, experts.expert_bytes(),
                                    scratch.bytes, Otherwise::kSlowly);
  experts_ = experts;
  if (is_used() && kernel().by != ProductKernel::kMma) experts_.at_once = 0;
}

RowProduct DecodedRows::of_turn(int first, int count, ExpertMatrix (&values)[2]) const {
  RowProduct turn = product_;
  for (int i = 0; i < turn.num_terms; ++i) {
    values[i] = experts_.values_of(i);
    shift(values[i].bias, first);
    turn.terms[i].b = &values[i];
  }
  turn.groups.offsets += first;
  if (turn.groups.counts) turn.groups.counts += first;
  turn.groups.count = count;
  return turn;
}

ProductKernel DecodedRows::kernel() const {
  ExpertMatrix values[2];
  return kernel_of(of_turn(0, experts_.at_once, values), output_);
}

void DecodedRows::launch(const Op& op) const {
  if (product_.groups.max_rows == 0) return;
  DecodeArgs args = decode_args(experts_);
  for (int i = 0; i < experts_.parts; ++i) args.from[i] = *experts_.from[i];
  set_sources(args);
  args.max_rows = product_.groups.max_rows;
  args.counters = scratch_.counters;
  const int num_experts = product_.groups.count;
  for (int first = 0; first < num_experts; first += experts_.at_once) {
    ExpertMatrix values[2];
    const int count = std::min(experts_.at_once, num_experts - first);
    const RowProduct turn = of_turn(first, count, values);
    args.first = first;
    args.count = count;
    args.group_offsets = turn.groups.offsets;
    check(launch_decode(args, op.multiprocessors, op.stream), "decoding experts");
    op.count(1);
    row_product(op, turn, output_);
  }
}

}  // namespace moec::cuda
