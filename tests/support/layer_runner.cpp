// SPDX-License-Identifier: Apache-2.0
#include "layer_runner.h"

#include <map>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "handles.h"

namespace moec::test {
namespace {

using oracle::Vec;

constexpr double kBefore = 0.25;

uint64_t bytes_for(const moec_size& size, int tokens) {
  return size.base + static_cast<uint64_t>(tokens) * size.per_token;
}

// One problem on the device.
class Run {
 public:
  Run(const oracle::Config& config, const oracle::Inputs& in, const RunOptions& options)
      : config_(config),
        in_(in),
        options_(options),
        context_(test_context(options.num_threads)),
        tokens_(in.tokens),
        hidden_(config.experts.hidden),
        columns_(config.router.columns()),
        slots_(config.router.top_k) {
    options_.layout.dtype = options.weights_dtype ? options.weights_dtype : options.dtype;
    create_layer();
    experts_ = bind(in.experts, layout_of(false), config.router.num_experts, config.experts.inter,
                    &weights_);
    if (config.experts.shared != oracle::Shared::kNone)
      shared_ = bind(in.shared, layout_of(true), 1, config.experts.shared_inter, &shared_weights_);
    bind_adapters();
    fill_arguments();
  }

  void forward() { check(moec_layer_forward(layer_.get(), &args_, nullptr)); }
  void backward(const Vec& d_y, const Vec& d_logits_in);
  oracle::Rounding between() const;
  void collect_bytes(LayerRun* run);
  void collect_values(LayerRun* run);

 private:
  std::vector<std::pair<const moec_tensor*, Vec*>> gradients(oracle::Gradients* g) const;
  void create_layer();
  WeightLayout layout_of(bool shared) const {
    WeightLayout layout = options_.layout;
    layout.codes = shared ? options_.shared_codes : options_.codes;
    layout.bound = shared ? options_.shared_bound : options_.bound;
    return layout;
  }
  std::unique_ptr<WeightSet> bind(const oracle::MlpWeights& values, const WeightLayout& layout,
                                  int experts, int inter, Weights* handle);
  void bind_adapters();
  void fill_arguments();
  moec_tensor data(const Vec& values, const std::vector<int64_t>& shape) {
    return tensors_.input(values, options_.dtype, shape);
  }
  moec_tensor gradient(const Vec& of, moec_dtype dtype, const std::vector<int64_t>& shape) {
    return of.empty() ? moec_tensor{} : gradient(dtype, shape);
  }
  moec_tensor gradient(moec_dtype dtype, const std::vector<int64_t>& shape) {
    if (!options_.accumulate) return tensors_.output(dtype, shape);
    int64_t count = 1;
    for (int64_t extent : shape) count *= extent;
    return tensors_.input(Vec(static_cast<size_t>(count), kBefore), dtype, shape);
  }
  // What the call added to a gradient.
  Vec added(Vec values) const {
    for (double& v : values) v -= options_.accumulate ? kBefore : 0;
    return values;
  }
  oracle::MlpWeights added(oracle::MlpWeights w) const {
    for (Vec* v : {&w.gate, &w.up, &w.down, &w.gate_bias, &w.up_bias, &w.down_bias})
      *v = added(std::move(*v));
    return w;
  }
  void add_bytes(const moec_tensor& tensor, LayerRun* run) const {
    const std::vector<uint8_t> one = tensors_.read_bytes(tensor);
    run->bytes.insert(run->bytes.end(), one.begin(), one.end());
  }

