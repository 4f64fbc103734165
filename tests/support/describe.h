// SPDX-License-Identifier: Apache-2.0
// What the C API tells of a call.
#pragma once

#include <vector>

#include "handles.h"
#include "json.h"

namespace moec::test {

inline Json describe_experts(const moec_experts* experts, const moec_weights* weights,
                             int64_t tokens) {
  uint64_t need = 0;
  check(moec_experts_describe(experts, weights, tokens, nullptr, 0, &need));
  std::vector<char> text(need);
  check(moec_experts_describe(experts, weights, tokens, text.data(), need, &need));
  return parse_json(text.data());
}

}  // namespace moec::test
