// SPDX-License-Identifier: Apache-2.0
// A call of the experts as a list of steps. src/experts writes it; a path of a backend runs it, or
// says why it cannot before anything is queued. A path may take neighbouring steps together.
//
// T tokens, P rows of the plan, H hidden, I inter.
#pragma once

#include <array>
#include <span>
#include <string>
#include <variant>

#include "backend/adapters.h"
#include "backend/product.h"

namespace moec {

// The routed experts of a call, or its shared expert, which is one group of all tokens.
struct Mlp {
  const WeightsView* weights = nullptr;    // null: there is none
  const WeightsView* gradients = nullptr;  // wanted; null: none
  moec_activation activation = {};
  uint32_t act_rounding = 0;  // moec_act_rounding
  moec_dtype dtype = 0;       // of x, activations and their gradients
  int64_t hidden = 0, inter = 0;
  int64_t num_rows = 0;  // rows that count as work
  RowGroups groups;
  const int32_t* row_token = nullptr;  // [P] token of a row; null: the row itself
  RowOperand x;                        // input of a row: of its token, or a row of its own
  LowRank gate_up_adapters, down_adapters;

  explicit operator bool() const { return weights != nullptr; }
  bool gated() const { return weights->gated; }
  int parts() const { return gated() ? 2 : 1; }
  uint64_t flops(int matrices) const {
    return 2 * uint64_t(matrices) * uint64_t(num_rows * hidden * inter);
  }
};

// Gate and up of the same rows: element (r, i) at gate or up + r * stride + i (elements). No gate:
// a plain MLP.
struct PartRows {
  void *gate = nullptr, *up = nullptr;
  int64_t stride = 0;
  explicit operator bool() const { return up != nullptr; }
};

// The gate of the shared expert: y = c0 routed + c1 shared, with
//   SIGMOID_GATE  c = (1, sigmoid(x . wg))        SOFTMAX2  c = softmax(x Wc^T + bc)
struct SharedGate {
  const moec_experts_desc* desc;
  int64_t num_tokens;
  Array x, weight, bias;  // [T,H]; [1,H] or [2,H]; [2], optional
  int logits() const { return desc->shared == MOEC_SHARED_SOFTMAX2 ? 2 : 1; }
};

// ---- steps of both directions
struct ListTokens {  // the shared expert's group: offsets {0, T}, tokens 0 .. T - 1
  int64_t num_tokens;
  int32_t *offsets, *tokens;  // tokens: optional
};
struct ScaleRows {  // to[row] = x[token of row] * weight[row], rounded; a zero weight gives zeros
  const Mlp* mlp;
  Array x;
  const float* weight;  // [P]
  void* to;             // [P,H]
};
struct MixForward {  // mix[t] = (c0, c1)
  SharedGate gate;
  float* mix;  // [T,2]
};
struct Up {  // pre = x W^T + bias; act = activation(pre) * act_weight
  const Mlp* mlp;
  PartRows pre;             // of type Between::pre; out, optional
  void* act;                // [P,I]; out, optional
  const float* act_weight;  // [P], null = 1
  const void* narrow;       // [P,R] of x beside gate_up_adapters: pre += narrow B^T; null: none
};

// ---- adapters (backend/adapters.h)
struct PackFactors {  // the copies of a list that `to` points to
  const FactorList* from;
  const LowRank* to;
  int64_t in, out;
  int32_t num_experts;
  bool copies_a, copies_b;  // what is not copied is read as it is bound
};
// to = scale (sum of the terms), rounded; zeros for ranks of other adapters than the token's.
struct NarrowRows {
  const Mlp* mlp;
  const LowRank* adapters;
  RowProduct product;  // its matrices are those of `adapters`
  void* to;            // [P,R]
};
struct FactorGrads {  // of each factor that `to` has
  const Mlp* mlp;
  const FactorList* to;
  RowOperand x, d_out[2];         // inputs of A, and gradients at the outputs of each B
  int64_t in, out, rank;          // rank: R
  const void *narrow, *d_narrow;  // [P,R] t and u
  float* sums;                    // [experts, largest_shared_rank, in]
  bool accumulate;
};

// ---- forward
struct Down {  // rows = act W^T + bias * bias_weight
  const Mlp* mlp;
  const void* act;
  const float* bias_weight;  // [P], null = 1
  Array rows;                // [P,H]; absent: the combine after it takes the sums as they come
  const void* narrow;        // [P,R] of act beside down_adapters: rows += narrow B^T; null: none
};
struct Combine {  // y = residual + c0 output_scale sum(w rows) + output_bias + c1 shared
  const moec_experts_desc* desc;
  const PlanView* plan;
  Array rows;               // [P,H], before a weight on the output
  Array shared;             // [T,H], absent: `shared_down` is taken together with this step
  const Down* shared_down;  // null without shared expert
  const float* mix;         // [T,2], null = 1
  Array x, output_bias, residual, y;
  bool skip_absent;  // rows of y of tokens without a row in the plan are not written
};
// Zeros for the padding rows of [P, bytes_of_row] at `begin`, and from the last row to `end`.
struct ClearPadding {
  const Mlp* mlp;
  int64_t bytes_of_row;
  void *begin, *end;
};

// ---- backward
struct RowFactors {  // d(y) / d(expert output): weight (1 on the input) * output_scale * c0
  const Mlp* mlp;
  const moec_experts_desc* desc;
  const PlanView* plan;
  const float* mix;  // [T,2], null = 1
  float* factor;     // [P]
};
struct MixFactors {  // c1 of each token
  int64_t num_tokens;
  const float* mix;  // [T,2], null = 1
  float* factor;     // [T]
};
struct ActGrad {  // q = d_y Wd of the row's token; d_pre = factor q slopes; dots = <q, act>
  const Mlp* mlp;
  Array d_y;     // [T,H]
  PartRows pre;  // of type Between::pre
  Array d_act;   // [P,I], room for q where Between::keeps_d_act
  PartRows d_pre;
  void* weighted;       // [P,I] factor * act
  const float* factor;  // [P]
  float* dots;          // [P * dot_floats]
  bool wants_d_pre, wants_weighted, wants_dots;
  const void* narrow;  // [P,R] of d_y beside down_adapters: q += narrow A; null: none
};
struct BiasDots {  // dots += <d_y of the row's token, bias of down>
  const Mlp* mlp;
  Array d_y;
  float* dots;
};
struct InputGrad {  // rows = d_gate Wg + d_up Wu, the gradient at the rows' inputs
  const Mlp* mlp;
  PartRows d_pre;
  Array rows;          // [P,H]; absent: the combine after it takes the sums as they come
  Array x;             // [T,H], of input_dots
  float* input_dots;   // [P * input_dot_floats] of <row, x of its token>; out, optional
  const void* narrow;  // [P,R] of d_pre beside gate_up_adapters: rows += narrow A; null: none
};
struct WeightGrads {  // of each matrix and bias that mlp->gradients has
  const Mlp* mlp;
  Array d_y;  // [T,H]
  PartRows d_pre;
  const void* weighted;
  const float* factor;  // of d_y in the gradient of down's bias
  bool accumulate;
};
struct Dots {  // what is known of <d_y, output> of the rows
  const Mlp* mlp;
  const float *dots, *input_dots;
  bool biased;  // down has a bias
};
struct GateGrad {  // d_logits, and the gradients of the shared expert's gate
  SharedGate gate;
  const PlanView* plan;
  Dots routed, shared;
  const float* mix;
  Array d_y;
  float* d_logits;       // [T,2]
  Array d_gate, d_bias;  // out, optional
  bool accumulate;
};
struct CombineGrad {  // d_x (+)= rows (weighted on the input) + identity experts + gate + shared
  const moec_experts_desc* desc;
  const PlanView* plan;
  Dots dots;
  Array rows, shared;            // [P,H]; [T,H] as in Combine
  const InputGrad* shared_grad;  // null without shared expert
  const float *mix, *d_logits;   // [T,2]; d_logits: null = no gate
  Array shared_gate, x, d_y;
  Array d_x;                 // [T,H]; out, optional
  float* d_routing_weights;  // [T,K], or [P] for expert choice; out, optional
  bool accumulate;           // d_x
};
struct DirectGrads {  // gradients that are d_y itself, or its sum
  int64_t num_tokens, hidden;
  Array d_y;
  Array d_output_bias;  // [H]; out, optional
  void* d_residual;     // [T,H]; out, optional
  bool accumulate;      // d_output_bias
};

using Step = std::variant<ListTokens, ScaleRows, MixForward, Up, Down, Combine, ClearPadding,
                          RowFactors, MixFactors, ActGrad, BiasDots, InputGrad, WeightGrads,
                          GateGrad, CombineGrad, DirectGrads, PackFactors, NarrowRows, FactorGrads>;

// Steps point to the MLPs beside them.
struct Program {
  static constexpr int kMostSteps = 32;
  const moec_experts_desc* desc = nullptr;
  const PlanView* plan = nullptr;
  int64_t num_tokens = 0;
  void* scratch = nullptr;                     // of Between::scratch
  WeightsView routed_weights, shared_weights;  // as products read them
  Mlp routed, shared;
  uint64_t flops = 0;  // of all steps, on rows that count
  int num_steps = 0;
  std::array<Step, kMostSteps> steps;

