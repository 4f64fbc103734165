// SPDX-License-Identifier: Apache-2.0
#include "coded_problem.h"

#include <deque>

#include "golden/golden_case.h"
#include "step.h"
#include "support/describe.h"
#include "support/layer_runner.h"
#include "support/tensors.h"

namespace moec::test {
namespace {

using oracle::Vec;

bool is_one_matrix(uint32_t layout) {
  return layout != MOEC_GATE_SPLIT && layout != MOEC_GATE_NONE;
}

Vec rounded(moec_dtype dtype, Vec values) {
  for (double& v : values) v = oracle::round_to(rounding_of(dtype), v);
  return values;
}

moec_dtype up_scales(const CodedCase& c) {
  if (!c.unlike_up) return c.scale_dtype;
  return c.scale_dtype == MOEC_F32 ? MOEC_BF16 : MOEC_F32;
}

CodedMatrix random_matrix(const CodedCase& c, Random& random, int N, int K, moec_dtype scale_dtype,
                          bool asymmetric) {
  CodedMatrix m;
  const size_t channels = size_t(kCodedExperts) * size_t(N);
  m.scales = random.normals(channels, 0.02 / 3);
  for (double& scale : m.scales) scale = std::fabs(scale) + 0.002;
  m.scales = rounded(scale_dtype, m.scales);
  for (size_t i = 0; i < channels && asymmetric; ++i)
    m.zeros.push_back(double(random.below(256) - 128));
  for (size_t i = 0; i < channels; ++i)
    for (int k = 0; k < K; ++k) {
      const double zero = asymmetric ? m.zeros[i] : 0;
      double code = std::nearbyint(zero + 20 * random.normal());
      code = k == 0 ? -128 : k == 1 ? 127 : std::min(127.0, std::max(-128.0, code));
      m.codes.push_back(code);
      const float value = (float(code) - float(zero)) * float(m.scales[i]);
      m.values.push_back(double(value));
    }
  m.values = rounded(c.dtype, m.values);
  if (c.bias) m.bias = rounded(c.dtype, random.normals(channels, 0.5));
  return m;
}

// The matrices of a call on the device.
class Matrices {
 public:
  Matrices(const CodedProblem& problem, Held held, Tensors& tensors)
      : c_(problem.c), held_(held), tensors_(tensors) {
    set_ = sized<moec_weight_set>();
    const bool in_out = c_.gate_up_orientation == MOEC_IN_OUT;
    if (is_one_matrix(c_.gate_layout)) {
      const auto kind = golden::GateLayout(c_.gate_layout);
      const auto join = [&](const Vec& gate, const Vec& up, int K) {
        const golden::Stack stack = {kCodedExperts, 2 * c_.inter, K, false};
        return up.empty() ? Vec{} : golden::join_gate_up(stack, kind, gate, up);
      };
      const CodedMatrix &g = problem.gate, &u = problem.up;
      const CodedMatrix both = {join(g.codes, u.codes, c_.hidden), join(g.scales, u.scales, 1),
                                join(g.zeros, u.zeros, 1), join(g.values, u.values, c_.hidden),
                                join(g.bias, u.bias, 1)};
      set_.gate_up = matrix(both, 2 * c_.inter, c_.hidden, in_out, c_.coded_gate_up);
    } else {
      if (c_.gate_layout != MOEC_GATE_NONE)
        set_.gate = matrix(problem.gate, c_.inter, c_.hidden, in_out, c_.coded_gate_up);
      set_.up = matrix(problem.up, c_.inter, c_.hidden, in_out, c_.coded_gate_up, up_scales(c_));
    }
    set_.down = matrix(problem.down, c_.hidden, c_.inter, c_.down_orientation == MOEC_IN_OUT,
                       c_.coded_down);
  }
  const moec_weight_set* set() const { return &set_; }
  moec_weights_desc desc() const {
    auto d = sized<moec_weights_desc>();
    d.num_experts = kCodedExperts;
    d.gate_layout = c_.gate_layout;
    d.hidden = c_.hidden;
    d.inter = c_.inter;
    d.gate_up_orientation = c_.gate_up_orientation;
    d.down_orientation = c_.down_orientation;
    d.dtype = c_.dtype;
    if (held_ == Held::kCodes && c_.coded_gate_up) d.gate_up_scheme = MOEC_SCHEME_INT8;
    if (held_ == Held::kCodes && c_.coded_down) d.down_scheme = MOEC_SCHEME_INT8;
    return d;
  }

