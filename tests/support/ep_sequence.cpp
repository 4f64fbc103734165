// SPDX-License-Identifier: Apache-2.0
// An EpProblem in one process: the router of each rank, the N ranges of experts one after the other
// on the tokens of all, what stays at home, and sums in rank order.
#include <cmath>
#include <numeric>

#include "ep_data.h"

namespace moec::test {
namespace {

class Sequence {
 public:
  explicit Sequence(const EpProblem& problem)
      : p_(problem), m_(problem), context_(test_context(1)), out_(size_t(p_.ranks)) {
    const moec_router_desc router = p_.router_desc();
    router_ = make<Router>(moec_router_create, context_, &router);
    for (int r = 0; r < p_.ranks; ++r) first_.push_back(r * p_.call_bound());
    guests_ = p_.ranks * p_.call_bound();
  }

  std::vector<Outputs> run() {
    for (int r = 0; r < p_.ranks; ++r) route(r);
    std::vector<Part> routed, home;
    for (int q = 0; q < p_.ranks; ++q) routed.push_back(run_range(q));
    for (int r = 0; r < p_.ranks; ++r) home.push_back(run_home(r));
    for (int r = 0; r < p_.ranks; ++r) {
      add_up(r, first_[size_t(r)], routed, home[size_t(r)]);
      if (!d_shared_a_.empty()) out_[size_t(r)]["d_shared_a"] = encode(d_shared_a_, MOEC_F32);
    }
    return out_;
  }

 private:
  struct Seat {  // what the router of one rank gave
    Batch batch;
    moec_gate_args gate;
    Vec ids, weights;
    moec_tensor logits, x;  // x: what its experts see
  };
  struct Part {  // of an experts call
    Vec y, d_x, d_weights;
  };
  using Shape = std::vector<int64_t>;

  // [guests, columns] of [tokens, columns] of each rank. Each has a place for as many tokens as
  // there may be, whatever the scheme: kernels are chosen as for them. Those between get `none`.
  template <typename Value>
  std::vector<Value> spread(const std::vector<std::vector<Value>>& parts, int64_t columns,
                            Value none) const {
    std::vector<Value> all(size_t(guests_ * columns), none);
    for (size_t r = 0; r < parts.size(); ++r)
      std::copy(parts[r].begin(), parts[r].end(), all.begin() + first_[r] * columns);
    return all;
  }

  void route(int r) {
    Seat s{batch_of(p_, r), {}, {}, {}, {}, {}};
    const int64_t T = s.batch.tokens, H = p_.hidden, N = p_.columns(), K = p_.top_k;
    s.gate = sized<moec_gate_args>();
    s.gate.rng_offset = s.batch.rng_offset;
    s.gate.x = s.x = m_.in(s.batch.x, p_.dtype, {T, H});
    s.gate.weight = m_.parameter(p_.gate_weight, p_.dtype, {N, H});
    s.gate.bias = m_.parameter(p_.gate_bias, p_.dtype, {N});
    s.gate.logits = s.logits = m_.output(MOEC_F32, {T, N});
    if (p_.jitter_x) s.gate.x_jittered = s.x = m_.output(p_.dtype, {T, H});
    check(moec_gate_forward(router_.get(), &s.gate, nullptr));
    auto args = sized<moec_route_args>();
    args.logits = s.logits;
    args.select_bias = m_.parameter(p_.select_bias, MOEC_F32, {N});
    if (!p_.token_mask.empty())
      args.token_mask = m_.in({s.batch.mask.begin(), s.batch.mask.end()}, MOEC_U8, {T});
    args.expert_ids = m_.output(MOEC_I32, {T, K});
    args.routing_weights = m_.output(MOEC_F32, {T, K});
    check(moec_route_forward(router_.get(), &args, nullptr));
    s.ids = m_.values(args.expert_ids);
    s.weights = m_.values(args.routing_weights);
    Outputs& out = out_[size_t(r)];
    out["expert_ids"] = m_.raw(args.expert_ids);
    out["routing_weights"] = m_.raw(args.routing_weights);
    seats_.push_back(s);
  }

