// SPDX-License-Identifier: Apache-2.0
// The last sums of a call, which all ways to run the experts ask for alike.
#pragma once

#include "backend/cuda/rows/combine.h"
#include "backend/cuda/rows/row_ops.h"

namespace moec::cuda {

// to[t] = residual[t] + output_scale * the sum of the token's rows, without weights
CombineParams sum_of_rows(const moec_experts_desc& desc, const PlanView& plan, const void* rows,
                          void* to, const void* residual);
// y: the rows by their weights, identity experts, output bias and residual
CombineParams sum_of_outputs(const ExpertsArgs& args, const void* rows);

// Of the shared expert's gate and its bias, and d_logits [T,2] on the way.
void gate_gradients(const Op& op, const ExpertsGradArgs& args, const WeightGrad& routed,
                    const SharedDots& shared, float* d_logits);
// What is d_y itself: gradients of the output bias and of the residual.
void direct_gradients(const Op& op, const ExpertsGradArgs& args);

}  // namespace moec::cuda
