// SPDX-License-Identifier: Apache-2.0
// Which token goes where, and where its partial rows come back: a dispatch, as all schemes see it.
//
// The outbox of a rank holds what it sends, in the order of ranks; partial rows come back to the
// same places. GATHER, whose places follow from a token's number, has SendToAll find them on the
// device (rank_steps.h); the others have the host plan them.
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
  std::vector<int64_t> wanted, sent, sent_at;  // rows: without a capacity, sent, first place
  std::vector<int64_t> received, received_at;  // guests from each rank
  int64_t num_tokens = 0, num_guests = 0, bound = 0;
  int64_t total_tokens = 0;  // -1: the host does not know it
  int64_t rows_needed = 0, rows_dropped = 0;
};

// How places are counted.
struct Places {
  int64_t stride;  // from a rank's first place to the next rank's; 0: its rows
  int64_t most;    // rows that a rank may get from another
};

class RoutePlanner {
 public:
  RoutePlanner(const Shape& shape, int32_t num_ranks);
  // Everything but what other ranks say (received, total_tokens, num_guests). Allocates nothing.
  void plan(const Tokens& tokens, const Places& places, Routes& routes);
  Routes make_routes() const;  // without the arrays of the device

 private:
  struct Cut {  // the least that is kept
    float weight;
    int32_t token;
  };
  int32_t owner(int64_t id) const;
  float weight_at(const Tokens& tokens, int64_t t, int32_t rank) const;
  template <class Body>
  void for_visits(const Tokens& tokens, const Body& body);
  void cut_by_weight(const Tokens& tokens, int32_t rank, int64_t most);

  const Shape& shape_;
  std::vector<int32_t> owner_;  // [E]
  std::vector<int64_t> last_;   // [N] last token seen by a rank
  std::vector<Cut> cuts_, visits_;
};

}  // namespace moec::ep
