// SPDX-License-Identifier: Apache-2.0
// Where the arrays of an experts call lie. One function lays out each buffer, so that the size
// queries are exact.
#pragma once

#include "backend/program.h"
#include "core/workspace.h"

namespace moec::experts {

bool is_gated(const moec_experts_desc& desc);
bool is_shared_gated(const moec_experts_desc& desc);  // the shared expert has gate and up
bool has_shared(const moec_experts_desc& desc);
bool is_mixed(const moec_experts_desc& desc);  // the shared expert has a gate

// Pre-activations, kept for backward. SAVE_ALL keeps what SAVE_PREACT does: activations come with
// their slopes, at no cost.
struct Saved {
  PartRows routed, shared;
};
Saved lay_out_saved(const moec_experts_desc& desc, const Between& between, Arena& arena);

struct TokenList {  // of the shared expert's group, where a path wants it
  int32_t *offsets = nullptr, *tokens = nullptr;
};

// The factors of adapters at one place, and which of them are copies that a step makes.
struct PlaceMemory {
  LowRank factors;
  bool copies_a = false, copies_b = false;
};
struct AdapterMemory {
  PlaceMemory gate_up, down;
  float* sums = nullptr;  // backward: gradients of each expert where A is one for all
};

struct MlpForward {
  PartRows pre;  // where they are not saved, and the path wants them all the same
  void* act = nullptr;
  void* rows = nullptr;
  void *narrow_x = nullptr, *narrow_act = nullptr;  // [P,R] with adapters
};
struct ForwardMemory {
  void* scratch = nullptr;
  void* scaled_x = nullptr;  // [P,H], weight on the input
  MlpForward routed, shared;
  float* mix = nullptr;  // [T,2]
  TokenList list;
  AdapterMemory adapters;
};
// weights: beside the adapters; null while measuring, since sizes do not depend on them.
ForwardMemory lay_out_forward(const moec_experts_desc& desc, const Between& between,
                              const AdaptersView* adapters, const WeightsView* weights,
                              Arena& arena);

struct MlpBackward {
  PartRows pre, d_pre;  // pre: computed again, with SAVE_INPUT
  void *weighted = nullptr, *rows = nullptr;
  float *factor = nullptr, *dots = nullptr;
  // [P,R] with adapters, as forward has them, and of the gradients there.
  void *narrow_x = nullptr, *narrow_act = nullptr;
  void *d_narrow_x = nullptr, *d_narrow_act = nullptr;
};
struct BackwardMemory {
  void* scratch = nullptr;
  void* scaled_x = nullptr;
  float* input_dots = nullptr;  // weight on the input
  MlpBackward routed, shared;
  float *mix = nullptr, *d_logits = nullptr;  // [T,2] each
  TokenList list;
  AdapterMemory adapters;
};
BackwardMemory lay_out_backward(const moec_experts_desc& desc, const Between& between,
                                const AdaptersView* adapters, const WeightsView* weights,
                                Arena& arena);

// The MLPs of a program whose description, plan and tokens are set, as its steps see them.
struct MlpInputs {
  Array x;
  const void* scaled_x;  // of the routed rows, null: they read x
  TokenList list;        // of the shared expert
  const AdapterMemory& adapters;
  const int32_t* adapter_ids;
};
void set_mlps(Program& program, const Between& between, const WeightsView& weights,
              const WeightsView* shared_weights, const MlpInputs& inputs);

}  // namespace moec::experts
