// SPDX-License-Identifier: Apache-2.0
// The adapters of a golden file in PEFT's storage, and their gradients.
#pragma once

#include <string>

#include "golden/golden_case.h"
#include "oracle/moe_oracle.h"
#include "safetensors.h"

namespace moec::test {

struct GoldenExperts {
  int experts, hidden, inter;
  golden::GateLayout gate_layout;
};
// `prefix`gate_up_proj.lora_A.`end` and its like: ("lora.a.", "weight"), ("ref_lora.a.", "grad").
// The A of gate_up is gate's and up's; of a gradient it is gate's, and up's is zeros.
oracle::Adapter golden_adapter(const SafeTensors& file, const std::string& prefix,
                               const std::string& end, const GoldenExperts& of, double scale);

}  // namespace moec::test
