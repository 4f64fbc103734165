// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/sm90/fast_shared.h"

#include "backend/cuda/experts/experts_sums.h"

namespace moec::cuda {
namespace {

// The one group and the gate, of forward and backward alike.
template <class Args>
void prepare(const Op& op, const Args& args, const SharedMemory& memory) {
  list_tokens(op, args.num_tokens, memory.offsets, memory.tokens);
  if (memory.mix)
    mix_forward(op, {args.desc, args.num_tokens, args.x, args.shared_gate, args.shared_gate_bias},
                memory.mix);
}

}  // namespace

void lay_out_shared(const moec_experts_desc& desc, bool backward, Arena& work,
                    SharedMemory& memory) {
  if (!has_shared(desc)) return;
  const int64_t size = dtype_bytes(desc.dtype), f32 = sizeof(float);
  const int64_t act = desc.shared_inter * size;
  memory.offsets = work.take_array<int32_t>(2, 0);
  memory.tokens = work.take_array<int32_t>(0, 1);
  if (backward && desc.save == MOEC_SAVE_INPUT) memory.pre = take_tokens(work, 2 * act);
  memory.weighted = memory.act = take_tokens(work, act);  // recomputed, then overwritten
  memory.rows = take_tokens(work, desc.hidden * size);
  if (is_mixed(desc)) memory.mix = work.take_array<float>(0, 2);
  if (!backward) return;
  memory.d_pre = take_tokens(work, 2 * act);
  memory.factor = work.take_array<float>(0, 1);
  memory.dots = static_cast<float*>(take_tokens(work, shared_dot_parts(desc) * f32));
  if (is_mixed(desc)) memory.d_logits = work.take_array<float>(0, 2);
}

FastMlp fast_shared_mlp(const moec_experts_desc& desc, int64_t num_tokens,
                        const WeightsView& weights, const SharedMemory& memory) {
  return {desc.hidden, desc.shared_inter,
          desc.dtype,  desc.shared_activation,
          &weights,    {{1, memory.offsets, memory.offsets + 1, num_tokens}, memory.tokens}};
}

void shared_forward(const Op& op, const ExpertsArgs& args, const SharedMemory& memory,
                    FastProducts& products) {
  products.queue([&] { prepare(op, args, memory); });
  products.up(args.x.data, memory.pre, memory.act);
  products.down(memory.act, memory.rows, Early::kWeights);
}

bool SharedBackward::wants_gate() const {
  return is_mixed(*args_.desc) &&
         (args_.d_x || args_.d_shared_gate.data || args_.d_shared_gate_bias.data);
}

void SharedBackward::run() {
  const moec_experts_desc& desc = *args_.desc;
  const int64_t tokens = args_.num_tokens;
  const WeightsView none = {}, &d = args_.d_shared_weights ? *args_.d_shared_weights : none;
  const ExpertMatrix& down = args_.shared_weights->down;
  if (d.gate.present() != d.up.present())
    products_.refuse("the gradient of only one of gate and up");
  products_.queue([&] {
    prepare(op_, args_, memory_);
    mix_factors(op_, tokens, memory_.mix, memory_.factor);
  });
  if (desc.save == MOEC_SAVE_INPUT) products_.up(args_.x.data, memory_.pre, memory_.act);
  products_.grad_down(args_.d_y,
                      {memory_.pre, memory_.d_pre, memory_.weighted, memory_.factor, memory_.dots});
  if (down.has_bias() && wants_gate())
    products_.queue([&] {
      row_dots(op_, products_.mlp().rows, desc.hidden, {}, &down,
               {const_cast<void*>(args_.d_y), desc.dtype}, false,
               memory_.dots + (shared_dot_parts(desc) - 1) * tokens);
    });
  if (d.down.present())
    products_.grad_weights(memory_.weighted, args_.d_y, d.down, nullptr, args_.accumulate,
                           Early::kNothing);
  if (d.gate.present())
    products_.grad_weights(memory_.d_pre, args_.x.data, d.gate, &d.up, args_.accumulate,
                           Early::kNothing);
  products_.grad_biases(d, memory_.d_pre, args_.d_y, memory_.factor, args_.accumulate);
  if (args_.d_x) products_.grad_up(memory_.d_pre, memory_.rows, Early::kNothing);
}

void SharedBackward::gate_gradients(WeightGrad routed) const {
  if (!wants_gate()) return;
  const bool biased = args_.shared_weights->down.has_bias();
  const int parts = shared_dot_parts(*args_.desc) - (biased ? 0 : 1);
  cuda::gate_gradients(op_, args_, routed, {memory_.dots, parts}, memory_.d_logits);
}

}  // namespace moec::cuda
