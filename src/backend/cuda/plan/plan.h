// SPDX-License-Identifier: Apache-2.0
// Routing plans: stable (token order inside each expert), the same bits each run, those of the CPU
// backend.
#pragma once

#include <cuda_runtime_api.h>

#include "backend/cuda/device/op.h"

namespace moec::cuda {

// ---- from ids (plan.cu). `clusters`: the device has thread block clusters.
// Bytes of PlanView::scratch that a plan of any number of tokens needs.
uint64_t plan_scratch_bytes(int num_local);
int plan_launches(const PlanView& plan, bool clusters = true);
cudaError_t launch_plan(const PlanSource& source, const PlanView& plan, cudaStream_t stream,
                        bool clusters = true);

// Dropping by weight: the assignments of each expert in token order, in the plan's scratch behind
// what plan_scratch_bytes says.
struct PlanLists {
  int32_t *offsets, *entries;  // [num_local + 1], [T*K]
  explicit PlanLists(const PlanView& plan)
      : offsets(reinterpret_cast<int32_t*>(static_cast<char*>(plan.scratch) +
                                           plan_scratch_bytes(plan.num_local))),
        entries(offsets + plan.num_local + 1) {}
};

// ---- every kind
moec_size plan_scratch(const moec_plan_desc& desc);
void build_plan(const Op& op, const PlanSource& source, const PlanView& plan);
void export_map(const Op& op, const PlanView& plan, int32_t field, int32_t* to);

// ---- parts of build_plan
// counts -> group_offsets and totals; totals[2] stays unless `clear_dropped` (plan_groups.cu).
void set_groups(const Op& op, const PlanView& plan, bool clear_dropped);
// -1, -1, 0 in every row that is not routed, up to max_rows.
void fill_padding(const Op& op, const PlanView& plan);
// Rows of the heaviest assignments of each expert, from PlanLists (plan_groups.cu).
void keep_heaviest(const Op& op, const PlanView& plan);
// The whole plan by expert choice (plan_choice.cu).
void build_choice_plan(const Op& op, const PlanSource& source, const PlanView& plan);
moec_size choice_scratch(int32_t num_local);

}  // namespace moec::cuda