  // Experts of a plan of these ids, forward and backward.
  Part run_experts(const moec_experts_desc& desc, const Batch& b, const Vec& x, const Vec& ids,
                   const Vec& weights, uint32_t drop, const BoundRange& own, const BoundMlp* shared,
                   Outputs& out) {
    const int64_t T = b.tokens, H = p_.hidden, K = p_.top_k;
    auto plan_desc = sized<moec_plan_desc>();
    plan_desc.max_tokens = T;
    plan_desc.num_experts = desc.num_experts;
    plan_desc.num_zero_experts = desc.num_zero_experts;
    plan_desc.top_k = desc.top_k;
    plan_desc.expert_begin = desc.expert_begin;
    plan_desc.expert_end = desc.expert_end;
    plan_desc.align = desc.align;
    plan_desc.drop = drop;
    if (drop) plan_desc.capacity = capacity();
    const PlanHandle plan = make<PlanHandle>(moec_plan_create, context_, &plan_desc, nullptr);
    const moec_tensor id_tensor = m_.in(ids, MOEC_I32, {T, K});
    const moec_tensor weight_tensor = m_.in(weights, MOEC_F32, {T, K});
    check(moec_plan_from_topk(plan.get(), &id_tensor, &weight_tensor, nullptr));
    const Experts experts = make<Experts>(moec_experts_create, context_, &desc);
    const bool home = &b != &all_;
    const moec_adapters* const adapters = home ? nullptr : own.adapters.get();
    auto sizes = sized<moec_experts_sizes>();
    check(adapters ? moec_experts_query_adapters(experts.get(), adapters, &sizes)
                   : moec_experts_query(experts.get(), &sizes));

    auto args = sized<moec_experts_args>();
    args.plan = plan.get();
    args.weights = own.mlp.handle.get();
    args.adapters = adapters;
    if (!home && !p_.adapter_ids.empty())
      args.adapter_ids = m_.in({b.adapter_ids.begin(), b.adapter_ids.end()}, MOEC_I32, {T});
    if (!home && !drop) args.flags = MOEC_EXPERTS_SKIP_ABSENT;
    args.x = m_.in(x, p_.dtype, {T, H});
    if (shared) args.shared_weights = shared->handle.get();
    if (home) {
      args.shared_gate = m_.parameter(p_.shared_gate, p_.dtype, {1, H});
      args.output_bias = m_.parameter(p_.output_bias, p_.dtype, {H});
      if (!p_.residual.empty()) args.residual = m_.in(b.residual, p_.dtype, {T, H});
    }
    args.y = m_.output(p_.dtype, {T, H});
    args.saved = m_.buffer(bytes_for(sizes.saved, T));
    check(moec_experts_forward(experts.get(), &args, nullptr));

    auto grad = sized<moec_experts_grad_args>();
    grad.flags = m_.grad_flags() & MOEC_GRAD_ACCUMULATE;
    grad.plan = plan.get();
    grad.weights = args.weights;
    grad.adapters = args.adapters;
    grad.adapter_ids = args.adapter_ids;
    grad.shared_weights = args.shared_weights;
    grad.x = args.x;
    grad.shared_gate = args.shared_gate;
    grad.d_y = m_.in(b.d_y, p_.dtype, {T, H});
    grad.saved = args.saved;
    // At home d_x is what the caller's gradient is added to, but where the gate adds it later.
    if (home && !p_.jitter_x) grad.flags = m_.grad_flags();
    grad.d_x = home && !p_.jitter_x ? m_.gradient(p_.dtype, {T, H}) : m_.output(p_.dtype, {T, H});
    grad.d_routing_weights = m_.output(MOEC_F32, {T, K});
    if (home) {
      if (shared) grad.d_shared_weights = &shared->d_set;
      if (!p_.shared_gate.empty()) grad.d_shared_gate = m_.gradient(MOEC_F32, {1, H});
      if (!p_.output_bias.empty()) grad.d_output_bias = m_.gradient(MOEC_F32, {H});
      if (!p_.residual.empty()) grad.d_residual = m_.output(p_.dtype, {T, H});
    } else {
      grad.d_expert_weights = &own.mlp.d_set;
      grad.d_adapters = own.d_list();
    }
    check(moec_experts_backward(experts.get(), &grad, nullptr));
    if (home) {
      if (shared) out["d_shared"] = shared->gradients->bytes();
      out["d_shared_gate"] = m_.raw(grad.d_shared_gate);
      out["d_output_bias"] = m_.raw(grad.d_output_bias);
      out["d_residual"] = m_.raw(grad.d_residual);
    } else {
      out["d_experts"] = own.mlp.gradients->bytes();
      if (own.d_factors) out["d_adapters"] = own.d_factors->bytes();
      if (own.d_factors && p_.adapter_layout.one_for_all) add_shared_a(own.d_shared_a());
    }
    return {m_.values(args.y), m_.values(grad.d_x), m_.values(grad.d_routing_weights)};
  }

  void add_shared_a(const Vec& d_a) {
    d_shared_a_.resize(d_a.size());
    for (size_t i = 0; i < d_a.size(); ++i)
      d_shared_a_[i] = double(float(d_shared_a_[i]) + float(d_a[i]));
  }

  // The experts of rank q for the tokens of all ranks, one rank after the other.
  Part run_range(int q) {
    const int begin = p_.begin[size_t(q)], end = p_.begin[size_t(q) + 1];
    std::vector<Vec> x, ids, weights;
    for (const Seat& s : seats_) {
      x.push_back(m_.values(s.x));
      weights.push_back(s.weights);
      ids.push_back(s.ids);
      for (double& id : ids.back()) id = id < p_.experts ? id : -1;
    }
    const int64_t H = p_.hidden, K = p_.top_k;
    all_ = {guests_, {}, spread(p_.d_y, H, 0.0), {}, {}, spread(p_.adapter_ids, 1, -1), 0};
    const BoundRange own(p_, context_, begin, end);
    return run_experts(p_.experts_desc(begin, end, false), all_, spread(x, H, 0.0),
                       spread(ids, K, -1.0), spread(weights, K, 0.0), p_.drop, own, nullptr,
                       out_[size_t(q)]);
  }
  // Of the tokens of all ranks. The factors that are drawn are exact.
  int64_t capacity() const {
    const double tokens = std::accumulate(p_.tokens.begin(), p_.tokens.end(), 0.0);
    const double rows = tokens * p_.top_k * double(p_.capacity_factor) / p_.experts;
    return std::max<int64_t>(1, int64_t(std::ceil(rows)));
  }

