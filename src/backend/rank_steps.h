// SPDX-License-Identifier: Apache-2.0
// What a rank does to arrays of its device between the collectives of an ep. A step is a function
// of one index below count(): a backend runs it for all of them, in any order. A step with `rows`
// is that of ids, and theirs beside it.
//
// N ranks, T tokens of this one, K top-k, G guests. `bound`: tokens that no rank exceeds.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>
#include <variant>

#include "backend/args.h"
#include "backend/plan_routes.h"
#include "core/dtype.h"

namespace moec {

// What a rank says to all others in front of its rows of ids: what must be equal, its tokens, and
// what did not fit.
struct RankHeader {
  static constexpr int kFacts = 5;
  int64_t facts[kFacts];
  int64_t num_tokens, rows_needed, rows_dropped;

  MOEC_HD int first_other(const RankHeader& own) const {  // kFacts: all are equal
    int i = 0;
    while (i < kFacts && facts[i] == own.facts[i]) ++i;
    return i;
  }
};
inline constexpr int64_t kHeaderWords = sizeof(RankHeader) / sizeof(int32_t);
// Words of one rank: its header and `rows` rows, so that each header is aligned.
MOEC_HD int64_t header_block(int64_t rows, int64_t columns) {
  return (rows * columns + 2 * kHeaderWords - 1) / kHeaderWords * kHeaderWords;
}

// What a rank has that is not equal, in memory that host and device reach.
struct Disagreement {
  volatile int64_t fact;  // 1 + its index; 0: none
  volatile int64_t theirs, own;
};

// What one rank has said of rows that did not fit, since the ep was made; memory like that.
struct Overflow {
  volatile int64_t rows_needed, rows_dropped;
  MOEC_HD void add(int64_t needed, int64_t dropped) {
    if (needed > rows_needed) rows_needed = needed;
    rows_dropped = rows_dropped + dropped;
  }
};

// Adds one to a number of the device, and shows it in memory that host and device reach. Steps that
// have one call it at their index 0.
struct CountUp {
  uint64_t* number = nullptr;  // null: nothing is counted
  volatile uint64_t* shown = nullptr;

  int64_t count() const { return number != nullptr; }
  MOEC_HD void operator()(int64_t i) const {
    if (number && i == 0) *shown = ++*number;
  }
};

// Rows one after the other, or in blocks: row i is row i % stride of block i / stride.
struct RowBlocks {
  void* data;
  int64_t stride = 0;  // rows of a block; 0: there is one
  int64_t apart = 0;   // bytes from one block to the next

  MOEC_HD char* at(int64_t i, int64_t row_bytes) const {
    const int64_t block = stride ? i / stride : 0;
    return static_cast<char*>(data) + block * apart + (i - block * stride) * row_bytes;
  }
};

struct PickRows {  // to[i] = from[index[i]]; where index[i] < 0, to[i] is left alone
  RowBlocks from;
  const int32_t* index;  // [rows]; null: i
  int64_t rows, row_bytes;
  RowBlocks to;

  int64_t count() const { return rows; }
  MOEC_HD int64_t source(int64_t i) const { return index ? index[i] : i; }
  MOEC_HD void operator()(int64_t i) const {
    const int64_t row = source(i);
    if (row >= 0) memcpy(to.at(i, row_bytes), from.at(row, row_bytes), size_t(row_bytes));
  }
};

// y[t] = scale * (0 + rows[index[t][0]] + ..) + what y holds, rounded once. Each backend has its
// own loop of it.
struct SumRows {
  int64_t num_tokens, hidden;
  int32_t width;         // entries of index for a token; the first negative one ends them
  const int32_t* index;  // [T,width]; null: row t alone
  Array rows;            // [.,H]
  float scale;
  bool add;                         // what y holds; else + nothing
  Array y;                          // out [T,H]
  const int32_t* broken = nullptr;  // where it is set, y is NaN; or null
  CountUp ended = {};

