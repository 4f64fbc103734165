// SPDX-License-Identifier: Apache-2.0
// Any bound layout as the one view that the backends read: gate [I,H], up [I,H] and down [H,I] of
// every expert, through strides and offsets.
//
//   row of gate_up   gate n   up n
//   GATE_THEN_UP     n        I+n
//   UP_THEN_GATE     I+n      n
//   INTERLEAVED      2n       2n+1
#pragma once

#include "backend/args.h"
#include "layer/check.h"

namespace moec {

// Defaults filled in: bias_dtype. Throws for what the header forbids; a scheme that is no format of
// quant/format.h is E_UNSUPPORTED.
moec_weights_desc checked_weights_desc(const moec_weights_desc& desc);

// Rows first, first + step, ... of gate_up are those of gate or of up; no step: the layout has no
// gate_up.
struct PartOfRows {
  int64_t first, step;
};
PartOfRows part_rows(uint32_t gate_layout, int64_t inter, bool up);

struct BoundWeights {
  WeightsView view;
  MemorySet memory;
};

// Entries of `pointers` and `blocks` that bind_weights() or bind_gradients() may fill. The quant of
// a gradient, which is refused, is not read.
int64_t binding_entries(const moec_weight_set& set, int64_t num_experts, bool gradients);

// The matrices of `set`, all of those that the layout has. `pointers` and `blocks` hold
// binding_entries() each and live as long as the result.
BoundWeights bind_weights(const Context& context, const moec_weights_desc& desc,
                          const moec_weight_set& set, void** pointers, MemoryBlock* blocks);

// The gradients of weights bound as `values`: each matrix and bias may be absent, of their dtype or
// f32. `name` stands for the set in messages about overlaps.
BoundWeights bind_gradients(const Context& context, const moec_weights_desc& desc,
                            const moec_weight_set& set, const WeightsView& values, const char* name,
                            void** pointers, MemoryBlock* blocks);

// A view without memory, of packed weights whose source never was here.
WeightsView unbound_view(const moec_weights_desc& desc, bool gate_bias, bool up_bias,
                         bool down_bias);

}  // namespace moec