  // What does not leave rank r: everything but its experts.
  Part run_home(int r) {
    const int begin = p_.begin[size_t(r)], end = p_.begin[size_t(r) + 1];
    const Seat& s = seats_[size_t(r)];
    Vec ids;
    for (const double id : s.ids) ids.push_back(id < p_.experts ? -1 : id);
    const BoundRange own(p_, context_, begin, end);
    std::unique_ptr<BoundMlp> shared;
    if (p_.shared)
      shared = std::make_unique<BoundMlp>(p_, context_, p_.shared_weights, 1, p_.shared_inter);
    return run_experts(p_.experts_desc(begin, end, true), s.batch, m_.values(s.x), ids, s.weights,
                       MOEC_DROP_NONE, own, shared.get(), out_[size_t(r)]);
  }

  // Row t of rank r is row first + t of all.
  void add_up(int r, int64_t first, const std::vector<Part>& routed, const Part& home) {
    const Seat& s = seats_[size_t(r)];
    const int64_t T = s.batch.tokens, H = p_.hidden, N = p_.columns(), K = p_.top_k;
    const auto visits = [&](int64_t t, int q) {
      for (int64_t a = t * K; a < (t + 1) * K; ++a)
        if (p_.owner(static_cast<int>(s.ids[size_t(a)])) == q) return true;
      return false;
    };
    const auto sum = [&](Vec Part::* rows) {
      Vec total;
      for (int64_t i = 0; i < T * H; ++i) {
        float value = 0.0f;
        for (int q = 0; q < p_.ranks; ++q)
          if (visits(i / H, q))
            value += static_cast<float>((routed[size_t(q)].*rows)[size_t(first * H + i)]);
        value += static_cast<float>((home.*rows)[size_t(i)]);
        total.push_back(static_cast<double>(value));
      }
      return decode(encode(total, p_.dtype), p_.dtype);
    };
    Outputs& out = out_[size_t(r)];
    out["y"] = encode(sum(&Part::y), p_.dtype);
    Vec d_weights;
    for (int64_t a = 0; a < T * K; ++a) {
      const int id = static_cast<int>(s.ids[size_t(a)]);
      const int owner = p_.owner(id);
      d_weights.push_back(owner < 0 ? home.d_weights[size_t(a)]
                                    : routed[size_t(owner)].d_weights[size_t(first * K + a)]);
    }
    out["d_routing_weights"] = encode(d_weights, MOEC_F32);

    auto route = sized<moec_route_grad_args>();
    route.logits = s.logits;
    route.expert_ids = m_.in(s.ids, MOEC_I32, {T, K});
    route.d_routing_weights = m_.in(d_weights, MOEC_F32, {T, K});
    route.d_logits = m_.output(MOEC_F32, {T, N});
    check(moec_route_backward(router_.get(), &route, nullptr));
    auto gate = sized<moec_gate_grad_args>();
    gate.flags = (m_.grad_flags() & MOEC_GRAD_ACCUMULATE) | MOEC_GRAD_SKIP_IDLE;
    gate.rng_offset = s.batch.rng_offset;
    gate.x = s.gate.x;
    gate.weight = s.gate.weight;
    gate.d_logits = route.d_logits;
    if (p_.jitter_x) {
      gate.flags |= m_.grad_flags();
      gate.d_x = m_.gradient(p_.dtype, {T, H});
      gate.d_x_jittered = m_.in(sum(&Part::d_x), p_.dtype, {T, H});
    } else {
      gate.flags |= MOEC_GRAD_ACCUMULATE_X;
      gate.d_x = m_.in(sum(&Part::d_x), p_.dtype, {T, H});
    }
    gate.d_weight = m_.gradient(MOEC_F32, {N, H});
    if (!p_.gate_bias.empty()) gate.d_bias = m_.gradient(MOEC_F32, {N});
    check(moec_gate_backward(router_.get(), &gate, nullptr));
    out["d_x"] = m_.raw(gate.d_x);
    out["d_gate_weight"] = m_.raw(gate.d_weight);
    out["d_gate_bias"] = m_.raw(gate.d_bias);
  }

  const EpProblem& p_;
  Memory m_;
  const moec_context* const context_;
  std::vector<Outputs> out_;
  Router router_;
  std::vector<Seat> seats_;
  std::vector<int64_t> first_;  // guest of each rank
  int64_t guests_ = 0;
  Batch all_{};
  Vec d_shared_a_;  // of the ranks so far
};

}  // namespace

std::vector<Outputs> run_in_sequence(const EpProblem& p) {
  return Sequence(p).run();
}

}  // namespace moec::test