  int64_t count() const { return num_tokens; }
};

// A row for each place of the outbox: K ids, -1 for what is no expert; K weights; with adapters the
// id of the token's. Of no token: -1 and 0.
struct PackIds {
  int64_t num_tokens, places;
  int32_t top_k, num_experts, columns;
  Array expert_ids;              // [T,K] i32|i64
  const float* routing_weights;  // [T,K] or null = 1
  const int32_t* adapter_ids;    // [T]
  const int32_t* token;          // [places] whose place it is; null: place t is token t's
  int32_t* to;                   // [places,columns]

  int64_t count() const { return places * top_k; }
  MOEC_HD int64_t id(int64_t slot) const {
    return load_integer(expert_ids.data, expert_ids.dtype, slot);
  }
  MOEC_HD void operator()(int64_t i) const {
    const int64_t place = i / top_k;
    write(place, int32_t(i - place * top_k), to + place * columns);
  }
  // Slot k of the row of a place.
  MOEC_HD void write(int64_t place, int32_t k, int32_t* ids) const {
    const int64_t t = token ? token[place] : place < num_tokens ? place : -1;
    const int64_t slot = t * top_k + k, expert = t < 0 ? -1 : id(slot);
    const float weight = t < 0 ? 0.0f : routing_weights ? routing_weights[slot] : 1.0f;
    ids[k] = expert >= 0 && expert < num_experts ? int32_t(expert) : -1;
    memcpy(ids + top_k + k, &weight, sizeof weight);
    if (k == 0 && columns > 2 * top_k) ids[columns - 1] = t < 0 ? -1 : adapter_ids[t];
  }
};

// The places of PlanRoutes as blocks of one rank each, which begin with a header.
struct PackBlocks {
  PackIds pack;  // to: the first block
  RankHeader header;
  const int32_t* wanted;  // [N] of PlanRoutes
  int32_t num_ranks;
  int64_t stride, block;  // places of a rank; words from its block to the next one
  CountUp begun = {};
  PickRows rows = {};

  int64_t count() const { return pack.count(); }
  MOEC_HD void operator()(int64_t i) const {
    begun(i);
    const int64_t place = i / pack.top_k, rank = place / stride, line = place - rank * stride;
    const auto k = int32_t(i - place * pack.top_k);
    int32_t* const to = pack.to + rank * block;
    pack.write(place, k, to + kHeaderWords + line * pack.columns);
    if (line > 0 || k > 0) return;
    RankHeader own = header;
    for (int32_t r = 0; r < num_ranks; ++r) {
      if (wanted[r] > own.rows_needed) own.rows_needed = wanted[r];
      if (wanted[r] > stride) own.rows_dropped += wanted[r] - stride;
    }
    *reinterpret_cast<RankHeader*>(to) = own;
  }
};

MOEC_HD int bits_set(uint64_t word) {
#if defined(__CUDA_ARCH__)
  return __popcll(word);
#else
  return __builtin_popcountll(word);
#endif
}

// Every token goes to all ranks, token t of rank r to place r * bound + t. Beside what all get, the
// places where the partial rows of the own tokens come back.
struct SendToAll {
  PackIds pack;  // places: bound
  RankHeader header;
  RankHeader* header_to;
  const int32_t* owners;     // [E] the rank of each expert
  int32_t num_ranks, width;  // width: min(K, N)
  int32_t* sum_index;        // [T,width] places of the partial rows of a token, by rank; -1 ends
  int32_t* slot_row;         // [T,K] place of the partial row that slot k is in, or -1
  CountUp begun = {};
  PickRows rows = {};

  int64_t count() const { return pack.count(); }
  MOEC_HD void operator()(int64_t i) const {
    begun(i);
    if (i == 0) *header_to = header;
    const int64_t t = i / pack.top_k;
    const auto k = int32_t(i - t * pack.top_k);
    if (t < pack.num_tokens) index(t, k);
    pack.write(t, k, pack.to + t * pack.columns);
  }