  const oracle::Config& config_;
  const oracle::Inputs& in_;
  RunOptions options_;
  const moec_context* context_;
  int64_t tokens_, hidden_, columns_, slots_;
  LayerHandle layer_;
  Weights weights_, shared_weights_;
  std::unique_ptr<WeightSet> experts_, shared_, d_experts_, d_shared_;
  std::unique_ptr<AdapterSet> adapters_, d_adapters_;
  Adapters adapter_handle_;
  Tensors tensors_;
  moec_experts_sizes sizes_ = sized<moec_experts_sizes>();
  moec_layer_args args_ = sized<moec_layer_args>();
  std::optional<moec_layer_grad_args> grad_;
};

void Run::create_layer() {
  const moec_router_desc router = router_desc(config_.router, in_);
  const moec_experts_desc experts = experts_desc(config_, in_, options_);
  auto desc = sized<moec_layer_desc>();
  desc.router = &router;
  desc.experts = &experts;
  desc.drop = static_cast<uint32_t>(config_.plan.drop);
  desc.capacity = config_.plan.capacity;
  desc.capacity_factor = static_cast<float>(config_.plan.capacity_factor);
  layer_ = make<LayerHandle>(moec_layer_create, context_, &desc);
  check(moec_layer_query(layer_.get(), &sizes_));
}

std::unique_ptr<WeightSet> Run::bind(const oracle::MlpWeights& values, const WeightLayout& layout,
                                     int experts, int inter, Weights* handle) {
  auto set =
      std::make_unique<WeightSet>(values, experts, static_cast<int>(hidden_), inter, layout, false);
  const moec_weights_desc desc = set->desc(options_.frozen);
  *handle = make<Weights>(moec_weights_create, context_, &desc);
  check(moec_weights_bind(handle->get(), set->set()));
  auto info = sized<moec_weights_info>();
  check(moec_weights_query(handle->get(), &info));
  if (options_.frozen && info.packed_bytes > 0)  // a GPU reads weights as they are bound
    check(moec_weights_pack(handle->get(), nullptr, nullptr));
  return set;
}

void Run::bind_adapters() {
  if (in_.adapters.empty()) return;
  adapters_ = std::make_unique<AdapterSet>(in_.adapters, config_.router.num_experts,
                                           static_cast<int>(hidden_), config_.experts.inter,
                                           options_.adapters);
  const moec_adapters_desc desc = adapters_->desc();
  adapter_handle_ = make<Adapters>(moec_adapters_create, context_, &desc);
  check(moec_adapters_bind(adapter_handle_.get(), adapters_->list().data(),
                           static_cast<int32_t>(adapters_->list().size())));
  check(moec_layer_query_adapters(layer_.get(), adapter_handle_.get(), &sizes_));
  args_.adapters = adapter_handle_.get();
  args_.adapter_ids = tensors_.input_ids(in_.adapter_ids, MOEC_I32, {tokens_});
}

void Run::fill_arguments() {
  args_.rng_offset = config_.router.rng_offset;
  args_.weights = weights_.get();
  args_.shared_weights = shared_weights_.get();
  args_.x = data(in_.x, {tokens_, hidden_});
  args_.router_x = data(in_.router_x, {tokens_, hidden_});
  args_.gate_weight = data(in_.gate_weight, {columns_, hidden_});
  args_.gate_bias = data(in_.gate_bias, {columns_});
  args_.input_scale = data(in_.input_scale, {hidden_});
  args_.select_bias = tensors_.input(in_.select_bias, MOEC_F32, {columns_});
  args_.per_expert_scale = data(in_.per_expert_scale, {columns_});
  args_.token_mask = tensors_.input_ids(in_.token_mask, MOEC_U8, {tokens_});
  args_.table = tensors_.input_ids(in_.table, MOEC_I32,
                                   {static_cast<int64_t>(in_.table.size()) / slots_, slots_});
  args_.token_ids = tensors_.input_ids(in_.token_ids, MOEC_I64, {tokens_});
  args_.given_ids = tensors_.input_ids(in_.given_ids, MOEC_I32, {tokens_, slots_});
  const auto gates = static_cast<int64_t>(in_.shared_gate.size()) / hidden_;
  args_.shared_gate = data(in_.shared_gate, {gates, hidden_});
  args_.shared_gate_bias = data(in_.shared_gate_bias, {2});
  args_.output_bias = data(in_.output_bias, {hidden_});
  args_.residual = data(in_.residual, {tokens_, hidden_});
  args_.y = tensors_.output(options_.dtype, {tokens_, hidden_});
  args_.logits = tensors_.output(MOEC_F32, {tokens_, columns_});
  args_.expert_ids = tensors_.output(MOEC_I32, {tokens_, slots_});
  args_.routing_weights = tensors_.output(MOEC_F32, {tokens_, slots_});
  const auto tokens = static_cast<int>(tokens_);
  args_.saved = tensors_.buffer(bytes_for(sizes_.saved, tokens), options_.saved_before);
  args_.workspace = tensors_.buffer(bytes_for(sizes_.forward_workspace, tokens));
}

void Run::backward(const Vec& d_y, const Vec& d_logits_in) {
  const moec_dtype f32 = MOEC_F32;
  const moec_dtype type = options_.dtype;
  WeightLayout layout = layout_of(false);
  layout.dtype = options_.grad_dtype;
  const auto hidden = static_cast<int>(hidden_);
  const double* const before = options_.accumulate ? &kBefore : nullptr;
  d_experts_ = std::make_unique<WeightSet>(in_.experts, config_.router.num_experts, hidden,
                                           config_.experts.inter, layout, true, before);
  grad_ = sized<moec_layer_grad_args>();
  grad_->forward = &args_;
  grad_->d_y = data(d_y, {tokens_, hidden_});
  grad_->d_logits_in = tensors_.input(d_logits_in, f32, {tokens_, columns_});
  if (options_.accumulate) grad_->flags = MOEC_GRAD_ACCUMULATE | MOEC_GRAD_ACCUMULATE_X;
  grad_->d_x = gradient(type, {tokens_, hidden_});
  grad_->d_router_x = gradient(in_.router_x, type, {tokens_, hidden_});
  grad_->d_gate_weight = gradient(f32, {columns_, hidden_});
  grad_->d_gate_bias = gradient(in_.gate_bias, f32, {columns_});
  grad_->d_input_scale = gradient(in_.input_scale, f32, {hidden_});
  grad_->d_per_expert_scale = gradient(in_.per_expert_scale, f32, {columns_});
  grad_->d_expert_weights = d_experts_->set();
  if (shared_) {
    layout = layout_of(true);
    layout.dtype = options_.grad_dtype;
    d_shared_ = std::make_unique<WeightSet>(in_.shared, 1, hidden, config_.experts.shared_inter,
                                            layout, true, before);
    grad_->d_shared_weights = d_shared_->set();
  }
  const auto gates = static_cast<int64_t>(in_.shared_gate.size()) / hidden_;
  grad_->d_shared_gate = gradient(in_.shared_gate, f32, {gates, hidden_});
  grad_->d_shared_gate_bias = gradient(in_.shared_gate_bias, f32, {2});
  grad_->d_output_bias = gradient(in_.output_bias, f32, {hidden_});
  if (!in_.residual.empty()) grad_->d_residual = tensors_.output(type, {tokens_, hidden_});
  grad_->d_routing_weights = tensors_.output(f32, {tokens_, slots_});
  if (adapters_ && !options_.no_adapter_grads) {
    constexpr double kPoison = -3e30;
    AdapterLayout of_grads = options_.adapters;
    of_grads.dtype = options_.grad_dtype;
    d_adapters_ = std::make_unique<AdapterSet>(in_.adapters, config_.router.num_experts, hidden,
                                               config_.experts.inter, of_grads,
                                               options_.accumulate ? &kBefore : &kPoison);
    grad_->d_adapters = d_adapters_->list().data();
  }
  grad_->workspace =
      tensors_.buffer(bytes_for(sizes_.backward_workspace, static_cast<int>(tokens_)));
  check(moec_layer_backward(layer_.get(), &*grad_, nullptr));
}

// The gradients that are tensors, and where their values go.
std::vector<std::pair<const moec_tensor*, Vec*>> Run::gradients(oracle::Gradients* g) const {
  return {{&grad_->d_x, &g->x},
          {&grad_->d_router_x, &g->router_x},
          {&grad_->d_gate_weight, &g->gate_weight},
          {&grad_->d_gate_bias, &g->gate_bias},
          {&grad_->d_input_scale, &g->input_scale},
          {&grad_->d_per_expert_scale, &g->per_expert_scale},
          {&grad_->d_shared_gate, &g->shared_gate},
          {&grad_->d_shared_gate_bias, &g->shared_gate_bias},
          {&grad_->d_output_bias, &g->output_bias},
          {&grad_->d_residual, &g->residual},
          {&grad_->d_routing_weights, &g->routing_weights}};
}

// By what moec_layer_describe says.
oracle::Rounding Run::between() const {
  char text[4096];
  uint64_t need = 0;
  check(moec_layer_describe(layer_.get(), weights_.get(), tokens_, text, sizeof text, &need));
  const std::string_view description(text);
  for (const auto& [name, rounding] :
       {std::pair{"bf16", oracle::Rounding::kBf16}, std::pair{"f16", oracle::Rounding::kFp16}})
    if (description.find(std::string("\"between_products\": \"") + name) != description.npos)
      return rounding;
  return oracle::Rounding::kNone;
}

void Run::collect_bytes(LayerRun* run) {
  check(moec_context_sync(context_, nullptr));
  run->neighbours_untouched = tensors_.neighbours_untouched();
  for (const moec_tensor* t : {&args_.y, &args_.logits, &args_.routing_weights, &args_.expert_ids})
    add_bytes(*t, run);
  if (!grad_) return;
  for (const auto& [tensor, values] : gradients(&run->grads)) add_bytes(*tensor, run);
  for (const WeightSet* set : {d_experts_.get(), d_shared_.get()}) {
    if (!set) continue;
    const std::vector<uint8_t> bytes = set->bytes();
    run->bytes.insert(run->bytes.end(), bytes.begin(), bytes.end());
    run->neighbours_untouched = run->neighbours_untouched && set->neighbours_untouched();
  }
  if (!d_adapters_) return;
  const std::vector<uint8_t> bytes = d_adapters_->bytes();
  run->bytes.insert(run->bytes.end(), bytes.begin(), bytes.end());
  run->neighbours_untouched = run->neighbours_untouched && d_adapters_->neighbours_untouched();
}

void Run::collect_values(LayerRun* run) {
  run->y = tensors_.read(args_.y);
  run->saved = tensors_.read_bytes(args_.saved);
  run->logits = tensors_.read(args_.logits);
  run->routing_weights = tensors_.read(args_.routing_weights);
  for (double id : tensors_.read(args_.expert_ids)) run->expert_ids.push_back(static_cast<int>(id));
  if (!grad_) return;
  oracle::Gradients& g = run->grads;
  for (const auto& [tensor, values] : gradients(&g)) {
    const bool overwritten = values == &g.residual || values == &g.routing_weights;
    *values = overwritten ? tensors_.read(*tensor) : added(tensors_.read(*tensor));
  }
  g.experts = added(d_experts_->read());
  if (d_shared_) g.shared = added(d_shared_->read());
  if (d_adapters_) g.adapters = d_adapters_->read(options_.accumulate ? kBefore : 0);
}

}  // namespace

std::string last_error() {
  auto info = sized<moec_error_info>();
  if (moec_last_error(&info) != MOEC_OK) return "moec_last_error failed";
  return std::string(moec_status_name(info.code)) + " " + info.message;
}

const moec_context* test_context(int num_threads) {
  static std::map<int, Context> contexts;
  Context& context = contexts[num_threads];
  if (!context) {
    const TestDevice device = test_device();
    auto desc = sized<moec_context_desc>();
    desc.device_type = device.type;
    desc.device_id = device.id;
    desc.num_threads = device.type == MOEC_CPU ? num_threads : 0;
    context = make<Context>(moec_context_create, &desc);
  }
  return context.get();
}

LayerRun run_layer(const oracle::Config& config, const oracle::Inputs& in, const Vec& d_y,
                   const Vec& d_logits_in, const RunOptions& options) {
  LayerRun result;
  result.dtype = options.dtype, result.grad_dtype = options.grad_dtype;
  try {
    Run run(config, in, options);
    if (options.dtype != MOEC_F32) result.rounding.operands = rounding_of(options.dtype);
    result.rounding.between = run.between();
    run.forward();
    if (options.save != MOEC_SAVE_NONE) run.backward(d_y, d_logits_in);
    run.collect_bytes(&result);
    if (!options.only_bytes) run.collect_values(&result);
  } catch (const Failure& failure) {
    result.status = failure.status;
    result.message = failure.what();
  }
  return result;
}

}  // namespace moec::test
