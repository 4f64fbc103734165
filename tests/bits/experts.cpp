// SPDX-License-Identifier: Apache-2.0
// The cases of the experts: each variation at each frame, then shapes, with a few variations.
#include <initializer_list>

#include "experts_case.h"

namespace moec::bits {
namespace {

struct Frame {
  const char* name;
  int64_t tokens, hidden, inter;
  int32_t experts = 8, top_k = 2;
};

struct ActivationCase {
  const char* name;
  bool gated;
  moec_activation kind;
};
constexpr ActivationCase kActivations[] = {
    {"gptoss", true, activation(MOEC_ACT_GPTOSS, {.limit = 1})},
    {"clamp_swiglu", true, activation(MOEC_ACT_CLAMP_SWIGLU, {.limit = 1})},
    {"swiglu_clamp", true, activation(MOEC_ACT_SWIGLU_CLAMP, {.limit = 1})},
    {"geglu_tanh", true, activation(MOEC_ACT_GEGLU_TANH)},
    {"geglu_erf", true, activation(MOEC_ACT_GEGLU_ERF)},
    {"quick_geglu", true, activation(MOEC_ACT_QUICK_GEGLU, {.offset = 1})},
    {"situ", true, activation(MOEC_ACT_SITU)},
    {"situ_bounded", true, activation(MOEC_ACT_SITU, {.beta = 1.5f, .linear_beta = 2})},
    {"relu2", false, activation(MOEC_ACT_RELU2)},
    {"silu", false, activation(MOEC_ACT_SILU)},
    {"identity", false, activation(MOEC_ACT_IDENTITY)},
};

void activate(const ActivationCase& a, moec_activation* to, WeightForm* form) {
  *to = a.kind;
  if (!a.gated) form->gate_layout = MOEC_GATE_NONE;
}

struct Variation {
  const char* name;
  void (*apply)(ExpertsCase& e);
};

void add_shared(ExpertsCase& e, uint32_t kind) {
  e.shared = kind;
  e.shared_inter = e.inter / 2 + e.inter % 2;
}
void add_everything(ExpertsCase& e) {
  add_shared(e, MOEC_SHARED_SOFTMAX2);
  e.shared_form.biases = e.form.biases = e.output_bias = e.residual = true;
  e.shared_form.gate_layout = MOEC_GATE_NONE;
  e.shared_activation.kind = MOEC_ACT_RELU2;
  e.output_scale = 1.5f;
}

constexpr Variation kPlain = {"plain", [](ExpertsCase&) {}};
constexpr Variation kBiases = {"biases", [](ExpertsCase& e) { e.form.biases = true; }};
constexpr Variation kShared = {"shared_sigmoid",
                               [](ExpertsCase& e) { add_shared(e, MOEC_SHARED_SIGMOID_GATE); }};
constexpr Variation kStorage[] = {
    {"split", [](ExpertsCase& e) { e.form.gate_layout = MOEC_GATE_SPLIT; }},
    {"split_biases",
     [](ExpertsCase& e) {
       e.form.gate_layout = MOEC_GATE_SPLIT;
       e.form.biases = true;
     }},
    {"up_then_gate",
     [](ExpertsCase& e) {
       e.form.gate_layout = MOEC_UP_THEN_GATE;
       e.form.biases = true;
     }},
    {"interleaved",
     [](ExpertsCase& e) {
       e.form.gate_layout = MOEC_GATE_INTERLEAVED;
       e.form.biases = true;
     }},
    {"in_out",
     [](ExpertsCase& e) { e.form.gate_up_orientation = e.form.down_orientation = MOEC_IN_OUT; }},
    {"gate_up_in_out", [](ExpertsCase& e) { e.form.gate_up_orientation = MOEC_IN_OUT; }},
    {"down_in_out", [](ExpertsCase& e) { e.form.down_orientation = MOEC_IN_OUT; }},
    {"gptoss_layout",
     [](ExpertsCase& e) {
       e.form = {.gate_layout = MOEC_GATE_INTERLEAVED,
                 .gate_up_orientation = MOEC_IN_OUT,
                 .down_orientation = MOEC_IN_OUT,
                 .biases = true};
       e.activation = activation(MOEC_ACT_GPTOSS, {.limit = 1});
     }},
    kBiases,
    {"biases_f32",
     [](ExpertsCase& e) {
       e.form.biases = true;
       e.form.bias_dtype = MOEC_F32;
     }},
    {"per_expert", [](ExpertsCase& e) { e.form.per_expert = e.form.biases = true; }},
    {"per_expert_split",
     [](ExpertsCase& e) {
       e.form.per_expert = true;
       e.form.gate_layout = MOEC_GATE_SPLIT;
     }},
    {"frozen", [](ExpertsCase& e) { e.form.frozen = e.form.biases = true; }},
    {"frozen_in_out",
     [](ExpertsCase& e) {
       e.form.frozen = e.few_gradients = true;
       e.form.gate_up_orientation = e.form.down_orientation = MOEC_IN_OUT;
     }},
    {"frozen_interleaved_per_expert",
     [](ExpertsCase& e) {
       e.form.frozen = e.form.per_expert = true;
       e.form.gate_layout = MOEC_GATE_INTERLEAVED;
     }},
};
constexpr Variation kArithmetic[] = {
    {"on_activation",
     [](ExpertsCase& e) {
       e.weight_position = MOEC_WEIGHT_ON_ACTIVATION;
       e.form.biases = true;
     }},
    {"on_input",
     [](ExpertsCase& e) {
       e.weight_position = MOEC_WEIGHT_ON_INPUT;
       e.form.biases = true;
     }},
    {"combine_by_expert", [](ExpertsCase& e) { e.combine = MOEC_COMBINE_FP32_EXPERT; }},
    {"combine_in_data", [](ExpertsCase& e) { e.combine = MOEC_COMBINE_DATA_EXPERT; }},
    {"per_op", [](ExpertsCase& e) { e.act_rounding = MOEC_ACT_PER_OP; }},
    {"per_op_gptoss",
     [](ExpertsCase& e) {
       e.act_rounding = MOEC_ACT_PER_OP;
       e.activation = activation(MOEC_ACT_GPTOSS, {.limit = 1});
       e.form.biases = true;
     }},
    {"save_none", [](ExpertsCase& e) { e.save = MOEC_SAVE_NONE; }},
    {"save_input",
     [](ExpertsCase& e) {
       e.save = MOEC_SAVE_INPUT;
       e.form.biases = true;
     }},
    {"save_preact", [](ExpertsCase& e) { e.save = MOEC_SAVE_PREACT; }},
    {"save_input_shared",
     [](ExpertsCase& e) {
       e.save = MOEC_SAVE_INPUT;
       add_shared(e, MOEC_SHARED_SIGMOID_GATE);
     }},
    {"output_terms",
     [](ExpertsCase& e) {
       e.output_scale = 2.5f;
       e.output_bias = e.residual = true;
     }},
    {"accumulate",
     [](ExpertsCase& e) {
       e.accumulate = true;
       add_everything(e);
     }},
    {"accumulate_own_type",
     [](ExpertsCase& e) {
       e.accumulate = e.form.biases = true;
       e.grad_dtype = 0;
     }},
    {"grads_of_own_type",
     [](ExpertsCase& e) {
       e.grad_dtype = 0;
       add_everything(e);
     }},
    {"parameters_f32",
     [](ExpertsCase& e) {
       add_everything(e);
       e.parameter_dtype = MOEC_F32;
     }},
    {"few_gradients",
     [](ExpertsCase& e) {
       add_everything(e);
       e.few_gradients = true;
     }},
    {"shared_add",
     [](ExpertsCase& e) {
       add_shared(e, MOEC_SHARED_ADD);
       e.output_scale = 2.5f;
     }},
    kShared,
    {"shared_softmax2", [](ExpertsCase& e) { add_shared(e, MOEC_SHARED_SOFTMAX2); }},
    {"shared_everything", add_everything},
};
constexpr Variation kPlans[] = {
    {"zero_experts", [](ExpertsCase& e) { e.zero_experts = 3; }},
    {"nobodys", [](ExpertsCase& e) { e.nobodys = true; }},
    {"expert_choice", [](ExpertsCase& e) { e.choice_capacity = 1 + e.tokens / 4; }},
    {"expert_choice_aligned",
     [](ExpertsCase& e) {
       e.choice_capacity = 1 + e.tokens / 5;
       e.align = 16;
       e.form.biases = true;
       e.expert_begin = 1;
       e.expert_end = 6;
     }},
    {"align", [](ExpertsCase& e) { e.align = 16; }},
    {"local_range",
     [](ExpertsCase& e) {
       e.expert_begin = 2;
       e.expert_end = 7;
       e.align = 4;
       e.form.biases = true;
     }},
    {"empty_experts",
     [](ExpertsCase& e) {
       e.busy_experts = 3;
       e.form.biases = true;
     }},
    {"top_1", [](ExpertsCase& e) { e.top_k = 1; }},
    {"top_6",
     [](ExpertsCase& e) {
       e.top_k = 6;
       e.combine = MOEC_COMBINE_FP32_EXPERT;
     }},
};

ExpertsCase case_of(const Frame& frame, const DtypeName& type) {
  ExpertsCase e = {.tokens = frame.tokens, .hidden = frame.hidden, .inter = frame.inter};
  e.experts = frame.experts;
  e.top_k = frame.top_k;
  e.dtype = type.dtype;
  return e;
}

void run(const moec_context* context, const Frame& frame, const DtypeName& type,
         const Variation& variation) {
  ExpertsCase e = case_of(frame, type);
  variation.apply(e);
  run_case(context, std::string("experts/") + frame.name + "/" + type.name + "/" + variation.name,
           [&](Case& c) { run_experts(c, e); });
}

void run_activations(const moec_context* context, const Frame& frame, const DtypeName& type) {
  for (const ActivationCase& a : kActivations)
    for (const bool biases : {false, true}) {
      ExpertsCase e = case_of(frame, type);
      e.form.biases = biases;
      activate(a, &e.activation, &e.form);
      if (biases) {  // with a shared expert, and recomputed
        add_shared(e, MOEC_SHARED_ADD);
        activate(a, &e.shared_activation, &e.shared_form);
        e.save = MOEC_SAVE_PREACT;
      }
      run_case(context,
               std::string("experts/") + frame.name + "/" + type.name + "/act_" + a.name +
                   (biases ? "_shared" : ""),
               [&](Case& c) { run_experts(c, e); });
    }
}

constexpr Frame kFrames[] = {{"aligned", 300, 256, 384},
                             {"unaligned", 37, 100, 77, 8, 3}};  // two terms have no order
constexpr Frame kFew[] = {
    {"no_tokens", 0, 256, 384},          {"one_token", 1, 256, 384},
    {"two_tokens", 2, 256, 384},         {"seven_tokens", 7, 256, 384},
    {"one_token_unaligned", 1, 100, 77}, {"seven_tokens_unaligned", 7, 100, 77},
    {"tokens_16", 16, 128, 192, 16, 4},  {"tokens_64", 64, 128, 192, 32, 4},
    {"tokens_150", 150, 192, 136, 3, 2}, {"one_expert", 90, 128, 64, 1, 1},
};
// Shapes by which the kernels of a GPU are chosen.
constexpr Frame kWide[] = {
    {"wide_1000", 1000, 1024, 768},        {"wide_3000", 3000, 1024, 512, 4, 2},
    {"wide_8192", 8192, 2048, 1280, 4, 2}, {"long_hidden", 300, 5120, 256, 4, 2},
    {"long_inter", 300, 256, 5120, 4, 2},  {"many_experts", 512, 512, 256, 128, 8},
    {"few_of_many", 8, 2048, 768, 128, 8}, {"tokens_32", 32, 2048, 768, 64, 6},
};

}  // namespace

void experts_cases(const moec_context* context, bool is_cuda) {
  for (const Frame& frame : kFrames)
    for (const DtypeName& type : kReals) {
      run(context, frame, type, kPlain);
      for (const Variation& variation : kStorage) run(context, frame, type, variation);
      for (const Variation& variation : kArithmetic) run(context, frame, type, variation);
      for (const Variation& variation : kPlans) run(context, frame, type, variation);
      run_activations(context, frame, type);
    }
  for (const Frame& frame : kFew)
    for (const DtypeName& type : kReals)
      for (const Variation& variation : {kPlain, kBiases, kShared})
        run(context, frame, type, variation);
  if (!is_cuda) return;
  for (const Frame& frame : kWide)
    for (const DtypeName& type : {kReals[1], kReals[2]})
      for (const Variation& variation : {kPlain, kBiases, kShared})
        run(context, frame, type, variation);
}

}  // namespace moec::bits
