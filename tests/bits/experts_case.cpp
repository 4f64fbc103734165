// SPDX-License-Identifier: Apache-2.0
#include "experts_case.h"

#include <algorithm>
#include <cmath>
#include <optional>

namespace moec::bits {

WeightTensors::WeightTensors(Case& c, const std::string& name, const WeightForm& form,
                             int64_t experts, int64_t hidden, int64_t inter, moec_dtype dtype,
                             Use use)
    : form_(form), experts_(experts), dtype_(dtype), use_(use) {
  const bool split = form.gate_layout == MOEC_GATE_SPLIT,
             plain = form.gate_layout == MOEC_GATE_NONE;
  const uint32_t orientation = form.gate_up_orientation;
  if (!split && !plain) set_.gate_up = matrix(c, name + ".gate_up", 2 * inter, hidden, orientation);
  if (split) set_.gate = matrix(c, name + ".gate", inter, hidden, orientation);
  if (split || plain) set_.up = matrix(c, name + ".up", inter, hidden, orientation);
  set_.down = matrix(c, name + ".down", hidden, inter, form.down_orientation);
}

moec_tensor WeightTensors::stack(Case& c, const std::string& name, const Shape& shape,
                                 double scale) const {
  switch (use_) {
    case Use::kOutput:
      return c.output(name, dtype_, shape);
    case Use::kSum:
      return c.sum(name, dtype_, shape);
    default:
      return c.input(dtype_, shape, {.scale = scale});
  }
}

// Backwards: no stride leads from one expert to the next.
const moec_tensor* WeightTensors::slices(const moec_tensor& stacked) {
  std::vector<moec_tensor> parts(static_cast<size_t>(experts_));
  const Shape shape(stacked.shape + 1, stacked.shape + stacked.ndim);
  const int64_t bytes = elements(shape) * (stacked.dtype >> 8 & 0xFF) / 8;
  for (int64_t e = 0; e < experts_; ++e)
    require("tensor_make",
            moec_tensor_make(&parts[static_cast<size_t>(e)],
                             static_cast<char*>(stacked.data) + (experts_ - 1 - e) * bytes,
                             stacked.dtype, stacked.device_type, stacked.device_id,
                             stacked.ndim - 1, shape.data()));
  slices_.push_back(std::move(parts));
  return slices_.back().data();
}

moec_matrix WeightTensors::matrix(Case& c, const std::string& name, int64_t rows, int64_t inputs,
                                  uint32_t orientation) {
  const Shape shape =
      orientation == MOEC_IN_OUT ? Shape{experts_, inputs, rows} : Shape{experts_, rows, inputs};
  moec_matrix m = {};
  m.data = stack(c, name, shape, 2 / std::sqrt(static_cast<double>(inputs)));
  if (form_.biases) {
    const bool own_type = use_ == Use::kInput && form_.bias_dtype;
    m.bias = own_type ? c.input(form_.bias_dtype, {experts_, rows}, {.scale = 0.5})
                      : stack(c, name + "_bias", {experts_, rows}, 0.5);
  }
  if (!form_.per_expert) return m;
  m.count = experts_;
  m.per_expert = slices(std::exchange(m.data, moec_tensor{}));
  if (form_.biases) m.per_expert_bias = slices(std::exchange(m.bias, moec_tensor{}));
  return m;
}

Weights bind_weights(Case& c, const WeightTensors& tensors, const WeightForm& form, int32_t experts,
                     int64_t hidden, int64_t inter, moec_dtype dtype) {
  auto desc = sized<moec_weights_desc>();
  desc.flags = form.frozen ? MOEC_WEIGHTS_FROZEN : 0;
  desc.num_experts = experts;
  desc.gate_layout = form.gate_layout;
  desc.hidden = hidden;
  desc.inter = inter;
  desc.gate_up_orientation = form.gate_up_orientation;
  desc.down_orientation = form.down_orientation;
  desc.dtype = dtype;
  desc.bias_dtype = form.bias_dtype;
  auto weights = make<Weights>("weights_create", moec_weights_create, c.context(), &desc);
  require("weights_bind", moec_weights_bind(weights.get(), tensors.set()));
  auto info = sized<moec_weights_info>();
  require("weights_query", moec_weights_query(weights.get(), &info));
  if (info.packed_bytes == 0) return weights;
  c.number("packed_bytes", info.packed_bytes);
  const moec_buffer memory = c.output_bytes("packed", info.packed_bytes);
  require("weights_pack", moec_weights_pack(weights.get(), &memory, nullptr));
  return weights;
}

std::vector<int64_t> draw_ids(Draw& draw, int64_t tokens, int64_t top_k, int64_t most) {
  std::vector<int64_t> ids;
  for (int64_t t = 0; t < tokens; ++t) {
    const auto first = static_cast<std::ptrdiff_t>(ids.size());
    while (static_cast<int64_t>(ids.size()) < (t + 1) * top_k) {
      const int64_t id = draw.below(most);
      if (std::find(ids.begin() + first, ids.end(), id) == ids.end()) ids.push_back(id);
    }
  }
  return ids;
}

namespace {

using Use = WeightTensors::Use;

class Run {
 public:
  Run(Case& c, const ExpertsCase& e) : c_(c), e_(e) {}
  void operator()() {
    build_plan();
    create();
    forward();
    if (e_.save != MOEC_SAVE_NONE) backward();
    c_.finish();
  }

