// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/experts/experts_memory.h"

#include "backend/cuda/experts/experts_path.h"
#include "backend/cuda/rows/row_ops.h"
#include "math/activation.h"

namespace moec::cuda {

Intermediates intermediates(const moec_experts_desc& desc, bool wide) {
  if (kFastPath.refuses(desc)) return {MOEC_F32, MOEC_F32, MOEC_F32};
  const moec_dtype between = wide ? moec_dtype(MOEC_F32) : desc.dtype;
  return {between, between, desc.dtype};
}

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

void* take_rows(Arena& arena, const moec_experts_desc& desc, int64_t row_bytes) {
  const auto local = uint64_t(desc.expert_end - desc.expert_begin), align = uint64_t(desc.align);
  const uint64_t base = uint64_t(desc.max_rows_base) + round_up(local * (align - 1), align);
  return arena.take(base * uint64_t(row_bytes), uint64_t(desc.top_k) * uint64_t(row_bytes));
}
void* take_tokens(Arena& arena, int64_t row_bytes) {
  return arena.take(0, uint64_t(row_bytes));
}

Saved lay_out_saved(const moec_experts_desc& desc, Arena& arena, bool wide) {
  Saved saved;
  if (desc.save < MOEC_SAVE_PREACT) return saved;
  const int64_t size = dtype_bytes(intermediates(desc, wide).pre);
  saved.pre = take_rows(arena, desc, parts_of(is_gated(desc)) * desc.inter * size);
  if (has_shared(desc))
    saved.shared_pre =
        take_tokens(arena, parts_of(is_shared_gated(desc)) * desc.shared_inter * size);
  return saved;
}

void clear_saved(const Op& op, const ExpertsArgs& args, bool wide) {
  if (!args.saved) return;
  const moec_experts_desc& desc = *args.desc;
  Arena arena(args.saved, args.num_tokens), measured;
  const Saved saved = lay_out_saved(desc, arena, wide);
  lay_out_saved(desc, measured, wide);
  char* const end = static_cast<char*>(args.saved) + bytes_for(measured.size(), args.num_tokens);
  const auto clear = [&](const RowGroups& groups, int64_t width, void* from, void* to) {
    const auto bytes = uint64_t(static_cast<char*>(to) - static_cast<char*>(from));
    clear_padding(op, groups, width * dtype_bytes(intermediates(desc, wide).pre), bytes, from);
  };
  const PlanView& plan = *args.plan;
  if (saved.pre)
    clear({plan.num_local, plan.group_offsets, plan.counts, plan.max_rows},
          parts_of(is_gated(desc)) * desc.inter, saved.pre,
          saved.shared_pre ? saved.shared_pre : end);
  if (saved.shared_pre)
    clear({1, nullptr, nullptr, args.num_tokens},
          parts_of(is_shared_gated(desc)) * desc.shared_inter, saved.shared_pre, end);
}

}  // namespace moec::cuda