 private:
  MOEC_HD int32_t owner(int64_t slot) const {
    const int64_t id = pack.id(slot);
    return id >= 0 && id < pack.num_experts ? owners[id] : -1;
  }
  // A token's first slot of each rank knows how many of its ranks come before, from sets of 64.
  MOEC_HD void index(int64_t t, int32_t k) const {
    const int64_t first = t * pack.top_k;
    const int32_t own = owner(first + k);
    bool writes = own >= 0;
    int32_t before = 0, all = 0;
    for (int32_t begin = 0; begin < num_ranks; begin += 64) {
      uint64_t ranks = 0;
      for (int32_t j = 0; j < pack.top_k; ++j) {
        const int32_t rank = owner(first + j);
        if (j < k && rank == own) writes = false;
        if (rank >= begin && rank < begin + 64) ranks |= uint64_t(1) << (rank - begin);
      }
      all += bits_set(ranks);
      if (own < begin) continue;
      before += bits_set(own < begin + 64 ? ranks & ((uint64_t(1) << (own - begin)) - 1) : ranks);
    }
    const auto place = int32_t(own * pack.places + t);
    if (writes) sum_index[t * width + before] = place;
    if (k >= all && k < width) sum_index[t * width + k] = -1;
    slot_row[first + k] = own < 0 ? -1 : place;
  }
};

// What a rank says of its rows in its notice to another.
struct PairRows {
  int64_t count, longest;  // those for the receiver, and most of those for any
};
struct TellCounts {
  const int32_t* counts;  // [N] rows for each rank
  int32_t num_ranks;
  PairRows* first;  // in the notice to rank 0
  int64_t apart;    // bytes from one notice to the next

  int64_t count() const { return num_ranks; }
  MOEC_HD void operator()(int64_t r) const {
    int32_t longest = 0;
    for (int32_t i = 0; i < num_ranks; ++i)
      if (counts[i] > longest) longest = counts[i];
    *reinterpret_cast<PairRows*>(reinterpret_cast<char*>(first) + r * apart) = {counts[r], longest};
  }
};

// Rows of PackIds to those of the guests. Ids of other ranks' experts become -1, and so do all of a
// rank that disagrees.
struct UnpackIds {
  int64_t guests;
  int64_t bound;       // rows of a rank, behind its header; 0: there are no headers
  int64_t block;       // words from a rank's header to the next one
  Overflow* overflow;  // [N] what headers say of it is added there; or null
  int32_t top_k, columns, expert_begin, expert_end;
  const int32_t* from;
  RankHeader own;
  Disagreement* disagreements;  // [N]
  int32_t* broken;              // set for good where a rank disagrees; then no guest has an id
  int32_t *ids, *adapter_ids;   // [G,K], [G]
  float* weights;               // [G,K]
  CountUp ended = {};
  PickRows rows = {};

  int64_t count() const { return guests * top_k; }
  MOEC_HD void operator()(int64_t i) const {
    ended(i);
    const int64_t row = i / top_k, rank = bound ? row / bound : 0, behind = row - rank * bound;
    const auto k = int32_t(i - row * top_k);
    const bool agrees = !bound || agree(rank, behind == 0 && k == 0);
    if (behind == 0 && k == 0 && overflow && agrees)
      overflow[rank].add(header_of(rank).rows_needed, header_of(rank).rows_dropped);
    const int32_t* const line = from + rank * block + (bound ? kHeaderWords : 0) + behind * columns;
    if (k == 0 && columns > 2 * top_k) adapter_ids[row] = agrees ? line[columns - 1] : -1;
    const int32_t id = line[k];
    const bool here = agrees && id >= expert_begin && id < expert_end;
    float weight = 0;
    if (here) memcpy(&weight, line + top_k + k, sizeof weight);
    ids[i] = here ? id : -1;
    weights[i] = weight;
  }

