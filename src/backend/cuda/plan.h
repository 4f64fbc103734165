// SPDX-License-Identifier: Apache-2.0
// The routing plan from top-k ids: stable (token order inside each expert), the same bits each run.
#pragma once

#include <cuda_runtime.h>

#include "backend/args.h"

namespace moec::cuda {

// Why build_plan has no kernel for this plan and source, or null.
const char* plan_refuses(const PlanSource& source, const PlanView& plan);
// Bytes of PlanView::scratch that a plan of any number of tokens needs.
uint64_t plan_scratch_bytes(int num_local);
int plan_launches(const PlanView& plan);
cudaError_t launch_plan(const PlanSource& source, const PlanView& plan, cudaStream_t stream);

}  // namespace moec::cuda
