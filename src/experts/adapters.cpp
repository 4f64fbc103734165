// SPDX-License-Identifier: Apache-2.0
#include "experts/adapters.h"

namespace moec::experts {
namespace {

// columns: of the outputs to which the narrow rows are then added.
const void* record_narrow(const Mlp& mlp, const LowRank& factors,
                          std::initializer_list<ProductTerm> terms, int64_t columns, void* to,
                          Program& program) {
  if (!factors) return nullptr;
  NarrowRows step = {};
  step.mlp = &mlp;
  step.adapters = &factors;
  step.product.groups = mlp.groups;
  step.product.n = factors.rank;
  int64_t k = 0;
  for (const ProductTerm& term : terms) {
    if (!term.b->present()) continue;
    step.product.add(term);
    k += term.k;
  }
  step.to = to;
  program.add(step);
  program.flops += narrow_flops(mlp, factors, k, columns);
  return to;
}

}  // namespace

uint64_t narrow_flops(const Mlp& mlp, const LowRank& factors, int64_t in, int64_t out) {
  return 2 * uint64_t(mlp.num_rows * factors.rank * (in + out));
}

RowOperand part_rows(const Mlp& mlp, const void* rows, int64_t stride) {
  return {{const_cast<void*>(rows), mlp.dtype}, stride, nullptr};
}

void record_copies(const AdaptersView& adapters, const AdapterMemory& memory, Program& program) {
  const auto add = [&](const FactorList& from, const PlaceMemory& place, const LowRank& to,
                       int64_t in, int64_t out) {
    if (to)
      program.add(
          PackFactors{&from, &to, in, out, adapters.num_experts, place.copies_a, place.copies_b});
  };
  const Mlp& mlp = program.routed;
  add(adapters.gate_up, memory.gate_up, mlp.gate_up_adapters, mlp.hidden, mlp.inter);
  add(adapters.down, memory.down, mlp.down_adapters, mlp.inter, mlp.hidden);
}

const void* record_narrow_x(const Mlp& mlp, bool is_added, void* to, Program& program) {
  const LowRank& factors = mlp.gate_up_adapters;
  const int64_t columns = mlp.inter * (factors.b[0].present() + factors.b[1].present());
  return record_narrow(mlp, factors, {{mlp.x, &factors.a, mlp.hidden, false, 0}},
                       is_added ? columns : 0, to, program);
}
const void* record_narrow_act(const Mlp& mlp, const void* act, bool is_added, void* to,
                              Program& program) {
  const LowRank& factors = mlp.down_adapters;
  const RowOperand rows = part_rows(mlp, act, mlp.inter);
  return record_narrow(mlp, factors, {{rows, &factors.a, mlp.inter, false, 0}},
                       is_added ? mlp.hidden : 0, to, program);
}
const void* record_narrow_d_y(const Mlp& mlp, const Array& d_y, bool is_added, void* to,
                              Program& program) {
  const LowRank& factors = mlp.down_adapters;
  const RowOperand rows = {d_y, mlp.hidden, mlp.row_token};
  return record_narrow(mlp, factors, {{rows, &factors.b[0], mlp.hidden, true, 0}},
                       is_added ? mlp.inter : 0, to, program);
}
const void* record_narrow_d_pre(const Mlp& mlp, const PartRows& d_pre, bool is_added, void* to,
                                Program& program) {
  const LowRank& factors = mlp.gate_up_adapters;
  const auto term = [&](const void* part, int i) {
    return ProductTerm{part_rows(mlp, part, d_pre.stride), &factors.b[i], mlp.inter, true, 0};
  };
  return record_narrow(mlp, factors, {term(d_pre.gate, 0), term(d_pre.up, 1)},
                       is_added ? mlp.hidden : 0, to, program);
}

WantedFactors wanted_of(const FactorList& gradients) {
  WantedFactors wanted = {};
  for (const Factors& f : gradients) {
    wanted.a |= f.a.present();
    wanted.b |= f.b[0].present() || f.b[1].present();
  }
  return wanted;
}

}  // namespace moec::experts
