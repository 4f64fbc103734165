// SPDX-License-Identifier: Apache-2.0
// What adapters need besides products.
#pragma once

#include "backend/args.h"
#include "backend/cuda/device/op.h"
#include "backend/program.h"

namespace moec::cuda {

// of_ranks: the arrays `scale` and `adapter` are wanted, too.
void pack_factors(const Op& op, const PackFactors& step, bool of_ranks);
// out(n, k) (+)= sum over experts, in their order, of sums [experts,n,k]
void add_experts(const Op& op, const float* sums, int32_t experts, int64_t n, int64_t k,
                 const MatrixView& out, bool accumulate);
void merge_factors(const Op& op, const MergeArgs& args);

}  // namespace moec::cuda
