// SPDX-License-Identifier: Apache-2.0
// One plain struct per operation of a backend; Operation (backend.h) lists them. Everything here is
// already validated by src/layer: shapes agree, descriptors have their defaults filled in, required
// arrays are present. An absent optional array has data == nullptr. All arrays are compact and
// row-major; pointers are element-aligned.
//
// T num_tokens, H hidden, I inter, E num_experts, Z num_zero, K top_k, P rows of the plan.
#pragma once

#include <moec/moec.h>

#include <cstdint>

#include "backend/adapters.h"
#include "backend/plan_view.h"
#include "backend/weights.h"
#include "core/portable.h"

namespace moec {

struct Array {  // element type and address; the shape stands in the comment of each use
  void* data = nullptr;
  moec_dtype dtype = 0;
  MOEC_HD explicit operator bool() const { return data != nullptr; }
};

// ---------------------------------------------------------------- router
struct GateArgs {  // logits = transform(x) * weight^T + bias
  const moec_router_desc* desc;
  int64_t num_tokens, hidden;
  uint64_t rng_offset;
  Array x;            // [T,H]
  Array weight;       // [E+Z,H]
  Array bias;         // [E+Z] optional
  Array input_scale;  // [H] optional
  float* logits;      // out [T,E+Z]
  Array x_jittered;   // out [T,H] optional
};
struct GateGradArgs {
  const moec_router_desc* desc;
  int64_t num_tokens, hidden;
  uint64_t rng_offset;
  bool accumulate, accumulate_x;
  bool skips_idle;  // a token whose row of d_logits is 0 leaves no trace, even if its x is NaN
  Array x, weight, input_scale;
  const float* d_logits;                       // [T,E+Z]
  Array d_x, d_weight, d_bias, d_input_scale;  // out, each optional
  Array d_x_jittered;  // [T,H] optional: gradient of forward's x_jittered; joins before the jitter
};
struct RouteArgs {
  const moec_router_desc* desc;
  int64_t num_tokens, table_rows;
  Array logits;  // [T,E+Z]
  const float* select_bias;
  Array per_expert_scale;
  const uint8_t* token_mask;
  Array table, token_ids, given_ids;
  int32_t* expert_ids;     // out [T,K]
  float* routing_weights;  // out [T,K]
  float* scores;           // out [T,E+Z] optional
  Array counts;            // inout [E+Z] i32 (which saturates) or i64, optional
};
struct RouteGradArgs {
  const moec_router_desc* desc;
  int64_t num_tokens;
  bool accumulate;
  Array logits, per_expert_scale, expert_ids;
  const float* d_routing_weights;  // [T,K]
  const float* d_logits_in;        // [T,E+Z] optional
  float* d_logits;                 // out [T,E+Z]; may be d_logits_in
  Array d_per_expert_scale;        // out [E+Z] optional
};
struct BiasUpdateArgs {
  int32_t num_ids;  // E+Z
  Array counts;     // [E+Z] i32|i64
  float rate;
  float* bias;
};
struct LossLayer {
  Array logits;     // [T,E]
  float* d_logits;  // [T,E] inout, backward
};
class RankSums {  // replaces values by their sums over all ranks, in rank order
 public:
  virtual void add(float* values, int64_t count) const = 0;
  virtual void add(double* values, int64_t count) const = 0;
  virtual void add(int64_t* values, int64_t count) const = 0;

