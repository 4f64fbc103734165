// SPDX-License-Identifier: Apache-2.0
// The whole layer, forward and backward, as a few model families have it.
#include <optional>

#include "experts_case.h"

namespace moec::bits {
namespace {

struct LayerCase {
  moec_router_desc router = sized<moec_router_desc>();
  moec_experts_desc experts = sized<moec_experts_desc>();
  WeightForm form = {}, shared_form = {};
  uint32_t drop = MOEC_DROP_NONE;
  float capacity_factor = 0;
  int64_t tokens = 0;
  bool router_x = false, d_logits = false, accumulate = false;
};

struct Family {
  const char* name;
  void (*apply)(LayerCase& l);
};

constexpr Family kFamilies[] = {
    {"mixtral", [](LayerCase& l) { l.router.norm = MOEC_NORM_SUM; }},
    {"gpt_oss",
     [](LayerCase& l) {
       l.router.flags = MOEC_ROUTER_LOGIT_BIAS;
       l.router.weight_rule = MOEC_WEIGHT_SOFTMAX_SELECTED;
       l.experts.activation = activation(MOEC_ACT_GPTOSS);
       l.form = {.gate_layout = MOEC_GATE_INTERLEAVED,
                 .gate_up_orientation = MOEC_IN_OUT,
                 .down_orientation = MOEC_IN_OUT,
                 .biases = true};
     }},
    {"deepseek",
     [](LayerCase& l) {
       l.router.flags = MOEC_ROUTER_SELECT_BIAS;
       l.router.score = MOEC_SCORE_SIGMOID;
       l.router.selection = MOEC_SELECT_GROUP_TOPK;
       l.router.num_groups = 4;
       l.router.top_groups = 2;
       l.router.group_top_m = 2;
       l.router.norm = MOEC_NORM_SUM;
       l.router.scale = 2.5f;
       l.experts.shared = MOEC_SHARED_ADD;
       l.d_logits = true;
     }},
    {"qwen",
     [](LayerCase& l) {
       l.experts.shared = MOEC_SHARED_SIGMOID_GATE;
       l.experts.save = MOEC_SAVE_PREACT;
     }},
    {"zero_experts",
     [](LayerCase& l) {
       l.router.num_zero_experts = 4;
       l.router.flags = MOEC_ROUTER_PER_EXPERT_SCALE;
     }},
    {"jitter",
     [](LayerCase& l) {
       l.router.jitter = 0.1f;
       l.router.flags = MOEC_ROUTER_JITTER_X;
     }},
    {"router_x",
     [](LayerCase& l) {
       l.router_x = l.accumulate = true;
       l.router.input = MOEC_INPUT_RMS_SCALED;
       l.experts.save = MOEC_SAVE_INPUT;
     }},
    {"dropping",
     [](LayerCase& l) {
       l.drop = MOEC_DROP_BY_WEIGHT;
       l.capacity_factor = 1;
       l.experts.align = 8;
     }},
    {"sparse_mixer",
     [](LayerCase& l) {
       l.router.selection = MOEC_SELECT_SPARSE_MIXER;
       l.router.top_k = 2;
       l.router.mixer_eps = 0.02f;
       l.form.gate_layout = MOEC_GATE_SPLIT;
     }},
    {"inference",
     [](LayerCase& l) {
       l.experts.save = MOEC_SAVE_NONE;
       l.form.frozen = true;
     }},
};

struct Frame {
  const char* name;
  int64_t tokens, hidden, inter;
};
constexpr Frame kFrames[] = {
    {"aligned", 300, 256, 384}, {"unaligned", 37, 100, 77}, {"few", 3, 128, 64}};
constexpr int32_t kExperts = 8, kTopK = 3;  // two terms have no order
constexpr int64_t kSharedInter = 80;

class Run {
 public:
  Run(Case& c, const LayerCase& l)
      : c_(c),
        l_(l),
        type_(l.experts.dtype),
        tokens_(l.tokens),
        hidden_(l.experts.hidden),
        columns_(kExperts + l.router.num_zero_experts) {}
  void operator()() {
    create();
    forward();
    if (l_.experts.save != MOEC_SAVE_NONE) backward();
    c_.finish();
  }

 private:
  void create();
  void forward();
  void backward();
  bool has_shared() const { return l_.experts.shared != MOEC_SHARED_NONE; }
  bool has_flag(uint32_t flag) const { return l_.router.flags & flag; }
  moec_tensor gradient(const char* name, moec_dtype dtype, const Shape& shape) {
    return l_.accumulate ? c_.sum(name, dtype, shape) : c_.output(name, dtype, shape);
  }
  moec_tensor gradient_of(const moec_tensor& parameter, const char* name) {
    if (!parameter.data) return {};
    return gradient(name, MOEC_F32, Shape(parameter.shape, parameter.shape + parameter.ndim));
  }

