// SPDX-License-Identifier: Apache-2.0
// The oracle's whole layer: gate, route, plan, experts.
#include <cmath>

#include "moe_oracle.h"

namespace moec::oracle {
namespace {

// The fault kDroppedRenormed: what is left after a drop is scaled to the sum it had before.
void renormalise_kept(const Plan& plan, int slots, Vec* weights) {
  for (size_t first = 0; first < weights->size(); first += static_cast<size_t>(slots)) {
    double all = 0;
    double kept = 0;
    for (size_t a = first; a < first + static_cast<size_t>(slots); ++a) {
      all += (*weights)[a];
      kept += plan.assignment_row[a] >= 0 ? (*weights)[a] : 0;
    }
    for (size_t a = first; a < first + static_cast<size_t>(slots) && kept != 0; ++a)
      (*weights)[a] *= all / kept;
  }
}

}  // namespace

Layer forward(const Config& config, const Inputs& in) {
  Layer layer;
  layer.gate = gate_forward(config, in);
  layer.route = route_forward(config, in, layer.gate.logits);
  Route& route = layer.route;
  layer.plan = build_plan(config, in.tokens, route.slots, route.ids, route.weights);
  if (config.fault == Fault::kDroppedRenormed)
    renormalise_kept(layer.plan, route.slots, &route.weights);
  layer.y = experts_forward(config, in, layer.gate.expert_x, route, layer.plan);
  return layer;
}

Gradients backward(const Config& config, const Inputs& in, const Layer& layer, const Vec& d_y,
                   const Vec& d_logits_in) {
  Gradients grads;
  const Vec d_expert_x =
      experts_backward(config, in, layer.gate.expert_x, layer.route, layer.plan, d_y, &grads);
  route_backward(config, in, layer.route, grads.routing_weights, &grads);
  for (size_t i = 0; i < d_logits_in.size(); ++i) grads.logits[i] += d_logits_in[i];
  gate_backward(config, in, layer.gate, grads.logits, d_expert_x, &grads);
  return grads;
}

}  // namespace moec::oracle
