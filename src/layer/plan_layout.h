// SPDX-License-Identifier: Apache-2.0
// The shape of a plan: its validated description, how many rows it can have, where its arrays lie,
// and the invariant that holds once it is built.
#pragma once

#include "backend/args.h"
#include "core/workspace.h"

namespace moec {

// Defaults filled in: expert_end and align at least 1. Throws for anything the header forbids.
moec_plan_desc checked_plan_desc(const moec_plan_desc& desc);

// Rows kept per expert for T tokens: capacity, or ceil(T * K / E * capacity_factor) where the
// product is taken to be an integer when it is one within float's precision; 0 = dropless.
int64_t plan_capacity(const moec_plan_desc& desc, int64_t num_tokens);

// P for T tokens: the smaller of (each assignment has a row, and each local expert wastes less than
// `align` of them) and (each local expert is full). Throws E_OVERFLOW at 2^31.
int64_t plan_max_rows(const moec_plan_desc& desc, int64_t num_tokens);

// Takes the arrays of a plan from the arena (null pointers while it measures).
// affine: sizes must be affine in T for any T (layers); else they are those of desc.max_tokens
// (plans).
PlanView lay_out_plan(const moec_plan_desc& desc, bool affine, Arena& arena);

// Takes the scratch of building a plan, on any backend: 64-byte aligned.
void* take_plan_scratch(const moec_plan_desc& desc, Arena& arena);

// Sets what depends on T in a view laid out before.
void set_plan_tokens(const moec_plan_desc& desc, int64_t num_tokens, PlanView& plan);

// The whole contract of a built plan whose arrays lie in host memory:
//   groups       counts and offsets agree, padded to `align`, within max_rows
//   rows         in token order, each names the (token, slot) that names it, padding is marked
//   assignments  each has its own row in the group of its expert, or none
//   totals       are what the arrays say
bool plan_holds(const PlanView& plan);

}  // namespace moec
