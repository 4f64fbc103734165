// SPDX-License-Identifier: Apache-2.0
// Where the arrays of an experts call lie. One function lays out each buffer, so that the size
// queries are exact. P is the bound on the plan's rows for T tokens, I and Is the inner widths.
#pragma once

#include "backend/args.h"
#include "core/workspace.h"

namespace moec::cpu {

inline constexpr int64_t kDotColumns = 32;  // one partial sum of a dot product per so many columns
inline int64_t dot_columns(int64_t width) {
  return (width + kDotColumns - 1) / kDotColumns;
}

// Pre-activations of a set of rows, [rows, inner width]. In fp32, whatever the data type: where a
// slope is a difference of them (a clamp, up + 1) or a routing weight's gradient is a small sum,
// their rounding would be the largest error of the backward pass. Aligned as the caller's buffer
// is. Null gate: a plain MLP.
struct Preact {
  void *gate = nullptr, *up = nullptr;
};

// Gradients at the pre-activations, and activations, [rows, inner width] of the data type.
struct Hidden {
  void *gate = nullptr, *up = nullptr, *act = nullptr;
};

// SAVE_ALL keeps what SAVE_PREACT does: activations come with their slopes, at no cost.
struct SavedMemory {
  Preact routed, shared;
};

struct ForwardMemory {
  void* products;                    // scratch of the grouped products
  void* scaled_x = nullptr;          // [P,H], weight on the input
  void *act, *shared_act = nullptr;  // [P,I], [T,Is] that the down projection reads
  float* out;                        // [P,H] of each row, before its weight
  float* mix = nullptr;              // [T,2] factors of the routed sum and the shared expert
};

struct BackwardMemory {
  void* products;
  void* scaled_x = nullptr;
  Preact preact, shared_preact;               // computed again, with SAVE_INPUT
  Hidden routed, shared;                      // act: times the factor of its row
  float* d_rows;                              // [P,H] gradient at each row's input
  float *factor, *shared_factor = nullptr;    // [P], [T] d(y) / d(expert output)
  float *dots, *shared_dots = nullptr;        // [P, I/32], [T, Is/32] parts of <dY W2, act>
  float* input_dots = nullptr;                // [P, H/32] parts of <d row, x>, weight on the input
  float *mix = nullptr, *d_logits = nullptr;  // [T,2] each
};

bool is_mixed(const moec_experts_desc& desc);         // the shared expert has a gate
bool is_shared_gated(const moec_experts_desc& desc);  // ... has gate and up projections

SavedMemory lay_out_saved(const moec_experts_desc& desc, Arena& arena);
ForwardMemory lay_out_forward(const moec_experts_desc& desc, int32_t num_threads, Arena& arena);
BackwardMemory lay_out_backward(const moec_experts_desc& desc, int32_t num_threads, Arena& arena);

}  // namespace moec::cpu
