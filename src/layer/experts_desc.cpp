// SPDX-License-Identifier: Apache-2.0
#include "layer/experts_desc.h"

#include <algorithm>
#include <cmath>

#include "core/dtype.h"
#include "layer/check.h"
#include "math/activation.h"

namespace moec {
namespace {

// Which parameters an activation reads, with what 0 stands for.
void fill_activation(const char* name, moec_activation& activation) {
  check_enum(name, activation.kind, math::Activations::kCount - 1);
  const math::ActivationInfo& info = math::activation_info(activation.kind);
  struct {
    const char* field;
    float& value;
    bool used;
    float fallback;
  } parameters[] = {{"alpha", activation.alpha, info.uses_alpha, info.default_alpha},
                    {"limit", activation.limit, info.uses_limit, info.default_limit},
                    {"offset", activation.offset, info.uses_offset, 0},
                    {"beta", activation.beta, info.uses_beta, info.default_beta},
                    {"linear_beta", activation.linear_beta, info.uses_beta, 0}};
  for (auto& parameter : parameters) {
    MOEC_REQUIRE(std::isfinite(parameter.value) && (parameter.used || parameter.value == 0),
                 MOEC_E_INVALID_ARG, "%s.%s is %g; expected %s for %s", name, parameter.field,
                 double(parameter.value), parameter.used ? "a finite number" : "0", info.name);
    if (parameter.value == 0) parameter.value = parameter.fallback;
  }
  for (const float value : {activation.limit, activation.beta, activation.linear_beta})
    MOEC_REQUIRE(value >= 0, MOEC_E_INVALID_ARG, "a parameter of %s is %g; expected 0 or more",
                 name, double(value));
  MOEC_REQUIRE(!info.uses_limit || activation.limit > 0, MOEC_E_INVALID_ARG,
               "%s.limit is 0; %s needs a limit above 0", name, info.name);
  check_flags(name, activation.reserved0 | activation.reserved1, 0);
}

void check_sizes(const moec_experts_desc& desc) {
  check_at_least("desc.hidden", desc.hidden, 1);
  check_at_least("desc.inter", desc.inter, 1);
  const int64_t num_ids = checked_num_ids(desc.num_experts, desc.num_zero_experts);
  if (desc.max_rows_base) {
    check_at_least("desc.max_rows_base", desc.max_rows_base, 0);
    checked_rows("desc.max_rows_base", desc.max_rows_base);
    check_range("desc.top_k", desc.top_k, 0, 0);
    check_range("desc.num_zero_experts", desc.num_zero_experts, 0, 0);
  } else {
    check_range("desc.top_k", desc.top_k, 1, num_ids);
  }
  check_local_experts(desc.expert_begin, desc.expert_end, desc.num_experts);
  MOEC_REQUIRE(desc.align >= 0 && (desc.align & (desc.align - 1)) == 0, MOEC_E_INVALID_ARG,
               "desc.align is %d; expected 0 or a power of two", desc.align);
  // Every byte count below is some small factor times rows * width, so that these keep it in 63
  // bits.
  const int64_t local = desc.expert_end ? desc.expert_end - desc.expert_begin : desc.num_experts;
  const int64_t rows = checked_rows("desc.max_rows_base + experts * (desc.align - 1)",
                                    desc.max_rows_base + local * std::max(desc.align - 1, 0));
  checked_product("rows * hidden", 64 * rows, desc.hidden);
  checked_product("rows * inter", 64 * rows, desc.inter);
  const int64_t width = checked_product("hidden * inter", desc.hidden, desc.inter);
  checked_product("num_experts * hidden * inter", 64 * num_ids, width);
}

void check_shared(const moec_experts_desc& desc) {
  if (desc.shared != MOEC_SHARED_NONE) {
    check_at_least("desc.shared_inter", desc.shared_inter, 1);
    checked_product("hidden * shared_inter", 64 * desc.hidden, desc.shared_inter);
    return;
  }
  check_range("desc.shared_inter", desc.shared_inter, 0, 0);
}

}  // namespace

moec_experts_desc checked_experts_desc(const moec_experts_desc& given) {
  moec_experts_desc desc = given;
  desc.struct_size = sizeof desc;  // stored descriptions are compared whole
  check_flags("desc.flags", desc.flags, MOEC_EXPERTS_PLAIN_WEIGHTS);
  const struct {
    const char* name;
    uint32_t value, last;
  } enums[] = {{"desc.gate_layout", desc.gate_layout, MOEC_GATE_NONE},
               {"desc.weight_position", desc.weight_position, MOEC_WEIGHT_ON_INPUT},
               {"desc.combine", desc.combine, MOEC_COMBINE_DATA_EXPERT},
               {"desc.act_rounding", desc.act_rounding, MOEC_ACT_PER_OP},
               {"desc.shared", desc.shared, MOEC_SHARED_SOFTMAX2},
               {"desc.save", desc.save, MOEC_SAVE_ALL}};
  for (const auto& row : enums) check_enum(row.name, row.value, row.last);
  MOEC_REQUIRE(is_real(desc.dtype), MOEC_E_DTYPE, "desc.dtype is 0x%x; expected f32, f16 or bf16",
               desc.dtype);
  check_sizes(desc);
  check_shared(desc);
  MOEC_REQUIRE(std::isfinite(desc.output_scale), MOEC_E_INVALID_ARG,
               "desc.output_scale is %g; expected a finite number", double(desc.output_scale));
  fill_activation("desc.activation", desc.activation);
  fill_activation("desc.shared_activation", desc.shared_activation);
  const bool plain = desc.gate_layout == MOEC_GATE_NONE;
  const math::ActivationInfo& info = math::activation_info(desc.activation.kind);
  MOEC_REQUIRE(info.gated != plain, MOEC_E_INVALID_ARG,
               "desc.activation is %s, which is %s; desc.gate_layout is %u", info.name,
               info.gated ? "gated" : "plain (needs MOEC_GATE_NONE)", desc.gate_layout);
  if (desc.expert_end == 0) desc.expert_end = desc.num_experts;
  desc.align = std::max(desc.align, 1);
  if (desc.output_scale == 0) desc.output_scale = 1;
  return desc;
}

}  // namespace moec