 private:
  // The stack, or where experts are separate tensors, those.
  void place(const Vec& canonical, moec_dtype dtype, int N, int K, bool in_out, moec_tensor& stack,
             const moec_tensor*& each) {
    if (canonical.empty()) return;
    const auto stored = golden::from_out_in({kCodedExperts, N, K, in_out}, canonical);
    const moec_tensor all =
        tensors_.input(stored, dtype, {kCodedExperts, in_out ? K : N, in_out ? N : K});
    if (!c_.per_expert) {
      stack = all;
      return;
    }
    std::vector<moec_tensor> slices;
    for (int e = 0; e < kCodedExperts; ++e) slices.push_back(slice(all, e));
    arrays_.push_back(std::move(slices));
    each = arrays_.back().data();
  }
  moec_matrix matrix(const CodedMatrix& from, int N, int K, bool in_out, bool is_coded) {
    return matrix(from, N, K, in_out, is_coded, c_.scale_dtype);
  }
  moec_matrix matrix(const CodedMatrix& from, int N, int K, bool in_out, bool is_coded,
                     moec_dtype scale_dtype) {
    const bool coded = is_coded && held_ == Held::kCodes;
    moec_matrix m = {};
    place(coded ? from.codes : from.values, coded ? moec_dtype(MOEC_I8) : c_.dtype, N, K, in_out,
          m.data, m.per_expert);
    if (!from.bias.empty()) m.bias = tensors_.input(from.bias, c_.dtype, {kCodedExperts, N});
    if (c_.per_expert) m.count = kCodedExperts;
    if (!coded) return m;
    quants_.push_back(sized<moec_quant>());
    moec_quant& quant = quants_.back();
    place(from.scales, scale_dtype, N, 1, in_out, quant.scales, quant.per_expert_scales);
    place(from.zeros, MOEC_I8, N, 1, in_out, quant.zeros, quant.per_expert_zeros);
    m.quant = &quant;
    return m;
  }

