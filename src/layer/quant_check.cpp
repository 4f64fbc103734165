// SPDX-License-Identifier: Apache-2.0
#include "layer/quant_check.h"

namespace moec {

std::string scheme_names() {
  std::string names = "0 (none)";
  for (const quant::FormatInfo& format : quant::Formats::kInfos)
    names.append(", ").append(std::to_string(format.scheme)) +=
        std::string(" (") + format.name + ')';
  return names;
}

bool has_arrays(const moec_quant& q) {
  return q.per_expert_scales || q.per_expert_scales2 || q.per_expert_zeros ||
         q.per_expert_scale_offset || q.per_expert_group_index;
}

void check_quant(const char* name, const moec_quant& quant, const quant::FormatInfo& format,
                 int64_t N, int64_t K) {
  check_flags("quant.flags", quant.flags, 0);
  const struct {
    const char* field;
    bool stacked, arrays, used;
  } rows[] = {
      {"scales", !is_absent(quant.scales), bool(quant.per_expert_scales), true},
      {"zeros", !is_absent(quant.zeros), bool(quant.per_expert_zeros), format.zeros_dtype != 0},
      {"scales2", !is_absent(quant.scales2), bool(quant.per_expert_scales2), false},
      {"codebook", !is_absent(quant.codebook), false, false},
      {"scale_book", !is_absent(quant.scale_book), false, false},
      {"scale_offset", !is_absent(quant.scale_offset), bool(quant.per_expert_scale_offset), false},
      {"group_index", !is_absent(quant.group_index), bool(quant.per_expert_group_index), false}};
  for (const auto& row : rows) {
    MOEC_REQUIRE(row.used || (!row.stacked && !row.arrays), MOEC_E_INVALID_ARG,
                 "%s.quant.%s is given; %s has none", name, row.field, format.name);
    MOEC_REQUIRE(!(row.stacked && row.arrays), MOEC_E_INVALID_ARG,
                 "%s.quant.%s is given twice, stacked and per expert; give one of them", name,
                 row.field);
  }
  const struct {
    const char* field;
    int64_t given, expected, whole;
  } blocks[] = {{"block_n", quant.block_n, format.block_n, N},
                {"block_k", quant.block_k, format.block_k, K},
                {"scale_block", quant.scale_block, 0, 0}};
  for (const auto& b : blocks) {
    const int64_t expected = b.expected ? b.expected : b.whole;
    MOEC_REQUIRE(b.given == 0 || b.given == expected, MOEC_E_UNSUPPORTED,
                 "%s.quant.%s is %lld; %s has 0 or %lld", name, b.field,
                 static_cast<long long>(b.given), format.name, static_cast<long long>(expected));
  }
}

}  // namespace moec
