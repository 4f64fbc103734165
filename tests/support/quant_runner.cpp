// SPDX-License-Identifier: Apache-2.0
#include "quant_runner.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <utility>

#include "describe.h"
#include "golden/golden_case.h"
#include "handles.h"
#include "layer_runner.h"

namespace moec::test {
namespace {

oracle::Config config_of(const QuantProblem& p) {
  oracle::Config config;
  config.router.num_experts = p.experts;
  config.router.top_k = p.top_k;
  config.experts.hidden = p.hidden;
  config.experts.inter = p.inter;
  config.experts.activation = p.activation;
  return config;
}

// What is bound: plain matrices of the values, or those of codes and what else is plain.
class Bound {
 public:
  Bound(const QuantProblem& p, bool as_values, Tensors& tensors)
      : binder_(tensors),
        plain_(as_values ? p.dequantised() : p.values, p.experts, p.hidden, p.inter, layout(p),
               false) {
    desc_ = plain_.desc(p.packed);
    set_ = *plain_.set();
    if (as_values) return;
    const auto replace = [&](const QuantisedMatrix& from, moec_matrix& to, uint32_t& scheme) {
      if (from.empty()) return;
      const moec_tensor bias = to.bias;
      to = binder_.matrix(from, p.whole_shape);
      to.bias = bias;
      scheme = uint32_t(from[0].scheme);
    };
    replace(p.gate_up, set_.gate_up, desc_.gate_up_scheme);
    replace(p.gate, set_.gate, desc_.gate_up_scheme);
    replace(p.up, set_.up, desc_.gate_up_scheme);
    replace(p.down, set_.down, desc_.down_scheme);
  }
  const moec_weights_desc* desc() const { return &desc_; }
  const moec_weight_set* set() const { return &set_; }

 private:
  static WeightLayout layout(const QuantProblem& p) {
    WeightLayout layout;
    layout.dtype = p.dtype;
    layout.gate_layout = p.gate_layout;
    const auto of = [](const QuantisedMatrix& m, uint32_t plain) -> uint32_t {
      return m.empty() ? plain : uint32_t(m[0].in_out ? MOEC_IN_OUT : MOEC_OUT_IN);
    };
    layout.gate_up_orientation = of(p.gate_up.empty() ? p.up : p.gate_up, p.gate_up_orientation);
    layout.down_orientation = of(p.down, p.down_orientation);
    return layout;
  }