 protected:
  ~RankSums() = default;
};
struct LossArgs {
  bool backward;
  uint32_t kind, score;
  int32_t num_experts, top_k;
  float coefficient;
  int64_t num_tokens, seq_len, num_layers;
  const LossLayer* layers;
  Array counts;  // [E] i32|i64, optional
  const uint8_t* token_mask;
  float* loss;                      // out [1], forward
  const float* d_loss;              // [1] optional, backward
  const RankSums* ranks = nullptr;  // sums are of the tokens of all ranks; null: of these
};

// ---------------------------------------------------------------- plan
// Ids that follow from the place of a slot: `run` slots in a row have one expert, the next ones the
// next of `count`, and so round and round.
struct IdRule {
  int64_t run = 0;  // 0: there is no rule
  int32_t first = 0, count = 0;
  MOEC_HD int32_t id(int64_t slot) const { return first + int32_t(slot / run % count); }
};

// What a plan is built from: ids or their rule (+ weights), a map (+ probs), or scores.
struct PlanSource {
  Array expert_ids;              // [T,K] i32|i64; may alias plan.expert_ids
  IdRule rule;                   // instead of expert_ids
  const float* routing_weights;  // [T,K] or null = 1; may alias plan.routing_weights
  Array routing_map;             // [T,E] u8|bool|i32
  const float* probs;            // [T,E] or null
  const float* scores;           // [T,E] expert choice
  const uint8_t* token_mask;     // [T] expert choice, optional
  bool check;                    // MOEC_CONTEXT_CHECK_INPUTS
};
struct PlanArgs {
  const PlanSource* source;
  const PlanView* plan;  // out
};
struct MapArgs {  // fields 11 and 12 of moec_plan_field
  const PlanView* plan;
  int32_t field;
  int32_t* to;  // every entry is written
};

// ---------------------------------------------------------------- rows
struct PermuteArgs {
  const PlanView* plan;
  int64_t row_bytes, scale_bytes, out_rows;  // bytes of one row of x / x_scale; rows in `rows`
  const void *x, *x_scale;
  void *rows, *row_scale;
  float* row_weight;  // optional; zero weight makes the row zero
};
struct UnpermuteArgs {
  const PlanView* plan;
  int64_t hidden;
  moec_dtype dtype;
  const void* rows;
  const float* routing_weights;  // [T,K] or null = 1
  const void* residual;          // [T,H] optional
  void* y;
};
struct PermuteGradArgs {
  const PlanView* plan;
  int64_t hidden;
  moec_dtype dtype;
  const void* d_rows;
  const float* d_row_weight;
  void* d_x;
  float* d_routing_weights;
};
struct UnpermuteGradArgs {
  const PlanView* plan;
  int64_t hidden, out_rows;
  moec_dtype dtype;
  const void* d_y;
  const void* rows;
  const float* routing_weights;
  void* d_rows;
  float* d_routing_weights;
};

// ---------------------------------------------------------------- experts
struct ExpertsArgs {
  const moec_experts_desc* desc;  // defaults filled in
  int64_t num_tokens;
  const PlanView* plan;
  const WeightsView* weights;
  const WeightsView* shared_weights;  // null without shared expert
  Array x;                            // [T,H]
  Array shared_gate, shared_gate_bias, output_bias;
  const void* residual;  // [T,H] dtype of x, optional; may be y
  void* y;               // [T,H]
  void* saved;           // null with SAVE_NONE; every byte of it is written
  void* workspace;
  bool skip_absent;              // rows of y of tokens without a row in the plan are not written
  const AdaptersView* adapters;  // null: none
  const int32_t* adapter_ids;    // [T], optional
};
struct ExpertsGradArgs {
  const moec_experts_desc* desc;
  int64_t num_tokens;
  bool accumulate, accumulate_x;
  const PlanView* plan;
  const WeightsView *weights, *shared_weights;
  Array x, shared_gate, shared_gate_bias;
  const void* d_y;
  const void* saved;
  void* d_x;
  float* d_routing_weights;                                // [T,K], or [P] for expert choice
  const WeightsView *d_expert_weights, *d_shared_weights;  // matrices absent = skipped; null = none
  Array d_shared_gate, d_shared_gate_bias, d_output_bias;
  void* d_residual;
  void* workspace;
  const AdaptersView* adapters;
  const int32_t* adapter_ids;
  const AdaptersView* d_adapters;  // as `adapters`, factors absent = skipped; null = none
};

// ---------------------------------------------------------------- weights
struct MergeArgs {  // matrix of each expert += sign * sum of scale B A, B of `part`; plain values
  const ExpertMatrix* matrix;
  int64_t n, k;
  int32_t num_experts;
  const FactorList* factors;
  int part;
  float sign;
};
struct ValuesArgs {  // to(n, k) = element (n, k) of one expert's matrix in fp32, rounded once
  const ExpertMatrix* matrix;
  int64_t expert, n, k;
  MatrixView to;
};

}  // namespace moec
