// SPDX-License-Identifier: Apache-2.0
// The steps of adapters that are no terms of another product, and merging.
#pragma once

#include "backend/args.h"
#include "backend/program.h"
#include "core/thread_pool.h"

namespace moec::cpu {

void pack_factors(const ThreadPool& pool, const PackFactors& step);
void run_narrow_rows(const ThreadPool& pool, const NarrowRows& step, void* scratch);
void run_factor_grads(const ThreadPool& pool, const FactorGrads& step, void* scratch);
void merge_factors(const ThreadPool& pool, const MergeArgs& args);

}  // namespace moec::cpu
