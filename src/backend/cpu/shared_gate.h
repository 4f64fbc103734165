// SPDX-License-Identifier: Apache-2.0
// The gate of the shared expert (SharedGate in backend/program.h).
#pragma once

#include "backend/program.h"
#include "core/thread_pool.h"

namespace moec::cpu {

// mix[t] = (c0, c1)
void mix_forward(const ThreadPool& pool, const MixForward& step);

// d_logits[t] from the mix and d_mix[t] = gradient at (c0, c1); may be in place.
void shared_gate_backward(const SharedGate& gate, int64_t t, const float* mix, const float* d_mix,
                          float* d_logits);

}  // namespace moec::cpu
