// SPDX-License-Identifier: Apache-2.0
#include "step.h"

#include "support/tensors.h"

namespace moec::test {

Step::Step(const moec_context* context, int32_t top_k, int32_t device, int32_t experts, bool coded)
    : context_(context),
      hidden_(coded ? 192 : kHidden),
      inter_(coded ? 80 : kInter),
      top_k_(top_k),
      device_(device) {
  CHECK_CUDA(cudaSetDevice(device));
  x_ = &input(MOEC_BF16, {kTokens, hidden_}, 1.0);
  d_y_ = &input(MOEC_BF16, {kTokens, hidden_}, 1.0);
  y_ = &output(MOEC_BF16, {kTokens, hidden_});
  d_x_ = &output(MOEC_BF16, {kTokens, hidden_});
  d_routing_ = &output(MOEC_F32, {kTokens, top_k});

  auto desc = sized<moec_weights_desc>();
  desc.num_experts = experts;
  desc.gate_layout = MOEC_GATE_THEN_UP;
  desc.hidden = hidden_;
  desc.inter = inter_;
  desc.dtype = MOEC_BF16;
  if (coded) {
    desc.gate_up_scheme = MOEC_SCHEME_CODEBOOK4;
    desc.down_scheme = MOEC_SCHEME_INT8;
  }
  weights_ =
      make<Weights>(moec_weights_create, context, static_cast<const moec_weights_desc*>(&desc));
  if (coded)
    bind_codes(experts);
  else
    bind_plain(experts);
}
void Step::bind_plain(int32_t experts) {
  auto set = sized<moec_weight_set>();
  set.gate_up.data = tensor(input(MOEC_BF16, {experts, 2 * inter_, hidden_}, 0.08));
  set.down.data = tensor(input(MOEC_BF16, {experts, hidden_, inter_}, 0.1));
  check(moec_weights_bind(weights_.get(), &set));
  d_weights_.gate_up.data = tensor(output(MOEC_BF16, {experts, 2 * inter_, hidden_}));
  d_weights_.down.data = tensor(output(MOEC_BF16, {experts, hidden_, inter_}));
}
void Step::bind_codes(int32_t experts) {
  const int64_t count = experts * 2 * inter_ * hidden_;
  auto nf4 = sized<moec_quant>(), int8 = sized<moec_quant>();
  nf4.scales = tensor(input(MOEC_F32, {count / 64}, 0.1));
  nf4.codebook = tensor(input(MOEC_F32, {16}, 0.6));
  int8.scales = tensor(input(MOEC_F32, {experts, hidden_, 1}, 0.001));
  auto set = sized<moec_weight_set>();
  set.gate_up.data = tensor(input(MOEC_U8, {count / 2}, 1));
  set.gate_up.quant = &nf4;
  set.down.data = tensor(input(MOEC_I8, {experts, hidden_, inter_}, 1));
  set.down.quant = &int8;
  check(moec_weights_bind(weights_.get(), &set));
}

DeviceBytes& Step::hold(moec_dtype dtype, std::vector<int64_t> shape, double scale) {
  size_t bytes = element_bytes(dtype);
  for (const int64_t extent : shape) bytes *= size_t(extent);
  held_.push_back({std::make_unique<DeviceBytes>(bytes), dtype, std::move(shape), scale});
  return *held_.back().array;
}
DeviceBytes& Step::input(moec_dtype dtype, std::vector<int64_t> shape, double scale) {
  return hold(dtype, std::move(shape), scale);
}
DeviceBytes& Step::output(moec_dtype dtype, std::vector<int64_t> shape) {
  return hold(dtype, std::move(shape), 0);
}
moec_buffer Step::memory(const moec_size& size) {
  memory_.push_back(std::make_unique<DeviceBytes>(size.base + kTokens * size.per_token));
  return buffer_of(*memory_.back());
}
moec_tensor Step::tensor(const DeviceBytes& array) const {
  for (const Held& held : held_) {
    if (held.array.get() != &array) continue;
    moec_tensor made;
    check(moec_tensor_make(&made, array.data(), held.dtype, MOEC_CUDA, device_,
                           int32_t(held.shape.size()), held.shape.data()));
    return made;
  }
  throw std::logic_error("an array of another step");
}
moec_experts_desc Step::experts_desc() const {
  auto desc = sized<moec_experts_desc>();
  desc.hidden = hidden_;
  desc.inter = inter_;
  desc.num_experts = kExperts;
  desc.top_k = top_k_;
  desc.gate_layout = MOEC_GATE_THEN_UP;
  desc.dtype = MOEC_BF16;
  desc.save = MOEC_SAVE_PREACT;
  return desc;
}

void Step::fill(uint64_t seed, Routing routing) {
  CHECK_CUDA(cudaSetDevice(device_));
  Random random(seed);
  for (const Held& held : held_) {
    if (held.scale == 0) continue;
    const size_t count = held.array->bytes() / element_bytes(held.dtype);
    if (held.dtype == MOEC_U8 || held.dtype == MOEC_I8) {  // codes: any bits
      std::vector<uint8_t> bytes(count);
      for (uint8_t& byte : bytes) byte = uint8_t(random.bits());
      held.array->assign(bytes);
      continue;
    }
    std::vector<double> values = random.normals(count, held.scale);
    if (held.array.get() == x_)  // a constant feature, by which steer() leads the tokens
      for (size_t t = 0; t < count; t += size_t(hidden_)) values[t] = 1;
    held.array->assign(encode(values, held.dtype));
  }
  steer(seed, routing);
  CHECK_CUDA(cudaDeviceSynchronize());
}

void Step::poison() {
  for (const Held& held : held_) {
    if (held.scale == 0) held.array->poison();
  }
  for (const auto& array : memory_) array->poison();
  CHECK_CUDA(cudaDeviceSynchronize());
}

std::vector<uint8_t> Step::outputs() const {
  std::vector<uint8_t> all;
  for (const Held& held : held_) {
    if (held.scale != 0) continue;
    const std::vector<uint8_t> one = held.array->host();
    all.insert(all.end(), one.begin(), one.end());
  }
  return all;
}

namespace {

class ExpertsStep : public Step {
 public:
  ExpertsStep(const moec_context* context, int32_t top_k, int32_t device, int64_t tokens,
              bool coded = false)
      : Step(context, top_k, device, kExperts, coded),
        tokens_(tokens),
        ids_(input(MOEC_I32, {kTokens, top_k}, 1)),
        routing_(input(MOEC_F32, {kTokens, top_k}, 1)) {
    auto plan_desc = sized<moec_plan_desc>();
    plan_desc.max_tokens = kTokens;
    plan_desc.num_experts = kExperts;
    plan_desc.top_k = top_k;
    plan_ =
        make<PlanHandle>(moec_plan_create, context, static_cast<const moec_plan_desc*>(&plan_desc),
                         static_cast<const moec_buffer*>(nullptr));
    const moec_experts_desc desc = experts_desc();
    experts_ = make<Experts>(moec_experts_create, context, &desc);
    check(moec_experts_query(experts_.get(), &sizes_));
    forward_ = sized<moec_experts_args>();
    forward_.plan = plan_.get();
    forward_.weights = weights_.get();
    forward_.x = of_tokens(*x_);
    forward_.y = of_tokens(*y_);
    backward_ = sized<moec_experts_grad_args>();
    backward_.plan = plan_.get();
    backward_.weights = weights_.get();
    backward_.x = forward_.x;
    backward_.d_y = of_tokens(*d_y_);
    backward_.d_x = of_tokens(*d_x_);
    backward_.d_routing_weights = of_tokens(*d_routing_);
    backward_.d_expert_weights = &d_weights_;
  }
  template <class Kind, class... Args>
  static std::unique_ptr<Step> with_saved(const Args&... args) {
    auto step = std::make_unique<Kind>(args...);
    step->forward_.saved = step->backward_.saved = step->memory(step->sizes_.saved);
    return step;
  }
  void take_workspace() override {
    forward_.workspace = memory(sizes_.forward_workspace);
    backward_.workspace = memory(sizes_.backward_workspace);
  }
  void queue(cudaStream_t stream) const override {
    const moec_tensor ids = of_tokens(ids_), routing = of_tokens(routing_);
    check(moec_plan_from_topk(plan_.get(), &ids, &routing, stream));
    check(moec_experts_forward(experts_.get(), &forward_, stream));
    check(moec_experts_backward(experts_.get(), &backward_, stream));
  }

