// SPDX-License-Identifier: Apache-2.0
// MOEC_EP_PEER: ranks that write to each other's memory. A dispatch is one step, and so is a
// combine. A step is the work of some crews: the blocks of a kernel, or one thread of the host
// (peer_crew.h).
//
// Each rank has a block of memory with one layout. Token t of rank s is guest s * bound + t of all
// ranks: its ids and weights go to all of them, its row to those that have one of its experts. No
// row is counted, and a row that nobody sent is named by no id.
//
// Steps are numbered. Crew b of a rank tells lane b of each other rank, by one word that is
// released after what the crew has stored, and waits for the same words of the others:
//   dispatch   store rows, ids | say | hear the lanes of this crew from all
//   combine    store d_weights | say | hear all lanes from all | read partial rows, add
// Since a crew of few says for the lanes of many (b, b + crews, ..), ranks may have other numbers
// of crews. A word holds the number of the step and what must be equal on all ranks, so that who
// differs is named. Numbers live in memory of the device and are counted by the steps: graphs that
// are replayed count on. A rank is at most one step ahead of another, because it hears all in each:
// two words for each lane, for even and odd steps, are enough.
//
// Why memory may be written again, without a meeting at the start of a step:
// - guests, by dispatch n + 1: who says combine n has queued its experts of dispatch n before, and
//   a rank dispatches n + 1 after it heard all in combine n. Where no combine lies between, a
//   dispatch begins with a meeting: all say, and hear all, before anything is stored.
// - partial rows and d_weights, by experts and combine n + 1 of their rank: it heard dispatch n + 1
//   of all, and each said that after it had read what it wanted in combine n.
// So a dispatch is combined once. A second combine finds that the last step was none, and breaks
// the ep, as a rank that differs or does not come does: then guests have no ids, sums are NaN, and
// later steps end at once. The ids of a rank that comes too late may still arrive.
#pragma once

#include "backend/rank_steps.h"

namespace moec {

inline constexpr int kMaxPeers = 16;
inline constexpr int kPeerLanes = 128;  // most crews

// ---- words
enum PeerKind : uint32_t { kNoStep, kPeerMeeting, kPeerDispatch, kPeerCombine };
enum PeerFact { kFactKind, kFactBeside, kFactAdapterIds, kFactWeights, kFactBound, kPeerFacts };
inline constexpr int kNumberBits = 24;
inline constexpr int64_t kPeerTimeout = 1 + kPeerFacts;  // as Disagreement::fact
inline constexpr int64_t kPeerOrder = 2 + kPeerFacts;    // a combine without a dispatch

MOEC_HD int peer_fact_shift(int fact) {
  constexpr int kShift[] = {24, 26, 27, 28, 29, 61};
  return kShift[fact];
}
MOEC_HD uint64_t peer_fact(int fact, int64_t value) {
  return uint64_t(value) << peer_fact_shift(fact);
}
MOEC_HD int64_t peer_fact_of(uint64_t word, int fact) {
  const int begin = peer_fact_shift(fact), end = peer_fact_shift(fact + 1);
  return int64_t(word >> begin & ((uint64_t(1) << (end - begin)) - 1));
}
MOEC_HD uint32_t peer_number(uint64_t word) {
  return uint32_t(word) & ((1u << kNumberBits) - 1);
}

struct PeerLane {  // of this rank alone: its last step
  uint32_t number, kind;
};

// Blocks of memory, as this rank reaches them. Offsets are bytes in each.
struct PeerMap {
  int32_t rank, num_ranks;
  char* block[kMaxPeers];
  uint64_t words;                      // u64 [2][N][kPeerLanes]
  uint64_t headers;                    // RankHeader [N]: num_tokens
  uint64_t guests, beside;             // [N * max_tokens, H]
  uint64_t ids, weights, adapter_ids;  // [N * max_tokens, K], [N * max_tokens]
  uint64_t partial;                    // [N * max_tokens, H]
  uint64_t d_weights;                  // f32 [max_tokens, K]: of the tokens of the block's rank
  uint64_t lanes;                      // PeerLane [kPeerLanes]
  uint64_t broken;                     // u32 [1] the step that broke the ep; 0: it is well
  uint64_t owners;                     // u32 [max_tokens] bit r: rank r has an expert of the token
  uint64_t slot_owner;                 // i32 [max_tokens, K] or -1
  Disagreement* reports;               // [N]
  uint64_t timeout_ns;
  int32_t max_crews;                    // 0: as the device likes
  int32_t expert_begin[kMaxPeers + 1];  // [N+1]

  template <class T>
  MOEC_HD T* at(int of, uint64_t offset) const {
    return reinterpret_cast<T*>(block[of] + offset);
  }
  template <class T>
  MOEC_HD T* own(uint64_t offset) const {
    return at<T>(rank, offset);
  }
  MOEC_HD uint64_t* word(int of, int from, int lane, uint32_t number) const {
    const int64_t array = number & 1;
    return at<uint64_t>(of, words) + (array * num_ranks + from) * kPeerLanes + lane;
  }
  MOEC_HD int32_t owner(int64_t id) const {
    int32_t r = -1;
    while (r < num_ranks && expert_begin[r + 1] <= id) ++r;
    return r < num_ranks ? r : -1;
  }
};

// ---- steps
struct PeerDispatch {
  PeerMap map;
  int64_t num_tokens, bound, hidden;
  int32_t top_k;
  Array expert_ids;              // [T,K] i32|i64
  const float* routing_weights;  // [T,K] or null = 1
  bool has_adapter_ids;
  const int32_t* adapter_ids;  // [T]
  Array x, beside;             // [T,H]
  bool has_beside;
  float beside_scale;
};

struct PeerCombine {
  PeerMap map;
  int64_t num_tokens, bound, hidden;
  int32_t top_k;
  moec_dtype partial_dtype;
  bool has_weights;
  const float* d_guest_weights;  // [N * bound, K]
  float scale;
  bool add;
  Array y;                   // [T,H], or none
  float* d_routing_weights;  // [T,K], or null
};

}  // namespace moec
