// SPDX-License-Identifier: Apache-2.0
// The arguments of quantising, apart from those of args.h, since few files need them.
#pragma once

#include "quant/quantise.h"

namespace moec {

struct QuantiseArgs {
  quant::RuleChoice rule;
  quant::QuantiseView view;
  uint32_t* expert_bits = nullptr;  // view.expert_bits, where they are asked for
  quant::NestedView nested;         // codes null: none
  quant::ZerosView packed_zeros;    // words null: none
};

}  // namespace moec