 protected:
  Experts experts_;
  moec_experts_sizes sizes_ = sized<moec_experts_sizes>();
  moec_experts_args forward_;
  moec_experts_grad_args backward_;

 private:
  moec_tensor of_tokens(const DeviceBytes& array) const {
    moec_tensor rows = tensor(array);
    rows.shape[0] = tokens_;
    return rows;
  }
  void steer(uint64_t seed, Routing routing) override {
    Random random(seed + 77);
    std::vector<int32_t> ids;
    for (int64_t i = 0; i < kTokens * top_k_; ++i) {  // some slots are nobody's; expert 3 is empty
      const auto id = int32_t(random.below(kExperts + 1));
      ids.push_back(routing == Routing::kOneExpert ? kOne : id == 3 || id == kExperts ? -1 : id);
    }
    ids_.assign(ids);
  }

  int64_t tokens_;
  DeviceBytes &ids_, &routing_;
  PlanHandle plan_;
};

class AdaptedStep : public ExpertsStep {
 public:
  AdaptedStep(const moec_context* context, int32_t top_k, int32_t device)
      : ExpertsStep(context, top_k, device, kTokens) {
    auto desc = sized<moec_adapters_desc>();
    desc.num_experts = kExperts;
    desc.gate_layout = MOEC_GATE_THEN_UP;
    desc.hidden = hidden_;
    desc.inter = inter_;
    adapters_ = make<Adapters>(moec_adapters_create, context,
                               static_cast<const moec_adapters_desc*>(&desc));
    moec_adapter adapter = {};
    add(&adapter.gate_up, &d_adapter_.gate_up, 2 * inter_, hidden_);
    add(&adapter.down, &d_adapter_.down, hidden_, inter_);
    check(moec_adapters_bind(adapters_.get(), &adapter, 1));
    check(moec_experts_query_adapters(experts_.get(), adapters_.get(), &sizes_));
    forward_.adapters = backward_.adapters = adapters_.get();
    backward_.d_adapters = &d_adapter_;
  }

