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

// Pre-activations and activations of a set of rows, [rows, inner width] of the data type. Gradients
// have the same shape. Null: not there (a plain MLP has no gate).
struct Hidden {
  void *gate = nullptr, *up = nullptr, *act = nullptr;
};

struct SavedMemory {
  Hidden routed, shared;  // act: before any weight
};

struct ForwardMemory {
  void* products;                              // scratch of the grouped products
  void* scaled_x = nullptr;                    // [P,H], weight on the input
  void *act = nullptr, *shared_act = nullptr;  // [P,I], [T,Is] read by the down projection; null:
                                               // the saved ones are
  float* out;                                  // [P,H] of each row, before its weight
  float* mix = nullptr;  // [T,2] factors of the routed sum and the shared expert
};

struct BackwardMemory {
  void* products;
  void* scaled_x = nullptr;
  Hidden routed, shared;                    // gradients; act: activations times their rows' factors
  float* d_rows;                            // [P,H] gradient at each row's input
  float *factor, *shared_factor = nullptr;  // [P], [T] d(y) / d(expert output)
  float *dots, *shared_dots = nullptr;      // [P, I/32], [T, Is/32] parts of <dY W, h>
  float* input_dots = nullptr;              // [P, H/32] parts of <d row, x>, weight on the input
  float *mix = nullptr, *d_logits = nullptr;  // [T,2] each
};

bool is_mixed(const moec_experts_desc& desc);         // the shared expert has a gate
bool is_shared_gated(const moec_experts_desc& desc);  // ... has gate and up projections

SavedMemory lay_out_saved(const moec_experts_desc& desc, Arena& arena);
ForwardMemory lay_out_forward(const moec_experts_desc& desc, int32_t num_threads, Arena& arena);
BackwardMemory lay_out_backward(const moec_experts_desc& desc, int32_t num_threads, Arena& arena);

}  // namespace moec::cpu
