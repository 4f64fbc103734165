// SPDX-License-Identifier: Apache-2.0
// The shared expert by Hopper's kernels: an MLP of one group that all tokens are in, mixed into
//   y = residual + c0 output_scale sum + output_bias + c1 shared
#pragma once

#include "backend/cuda/experts/experts_memory.h"
#include "backend/cuda/sm90/fast_products.h"

namespace moec::cuda {

struct SharedMemory {
  int32_t *offsets = nullptr, *tokens;  // [2], [T]
  void *pre = nullptr, *act, *rows;     // [T,2,I], [T,I], [T,H]
  void *d_pre, *weighted;               // [T,2,I], [T,I]
  float *factor, *dots;                 // [T]: c1; [shared_dot_parts, T]: parts of <d_y, shared>
  float *mix = nullptr, *d_logits = nullptr;  // [T,2] with a gate
};
inline int shared_dot_parts(const moec_experts_desc& desc) {
  return fast_dot_parts(desc.shared_inter) + 1;  // the last one: of the bias
}
// Nothing without a shared expert.
void lay_out_shared(const moec_experts_desc& desc, bool backward, Arena& work,
                    SharedMemory& memory);

// `memory` holds its pre-activations where they are saved.
FastMlp fast_shared_mlp(const moec_experts_desc& desc, int64_t num_tokens,
                        const WeightsView& weights, const SharedMemory& memory);

void shared_forward(const Op& op, const ExpertsArgs& args, const SharedMemory& memory,
                    FastProducts& products);

// Up to what the shared expert adds: gradients of its weights, its rows of d_x, its gate.
class SharedBackward {
 public:
  SharedBackward(const Op& op, const ExpertsGradArgs& args, const SharedMemory& memory,
                 FastProducts& products)
      : op_(op), args_(args), memory_(memory), products_(products) {}
  void run();
  // After both MLPs' gradients at the activations.
  void gate_gradients(WeightGrad routed) const;

 private:
  bool wants_gate() const;

  const Op& op_;
  const ExpertsGradArgs& args_;
  const SharedMemory& memory_;
  FastProducts& products_;
};

}  // namespace moec::cuda
