// SPDX-License-Identifier: Apache-2.0
// The gate of the shared expert: y = c0 routed + c1 shared, with
//   SIGMOID_GATE  c = (1, sigmoid(x . wg))        SOFTMAX2  c = softmax(x Wc^T + bc)
#pragma once

#include "backend/args.h"
#include "core/thread_pool.h"

namespace moec::cpu {

struct SharedGate {
  const moec_experts_desc* desc;
  int64_t num_tokens;
  const void* x;       // [T,H]
  Array weight, bias;  // [1,H] or [2,H]; [2], optional
  int logits() const { return desc->shared == MOEC_SHARED_SOFTMAX2 ? 2 : 1; }
};

// mix[t] = (c0, c1)
void shared_gate_forward(const ThreadPool& pool, const SharedGate& gate, float* mix);

// d_logits[t] from the mix and d_mix[t] = gradient at (c0, c1); may be in place.
void shared_gate_backward(const SharedGate& gate, int64_t t, const float* mix, const float* d_mix,
                          float* d_logits);

}  // namespace moec::cpu
