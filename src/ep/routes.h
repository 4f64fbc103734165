// SPDX-License-Identifier: Apache-2.0
// Which token goes where, and where its partial rows come back: a dispatch, as all schemes see it.
//
// The outbox of a rank holds what it sends, in the order of ranks; partial rows come back to the
// same places. The device finds them: SendToAll of GATHER (backend/rank_steps.h), whose places
// follow from a token's number, and PlanRoutes of the others.
#pragma once

#include <moec/moec.h>

#include <vector>

#include "backend/args.h"

namespace moec::ep {

struct Shape {  // of an ep, checked; equal on all ranks
  int64_t hidden, max_tokens, pair_rows;
  int32_t num_experts, num_zero, top_k;
  uint32_t flags, scheme, overflow;
  moec_dtype dtype, partial_dtype;
  float grad_scale;
  std::vector<int32_t> expert_begin;  // [N+1]
  uint32_t timeout_ms;                // of PEER
  int32_t max_blocks;
};

struct Tokens {  // of this rank
  int64_t count;
  Array expert_ids;              // [T,K] i32|i64
  const float* routing_weights;  // [T,K] or null = 1
};

struct Routes {
  // ---- by token, memory of the device
  int32_t width = 0;             // most ranks of a token
  int32_t* sum_index = nullptr;  // [T,width] places of its partial rows, by rank; -1 ends them
  int32_t* slot_row = nullptr;   // [T,K] place of the partial row that slot k is in, or -1
  // ---- by place of the outbox
  int32_t* token = nullptr;  // whose row it is, or -1; null: place t is token t's
  int64_t num_sent = 0;      // places
  // ---- by rank
  std::vector<int64_t> sent, sent_at;          // rows and first place, where the host counts them
  std::vector<int64_t> received, received_at;  // guests from each rank
  int64_t num_tokens = 0, num_guests = 0, bound = 0;
  int64_t total_tokens = 0;  // -1: the host does not know it
  int64_t longest = 0;       // most rows from one rank to another, where the host counts them
};

// How places are counted.
struct Places {
  int64_t stride;  // from a rank's first place to the next rank's; 0: its rows, counted by the host
  int64_t most;    // rows that a rank may get from another
};

}  // namespace moec::ep