 private:
  void add(moec_factors* factors, moec_factors* gradients, int64_t outer, int64_t inner) {
    factors->a = tensor(input(MOEC_BF16, {kExperts, kRank, inner}, 0.1));
    factors->b = tensor(input(MOEC_BF16, {kExperts, outer, kRank}, 0.1));
    factors->scale = 0.5f;
    gradients->a = tensor(output(MOEC_BF16, {kExperts, kRank, inner}));
    gradients->b = tensor(output(MOEC_BF16, {kExperts, outer, kRank}));
  }

  static constexpr int64_t kRank = 16;
  Adapters adapters_;
  moec_adapter d_adapter_ = {};
};

class LayerStep : public Step {
 public:
  LayerStep(const moec_context* context, int32_t top_k, int32_t device, moec_ep* ep = nullptr,
            int32_t local_experts = kExperts)
      : Step(context, top_k, device, local_experts),
        gate_(input(MOEC_F32, {kExperts, hidden_}, 0.1)),
        d_gate_(output(MOEC_F32, {kExperts, hidden_})),
        select_bias_(input(MOEC_F32, {kExperts}, 0.01)),
        logits_(output(MOEC_F32, {kTokens, kExperts})),
        d_logits_(output(MOEC_F32, {kTokens, kExperts})),
        counts_(output(MOEC_I32, {kExperts})),
        balance_(output(MOEC_F32, {1})),
        z_(output(MOEC_F32, {1})),
        bias_after_(output(MOEC_F32, {kExperts})) {
    auto router = sized<moec_router_desc>();
    router.flags = MOEC_ROUTER_SELECT_BIAS;
    router.num_experts = kExperts;
    router.top_k = top_k;
    router.norm = MOEC_NORM_SUM;
    router_ =
        make<Router>(moec_router_create, context, static_cast<const moec_router_desc*>(&router));
    const moec_experts_desc experts = experts_desc();
    auto desc = sized<moec_layer_desc>();
    desc.router = &router;
    desc.experts = &experts;
    desc.ep = ep;
    layer_ =
        make<LayerHandle>(moec_layer_create, context, static_cast<const moec_layer_desc*>(&desc));
    check(moec_layer_query(layer_.get(), &sizes_));
    forward_ = sized<moec_layer_args>();
    forward_.weights = weights_.get();
    forward_.x = tensor(*x_);
    forward_.gate_weight = tensor(gate_);
    forward_.select_bias = tensor(select_bias_);
    forward_.y = tensor(*y_);
    forward_.logits = tensor(logits_);
    forward_.counts = tensor(counts_);
    forward_.saved = memory(sizes_.saved);
    backward_ = sized<moec_layer_grad_args>();
    backward_.forward = &forward_;
    backward_.d_y = tensor(*d_y_);
    backward_.d_logits_in = tensor(d_logits_);
    backward_.d_x = tensor(*d_x_);
    backward_.d_gate_weight = tensor(d_gate_);
    backward_.d_expert_weights = &d_weights_;
    backward_.d_routing_weights = tensor(*d_routing_);
  }
  void take_workspace() override {
    forward_.workspace = memory(sizes_.forward_workspace);
    backward_.workspace = memory(sizes_.backward_workspace);
  }
  void queue(cudaStream_t stream) const override {
    CHECK_CUDA(cudaMemsetAsync(counts_.data(), 0, counts_.bytes(), stream));
    check(moec_layer_forward(layer_.get(), &forward_, stream));
    CHECK_CUDA(cudaMemsetAsync(d_logits_.data(), 0, d_logits_.bytes(), stream));
    loss(MOEC_LOSS_BALANCE_SWITCH, balance_, stream);
    loss(MOEC_LOSS_Z, z_, stream);
    check(moec_layer_backward(layer_.get(), &backward_, stream));
    const moec_tensor counts = tensor(counts_), bias = tensor(bias_after_);
    CHECK_CUDA(cudaMemcpyAsync(bias_after_.data(), select_bias_.data(), bias_after_.bytes(),
                               cudaMemcpyDeviceToDevice, stream));
    check(moec_router_bias_update(router_.get(), &counts, 1e-3f, &bias, stream));
  }

