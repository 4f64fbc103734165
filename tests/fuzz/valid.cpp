// SPDX-License-Identifier: Apache-2.0
// Calls that may succeed: one small layer (T 3, E 4, K 2, H 8, I 8) whose structs the fuzzer then
// damages.
#include <cstring>

#include "fuzz.h"

namespace moec_fuzz {
namespace {

constexpr int64_t kT = 3, kE = 4, kK = 2, kH = 8, kI = 8;

moec_matrix stacked(Fuzz& fuzz, int64_t n, int64_t k) {
  moec_matrix matrix = {};
  matrix.data = fuzz.tensor(MOEC_F32, {kE, n, k});
  return matrix;
}

void fill(Fuzz&, moec_router_desc& d) {
  d.num_experts = kE;
  d.top_k = kK;
}
void fill(Fuzz& fuzz, moec_plan_desc& d) {
  d.max_tokens = kT;
  d.num_experts = kE;
  d.top_k = kK;
  if (fuzz.chance(20)) {
    d.kind = MOEC_PLAN_EXPERT_CHOICE;
    d.top_k = 0;
    d.capacity = 2;
  }
}
void fill(Fuzz& fuzz, moec_experts_desc& d) {
  d.num_experts = kE;
  d.top_k = kK;
  d.hidden = kH;
  d.inter = kI;
  d.dtype = MOEC_F32;
  d.save = uint32_t(fuzz.below(4));
}
void fill(Fuzz& fuzz, moec_layer_desc& d) {
  d.router = static_cast<moec_router_desc*>(fuzz.structure("moec_router_desc", false, 1));
  d.experts = static_cast<moec_experts_desc*>(fuzz.structure("moec_experts_desc", false, 1));
}
void fill(Fuzz& fuzz, moec_weights_desc& d) {
  d.num_experts = kE;
  d.hidden = kH;
  d.inter = kI;
  d.gate_layout = MOEC_GATE_THEN_UP;
  d.dtype = MOEC_F32;
  d.flags = fuzz.chance(50) ? MOEC_WEIGHTS_FROZEN : 0;
}
void fill(Fuzz& fuzz, moec_weight_set& s) {
  s.gate_up = stacked(fuzz, 2 * kI, kH);
  s.down = stacked(fuzz, kH, kI);
}
void fill(Fuzz& fuzz, moec_quantise_desc& d) {
  d.kind = uint32_t(fuzz.below(8));
  d.dtype = MOEC_F32;
  d.num_experts = kE;
  d.out_features = kH;
  d.in_features = 32;
}
void fill(Fuzz& fuzz, moec_quantise_args& a) {  // of FP8 in channels
  auto* const desc =
      static_cast<moec_quantise_desc*>(fuzz.structure("moec_quantise_desc", false, 1));
  auto* const quant = static_cast<moec_quant*>(fuzz.structure("moec_quant", false, 1));
  a.desc = desc;
  a.quant = quant;
  if (!desc || !quant) return;
  desc->kind = MOEC_QUANTISE_FP8;
  quant->block_n = 1;
  quant->block_k = desc->in_features;
  quant->scales = fuzz.tensor(MOEC_F32, {kE, kH, 1});
  a.source = fuzz.tensor(MOEC_F32, {kE, kH, 32});
  a.codes = fuzz.tensor(MOEC_F8_E4M3, {kE, kH, 32});
}
void fill(Fuzz& fuzz, moec_gate_args& a) {
  a.x = fuzz.tensor(MOEC_F32, {kT, kH});
  a.weight = fuzz.tensor(MOEC_F32, {kE, kH});
  a.logits = fuzz.tensor(MOEC_F32, {kT, kE});
}
void fill(Fuzz& fuzz, moec_gate_grad_args& a) {
  a.x = fuzz.tensor(MOEC_F32, {kT, kH});
  a.weight = fuzz.tensor(MOEC_F32, {kE, kH});
  a.d_logits = fuzz.tensor(MOEC_F32, {kT, kE});
  a.d_x = fuzz.tensor(MOEC_F32, {kT, kH});
  a.d_weight = fuzz.tensor(MOEC_F32, {kE, kH});
}
void fill(Fuzz& fuzz, moec_route_args& a) {
  a.logits = fuzz.tensor(MOEC_F32, {kT, kE});
  a.expert_ids = fuzz.tensor(MOEC_I32, {kT, kK});
  a.routing_weights = fuzz.tensor(MOEC_F32, {kT, kK});
}
void fill(Fuzz& fuzz, moec_route_grad_args& a) {
  a.logits = fuzz.tensor(MOEC_F32, {kT, kE});
  a.expert_ids = fuzz.tensor(MOEC_I32, {kT, kK});
  a.d_routing_weights = fuzz.tensor(MOEC_F32, {kT, kK});
  a.d_logits = fuzz.tensor(MOEC_F32, {kT, kE});
}
void fill(Fuzz& fuzz, moec_loss_args& a) {
  auto* const logits = static_cast<moec_tensor*>(fuzz.block());
  *logits = fuzz.tensor(MOEC_F32, {kT, kE});
  auto* const d_logits = static_cast<moec_tensor*>(fuzz.block());
  *d_logits = fuzz.tensor(MOEC_F32, {kT, kE});
  a.kind = uint32_t(fuzz.below(4));
  a.top_k = kK;
  a.seq_len = kT;
  a.logits = logits;
  a.d_logits = d_logits;
  a.count = 1;
  a.loss = fuzz.tensor(MOEC_F32, {1});
}
void fill(Fuzz& fuzz, moec_permute_args& a) {
  a.plan = static_cast<moec_plan*>(fuzz.live("moec_plan"));
  a.x = fuzz.tensor(MOEC_F32, {kT, kH});
  a.rows = fuzz.tensor(MOEC_F32, {kT * kK, kH});
}
void fill(Fuzz& fuzz, moec_unpermute_args& a) {
  a.plan = static_cast<moec_plan*>(fuzz.live("moec_plan"));
  a.rows = fuzz.tensor(MOEC_F32, {kT * kK, kH});
  a.y = fuzz.tensor(MOEC_F32, {kT, kH});
}
void fill(Fuzz& fuzz, moec_permute_grad_args& a) {
  a.plan = static_cast<moec_plan*>(fuzz.live("moec_plan"));
  a.d_rows = fuzz.tensor(MOEC_F32, {kT * kK, kH});
  a.d_x = fuzz.tensor(MOEC_F32, {kT, kH});
}
void fill(Fuzz& fuzz, moec_unpermute_grad_args& a) {
  a.plan = static_cast<moec_plan*>(fuzz.live("moec_plan"));
  a.d_y = fuzz.tensor(MOEC_F32, {kT, kH});
  a.rows = fuzz.tensor(MOEC_F32, {kT * kK, kH});
  a.d_rows = fuzz.tensor(MOEC_F32, {kT * kK, kH});
}
void fill(Fuzz& fuzz, moec_experts_args& a) {
  a.plan = static_cast<moec_plan*>(fuzz.live("moec_plan"));
  a.weights = static_cast<moec_weights*>(fuzz.live("moec_weights"));
  a.x = fuzz.tensor(MOEC_F32, {kT, kH});
  a.y = fuzz.tensor(MOEC_F32, {kT, kH});
  a.saved = {fuzz.fresh_block(), kBlock};
}
void fill(Fuzz& fuzz, moec_experts_grad_args& a) {
  a.plan = static_cast<moec_plan*>(fuzz.live("moec_plan"));
  a.weights = static_cast<moec_weights*>(fuzz.live("moec_weights"));
  a.x = fuzz.tensor(MOEC_F32, {kT, kH});
  a.d_y = fuzz.tensor(MOEC_F32, {kT, kH});
  a.d_x = fuzz.tensor(MOEC_F32, {kT, kH});
  a.d_routing_weights = fuzz.tensor(MOEC_F32, {kT, kK});
  a.saved = {fuzz.fresh_block(), kBlock};
  a.d_expert_weights = static_cast<moec_weight_set*>(fuzz.structure("moec_weight_set", false, 1));
}
void fill(Fuzz& fuzz, moec_layer_args& a) {
  a.weights = static_cast<moec_weights*>(fuzz.live("moec_weights"));
  a.x = fuzz.tensor(MOEC_F32, {kT, kH});
  a.gate_weight = fuzz.tensor(MOEC_F32, {kE, kH});
  a.y = fuzz.tensor(MOEC_F32, {kT, kH});
  a.saved = {fuzz.fresh_block(), kBlock};
}
void fill(Fuzz& fuzz, moec_layer_grad_args& a) {
  a.forward = static_cast<moec_layer_args*>(fuzz.structure("moec_layer_args", false, 1));
  a.d_y = fuzz.tensor(MOEC_F32, {kT, kH});
  a.d_x = fuzz.tensor(MOEC_F32, {kT, kH});
  a.d_gate_weight = fuzz.tensor(MOEC_F32, {kE, kH});
}
void fill(Fuzz& fuzz, moec_tensor& t) {
  switch (fuzz.below(4)) {  // what the functions that take a bare tensor want
    case 0:
      t = fuzz.tensor(MOEC_I32, {kT, kK});
      break;
    case 1:
      t = fuzz.tensor(MOEC_F32, {kT, kE});
      break;
    case 2:
      t = fuzz.tensor(MOEC_I32, {kE});
      break;
    default:
      t = fuzz.tensor(MOEC_F32, {kT, kK});
  }
}
void fill(Fuzz& fuzz, moec_buffer& b) {
  b = {fuzz.owned_block(), kBlock};
}

struct Template {
  const char* name;
  void (*make)(Fuzz&, void*);
};
template <class T>
void make(Fuzz& fuzz, void* out) {
  fill(fuzz, *static_cast<T*>(out));
}
#define TEMPLATE(name) {#name, make<name>}
constexpr Template kTemplates[] = {TEMPLATE(moec_router_desc),
                                   TEMPLATE(moec_plan_desc),
                                   TEMPLATE(moec_experts_desc),
                                   TEMPLATE(moec_layer_desc),
                                   TEMPLATE(moec_weights_desc),
                                   TEMPLATE(moec_weight_set),
                                   TEMPLATE(moec_quantise_desc),
                                   TEMPLATE(moec_quantise_args),
                                   TEMPLATE(moec_gate_args),
                                   TEMPLATE(moec_gate_grad_args),
                                   TEMPLATE(moec_route_args),
                                   TEMPLATE(moec_route_grad_args),
                                   TEMPLATE(moec_loss_args),
                                   TEMPLATE(moec_permute_args),
                                   TEMPLATE(moec_unpermute_args),
                                   TEMPLATE(moec_permute_grad_args),
                                   TEMPLATE(moec_unpermute_grad_args),
                                   TEMPLATE(moec_experts_args),
                                   TEMPLATE(moec_experts_grad_args),
                                   TEMPLATE(moec_layer_args),
                                   TEMPLATE(moec_layer_grad_args),
                                   TEMPLATE(moec_tensor),
                                   TEMPLATE(moec_buffer)};
#undef TEMPLATE

}  // namespace

bool Fuzz::make_valid(const std::string& name, void* out) {
  for (const Template& row : kTemplates)
    if (name == row.name) {
      row.make(*this, out);
      return true;
    }
  return false;
}

}  // namespace moec_fuzz
