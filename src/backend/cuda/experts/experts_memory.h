// SPDX-License-Identifier: Apache-2.0
// What all ways to run the experts agree on: the rows of a call, and what is saved for backward.
#pragma once

#include "backend/cuda/device/op.h"
#include "core/dtype.h"
#include "core/workspace.h"

namespace moec::cuda {

// Types of what lies between the products: 16 bits where Hopper's kernels may run, else fp32, as on
// the CPU. wide: a context that does not use those kernels. The first two are the errors of the
// routing weights' gradients, so every path of a context has the same ones.
struct Intermediates {
  moec_dtype pre;    // pre-activations
  moec_dtype d_act;  // gradient at the activations, before the routing weight
  moec_dtype rows;   // outputs of rows, gradients at their inputs
};
Intermediates intermediates(const moec_experts_desc& desc, bool wide = false);

bool is_gated(const moec_experts_desc& desc);
bool is_shared_gated(const moec_experts_desc& desc);
bool has_shared(const moec_experts_desc& desc);
bool is_mixed(const moec_experts_desc& desc);  // the shared expert has a gate
inline int parts_of(bool gated) {
  return gated ? 2 : 1;
}

// One region of so many bytes for each row of the plan, or for each token.
void* take_rows(Arena& arena, const moec_experts_desc& desc, int64_t row_bytes);
void* take_tokens(Arena& arena, int64_t row_bytes);

// Pre-activations [rows, parts, inter] of the routed and of the shared expert; null: not saved.
struct Saved {
  void *pre = nullptr, *shared_pre = nullptr;
};
Saved lay_out_saved(const moec_experts_desc& desc, Arena& arena, bool wide = false);
// Zeros for every byte of `saved` that holds no row.
void clear_saved(const Op& op, const ExpertsArgs& args, bool wide);

}  // namespace moec::cuda
