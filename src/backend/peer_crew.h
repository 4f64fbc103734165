// SPDX-License-Identifier: Apache-2.0
// What a crew does in a step of peer_steps.h: one code for the blocks of a kernel and for a thread
// of the host. A Crew is one of crews(), with threads of which lanes() work as one, a team:
//   index() crews() thread() threads() lane() lanes() team() teams()
//   global_thread() global_threads()  of all crews; neighbours stand side by side
//   sync()  any(bool): sync, and whether it is true anywhere in the crew
//   join(bits) of the lanes of a team
//   say(word, value) after all that the crew stored before its last sync; hear(word)
//   now() in ns  pause()  load(from) store(to, value)  go_on(): the next kernel may come
#pragma once

#include <utility>

#include "backend/peer_steps.h"

#if defined(__CUDACC__)
#define MOEC_CREW __device__ inline
#else
#define MOEC_CREW inline
#endif

namespace moec {

struct alignas(16) PeerChunk {
  uint32_t part[4];
};
inline constexpr float kPeerNan = std::numeric_limits<float>::quiet_NaN();

namespace peer {

struct PeerTurn {  // of a step
  uint32_t step, number;
  uint64_t facts, begin;  // begin: of its waits, in ns
};

// body(0), .., body(N - 1)
template <int N, class Body>
MOEC_CREW void unrolled(const Body& body) {
  [&]<int... I>(std::integer_sequence<int, I...>) {
    (body(I), ...);
  }(std::make_integer_sequence<int, N>());
}

template <class Crew>
MOEC_CREW int own_lanes(const Crew& crew) {
  return (kPeerLanes - crew.index() + crew.crews() - 1) / crew.crews();
}

template <class Crew>
MOEC_CREW void say(const PeerMap& map, Crew& crew, const PeerTurn& turn) {
  crew.sync();
  const int each = own_lanes(crew);
  const uint32_t number = turn.number;
  const uint64_t word = turn.facts | peer_number(number);
  for (int i = crew.thread(); i < each * map.num_ranks; i += crew.threads()) {
    const int to = i / each, lane = crew.index() + i % each * crew.crews();
    crew.say(map.word(to, map.rank, lane, number), word);
  }
}

// `step`: the first number of the step, for which its other crews go on.
MOEC_CREW void report(const PeerMap& map, uint32_t step, int rank, int64_t fact, int64_t theirs,
                      int64_t own) {
  Disagreement& report = map.reports[rank];
  *map.own<uint32_t>(map.broken) = step;
  if (report.fact != 0) return;
  report.theirs = theirs;
  report.own = own;
#if defined(__CUDA_ARCH__)
  __threadfence_system();  // before the host sees that there is something to read
#endif
  report.fact = fact;
}

// Whether all are in this step, too: those lanes that this crew has, or all.
template <class Crew>
MOEC_CREW bool hear(const PeerMap& map, Crew& crew, const PeerTurn& turn, bool all) {
  const uint32_t number = turn.number;
  const int first = all ? 0 : crew.index(), apart = all ? 1 : crew.crews();
  const int each = all ? kPeerLanes : own_lanes(crew);
  const uint64_t own = turn.facts | peer_number(number);
  bool differs = false;
  for (int i = crew.thread(); i < each * map.num_ranks; i += crew.threads()) {
    const int from = i / each, lane = first + i % each * apart;
    const uint64_t* const at = map.word(map.rank, from, lane, number);
    uint64_t word = crew.hear(at);
    while (peer_number(word) != peer_number(own) && crew.now() - turn.begin < map.timeout_ns) {
      crew.pause();
      word = crew.hear(at);
    }
    if (word == own) continue;
    differs = true;
    int fact = 0;
    if (peer_number(word) != peer_number(own))
      fact = kPeerTimeout - 1;
    else
      while (peer_fact_of(word, fact) == peer_fact_of(own, fact)) ++fact;
    const bool late = fact == kPeerTimeout - 1;
    report(map, turn.step, from, fact + 1, late ? 0 : peer_fact_of(word, fact),
           peer_fact_of(own, late ? kFactKind : fact));
  }
  return !crew.any(differs);
}

// By an earlier step.
template <class Crew>
MOEC_CREW bool is_broken(const PeerMap& map, Crew& crew, uint32_t step) {
  const uint32_t broken = *map.own<volatile const uint32_t>(map.broken);
  return crew.any(broken != 0 && broken != step);
}

template <class Crew>
MOEC_CREW void count(const PeerMap& map, Crew& crew, uint32_t number, uint32_t kind) {
  for (int i = crew.thread(); i < own_lanes(crew); i += crew.threads())
    map.own<PeerLane>(map.lanes)[crew.index() + i * crew.crews()] = {number, kind};
}

// ---- dispatch
template <class Crew>
MOEC_CREW void forget_guests(const PeerDispatch& d, Crew& crew) {
  int32_t* const ids = d.map.own<int32_t>(d.map.ids);
  const int64_t slots = d.map.num_ranks * d.bound * d.top_k;
  for (int64_t i = crew.global_thread(); i < slots; i += crew.global_threads()) ids[i] = -1;
}

template <class Crew>
MOEC_CREW void send_ids(const PeerDispatch& d, Crew& crew) {
  const PeerMap& m = d.map;
  const int64_t first = m.rank * d.bound, used = d.num_tokens * d.top_k;
  for (int64_t i = crew.global_thread(); i < d.bound * d.top_k; i += crew.global_threads()) {
    const int64_t id = i < used ? load_integer(d.expert_ids.data, d.expert_ids.dtype, i) : -1;
    const float weight = i < used && d.routing_weights ? d.routing_weights[i] : 1.0f;
    const int32_t owner = m.owner(id);
    if (i < used) m.own<int32_t>(m.slot_owner)[i] = owner;
    for (int r = 0; r < m.num_ranks; ++r) {
      m.at<int32_t>(r, m.ids)[first * d.top_k + i] = r == owner ? int32_t(id) : -1;
      m.at<float>(r, m.weights)[first * d.top_k + i] = r == owner ? weight : 0.0f;
    }
  }
  if (d.has_adapter_ids)
    for (int64_t t = crew.global_thread(); t < d.bound; t += crew.global_threads())
      for (int r = 0; r < m.num_ranks; ++r)
        m.at<int32_t>(r, m.adapter_ids)[first + t] = t < d.num_tokens ? d.adapter_ids[t] : -1;
  if (crew.global_thread() == 0)
    for (int r = 0; r < m.num_ranks; ++r)
      m.at<RankHeader>(r, m.headers)[m.rank].num_tokens = d.num_tokens;
}

template <class Word>
MOEC_CREW Word scaled(const Word& word, moec_dtype dtype, float scale) {
  Word result = word;
  with_real(dtype, [&]<class T>() {
    if constexpr (sizeof(Word) >= sizeof(T)) {
      T values[sizeof(Word) / sizeof(T)];
      memcpy(values, &word, sizeof word);
      for (T& value : values) value = from_float<T>((0.0f + to_float(value)) * scale);
      memcpy(&result, values, sizeof result);
    }
  });
  return result;
}

// Pieces of rows, each to all ranks that want it, from the next one on.
template <class Word, class Crew>
MOEC_CREW void send_rows(const PeerDispatch& d, Crew& crew) {
  constexpr int kEach = 4;
  const PeerMap& m = d.map;
  const int64_t words = d.hidden * dtype_bytes(d.x.dtype) / int64_t(sizeof(Word));
  const int64_t piece = int64_t(kEach) * crew.lanes(), pieces = (words + piece - 1) / piece;
  const int64_t items = d.num_tokens * pieces * (d.has_beside ? 2 : 1);
  for (int64_t item = crew.team(); item < items; item += crew.teams()) {
    const int64_t row = item / pieces, first = (item - row * pieces) * piece + crew.lane();
    const bool is_beside = row >= d.num_tokens;
    const int64_t t = is_beside ? row - d.num_tokens : row;
    const Array& rows = is_beside ? d.beside : d.x;
    const Word* const from = static_cast<const Word*>(rows.data) + t * words;
    Word part[kEach];
    const auto for_words = [&](const auto& body) {
      unrolled<kEach>([&](int u) {
        if (first + u * crew.lanes() < words) body(part[u], first + u * crew.lanes());
      });
    };
    for_words([&](Word& word, int64_t at) { word = crew.load(from + at); });
    uint32_t owners = 0;
    for (int k = crew.lane(); k < d.top_k; k += crew.lanes()) {
      const int32_t owner =
          m.owner(load_integer(d.expert_ids.data, d.expert_ids.dtype, t * d.top_k + k));
      if (owner >= 0) owners |= 1u << owner;
    }
    owners = crew.join(owners);
    if (!is_beside && first == 0) m.own<uint32_t>(m.owners)[t] = owners;
    if (is_beside && d.beside_scale != 1.0f)
      for_words([&](Word& word, int64_t) { word = scaled(word, d.x.dtype, d.beside_scale); });
    for (int i = 1; i <= m.num_ranks; ++i) {
      const int r = (m.rank + i) % m.num_ranks;
      if (!(owners >> r & 1)) continue;
      Word* const to =
          m.at<Word>(r, is_beside ? m.beside : m.guests) + (m.rank * d.bound + t) * words;
      for_words([&](const Word& word, int64_t at) { crew.store(to + at, word); });
    }
  }
}

// rows(): send_rows of the words that rows are.
template <class Crew, class Rows>
MOEC_CREW void run(const PeerDispatch& d, Crew& crew, const Rows& rows) {
  const PeerMap& m = d.map;
  const PeerLane last = m.own<PeerLane>(m.lanes)[crew.index()];
  PeerTurn turn = {last.number + 1, last.number + 1, 0, crew.now()};
  if (is_broken(m, crew, turn.step)) return forget_guests(d, crew);
  const uint64_t facts = peer_fact(kFactBeside, d.has_beside) |
                         peer_fact(kFactAdapterIds, d.has_adapter_ids) |
                         peer_fact(kFactBound, d.bound);
  bool agrees = true;
  if (last.kind == kPeerDispatch) {
    turn.facts = facts | peer_fact(kFactKind, kPeerMeeting);
    say(m, crew, turn);
    agrees = hear(m, crew, turn, true);
    ++turn.number;
  }
  turn.facts = facts | peer_fact(kFactKind, kPeerDispatch);
  if (agrees) {
    send_ids(d, crew);
    rows();
    say(m, crew, turn);
    agrees = hear(m, crew, turn, false);
    if (!agrees) hear(m, crew, turn, true);  // until nobody stores any more
  }
  if (!agrees) forget_guests(d, crew);
  count(m, crew, turn.number, kPeerDispatch);
}

// ---- combine
template <class Crew>
MOEC_CREW void send_weights(const PeerCombine& c, Crew& crew) {
  const PeerMap& m = c.map;
  const int32_t* const ids = m.own<int32_t>(m.ids);
  const int64_t each = c.bound * c.top_k;
  for (int64_t i = crew.global_thread(); i < each * m.num_ranks; i += crew.global_threads())
    if (ids[i] >= 0) {
      const int64_t home = i / each;
      m.at<float>(int(home), m.d_weights)[i - home * each] = c.d_guest_weights[i];
    }
}

template <class Crew>
MOEC_CREW void take_weights(const PeerCombine& c, Crew& crew, bool is_well) {
  const PeerMap& m = c.map;
  const float* const from = m.own<float>(m.d_weights);
  const int64_t slots = c.num_tokens * c.top_k;
  for (int64_t i = crew.global_thread(); i < slots; i += crew.global_threads())
    c.d_routing_weights[i] = !is_well                              ? kPeerNan
                             : m.own<int32_t>(m.slot_owner)[i] < 0 ? 0.0f
                                                                   : c.scale * from[i];
}

template <class T, int V>
struct alignas(V * sizeof(T)) PeerSpan {
  T v[V];
};

// y[t] = scale * (0 + the partial rows of t, by rank) + what y holds; or NaN.
template <class P, class Y, int V, class Crew>
MOEC_CREW void sum_rows(const PeerCombine& c, Crew& crew, bool is_well) {
  constexpr int kEach = 4, kAtOnce = 2;
  using From = PeerSpan<P, V>;
  using To = PeerSpan<Y, V>;
  const PeerMap& m = c.map;
  const int64_t spans = c.hidden / V, piece = int64_t(kEach) * crew.lanes();
  const int64_t pieces = (spans + piece - 1) / piece;
  for (int64_t item = crew.team(); item < c.num_tokens * pieces; item += crew.teams()) {
    const int64_t t = item / pieces, first = (item - t * pieces) * piece + crew.lane();
    const auto for_spans = [&](const auto& body) {  // of this lane
      unrolled<kEach>([&](int u) {
        if (first + u * crew.lanes() < spans) body(u, first + u * crew.lanes());
      });
    };
    uint32_t owners = is_well ? m.own<uint32_t>(m.owners)[t] : 0;
    float sum[kEach][V] = {};
    for (int r = 0; owners;) {
      From part[kAtOnce][kEach];
      int parts = 0;
      unrolled<kAtOnce>([&](int a) {
        if (!owners) return;
        while (!(owners & 1)) owners >>= 1, ++r;
        const From* const row = m.at<From>(r, m.partial) + (m.rank * c.bound + t) * spans;
        for_spans([&](int u, int64_t at) { part[a][u] = crew.load(row + at); });
        owners >>= 1, ++r, ++parts;
      });
      unrolled<kAtOnce>([&](int a) {
        if (a >= parts) return;
        for_spans([&](int u, int64_t) {
          unrolled<V>([&](int v) { sum[u][v] += to_float(part[a][u].v[v]); });
        });
      });
    }
    To* const y = static_cast<To*>(c.y.data) + t * spans;
    for_spans([&](int u, int64_t at) {
      To to = {};
      if (c.add) to = crew.load(y + at);
      unrolled<V>([&](int v) {
        float value = sum[u][v] * c.scale;
        if (c.add) value += to_float(to.v[v]);
        to.v[v] = from_float<Y>(is_well ? value : kPeerNan);
      });
      crew.store(y + at, to);
    });
  }
}

// rows(is_well): sum_rows of the types that rows have.
template <class Crew, class Rows>
MOEC_CREW void run(const PeerCombine& c, Crew& crew, const Rows& rows) {
  const PeerMap& m = c.map;
  const PeerLane last = m.own<PeerLane>(m.lanes)[crew.index()];
  const PeerTurn turn = {last.number + 1, last.number + 1,
                         peer_fact(kFactKind, kPeerCombine) |
                             peer_fact(kFactWeights, c.has_weights) |
                             peer_fact(kFactBound, c.bound),
                         crew.now()};
  bool is_well = !is_broken(m, crew, turn.step);
  if (is_well && last.kind != kPeerDispatch) {
    if (crew.thread() == 0) report(m, turn.step, m.rank, kPeerOrder, 0, 0);
    is_well = false;
  } else if (is_well) {
    if (c.has_weights) send_weights(c, crew);
    say(m, crew, turn);
    is_well = hear(m, crew, turn, true);
  }
  count(m, crew, turn.number, kPeerCombine);
  crew.go_on();
  if (c.y) rows(is_well);
  if (c.d_routing_weights) take_weights(c, crew, is_well);
}

}  // namespace peer
}  // namespace moec
