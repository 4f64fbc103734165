// SPDX-License-Identifier: Apache-2.0
// The whole Mixture-of-Experts layer in double precision with plain loops: the truth for tests.
// It includes only the standard library and shares no code with the library under test. Nothing
// is rounded except where a Rounding option says so. Enumerators have the values of moec.h.
//   T tokens, H hidden, I intermediate, E experts, Z identity experts, C = E + Z, K slots a token
#pragma once

#include <cstdint>
#include <vector>

#include "kinds.h"
#include "rounding.h"

namespace moec::oracle {

using Vec = std::vector<double>;
using Ids = std::vector<int>;
using Mask = std::vector<uint8_t>;  // empty = all ones

enum class RouterInput { kPlain, kRmsScaled };
enum class Select { kTopK, kGroupTopK, kTable, kSparseMixer, kGiven };
enum class GroupFill { kNegInf, kZero };
enum class WeightRule { kScore, kSoftmaxSelected, kSigmoidSelected };
enum class Norm { kNone, kSum, kClampSum, kP };
enum class SlotOrder { kByValue, kByExpert };
enum class WeightPosition { kOutput, kActivation, kInput };
enum class Shared { kNone, kAdd, kSigmoidGate, kSoftmax2 };
enum class Drop { kNone, kByPosition, kByWeight };
enum class LossKind { kMixtral, kSwitch, kSequence, kZ };

// A deliberate error, planted by the mutation tests to show that a case can fail.
enum class Fault {
  kNone,
  kBiasInWeight,        // the selection bias enters the routing weight
  kGateLowerClamp,      // the gate is clamped from below as well
  kNoUpClamp,           // up is not clamped
  kClampGradExclusive,  // no gradient at g == L and |u| == L
  kTieToHighestId,      // equal choice scores: the highest id wins
  kNormBeforeSelect,    // the softmax of the selected is taken over all experts
  kScaleOnlyWithNorm,   // the scale is forgotten when there is no normalisation
  kDroppedRenormed,     // capacity: the kept weights are scaled to the full sum
  kIdentityDropped,     // identity experts contribute nothing
  kDownBiasUnweighted,  // weight on the activation: the down bias is not weighted
  kMixerThresholdOff,   // sparse mixer: plain softmax, no threshold
  kLossDivisor,         // aux loss: not divided by K (Switch), divided by K (Mixtral)
};

struct RouterConfig {
  int num_experts = 0;
  int num_zero_experts = 0;
  int top_k = 0;
  RouterInput input = RouterInput::kPlain;
  double rms_eps = 1e-6;
  double jitter = 0;
  bool jitter_x = false;  // the experts see the jittered x, too
  uint64_t seed = 0;
  uint64_t rng_offset = 0;
  Rounding logit_rounding = Rounding::kNone;
  double logit_softcap = 0;  // 0 = off
  Score score = Score::kSoftmax;
  Rounding score_rounding = Rounding::kNone;
  Select select = Select::kTopK;
  int num_groups = 1;
  int top_groups = 1;
  int group_top_m = 1;
  GroupFill group_fill = GroupFill::kNegInf;
  double mixer_eps = 0;
  WeightRule weight_rule = WeightRule::kScore;
  Norm norm = Norm::kNone;
  double norm_eps = 0;
  double norm_p = 1;
  bool norm_if_k_gt_1 = false;
  Rounding norm_rounding = Rounding::kNone;
  double scale = 1;
  Rounding weight_rounding = Rounding::kNone;
  SlotOrder slot_order = SlotOrder::kByValue;
  int columns() const { return num_experts + num_zero_experts; }
};

struct Activation {
  Act kind = Act::kSwiglu;
  double alpha = 1.702;    // gptoss, quick_geglu
  double limit = 7;        // gptoss, clamp_swiglu, swiglu_clamp
  double offset = 0;       // quick_geglu
  double beta = 4;         // situ
  double linear_beta = 0;  // situ; 0 = up is not bounded
  // Forward, operation by operation as an eager framework: pre-activations and each value on the
  // way to the result. Situ has the result alone, as its references have.
  Rounding steps = Rounding::kNone;
};

struct ExpertsConfig {
  int hidden = 0;
  int inter = 0;
  int shared_inter = 0;
  Activation activation;
  Activation shared_activation;
  WeightPosition weight_position = WeightPosition::kOutput;
  Shared shared = Shared::kNone;
  double output_scale = 1;
  // What products read of rows that they did not get as inputs: x times a weight on the input (an
  // fp32 product before), activations times their factor in y, gradients at the pre-activations.
  Rounding operands = Rounding::kNone;
  // Of each expert's output, its weighted output and each sum of them, by ascending expert id.
  Rounding sums = Rounding::kNone;
  // What a 16-bit backward rounds between its products as well: pre-activations, which forward has
  // kept, and the gradient at the activations, before their factor.
  Rounding between = Rounding::kNone;
  // The terms of adapters are added to results that have been rounded so, too: by products of their
  // own. Else a product adds up all terms.
  bool terms_apart = true;
  bool shifts = false;  // backward computes them; they take half as long as the rest
};

struct PlanConfig {
  int expert_begin = 0;
  int expert_end = 0;  // 0, 0 = all
  int align = 1;
  Drop drop = Drop::kNone;
  int64_t capacity = 0;  // 0 = by capacity_factor
  double capacity_factor = 0;
};

struct Config {
  RouterConfig router;
  ExpertsConfig experts;
  PlanConfig plan;
  Fault fault = Fault::kNone;
};

// gate, up [E,I,H]; down [E,H,I]; biases [E,I], [E,I], [E,H]. Empty: absent (plain: no gate).
struct MlpWeights {
  Vec gate, up, down, gate_bias, up_bias, down_bias;
};

// A low-rank term beside a matrix [N,K] of every expert; rank 0: absent.
struct Factors {
  int rank = 0;
  double scale = 1;
  Vec a, b;  // [E,rank,K], [E,N,rank]
  bool operator==(const Factors&) const = default;
};
struct Adapter {
  Factors gate, up, down;
  bool operator==(const Adapter&) const = default;
};

// Every input of a layer. An empty vector is "absent".
struct Inputs {
  int tokens = 0;
  Vec x;                 // [T,H]
  Vec router_x;          // [T,H], absent = x
  Vec gate_weight;       // [C,H]
  Vec gate_bias;         // [C]
  Vec input_scale;       // [H]
  Vec select_bias;       // [C]
  Vec per_expert_scale;  // [C]
  Mask token_mask;       // [T]
  Ids table, token_ids;  // [V,K], [T]
  Ids given_ids;         // [T,K]
  MlpWeights experts;
  MlpWeights shared;              // E = 1, I = shared_inter
  std::vector<Adapter> adapters;  // of the experts
  Ids adapter_ids;                // [T] the only adapter of a token; absent: all
  Vec shared_gate;                // [1,H] or [2,H]
  Vec shared_gate_bias;           // [2]
  Vec output_bias;                // [H]
  Vec residual;                   // [T,H]
};

// How large the terms are that a gradient is a sum of: the root of their squares. Sums may cancel,
// and what is rounded on the way is a part of the terms.
struct GradientTerms {
  MlpWeights experts, shared;
  Vec routing_weights;
};

// How far fp32 may be from the gradients of gate and up, because pre-activations and gradients at
// activations are sums in fp32: a slope near 0, or at a clamp, makes a large part of a gradient of
// a small part of a pre-activation. Root of the squares over a gradient's terms. Empty without
// ExpertsConfig::shifts.
struct GradientShifts {
  MlpWeights experts, shared;
};

// Gradients, in the shapes of Inputs.
struct Gradients {
  Vec x, router_x, gate_weight, gate_bias, input_scale, per_expert_scale;
  MlpWeights experts, shared;
  Vec shared_gate, shared_gate_bias, output_bias, residual;
  Vec routing_weights;  // [T,K]
  Vec logits;           // [T,C], at the logits before the soft-cap
  std::vector<Adapter> adapters;
  GradientTerms terms;
  GradientShifts shifts;
};

struct Gate {
  Vec factor;    // [T,H] jitter, empty = off
  Vec expert_x;  // [T,H] what the experts see
  Vec router_x;  // [T,H] what the gate GEMM sees
  Vec logits;    // [T,C] before the soft-cap
};

struct Route {
  int slots = 0;                // K (E for expert choice)
  Vec capped;                   // [T,C] logits after the soft-cap
  Vec scores;                   // [T,C]
  Ids ids;                      // [T,K], -1 = none
  Vec raw;                      // [T,K] after the weight rule
  Vec normed;                   // [T,K] after the normalisation
  Vec weights;                  // [T,K]
  std::vector<int64_t> counts;  // [C] selections per id
};

// Rows of local expert e are [group_offsets[e], group_offsets[e+1]), in token order, then padding.
struct Plan {
  Ids counts;          // [El]
  Ids group_offsets;   // [El+1]
  Ids row_token;       // [P], -1 = padding
  Ids row_slot;        // [P], -1 = padding
  Vec row_weight;      // [P]
  Ids assignment_row;  // [T,K], -1 = dropped, remote, identity, none
  Ids expert_ids;      // [T,K], outside [0,C) as -1
  Ids totals;          // routed rows, P, dropped, largest group
};

struct Layer {
  Gate gate;
  Route route;
  Plan plan;
  Vec y;  // [T,H]
};

// ---- random numbers ----
// Philox4x32-10, counter (low 64 bits; the rest 0), key = seed; first output word.
uint32_t philox(uint64_t seed, uint64_t counter);
// Jitter factor 1 + j * (2u - 1), u = (philox word >> 8) / 2^24.
double jitter_factor(double jitter, uint64_t seed, uint64_t counter);

// ---- activations ----
double activate(const Activation& act, double gate, double up, Fault fault = Fault::kNone);
// Gradient at (gate, up) for a unit gradient of the result.
void activate_backward(const Activation& act, double gate, double up, double* d_gate, double* d_up,
                       Fault fault = Fault::kNone);

// ---- scores ----
// Of one logit and its derivative there; softmax is one of a whole row and has none.
double score_value(Score score, double z);
double score_slope(Score score, double z, double value);

// ---- router ----
Gate gate_forward(const Config& config, const Inputs& in);
// d_logits, d_expert_x -> x, router_x, gate_weight, gate_bias, input_scale.
void gate_backward(const Config& config, const Inputs& in, const Gate& gate, const Vec& d_logits,
                   const Vec& d_expert_x, Gradients* grads);
Route route_forward(const Config& config, const Inputs& in, const Vec& logits);
// d_routing_weights [T,K] -> logits, per_expert_scale.
void route_backward(const Config& config, const Inputs& in, const Route& route,
                    const Vec& d_routing_weights, Gradients* grads);
// Each expert takes its `capacity` best unmasked tokens of scores [T,E]; K = E slots by expert.
Route expert_choice(const Vec& scores, int tokens, int experts, int64_t capacity, const Mask& mask);
// Aux-loss-free balancing, in place.
void bias_update(const std::vector<int64_t>& counts, double rate, Vec* bias);

// ---- plans and rows ----
Plan build_plan(const Config& config, int tokens, int slots, const Ids& ids, const Vec& weights);
// [T,E] map -> ids and weights of `slots` slots by ascending id, the rest -1 and 0.
void from_map(const Mask& map, const Vec& probs, int tokens, int experts, int slots, Ids* ids,
              Vec* weights);
// TransformerEngine's mask map [T,2E+1]; undefined entries are -1. 5.1 of the numerics notes.
Ids te_row_id_map(const Mask& map, int tokens, int experts);
Ids te_pad_offsets(const Mask& map, int tokens, int experts, int align);
// TransformerEngine's index map [K*T] of ids [T,K]; rows >= num_out are -1.
Ids te_index_map(const Ids& ids, int tokens, int slots, int64_t num_out);
Vec permute(const Plan& plan, const Vec& x, int width);
Vec permute_backward(const Plan& plan, int tokens, int slots, const Vec& d_rows, int width);
Vec unpermute(const Plan& plan, int tokens, int slots, const Vec& rows, const Vec& weights,
              int width);
void unpermute_backward(const Plan& plan, int slots, const Vec& rows, const Vec& weights,
                        const Vec& d_y, int width, Vec* d_rows, Vec* d_routing_weights);

// ---- experts ----
Vec experts_forward(const Config& config, const Inputs& in, const Vec& x, const Route& route,
                    const Plan& plan);
// Returns the gradient at x; fills routing_weights and every weight's gradient.
Vec experts_backward(const Config& config, const Inputs& in, const Vec& x, const Route& route,
                     const Plan& plan, const Vec& d_y, Gradients* grads);

// ---- quantised matrices ----
// Codes [E,N,K] of one matrix with scales and zero points [E,N]; symmetric ones have no zeros.
struct Coded {
  Vec codes, scales, zeros;
};
struct CodedMlp {  // a matrix without codes is plain
  Coded gate, up, down;
};
// INT8 in channels -> [E,N,K]: (code - zero) * scale in fp32, then rounded once.
Vec dequantise_int8(const Coded& matrix, Rounding rounding);

// ---- the layer ----
Layer forward(const Config& config, const Inputs& in);
// d_logits_in [T,C]: gradient of auxiliary losses at the logits; may be empty.
Gradients backward(const Config& config, const Inputs& in, const Layer& layer, const Vec& d_y,
                   const Vec& d_logits_in = {});

// ---- auxiliary losses ----
struct LossConfig {
  LossKind kind = LossKind::kMixtral;
  int experts = 0;
  int top_k = 1;
  double coefficient = 1;
  int64_t seq_len = 0;
  Score score = Score::kSoftmax;  // Switch, sequence
  Fault fault = Fault::kNone;
};
struct Loss {
  double value = 0;
  std::vector<Vec> d_logits;  // per layer [T,E]
};
// logits: one [T,E] per layer; mask [T] is the same for each; counts [E] replaces n_e (Switch).
Loss aux_loss(const LossConfig& config, const std::vector<Vec>& logits, const Mask& mask = {},
              const std::vector<int64_t>& counts = {});

}  // namespace moec::oracle
