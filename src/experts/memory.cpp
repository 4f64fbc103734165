// SPDX-License-Identifier: Apache-2.0
#include "experts/memory.h"

#include <algorithm>

#include "core/dtype.h"
#include "math/activation.h"

namespace moec::experts {
namespace {

// The rows of one MLP: base + T * per_token.
class Regions {
 public:
  Regions(Arena& arena, uint64_t base, uint64_t per_token)
      : arena_(arena), base_(base), per_token_(per_token) {}

  void* take(int64_t bytes_of_row) const {
    return arena_.take(base_ * uint64_t(bytes_of_row), per_token_ * uint64_t(bytes_of_row));
  }
  float* floats(int64_t of_row) const {
    return static_cast<float*>(take(of_row * int64_t(sizeof(float))));
  }
  PartRows parts(bool apart, bool gated, int64_t inter, moec_dtype dtype) const {
    const int64_t bytes = inter * dtype_bytes(dtype);
    if (!apart) return side_by_side(take((gated ? 2 : 1) * bytes), gated, inter, dtype);
    void* const gate = gated ? take(bytes) : nullptr;
    return {gate, take(bytes), inter};
  }
  static PartRows side_by_side(void* data, bool gated, int64_t inter, moec_dtype dtype) {
    if (!gated || !data) return {gated ? data : nullptr, data, (gated ? 2 : 1) * inter};
    return {data, static_cast<char*>(data) + inter * dtype_bytes(dtype), 2 * inter};
  }