 private:
  MOEC_HD const RankHeader& header_of(int64_t rank) const {
    return *reinterpret_cast<const RankHeader*>(from + rank * block);
  }
  MOEC_HD bool agree(int64_t rank, bool reports) const {
    const RankHeader& header = header_of(rank);
    const int i = header.first_other(own);
    if (i == RankHeader::kFacts) return *broken == 0;
    if (reports && disagreements[rank].fact == 0) {
      disagreements[rank].theirs = header.facts[i];
      disagreements[rank].own = own.facts[i];
#if defined(__CUDA_ARCH__)
      __threadfence_system();  // before the host sees that there is something to read
#endif
      disagreements[rank].fact = i + 1;
      *broken = 1;
    }
    return false;
  }
};

// The capacity of an expert from the tokens of all ranks, which their headers have.
struct CapacityOfAll {
  const int32_t* from;  // as UnpackIds has it
  int64_t block;        // words of a rank
  int32_t num_ranks, num_experts, top_k;
  double factor;
  int32_t* to;  // [1]

  int64_t count() const { return 1; }
  MOEC_HD void operator()(int64_t) const {
    int64_t tokens = 0;
    for (int32_t r = 0; r < num_ranks; ++r)
      tokens += reinterpret_cast<const RankHeader*>(from + r * block)->num_tokens;
    const int64_t capacity = capacity_for(factor, tokens, top_k, num_experts);
    *to = int32_t(capacity < INT32_MAX ? capacity : INT32_MAX);
  }
};

struct BringWeights {  // to[slot] = scale * from[its row][its k]; 0 where the slot has no row
  int64_t slots;
  int32_t top_k;
  const float* from;
  const int32_t* slot_row;  // [T,K]
  float scale;
  float* to;  // [T,K]

  int64_t count() const { return slots; }
  MOEC_HD void operator()(int64_t slot) const {
    const int64_t row = slot_row[slot];
    to[slot] = row < 0 ? 0.0f : scale * from[row * top_k + slot % top_k];
  }
};

// ---- what stays at home: slots of identity experts
struct KeepIdentities {  // the ids of experts become -1
  int64_t slots;
  int32_t num_experts;
  const int32_t* from;
  int32_t* to;

  int64_t count() const { return slots; }
  MOEC_HD void operator()(int64_t slot) const {
    to[slot] = from[slot] < num_experts ? -1 : from[slot];
  }
};
struct TakeIdentities {  // to[slot] = from[slot] where ids[slot] is an identity expert
  int64_t slots;
  int32_t num_experts;
  const int32_t* ids;
  const float* from;
  float* to;

  int64_t count() const { return slots; }
  MOEC_HD void operator()(int64_t slot) const {
    if (ids[slot] >= num_experts) to[slot] = from[slot];
  }
};

// to[i] = 0 + parts[0][i] + parts[1][i] + ..; i32 saturates, as counts do
template <class T>
struct AddRanks {
  int64_t values;
  int32_t num_ranks;
  const T* parts;  // [N,values]
  T* to;

  int64_t count() const { return values; }
  MOEC_HD void operator()(int64_t i) const {
    std::conditional_t<std::is_same_v<T, int32_t>, int64_t, T> sum = 0;
    for (int64_t r = 0; r < num_ranks; ++r) sum += parts[r * values + i];
    if constexpr (std::is_same_v<T, int32_t>)
      sum = sum < INT32_MIN ? INT32_MIN : sum > INT32_MAX ? INT32_MAX : sum;
    to[i] = T(sum);
  }
};

using RankSteps =
    std::variant<CountUp, PlanRoutes, PickRows, SumRows, PackIds, PackBlocks, SendToAll, TellCounts,
                 UnpackIds, CapacityOfAll, BringWeights, KeepIdentities, TakeIdentities,
                 AddRanks<float>, AddRanks<double>, AddRanks<int32_t>, AddRanks<int64_t>>;
struct RankStep : RankSteps {  // of a name that backend.h can say
  using RankSteps::variant;
};

}  // namespace moec