  const CodedCase& c_;
  const Held held_;
  Tensors& tensors_;
  std::deque<std::vector<moec_tensor>> arrays_;
  std::deque<moec_quant> quants_;
  moec_weight_set set_;
};

moec_buffer buffer_of(Tensors& tensors, const moec_size& size, int tokens) {
  return tensors.buffer(size.base + uint64_t(tokens) * size.per_token);
}

// The names of the kernels of calls that want every gradient.
void name_kernels(const moec_experts* experts, const moec_weights* weights, int64_t tokens,
                  CodedResults& results) {
  const Json json = describe_experts(experts, weights, tokens);
  const auto name = [&](const char* direction, std::set<std::string>& names) {
    const Json* const call = json.find(direction);  // none without SAVE; no kernels: refused
    const Json* const kernels = call ? call->find("kernels") : nullptr;
    if (!kernels) return;
    for (const Json& entry : kernels->array) names.insert(entry.at("kernel").string);
  };
  name("forward", results.forward);
  name("backward", results.backward);
}

}  // namespace

std::string CodedCase::text() const {
  const auto orientation = [](uint32_t o) { return o == MOEC_IN_OUT ? " in_out" : " out_in"; };
  return "dtype " + std::to_string(dtype) + " scales " + std::to_string(scale_dtype) + " layout " +
         std::to_string(gate_layout) + orientation(gate_up_orientation) +
         orientation(down_orientation) + (asymmetric ? " asymmetric" : "") + (bias ? " bias" : "") +
         (per_expert ? " per_expert" : "") + (unlike_up ? " unlike_up" : "") +
         (coded_gate_up ? "" : " plain gate_up") + (coded_down ? "" : " plain down") + " T " +
         std::to_string(tokens) + " H " + std::to_string(hidden) + " I " + std::to_string(inter) +
         " act " + std::to_string(int(act)) + " save " + std::to_string(save);
}

CodedProblem::CodedProblem(const CodedCase& coded_case) : c(coded_case) {
  Random random(77);
  config.router.num_experts = kCodedExperts;
  config.router.top_k = kCodedTopK;
  config.experts.hidden = c.hidden;
  config.experts.inter = c.inter;
  config.experts.activation.kind = c.act;
  // Far from every pre-activation: at a clamp the gradient has another value on either side.
  if (oracle::info_of(c.act).limit) config.experts.activation.limit = 1000;
  const bool gated = c.gate_layout != MOEC_GATE_NONE;
  if (gated) gate = random_matrix(c, random, c.inter, c.hidden, c.scale_dtype, c.asymmetric);
  up = random_matrix(c, random, c.inter, c.hidden, up_scales(c), c.asymmetric != c.unlike_up);
  down = random_matrix(c, random, c.hidden, c.inter, c.scale_dtype, c.asymmetric);
  in.tokens = c.tokens;
  const size_t values = size_t(c.tokens) * size_t(c.hidden);
  in.x = rounded(c.dtype, random.normals(values));
  d_y = rounded(c.dtype, random.normals(values));
  in.experts = {gate.values, up.values, down.values, gate.bias, up.bias, down.bias};
  route.slots = kCodedTopK;
  for (int t = 0; t < c.tokens; ++t) {  // the last expert has no token
    const auto first = int(random.below(kCodedExperts - 1));
    route.ids.insert(route.ids.end(), {first, (first + 1) % (kCodedExperts - 1)});
    for (int slot = 0; slot < kCodedTopK; ++slot)
      route.weights.push_back(oracle::round_to(oracle::Rounding::kFp32, random.uniform() + 0.25));
  }
  plan = oracle::build_plan(config, c.tokens, kCodedTopK, route.ids, route.weights);
}

CodedResults run(const moec_context* context, const CodedProblem& problem, Held held,
                 uint32_t save) {
  CodedResults results;
  try {
    const CodedCase& c = problem.c;
    Tensors tensors;
    RunOptions options;
    options.dtype = c.dtype;
    options.layout.gate_layout = c.gate_layout;
    options.save = save;
    const moec_experts_desc desc = experts_desc(problem.config, problem.in, options);
    const auto experts = make<Experts>(moec_experts_create, context, &desc);
    const Matrices matrices(problem, held, tensors);
    const moec_weights_desc weights_desc = matrices.desc();
    const auto weights = make<Weights>(moec_weights_create, context, &weights_desc);
    check(moec_weights_bind(weights.get(), matrices.set()));
    auto plan_desc = sized<moec_plan_desc>();
    plan_desc.max_tokens = c.tokens;
    plan_desc.num_experts = kCodedExperts;
    plan_desc.top_k = kCodedTopK;
    const moec_buffer* const own = nullptr;
    const auto plan = make<PlanHandle>(moec_plan_create, context, &plan_desc, own);
    const moec_tensor ids = tensors.input_ids(problem.route.ids, MOEC_I32, {c.tokens, kCodedTopK});
    const moec_tensor routing =
        tensors.input(problem.route.weights, MOEC_F32, {c.tokens, kCodedTopK});
    check(moec_plan_from_topk(plan.get(), &ids, &routing, nullptr));
    auto sizes = sized<moec_experts_sizes>();
    check(moec_experts_query(experts.get(), &sizes));
    auto args = sized<moec_experts_args>();
    args.plan = plan.get();
    args.weights = weights.get();
    args.x = tensors.input(problem.in.x, c.dtype, {c.tokens, c.hidden});
    args.y = tensors.output(c.dtype, {c.tokens, c.hidden});
    if (save != MOEC_SAVE_NONE) args.saved = buffer_of(tensors, sizes.saved, c.tokens);
    check(moec_experts_forward(experts.get(), &args, nullptr));
    auto grad = sized<moec_experts_grad_args>();
    if (save != MOEC_SAVE_NONE) {
      grad.plan = args.plan;
      grad.weights = args.weights;
      grad.x = args.x;
      grad.saved = args.saved;
      grad.d_y = tensors.input(problem.d_y, c.dtype, {c.tokens, c.hidden});
      grad.d_x = tensors.output(c.dtype, {c.tokens, c.hidden});
      grad.d_routing_weights = tensors.output(MOEC_F32, {c.tokens, kCodedTopK});
      check(moec_experts_backward(experts.get(), &grad, nullptr));
    }
    check(moec_context_sync(context, nullptr));
    name_kernels(experts.get(), weights.get(), c.tokens, results);
    results.y = tensors.read(args.y);
    if (save != MOEC_SAVE_NONE) {
      results.d_x = tensors.read(grad.d_x);
      results.d_routing_weights = tensors.read(grad.d_routing_weights);
    }
  } catch (const Failure& failure) {
    results = {};
    results.status = failure.status;
    results.message = failure.what();
  }
  return results;
}

CodedResults reference(const CodedProblem& problem) {
  CodedResults results;
  const oracle::Inputs& in = problem.in;
  oracle::Gradients grads;
  results.y = oracle::experts_forward(problem.config, in, in.x, problem.route, problem.plan);
  results.d_x = oracle::experts_backward(problem.config, in, in.x, problem.route, problem.plan,
                                         problem.d_y, &grads);
  results.d_routing_weights = grads.routing_weights;
  results.terms = grads.terms.routing_weights;
  return results;
}

}  // namespace moec::test