 private:
  Arena& arena_;
  const uint64_t base_, per_token_;
};

Regions routed_rows(const moec_experts_desc& desc, Arena& arena) {
  const auto padding = uint64_t(desc.expert_end - desc.expert_begin) * uint64_t(desc.align - 1);
  return {arena, uint64_t(desc.max_rows_base) + padding, uint64_t(desc.top_k)};
}
Regions tokens(Arena& arena) {
  return {arena, 0, 1};
}

struct MlpShape {
  bool gated;
  int64_t hidden, inter;
  moec_dtype dtype;
};
MlpShape routed_shape(const moec_experts_desc& desc) {
  return {is_gated(desc), desc.hidden, desc.inter, desc.dtype};
}
MlpShape shared_shape(const moec_experts_desc& desc) {
  return {is_shared_gated(desc), desc.hidden, desc.shared_inter, desc.dtype};
}

TokenList take_list(const Between& between, Arena& arena) {
  TokenList list;
  if (between.shared_group == SharedGroup::kNone) return list;
  list.offsets = arena.take_array<int32_t>(2, 0);
  if (between.shared_group == SharedGroup::kTokens) list.tokens = arena.take_array<int32_t>(0, 1);
  return list;
}

MlpForward lay_out_mlp(const MlpShape& mlp, const Between& between, bool keeps_pre, bool has_rows,
                       const Regions& regions) {
  const int64_t pre = keeps_pre ? (mlp.gated ? 2 : 1) * mlp.inter * dtype_bytes(between.pre) : 0;
  MlpForward m;
  m.act = regions.take(mlp.inter * dtype_bytes(mlp.dtype));
  if (has_rows) m.rows = regions.take(std::max(mlp.hidden * dtype_bytes(between.rows), pre));
  if (pre) m.pre = Regions::side_by_side(m.rows, mlp.gated, mlp.inter, between.pre);
  return m;
}

MlpBackward lay_out_mlp_backward(const MlpShape& mlp, const Between& between, bool again,
                                 bool has_rows, const Regions& regions) {
  const int64_t q = between.keeps_d_act ? mlp.inter * dtype_bytes(between.d_act) : 0;
  MlpBackward m;
  if (again) m.pre = regions.parts(between.parts_apart, mlp.gated, mlp.inter, between.pre);
  m.d_pre = regions.parts(between.parts_apart, mlp.gated, mlp.inter, mlp.dtype);
  m.weighted = regions.take(mlp.inter * dtype_bytes(mlp.dtype));
  if (has_rows) m.rows = regions.take(std::max(mlp.hidden * dtype_bytes(between.rows), q));
  m.factor = regions.floats(1);
  m.dots = regions.floats(between.dot_floats(mlp.inter));
  return m;
}

// Factors that products read as they are bound: one list entry of the type of x whose lines of
// values lie as the tensor cores read them.
bool is_bound_form(const ExpertMatrix& m, moec_dtype dtype, FactorForm form) {
  const bool along_k = m.col_stride == 1, along_n = m.row_stride == 1;
  const int64_t lines = along_k ? m.row_stride : m.col_stride;
  const bool has_form = form == FactorForm::kAny      ? along_k || along_n
                        : form == FactorForm::kAlongK ? along_k
                                                      : form == FactorForm::kAlongN && along_n;
  return has_form && m.values.dtype == dtype && lines % 8 == 0 && m.values.expert_stride % 8 == 0 &&
         reinterpret_cast<uintptr_t>(m.values.base) % 16 == 0;
}

// Of the part-th of two matrices, for which `data` has room.
ExpertMatrix copy_of(void* data, moec_dtype dtype, int64_t n, int64_t k, int32_t experts,
                     FactorForm form, int part = 0) {
  const bool along_k = form == FactorForm::kAny || form == FactorForm::kAlongK;
  const bool alternating = form == FactorForm::kAlternating;
  ExpertMatrix m;
  m.values = {data, nullptr, (alternating ? 2 : 1) * n * k, 0, dtype};
  m.values = m.values.from(part * (alternating ? 1 : experts * n * k));
  m.dtype = dtype;
  m.row_stride = along_k ? k : alternating ? 2 : 1;
  m.col_stride = along_k ? 1 : alternating ? 2 * n : n;
  return m;
}

// Room for copies is there whatever is copied, so that sizes depend on ranks alone.
PlaceMemory lay_out_place(const FactorList& list, const MlpShape& mlp, int64_t in, int64_t out,
                          int32_t experts, FactorForm form, Arena& arena) {
  PlaceMemory place;
  if (!list.count) return place;
  LowRank& to = place.factors;
  const Factors& first = *list.first;
  const bool one = list.count == 1 && first.rank == list.rank;
  const auto take = [&](int64_t elements) {
    return arena.take(uint64_t(experts * elements * dtype_bytes(mlp.dtype)), 0);
  };
  to.rank = list.rank;
  to.count = list.count;
  to.only_scale = first.scale;
  const FactorForm of_a = form == FactorForm::kAlternating ? FactorForm::kAlongN : form;
  to.a = copy_of(take(list.rank * in), mlp.dtype, list.rank, in, experts, of_a);
  place.copies_a = !one || !is_bound_form(first.a, mlp.dtype, of_a);
  if (!place.copies_a) to.a = first.a;
  bool any[2] = {};
  for (const Factors& f : list)
    for (int i = 0; i < 2; ++i) any[i] |= f.b[i].present();
  void* const copies_of_b = take((any[0] + any[1]) * out * list.rank);
  if (!(any[0] && any[1]) && form == FactorForm::kAlternating) form = FactorForm::kAlongN;
  for (int i = 0; i < 2; ++i) {
    if (!any[i]) continue;
    to.b[i] = copy_of(copies_of_b, mlp.dtype, out, list.rank, experts, form, any[0] ? i : 0);
    place.copies_b |= !one || !is_bound_form(first.b[i], mlp.dtype, form);
  }
  for (int i = 0; i < 2 && !place.copies_b; ++i) to.b[i] = first.b[i];
  to.scale = arena.take_array<float>(uint64_t(list.rank), 0);
  to.adapter = arena.take_array<int32_t>(uint64_t(list.rank), 0);
  return place;
}

AdapterMemory lay_out_adapters(const Between& between, const AdaptersView* adapters,
                               const WeightsView* weights, const MlpShape& mlp, bool backward,
                               Arena& arena) {
  AdapterMemory m;
  if (!adapters) return m;
  const int32_t experts = adapters->num_experts;
  FactorForm gate_up = FactorForm::kAny, down = gate_up;
  if (weights && between.factor_form) {
    gate_up = between.factor_form(weights->gate, &weights->up);
    down = between.factor_form(weights->down, nullptr);
  }
  m.gate_up = lay_out_place(adapters->gate_up, mlp, mlp.hidden, mlp.inter, experts, gate_up, arena);
  m.down = lay_out_place(adapters->down, mlp, mlp.inter, mlp.hidden, experts, down, arena);
  const int64_t sums = std::max(adapters->gate_up.largest_shared_rank * mlp.hidden,
                                adapters->down.largest_shared_rank * mlp.inter);
  if (backward && sums) m.sums = arena.take_array<float>(uint64_t(experts * sums), 0);
  return m;
}

}  // namespace

bool is_gated(const moec_experts_desc& desc) {
  return desc.gate_layout != MOEC_GATE_NONE;
}
bool is_shared_gated(const moec_experts_desc& desc) {
  return math::activation_info(desc.shared_activation.kind).gated;
}
bool has_shared(const moec_experts_desc& desc) {
  return desc.shared != MOEC_SHARED_NONE;
}
bool is_mixed(const moec_experts_desc& desc) {
  return desc.shared >= MOEC_SHARED_SIGMOID_GATE;
}

Saved lay_out_saved(const moec_experts_desc& desc, const Between& between, Arena& arena) {
  Saved saved;
  if (desc.save < MOEC_SAVE_PREACT) return saved;
  const auto parts = [&](const Regions& regions, const MlpShape& mlp) {
    return regions.parts(between.parts_apart, mlp.gated, mlp.inter, between.pre);
  };
  saved.routed = parts(routed_rows(desc, arena), routed_shape(desc));
  if (has_shared(desc)) saved.shared = parts(tokens(arena), shared_shape(desc));
  return saved;
}

ForwardMemory lay_out_forward(const moec_experts_desc& desc, const Between& between,
                              const AdaptersView* adapters, const WeightsView* weights,
                              Arena& arena) {
  const Regions rows = routed_rows(desc, arena);
  const bool keeps_pre = between.keeps_pre && desc.save < MOEC_SAVE_PREACT;
  ForwardMemory m;
  m.scratch = arena.take(between.scratch, 0);
  if (desc.weight_position == MOEC_WEIGHT_ON_INPUT)
    m.scaled_x = rows.take(desc.hidden * dtype_bytes(desc.dtype));
  m.routed = lay_out_mlp(routed_shape(desc), between, keeps_pre, true, rows);
  m.adapters = lay_out_adapters(between, adapters, weights, routed_shape(desc), false, arena);
  const auto narrow = [&](const PlaceMemory& place) {
    return place.factors ? rows.take(place.factors.rank * dtype_bytes(desc.dtype)) : nullptr;
  };
  m.routed.narrow_x = narrow(m.adapters.gate_up);
  m.routed.narrow_act = narrow(m.adapters.down);
  if (is_mixed(desc)) m.mix = tokens(arena).floats(2);
  if (!has_shared(desc)) return m;
  m.shared =
      lay_out_mlp(shared_shape(desc), between, keeps_pre, !between.fuses_shared, tokens(arena));
  m.list = take_list(between, arena);
  return m;
}

BackwardMemory lay_out_backward(const moec_experts_desc& desc, const Between& between,
                                const AdaptersView* adapters, const WeightsView* weights,
                                Arena& arena) {
  const Regions rows = routed_rows(desc, arena);
  const bool again = desc.save == MOEC_SAVE_INPUT;
  BackwardMemory m;
  m.scratch = arena.take(between.scratch, 0);
  m.routed = lay_out_mlp_backward(routed_shape(desc), between, again, true, rows);
  m.adapters = lay_out_adapters(between, adapters, weights, routed_shape(desc), true, arena);
  const auto narrow = [&](const PlaceMemory& place, void*& forward, void*& backward) {
    if (!place.factors) return;
    for (void** to : {&forward, &backward})
      *to = rows.take(place.factors.rank * dtype_bytes(desc.dtype));
  };
  narrow(m.adapters.gate_up, m.routed.narrow_x, m.routed.d_narrow_x);
  narrow(m.adapters.down, m.routed.narrow_act, m.routed.d_narrow_act);
  if (desc.weight_position == MOEC_WEIGHT_ON_INPUT) {
    m.scaled_x = rows.take(desc.hidden * dtype_bytes(desc.dtype));
    m.input_dots = rows.floats(between.input_dot_floats(desc.hidden));
  }
  if (is_mixed(desc)) {
    m.mix = tokens(arena).floats(2);
    m.d_logits = tokens(arena).floats(2);
  }
  if (!has_shared(desc)) return m;
  m.shared = lay_out_mlp_backward(shared_shape(desc), between, again, !between.fuses_shared,
                                  tokens(arena));
  m.list = take_list(between, arena);
  return m;
}

void set_mlps(Program& program, const Between& between, const WeightsView& weights,
              const WeightsView* shared_weights, const MlpInputs& in) {
  const moec_experts_desc& desc = *program.desc;
  const PlanView& plan = *program.plan;
  Mlp mlp;
  mlp.act_rounding = desc.act_rounding;
  mlp.dtype = desc.dtype;
  mlp.hidden = desc.hidden;

  Mlp& routed = program.routed = mlp;
  routed.weights = &(program.routed_weights = beside_rows(weights, desc.dtype));
  routed.activation = desc.activation;
  routed.inter = desc.inter;
  routed.num_rows = between.host_plan && plan.totals
                        ? plan.totals[0]
                        : plan.num_tokens * desc.top_k + desc.max_rows_base;
  routed.groups = {plan.num_local, plan.group_offsets, plan.counts, plan.max_rows,
                   plan.choice_rows};
  routed.row_token = plan.row_token;
  routed.x = in.scaled_x
                 ? RowOperand{{const_cast<void*>(in.scaled_x), desc.dtype}, desc.hidden, nullptr}
                 : RowOperand{in.x, desc.hidden, plan.row_token};
  routed.gate_up_adapters = in.adapters.gate_up.factors;
  routed.down_adapters = in.adapters.down.factors;
  routed.gate_up_adapters.ids = routed.down_adapters.ids = in.adapter_ids;

  Mlp& shared = program.shared = mlp;
  if (shared_weights)
    shared.weights = &(program.shared_weights = beside_rows(*shared_weights, desc.dtype));
  const int32_t *const offsets = in.list.offsets, *const tokens = in.list.tokens;
  shared.activation = desc.shared_activation;
  shared.inter = desc.shared_inter;
  shared.num_rows = program.num_tokens;
  shared.groups = {1, offsets, offsets ? offsets + 1 : nullptr, program.num_tokens,
                   program.num_tokens};
  shared.row_token = tokens;
  shared.x = {in.x, desc.hidden, tokens};
}

}  // namespace moec::experts