  Program() = default;
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  bool has_adapters() const { return routed.gate_up_adapters || routed.down_adapters; }
  template <class T>
  const T* add(const T& step) {
    return &(steps[size_t(num_steps++)].template emplace<T>(step));
  }
};

// How the shared expert's group of all tokens is given: not at all, with offsets, or with its
// tokens as well, like a plan's groups.
enum class SharedGroup { kNone, kOffsets, kTokens };

// What lies between the steps of a path.
struct Between {
  moec_dtype pre = 0;           // pre-activations
  moec_dtype d_act = 0;         // gradient at the activations, before the routing weight
  moec_dtype rows = 0;          // outputs of rows, gradients at their inputs
  bool parts_apart = false;     // gate and up lie in an array each, else in one [rows, 2, I]
  bool keeps_pre = false;       // Up writes pre-activations, saved or not: where `rows` will be
  bool keeps_d_act = false;     // ActGrad writes its q, likewise
  bool recomputes_act = false;  // an Up of the backward writes activations, too
  bool fuses_shared = false;    // the combine takes the shared expert's last product
  SharedGroup shared_group = SharedGroup::kNone;
  bool adds_bias_dots = false;  // BiasDots is a step of its own
  bool host_plan = false;       // the host can read the plan, so that Mlp::num_rows is exact
  // The form of factors beside such matrices: gate and up, or down and null. Null: any.
  FactorForm (*factor_form)(const ExpertMatrix& first, const ExpertMatrix* second) = nullptr;
  // Floats of a row: in dots, by I, and in input_dots, by H.
  int64_t (*dot_floats)(int64_t) = nullptr;
  int64_t (*input_dot_floats)(int64_t) = nullptr;
  uint64_t scratch = 0;  // bytes for the path itself, in forward and in backward
};

// Of calls that a path ran, in the order of moec_stats.
enum class PathCounter { kCpu, kPortable, kSm90, kFewTokens, kFewRows };
inline constexpr int kPathCounters = 5;

// What is known of a call before it is recorded.
struct ExpertsCall {
  const moec_experts_desc& desc;
  const WeightsView& weights;
  const PlanView& plan;
  bool is_backward;
};

// One way of a backend to run the experts.
class ExpertsPath {
 public:
  explicit ExpertsPath(PathCounter counts_as) : counter(counts_as) {}
  virtual ~ExpertsPath() = default;
  const PathCounter counter;
  virtual const char* name() const = 0;
  // Why it never takes such a description, or null.
  virtual const char* refuses(const moec_experts_desc& desc) const = 0;
  // Why it leaves such a call to others, where that is known before the call is recorded, or null.
  virtual const char* leaves(const ExpertsCall&) const { return nullptr; }
  // What lies between the steps of a call, forward or backward.
  virtual Between between(const moec_experts_desc& desc) const = 0;
  // Queues the whole program, or says why not before anything is queued.
  virtual const char* run(const Program& program, moec_stream stream) const = 0;
  // Appends a JSON object for each kernel that run() would launch, or says why it would launch
  // none. A comma stands before each object but the first of `text`.
  virtual const char* describe(const Program& program, std::string& text) const = 0;
  // Ends the message about a call that no path takes: "; what to do", or nothing.
  virtual std::string hint() const { return {}; }
};

struct Taken {  // what ran a call
  const ExpertsPath* path;
  bool is_fallback;  // a better one, asked to run it, did not
};

using ExpertsPaths = std::span<const ExpertsPath* const>;  // best first

}  // namespace moec