  QuantBinder binder_;
  WeightSet plain_;
  moec_weights_desc desc_;
  moec_weight_set set_;
};

char* begin_of(const moec_tensor& t) {
  return static_cast<char*>(t.data) + t.byte_offset;
}
std::vector<uint8_t> bytes_of(const moec_tensor& t) {
  std::vector<uint8_t> bytes(tensor_bytes(t));
  DeviceBuffer::copy_out(bytes.data(), begin_of(t), bytes.size());
  return bytes;
}

// The weights mapped from a file of the packed copy of `weights`, which forget their source. What
// they unpack is what was bound.
Weights through_a_file(const QuantProblem& p, const moec_context* context, const Bound& bound,
                       Weights weights) {
  const std::string path = testing::TempDir() + "moec-schemes-" + std::to_string(getpid());
  check(moec_weights_pack(weights.get(), nullptr, nullptr));
  check(moec_weights_release_source(weights.get()));
  check(moec_weights_save_sync(weights.get(), path.c_str()));
  auto mapped = make<Weights>(moec_weights_create, context, bound.desc());
  check(moec_weights_map_sync(mapped.get(), path.c_str()));
  unlink(path.c_str());
  Tensors memory;
  const Bound again(p, false, memory);
  const std::vector<moec_tensor> expected = tensors_of(*bound.set()),
                                 got = tensors_of(*again.set());
  for (const moec_tensor& t : got) {
    const std::vector<uint8_t> poison(tensor_bytes(t), 0x5a);
    DeviceBuffer::copy_in(begin_of(t), poison.data(), poison.size());
  }
  check(moec_weights_unpack(mapped.get(), again.set(), nullptr));
  for (size_t i = 0; i < expected.size(); ++i)
    EXPECT_EQ(bytes_of(got[i]), bytes_of(expected[i])) << "tensor " << i;
  EXPECT_TRUE(memory.neighbours_untouched());
  return mapped;
}

moec_buffer buffer_of(Tensors& tensors, const moec_size& size, int tokens) {
  return tensors.buffer(size.base + uint64_t(tokens) * size.per_token);
}

}  // namespace

std::vector<moec_tensor> tensors_of(const moec_weight_set& set) {
  std::vector<moec_tensor> all;
  const auto add = [&](const moec_tensor& stacked, const moec_tensor* per_expert, int64_t count) {
    if (stacked.data) all.push_back(stacked);
    if (per_expert) all.insert(all.end(), per_expert, per_expert + count);
  };
  for (const moec_matrix* m : {&set.gate_up, &set.gate, &set.up, &set.down}) {
    add(m->data, m->per_expert, m->count);
    add(m->bias, m->per_expert_bias, m->count);
    if (!m->quant) continue;
    const moec_quant& q = *m->quant;
    add(q.scales, q.per_expert_scales, m->count);
    add(q.scales2, q.per_expert_scales2, m->count);
    add(q.zeros, q.per_expert_zeros, m->count);
    add(q.scale_offset, q.per_expert_scale_offset, m->count);
    add(q.group_index, q.per_expert_group_index, m->count);
    add(q.codebook, nullptr, 0);
    add(q.scale_book, nullptr, 0);
  }
  return all;
}

size_t tensor_bytes(const moec_tensor& t) {
  size_t bytes = element_bytes(t.dtype);
  for (int32_t i = 0; i < t.ndim; ++i) bytes *= size_t(t.shape[i]);
  return bytes;
}

oracle::MlpWeights QuantProblem::dequantised() const {
  oracle::MlpWeights w = values;
  const oracle::Rounding rounding = rounding_of(dtype);
  if (!gate_up.empty())
    golden::split_gate_up({experts, 2 * inter, hidden, false}, golden::GateLayout(gate_layout),
                          test::dequantise(gate_up, rounding), &w.gate, &w.up);
  if (!gate.empty()) w.gate = test::dequantise(gate, rounding);
  if (!up.empty()) w.up = test::dequantise(up, rounding);
  if (!down.empty()) w.down = test::dequantise(down, rounding);
  return w;
}

QuantResults run(const QuantProblem& p, bool as_values, Json* described) {
  QuantResults results;
  try {
    const moec_context* const context = test_context();
    Tensors tensors;
    RunOptions options;
    options.dtype = p.dtype;
    options.layout.gate_layout = p.gate_layout;
    options.save = p.save;
    oracle::Inputs in;
    in.tokens = p.tokens;
    if (p.gate_layout != MOEC_GATE_NONE) in.experts.gate = {0};  // there is one
    const moec_experts_desc desc = experts_desc(config_of(p), in, options);
    const auto experts = make<Experts>(moec_experts_create, context, &desc);
    const Bound bound(p, as_values, tensors);
    auto weights = make<Weights>(moec_weights_create, context, bound.desc());
    check(moec_weights_bind(weights.get(), bound.set()));
    if (p.packed && !as_values) weights = through_a_file(p, context, bound, std::move(weights));
    auto plan_desc = sized<moec_plan_desc>();
    plan_desc.max_tokens = p.tokens;
    plan_desc.num_experts = p.experts;
    plan_desc.top_k = p.top_k;
    const moec_buffer* const own = nullptr;
    const auto plan = make<PlanHandle>(moec_plan_create, context, &plan_desc, own);
    const moec_tensor ids = tensors.input_ids(p.ids, MOEC_I32, {p.tokens, p.top_k});
    const moec_tensor routing = tensors.input(p.routing_weights, MOEC_F32, {p.tokens, p.top_k});
    check(moec_plan_from_topk(plan.get(), &ids, &routing, nullptr));
    auto sizes = sized<moec_experts_sizes>();
    check(moec_experts_query(experts.get(), &sizes));
    auto args = sized<moec_experts_args>();
    auto grad = sized<moec_experts_grad_args>();
    const AdapterSet factors(p.adapters, p.experts, p.hidden, p.inter, p.adapter_layout);
    constexpr double kPoison = -3e30;
    const AdapterSet d_factors(p.adapters, p.experts, p.hidden, p.inter, p.adapter_layout,
                               &kPoison);
    Adapters adapters;
    if (!p.adapters.empty()) {
      const moec_adapters_desc of_adapters = factors.desc();
      adapters = make<Adapters>(moec_adapters_create, context, &of_adapters);
      check(moec_adapters_bind(adapters.get(), factors.list().data(), int(p.adapters.size())));
      check(moec_experts_query_adapters(experts.get(), adapters.get(), &sizes));
      args.adapters = grad.adapters = adapters.get();
      grad.d_adapters = d_factors.list().data();
    }
    args.plan = plan.get();
    args.weights = weights.get();
    args.x = tensors.input(p.x, p.dtype, {p.tokens, p.hidden});
    args.y = tensors.output(p.dtype, {p.tokens, p.hidden});
    args.saved = buffer_of(tensors, sizes.saved, p.tokens);
    check(moec_experts_forward(experts.get(), &args, nullptr));
    grad.plan = args.plan;
    grad.weights = args.weights;
    grad.x = args.x;
    grad.saved = args.saved;
    grad.d_y = tensors.input(p.d_y, p.dtype, {p.tokens, p.hidden});
    grad.d_x = tensors.output(p.dtype, {p.tokens, p.hidden});
    grad.d_routing_weights = tensors.output(MOEC_F32, {p.tokens, p.top_k});
    check(moec_experts_backward(experts.get(), &grad, nullptr));
    check(moec_context_sync(context, nullptr));
    if (described) *described = describe_experts(experts.get(), weights.get(), p.tokens);
    results.y = tensors.read(args.y);
    results.d_x = tensors.read(grad.d_x);
    results.d_routing_weights = tensors.read(grad.d_routing_weights);
    if (grad.d_adapters) results.d_adapters = d_factors.read();
  } catch (const Failure& failure) {
    results = {failure.status, failure.what(), {}, {}, {}, {}};
  }
  return results;
}

QuantResults reference(const QuantProblem& p) {
  const oracle::Config config = config_of(p);
  oracle::Inputs in;
  in.tokens = p.tokens;
  in.x = p.x;
  in.experts = p.dequantised();
  oracle::Route route;
  route.slots = p.top_k;
  route.ids = p.ids;
  route.weights = p.routing_weights;
  const oracle::Plan plan = oracle::build_plan(config, p.tokens, p.top_k, route.ids, route.weights);
  QuantResults results;
  oracle::Gradients grads;
  results.y = oracle::experts_forward(config, in, in.x, route, plan);
  results.d_x = oracle::experts_backward(config, in, in.x, route, plan, p.d_y, &grads);
  results.d_routing_weights = grads.routing_weights;
  results.routing_terms = grads.terms.routing_weights;
  return results;
}

}  // namespace moec::test