 private:
  void build_plan();
  void create();
  void forward();
  void backward();
  void grad_of_shared();
  int64_t mixes() const {  // rows of the shared gate
    return e_.shared == MOEC_SHARED_SOFTMAX2 ? 2 : e_.shared == MOEC_SHARED_SIGMOID_GATE;
  }
  moec_dtype parameter() const { return e_.parameter_dtype ? e_.parameter_dtype : e_.dtype; }
  moec_dtype grad_type() const { return e_.grad_dtype ? e_.grad_dtype : e_.dtype; }
  moec_tensor of_tokens(const Numbers& numbers = {}) {
    return c_.input(e_.dtype, {e_.tokens, e_.hidden}, numbers);
  }
  moec_tensor gradient(const char* name, moec_dtype dtype, const Shape& shape) {
    return e_.accumulate ? c_.sum(name, dtype, shape) : c_.output(name, dtype, shape);
  }
  std::vector<int64_t> ids();

  Case& c_;
  const ExpertsCase& e_;
  Plan plan_;
  Experts experts_;
  Weights weights_, shared_;
  std::optional<WeightTensors> tensors_, shared_tensors_, d_tensors_, d_shared_tensors_;
  moec_experts_sizes sizes_ = sized<moec_experts_sizes>();
  moec_experts_args args_ = sized<moec_experts_args>();
  moec_experts_grad_args grad_ = sized<moec_experts_grad_args>();
};

std::vector<int64_t> Run::ids() {
  const int64_t most = e_.busy_experts ? e_.busy_experts : e_.experts + e_.zero_experts;
  std::vector<int64_t> ids = draw_ids(c_.draw(), e_.tokens, e_.top_k, most);
  for (int64_t& id : ids)
    if (e_.nobodys && c_.draw().below(5) == 0) id = -1;
  return ids;
}

void Run::build_plan() {
  auto desc = sized<moec_plan_desc>();
  desc.max_tokens = e_.tokens;
  desc.num_experts = e_.experts;
  desc.num_zero_experts = e_.zero_experts;
  desc.top_k = e_.slots();
  desc.kind = e_.choice_capacity ? MOEC_PLAN_EXPERT_CHOICE : MOEC_PLAN_TOPK;
  desc.capacity = e_.choice_capacity;
  desc.expert_begin = e_.expert_begin;
  desc.expert_end = e_.expert_end;
  desc.align = e_.align;
  uint64_t bytes = 0;
  int64_t max_rows = 0;
  require("plan_size", moec_plan_size(&desc, &bytes, &max_rows));
  const moec_buffer memory = c_.workspace(bytes);
  plan_ = make<Plan>("plan_create", moec_plan_create, c_.context(), &desc, &memory);
  if (e_.choice_capacity) {
    const moec_tensor scores = c_.input(MOEC_F32, {e_.tokens, e_.experts}, {.offset = 1});
    return require("plan_from_scores",
                   moec_plan_from_scores(plan_.get(), &scores, nullptr, nullptr));
  }
  const moec_tensor id = c_.input_ids(MOEC_I32, {e_.tokens, e_.top_k}, ids());
  const moec_tensor weights =
      c_.input(MOEC_F32, {e_.tokens, e_.top_k}, {.scale = 0.5, .offset = 0.5});
  require("plan_from_topk", moec_plan_from_topk(plan_.get(), &id, &weights, nullptr));
}

void Run::create() {
  auto desc = sized<moec_experts_desc>();
  desc.hidden = e_.hidden;
  desc.inter = e_.inter;
  desc.shared_inter = e_.shared_inter;
  desc.num_experts = e_.experts;
  desc.num_zero_experts = e_.zero_experts;
  desc.top_k = e_.slots();
  desc.expert_begin = e_.expert_begin;
  desc.expert_end = e_.expert_end;
  desc.align = e_.align;
  desc.max_rows_base = e_.choice_capacity * e_.local_experts();
  desc.gate_layout = e_.form.gate_layout;
  desc.dtype = e_.dtype;
  desc.activation = e_.activation;
  desc.shared_activation = e_.shared_activation;
  desc.weight_position = e_.weight_position;
  desc.combine = e_.combine;
  desc.act_rounding = e_.act_rounding;
  desc.shared = e_.shared;
  desc.save = e_.save;
  desc.output_scale = e_.output_scale;
  experts_ = make<Experts>("experts_create", moec_experts_create, c_.context(), &desc);
  require("experts_query", moec_experts_query(experts_.get(), &sizes_));
  c_.number("forward_workspace", sizes_.forward_workspace);
  c_.number("backward_workspace", sizes_.backward_workspace);
  c_.number("saved_bytes", sizes_.saved);

  tensors_.emplace(c_, "w", e_.form, e_.local_experts(), e_.hidden, e_.inter, e_.dtype,
                   Use::kInput);
  weights_ =
      bind_weights(c_, *tensors_, e_.form, e_.local_experts(), e_.hidden, e_.inter, e_.dtype);
  if (e_.shared == MOEC_SHARED_NONE) return;
  shared_tensors_.emplace(c_, "s", e_.shared_form, 1, e_.hidden, e_.shared_inter, e_.dtype,
                          Use::kInput);
  shared_ =
      bind_weights(c_, *shared_tensors_, e_.shared_form, 1, e_.hidden, e_.shared_inter, e_.dtype);
}

void Run::forward() {
  args_.plan = plan_.get();
  args_.weights = weights_.get();
  args_.shared_weights = shared_.get();
  args_.x = of_tokens();
  if (mixes()) args_.shared_gate = c_.input(parameter(), {mixes(), e_.hidden}, {.scale = 0.1});
  if (mixes() == 2) args_.shared_gate_bias = c_.input(parameter(), {2});
  if (e_.output_bias) args_.output_bias = c_.input(parameter(), {e_.hidden});
  if (e_.residual) args_.residual = of_tokens();
  args_.y = c_.output("y", e_.dtype, {e_.tokens, e_.hidden});
  args_.saved = c_.output_bytes("saved", bytes_for(sizes_.saved, e_.tokens));
  args_.workspace = c_.workspace(bytes_for(sizes_.forward_workspace, e_.tokens));
  require("forward", moec_experts_forward(experts_.get(), &args_, nullptr));
}

void Run::grad_of_shared() {
  const Use use = e_.accumulate ? Use::kSum : Use::kOutput;
  d_shared_tensors_.emplace(c_, "d_s", e_.shared_form, 1, e_.hidden, e_.shared_inter, grad_type(),
                            use);
  grad_.d_shared_weights = d_shared_tensors_->set();
  if (mixes()) grad_.d_shared_gate = gradient("d_shared_gate", grad_type(), {mixes(), e_.hidden});
  if (mixes() == 2) grad_.d_shared_gate_bias = gradient("d_shared_gate_bias", grad_type(), {2});
}

void Run::backward() {
  if (e_.accumulate) grad_.flags = MOEC_GRAD_ACCUMULATE | MOEC_GRAD_ACCUMULATE_X;
  grad_.plan = args_.plan;
  grad_.weights = args_.weights;
  grad_.shared_weights = args_.shared_weights;
  grad_.x = args_.x;
  grad_.shared_gate = args_.shared_gate;
  grad_.shared_gate_bias = args_.shared_gate_bias;
  grad_.saved = args_.saved;
  grad_.d_y = of_tokens();
  grad_.d_x = gradient("d_x", e_.dtype, {e_.tokens, e_.hidden});
  moec_tensor rows;
  require("plan_view", moec_plan_view(plan_.get(), MOEC_PLAN_ROW_WEIGHT, &rows));
  const Shape routing = e_.choice_capacity ? Shape{rows.shape[0]} : Shape{e_.tokens, e_.top_k};
  grad_.d_routing_weights = c_.output("d_routing_weights", MOEC_F32, routing);
  if (!e_.few_gradients) {
    d_tensors_.emplace(c_, "d_w", e_.form, e_.local_experts(), e_.hidden, e_.inter, grad_type(),
                       e_.accumulate ? Use::kSum : Use::kOutput);
    grad_.d_expert_weights = d_tensors_->set();
    if (shared_) grad_of_shared();
    if (e_.output_bias) grad_.d_output_bias = gradient("d_output_bias", grad_type(), {e_.hidden});
    if (e_.residual) grad_.d_residual = c_.output("d_residual", e_.dtype, {e_.tokens, e_.hidden});
  }
  grad_.workspace = c_.workspace(bytes_for(sizes_.backward_workspace, e_.tokens));
  require("backward", moec_experts_backward(experts_.get(), &grad_, nullptr));
}

}  // namespace

void run_experts(Case& c, const ExpertsCase& e) {
  Run(c, e)();
}

}  // namespace moec::bits