  Case& c_;
  const LayerCase& l_;
  const moec_dtype type_;
  const int64_t tokens_, hidden_, columns_;
  Layer layer_;
  Weights weights_, shared_;
  std::optional<WeightTensors> tensors_, shared_tensors_, d_tensors_, d_shared_tensors_;
  moec_experts_sizes sizes_ = sized<moec_experts_sizes>();
  moec_layer_args args_ = sized<moec_layer_args>();
  moec_layer_grad_args grad_ = sized<moec_layer_grad_args>();
};

void Run::create() {
  auto desc = sized<moec_layer_desc>();
  desc.router = &l_.router;
  desc.experts = &l_.experts;
  desc.drop = l_.drop;
  desc.capacity_factor = l_.capacity_factor;
  layer_ = make<Layer>("layer_create", moec_layer_create, c_.context(), &desc);
  require("layer_query", moec_layer_query(layer_.get(), &sizes_));
  c_.number("forward_workspace", sizes_.forward_workspace);
  c_.number("backward_workspace", sizes_.backward_workspace);
  c_.number("saved_bytes", sizes_.saved);
  const int64_t inter = l_.experts.inter;
  tensors_.emplace(c_, "w", l_.form, kExperts, hidden_, inter, type_, WeightTensors::Use::kInput);
  weights_ = bind_weights(c_, *tensors_, l_.form, kExperts, hidden_, inter, type_);
  if (!has_shared()) return;
  shared_tensors_.emplace(c_, "s", l_.shared_form, 1, hidden_, kSharedInter, type_,
                          WeightTensors::Use::kInput);
  shared_ = bind_weights(c_, *shared_tensors_, l_.shared_form, 1, hidden_, kSharedInter, type_);
}

void Run::forward() {
  const Shape x = {tokens_, hidden_};
  args_.rng_offset = 5;
  args_.weights = weights_.get();
  args_.shared_weights = shared_.get();
  args_.x = c_.input(type_, x);
  if (l_.router_x) args_.router_x = c_.input(type_, x);
  args_.gate_weight = c_.input(type_, {columns_, hidden_}, {.scale = 0.2});
  if (has_flag(MOEC_ROUTER_LOGIT_BIAS)) args_.gate_bias = c_.input(type_, {columns_});
  if (l_.router.input == MOEC_INPUT_RMS_SCALED) args_.input_scale = c_.input(type_, {hidden_});
  if (has_flag(MOEC_ROUTER_SELECT_BIAS)) args_.select_bias = c_.input(MOEC_F32, {columns_});
  if (has_flag(MOEC_ROUTER_PER_EXPERT_SCALE)) args_.per_expert_scale = c_.input(type_, {columns_});
  if (l_.experts.shared == MOEC_SHARED_SIGMOID_GATE)
    args_.shared_gate = c_.input(type_, {1, hidden_}, {.scale = 0.2});
  args_.y = c_.output("y", type_, x);
  args_.logits = c_.output("logits", MOEC_F32, {tokens_, columns_});
  args_.expert_ids = c_.output("expert_ids", MOEC_I32, {tokens_, l_.router.top_k});
  args_.routing_weights = c_.output("routing_weights", MOEC_F32, {tokens_, l_.router.top_k});
  args_.counts = c_.sum("counts", MOEC_I32, {columns_});
  args_.saved = c_.output_bytes("saved", bytes_for(sizes_.saved, tokens_));
  args_.workspace = c_.workspace(bytes_for(sizes_.forward_workspace, tokens_));
  require("forward", moec_layer_forward(layer_.get(), &args_, nullptr));
}

void Run::backward() {
  const Shape x = {tokens_, hidden_};
  const auto use = l_.accumulate ? WeightTensors::Use::kSum : WeightTensors::Use::kOutput;
  if (l_.accumulate) grad_.flags = MOEC_GRAD_ACCUMULATE | MOEC_GRAD_ACCUMULATE_X;
  grad_.forward = &args_;
  grad_.d_y = c_.input(type_, x);
  if (l_.d_logits) grad_.d_logits_in = c_.input(MOEC_F32, {tokens_, columns_}, {.scale = 0.1});
  grad_.d_x = gradient("d_x", type_, x);
  if (l_.router_x) grad_.d_router_x = gradient("d_router_x", type_, x);
  grad_.d_gate_weight = gradient_of(args_.gate_weight, "d_gate_weight");
  grad_.d_gate_bias = gradient_of(args_.gate_bias, "d_gate_bias");
  grad_.d_input_scale = gradient_of(args_.input_scale, "d_input_scale");
  grad_.d_per_expert_scale = gradient_of(args_.per_expert_scale, "d_per_expert_scale");
  grad_.d_shared_gate = gradient_of(args_.shared_gate, "d_shared_gate");
  grad_.d_routing_weights = c_.output("d_routing_weights", MOEC_F32, {tokens_, l_.router.top_k});
  d_tensors_.emplace(c_, "d_w", l_.form, kExperts, hidden_, l_.experts.inter, MOEC_F32, use);
  grad_.d_expert_weights = d_tensors_->set();
  if (has_shared()) {
    d_shared_tensors_.emplace(c_, "d_s", l_.shared_form, 1, hidden_, kSharedInter, MOEC_F32, use);
    grad_.d_shared_weights = d_shared_tensors_->set();
  }
  grad_.workspace = c_.workspace(bytes_for(sizes_.backward_workspace, tokens_));
  require("backward", moec_layer_backward(layer_.get(), &grad_, nullptr));
}

}  // namespace

void layer_cases(const moec_context* context) {
  for (const Frame& frame : kFrames)
    for (const DtypeName& type : kReals)
      for (const Family& family : kFamilies) {
        LayerCase l;
        l.tokens = frame.tokens;
        l.router.num_experts = l.experts.num_experts = kExperts;
        l.router.top_k = kTopK;
        l.router.data_dtype = l.experts.dtype = type.dtype;
        l.experts.hidden = frame.hidden;
        l.experts.inter = frame.inter;
        l.experts.save = MOEC_SAVE_ALL;
        family.apply(l);
        l.experts.top_k = l.router.top_k;
        l.experts.num_zero_experts = l.router.num_zero_experts;
        l.experts.gate_layout = l.form.gate_layout;
        if (l.experts.shared != MOEC_SHARED_NONE) l.experts.shared_inter = kSharedInter;
        run_case(context, std::string("layer/") + frame.name + "/" + type.name + "/" + family.name,
                 [&](Case& c) { Run(c, l)(); });
      }
}

}  // namespace moec::bits