 private:
  void loss(uint32_t kind, const DeviceBytes& value, cudaStream_t stream) const {
    const moec_tensor logits = tensor(logits_), d_logits = tensor(d_logits_);
    auto args = sized<moec_loss_args>();
    args.kind = kind;
    args.top_k = kind == MOEC_LOSS_Z ? 0 : top_k_;
    args.coefficient = 0.01f;
    args.logits = &logits;
    args.count = 1;
    args.loss = tensor(value);
    check(moec_loss_forward(context_, &args, stream));
    args.loss = {};
    args.d_logits = &d_logits;
    check(moec_loss_backward(context_, &args, stream));
  }
  void steer(uint64_t seed, Routing routing) override {
    Random random(seed + 77);
    std::vector<double> gate = random.normals(size_t(kExperts * hidden_), 0.1);
    if (routing == Routing::kOneExpert) gate[size_t(kOne * hidden_)] = 50;  // times x[t,0] = 1
    gate_.assign(encode(gate, MOEC_F32));
  }

  DeviceBytes &gate_, &d_gate_, &select_bias_, &logits_, &d_logits_, &counts_, &balance_, &z_,
      &bias_after_;
  Router router_;
  LayerHandle layer_;
  moec_experts_sizes sizes_ = sized<moec_experts_sizes>();
  moec_layer_args forward_;
  moec_layer_grad_args backward_;
};

}  // namespace

std::unique_ptr<Step> layer_step(const moec_context* context, int32_t top_k, int32_t device) {
  return std::make_unique<LayerStep>(context, top_k, device);
}
std::unique_ptr<Step> ep_layer_step(const moec_context* context, int32_t top_k, moec_ep* ep,
                                    int32_t device) {
  auto info = sized<moec_ep_info>();
  check(moec_ep_query(ep, &info));
  return std::make_unique<LayerStep>(context, top_k, device, ep,
                                     info.expert_end - info.expert_begin);
}
std::unique_ptr<Step> experts_step(const moec_context* context, int32_t top_k, int32_t device) {
  return ExpertsStep::with_saved<ExpertsStep>(context, top_k, device, Step::kTokens);
}
std::unique_ptr<Step> adapted_step(const moec_context* context, int32_t top_k, int32_t device) {
  return ExpertsStep::with_saved<AdaptedStep>(context, top_k, device);
}
std::unique_ptr<Step> coded_step(const moec_context* context, int32_t top_k, int32_t device) {
  return ExpertsStep::with_saved<ExpertsStep>(context, top_k, device, Step::kTokens, true);
}
std::unique_ptr<Step> coded_step_of_few_rows(const moec_context* context, int32_t top_k,
                                             int32_t device) {
  return ExpertsStep::with_saved<ExpertsStep>(context, top_k, device, 24, true);
}
std::unique_ptr<Step> experts_step_of_no_tokens(const moec_context* context) {
  return ExpertsStep::with_saved<ExpertsStep>(context, 2, 0, 0);
}

}  // namespace moec::test
