// SPDX-License-Identifier: Apache-2.0
// Layers of an EpProblem: with an ep on N ranks, and without on all tokens.
#include <gtest/gtest.h>

#include "ep_data.h"

namespace moec::test {
namespace {

// A whole layer, with an ep of a comm or without both.
Outputs run_layer(
    const EpProblem& p, const Batch& b, const moec_context* context, moec_comm* comm, moec_ep* ep,
    moec_stream stream, int begin, int end, const std::function<void()>& wait_for_all = [] {}) {
  const int64_t T = b.tokens, H = p.hidden, N = p.columns(), K = p.top_k;
  const moec_router_desc router = p.router_desc();
  const moec_experts_desc experts = p.experts_desc(begin, end, true);
  auto desc = sized<moec_layer_desc>();
  desc.router = &router;
  desc.experts = &experts;
  desc.drop = p.drop;
  desc.capacity_factor = p.capacity_factor;
  desc.ep = ep;
  const LayerHandle layer = make<LayerHandle>(moec_layer_create, context, &desc);
  const BoundRange own(p, context, begin, end);
  std::unique_ptr<BoundMlp> shared;
  if (p.shared)
    shared = std::make_unique<BoundMlp>(p, context, p.shared_weights, 1, p.shared_inter);

  auto sizes = sized<moec_experts_sizes>();
  check(own.adapters ? moec_layer_query_adapters(layer.get(), own.adapters.get(), &sizes)
                     : moec_layer_query(layer.get(), &sizes));
  Memory m(p);
  auto args = sized<moec_layer_args>();
  args.rng_offset = b.rng_offset;
  args.bound = ep ? p.bound : 0;
  args.weights = own.mlp.handle.get();
  args.adapters = own.adapters.get();
  if (!p.adapter_ids.empty())
    args.adapter_ids = m.in({b.adapter_ids.begin(), b.adapter_ids.end()}, MOEC_I32, {T});
  if (shared) args.shared_weights = shared->handle.get();
  args.x = m.in(b.x, p.dtype, {T, H});
  args.gate_weight = m.parameter(p.gate_weight, p.dtype, {N, H});
  args.gate_bias = m.parameter(p.gate_bias, p.dtype, {N});
  args.select_bias = m.parameter(p.select_bias, MOEC_F32, {N});
  if (!p.token_mask.empty()) args.token_mask = m.in({b.mask.begin(), b.mask.end()}, MOEC_U8, {T});
  args.shared_gate = m.parameter(p.shared_gate, p.dtype, {1, H});
  args.output_bias = m.parameter(p.output_bias, p.dtype, {H});
  if (!p.residual.empty()) args.residual = m.in(b.residual, p.dtype, {T, H});
  args.y = m.output(p.dtype, {T, H});
  args.expert_ids = m.output(MOEC_I32, {T, K});
  args.routing_weights = m.output(MOEC_F32, {T, K});
  args.saved = m.buffer(bytes_for(sizes.saved, T));
  args.workspace = m.buffer(bytes_for(sizes.forward_workspace, T));
  check(moec_context_reserve(context, uint64_t{16} << 20, stream));
  wait_for_all();
  check(moec_layer_forward(layer.get(), &args, stream));
  check(moec_context_sync(context, stream));
  wait_for_all();

  auto grad = sized<moec_layer_grad_args>();
  grad.flags = m.grad_flags();
  grad.forward = &args;
  grad.d_y = m.in(b.d_y, p.dtype, {T, H});
  grad.d_x = m.gradient(p.dtype, {T, H});
  grad.d_gate_weight = m.gradient(MOEC_F32, {N, H});
  if (!p.gate_bias.empty()) grad.d_gate_bias = m.gradient(MOEC_F32, {N});
  grad.d_expert_weights = &own.mlp.d_set;
  grad.d_adapters = own.d_list();
  if (shared) grad.d_shared_weights = &shared->d_set;
  if (!p.shared_gate.empty()) grad.d_shared_gate = m.gradient(MOEC_F32, {1, H});
  if (!p.output_bias.empty()) grad.d_output_bias = m.gradient(MOEC_F32, {H});
  if (!p.residual.empty()) grad.d_residual = m.output(p.dtype, {T, H});
  grad.d_routing_weights = m.output(MOEC_F32, {T, K});
  grad.workspace = m.buffer(bytes_for(sizes.backward_workspace, T));
  wait_for_all();
  check(moec_layer_backward(layer.get(), &grad, stream));
  check(moec_context_sync(context, stream));
  wait_for_all();
  EXPECT_TRUE(m.neighbours_untouched());

  Outputs out;
  out["y"] = m.raw(args.y);
  out["expert_ids"] = m.raw(args.expert_ids);
  out["routing_weights"] = m.raw(args.routing_weights);
  out["d_x"] = m.raw(grad.d_x);
  out["d_gate_weight"] = m.raw(grad.d_gate_weight);
  out["d_gate_bias"] = m.raw(grad.d_gate_bias);
  out["d_experts"] = own.mlp.gradients->bytes();
  if (own.d_factors) out["d_adapters"] = own.d_factors->bytes();
  if (own.d_factors && p.adapter_layout.one_for_all) {
    for (const moec_adapter& one : own.d_factors->list())
      for (const moec_factors* f : {&one.gate_up, &one.gate, &one.up, &one.down})
        if (comm && f->a.data) check(moec_comm_sum(comm, &f->a, stream));
    check(moec_context_sync(context, stream));
    out["d_shared_a"] = encode(own.d_shared_a(), MOEC_F32);
  }
  if (shared) out["d_shared"] = shared->gradients->bytes();
  out["d_shared_gate"] = m.raw(grad.d_shared_gate);
  out["d_output_bias"] = m.raw(grad.d_output_bias);
  out["d_residual"] = m.raw(grad.d_residual);
  out["d_routing_weights"] = m.raw(grad.d_routing_weights);
  return out;
}

}  // namespace

Outputs run_ep_layer(const EpProblem& p, int rank, const moec_context* context, moec_comm* comm,
                     moec_stream stream, const std::function<void()>& wait_for_all) {
  auto desc = sized<moec_ep_desc>();
  desc.hidden = p.hidden;
  desc.max_tokens = p.max_tokens();
  desc.num_experts = p.experts;
  desc.num_zero_experts = p.zero_experts;
  desc.top_k = p.top_k;
  desc.scheme = p.scheme;
  desc.dtype = p.dtype;
  desc.expert_begin = p.begin.data();
  desc.grad_scale = p.grad_scale;
  desc.timeout_ms = 6000;
  const Ep ep = make<Ep>(moec_ep_create, comm, &desc);
  const auto r = static_cast<size_t>(rank);
  return run_layer(p, batch_of(p, rank), context, comm, ep.get(), stream, p.begin[r],
                   p.begin[r + 1], wait_for_all);
}

std::vector<Outputs> run_ep_layers(const EpProblem& p, RankBoard& board) {
  std::vector<Outputs> out(static_cast<size_t>(p.ranks));
  const std::vector<std::string> errors = run_ranks(p.ranks, [&](int r) {
    const Rank rank(board, r, p.counts);
    out[static_cast<size_t>(r)] = run_ep_layer(p, rank);
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
  return out;
}

std::vector<Outputs> run_ep_layers(const EpProblem& p) {
  RankBoard board(p.ranks);
  return run_ep_layers(p, board);
}

Outputs run_one_layer(const EpProblem& p) {
  return run_layer(p, all_of(p), test_context(1), nullptr, nullptr, nullptr, 0, p.experts);
}

}  // namespace moec::test
