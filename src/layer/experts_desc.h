// SPDX-License-Identifier: Apache-2.0
// The experts description: what the header promises about it.
#pragma once

#include <moec/moec.h>

namespace moec {

// Defaults filled in: expert_end, align, output_scale and the activations' parameters.
moec_experts_desc checked_experts_desc(const moec_experts_desc& desc);

}  // namespace moec
