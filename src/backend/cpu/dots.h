// SPDX-License-Identifier: Apache-2.0
// Dot products of a backward call: <d_y, output of an expert or of the shared expert>, from the
// parts that the steps left, and what follows from them.
#pragma once

#include "backend/program.h"
#include "core/thread_pool.h"

namespace moec::cpu {

void gate_grad(const ThreadPool& pool, const GateGrad& step);
// d_routing_weights of a CombineGrad.
void routing_weight_grads(const ThreadPool& pool, const CombineGrad& step);
void direct_grads(const ThreadPool& pool, const DirectGrads& step);
// factor[t] = c1
void mix_factors(const ThreadPool& pool, const MixFactors& step);
void row_factors(const ThreadPool& pool, const RowFactors& step);

}  // namespace moec::cpu
