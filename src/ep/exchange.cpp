// SPDX-License-Identifier: Apache-2.0
#include "ep/exchange.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "core/dtype.h"

namespace moec::ep {

Exchange::Exchange(Communicator& comm, const Backend& backend, const Shape& shape)
    : comm_(comm),
      backend_(backend),
      shape_(shape),
      scheme_(scheme_of(shape.scheme)),
      planner_(shape_, comm.size()),
      routes_(planner_.make_routes(
          std::max(scheme_.most_sent(shape_, comm.size(), shape.max_tokens), shape.max_tokens))) {}

int64_t Exchange::most_guests() const {
  return scheme_.most_guests(shape_, comm_.size(), shape_.max_tokens);
}

// The outbox serves both ways: rows that go, and partial rows that come back.
Exchange::Memory Exchange::lay_out(Arena& arena) const {
  const auto sent = uint64_t(scheme_.most_sent(shape_, comm_.size(), shape_.max_tokens));
  const auto guests = uint64_t(most_guests());
  const auto hidden = uint64_t(shape_.hidden), slots = uint64_t(shape_.top_k);
  const auto row = hidden * uint64_t(dtype_bytes(shape_.dtype));
  const auto partial = hidden * uint64_t(dtype_bytes(shape_.partial_dtype));
  Memory memory;
  memory.outbox = arena.take(sent * std::max(row, partial), 0);
  memory.outbox_meta = arena.take_array<int32_t>(sent * (2 * slots + 1), 0);
  memory.guests = arena.take(guests * row, 0);
  memory.beside = shape_.flags & MOEC_EP_FORWARD_ONLY ? nullptr : arena.take(guests * row, 0);
  memory.guest_meta = arena.take_array<int32_t>(guests * (2 * slots + 1), 0);
  memory.ids = arena.take_array<int32_t>(guests * slots, 0);
  memory.adapter_ids = arena.take_array<int32_t>(guests, 0);
  memory.weights = arena.take_array<float>(guests * slots, 0);
  memory.partial = arena.take(guests * partial, 0);
  return memory;
}

uint64_t Exchange::bytes() const {
  Arena arena;
  lay_out(arena);
  return arena.size().base;
}

void Exchange::set_memory(void* memory) {
  Arena arena(memory, 0);
  memory_ = lay_out(arena);
}

int64_t Exchange::outbox_places() const {
  return scheme_.places(shape_, routes_.bound).by_token ? routes_.bound : routes_.num_sent;
}

void Exchange::pack(const void* rows, float scale, moec_stream stream) {
  const int64_t places = outbox_places(), bytes = shape_.hidden * dtype_bytes(shape_.dtype);
  if (scale == 1.0f)
    return backend_.pick_rows({rows, routes_.token.data(), places, bytes, memory_.outbox}, stream);
  backend_.sum_rows({places,
                     shape_.hidden,
                     1,
                     routes_.token.data(),
                     {const_cast<void*>(rows), shape_.dtype},
                     scale,
                     false,
                     {memory_.outbox, shape_.dtype}},
                    stream);
}

void Exchange::pack_meta(const Departure& from) {
  const Tokens& tokens = from.tokens;
  const int64_t K = shape_.top_k;
  meta_columns_ = 2 * K + from.has_adapter_ids;
  for (int64_t place = 0; place < outbox_places(); ++place) {
    const int64_t t = routes_.token[size_t(place)];
    int32_t *const ids = memory_.outbox_meta + place * meta_columns_, *const weights = ids + K;
    if (from.has_adapter_ids) weights[K] = t < 0 ? -1 : from.adapter_ids[t];
    for (int64_t k = 0; k < K; ++k) {
      const int64_t a = t * K + k;
      const int64_t id =
          t < 0 ? -1 : load_integer(tokens.expert_ids.data, tokens.expert_ids.dtype, a);
      const float weight = t < 0 ? 0.0f : tokens.routing_weights ? tokens.routing_weights[a] : 1.0f;
      ids[k] = id >= 0 && id < shape_.num_experts ? int32_t(id) : -1;
      weights[k] = std::bit_cast<int32_t>(weight);
    }
  }
}

// Places of guests that nobody came to are a part of what was sent: their ids are -1.
void Exchange::unpack_meta() {
  const int64_t K = shape_.top_k;
  const int32_t begin = expert_begin(), end = expert_end();
  for (int64_t row = 0; row < routes_.num_guests; ++row) {
    const int32_t *const ids = memory_.guest_meta + row * meta_columns_, *const weights = ids + K;
    if (meta_columns_ > 2 * K) memory_.adapter_ids[row] = weights[K];
    for (int64_t k = 0; k < K; ++k) {
      const bool here = ids[k] >= begin && ids[k] < end;
      memory_.ids[row * K + k] = here ? ids[k] : -1;
      memory_.weights[row * K + k] = here ? std::bit_cast<float>(weights[k]) : 0.0f;
    }
  }
}

// What the notices say: guests from each rank, tokens of all, rows that did not fit anywhere.
void Exchange::learn(const Notice* notices) {
  const Places places = scheme_.places(shape_, routes_.bound);
  int64_t needed = counters_.rows_needed, dropped = counters_.rows_dropped;
  routes_.num_guests = routes_.total_tokens = 0;
  for (size_t r = 0; r < routes_.received.size(); ++r) {
    const Notice& notice = notices[r];
    MOEC_REQUIRE(notice.pair_rows >= 0 && notice.pair_rows <= routes_.bound, MOEC_E_MISMATCH,
                 "rank %d sends %lld rows; expected at most the bound, %lld", int(r),
                 static_cast<long long>(notice.pair_rows), static_cast<long long>(routes_.bound));
    routes_.received[r] = places.stride ? places.stride : notice.pair_rows;
    routes_.received_at[r] = routes_.num_guests;
    routes_.num_guests += routes_.received[r];
    routes_.total_tokens += notice.num_tokens;
    needed = std::max(needed, notice.rows_needed);
    dropped += notice.rows_dropped;
  }
  counters_.rows_needed = needed;
  counters_.rows_dropped = dropped;
}

// Of one go() or come_back().
void Exchange::count_bytes(uint64_t row_bytes, bool homewards) {
  const Places places = scheme_.places(shape_, routes_.bound);
  uint64_t out = 0, in = 0;
  for (size_t r = 0; r < routes_.received.size(); ++r) {
    if (int32_t(r) == comm_.rank()) continue;
    out += uint64_t(places.stride ? places.stride : routes_.sent[r]) * row_bytes;
    in += uint64_t(routes_.received[r]) * row_bytes;
  }
  counters_.bytes_sent += homewards ? in : out;
  counters_.bytes_received += homewards ? out : in;
}

Guests Exchange::dispatch(const Departure& from, moec_stream stream) {
  guests_ = {};
  prepare(comm_, Call::kDispatch, [&] {
    planner_.plan(from.tokens, from.bound, scheme_.places(shape_, from.bound), routes_);
    pack_meta(from);
    pack(from.x, 1.0f, stream);
  });
  const Fact facts[] = {{"ep (of those made with the comm)", number_},
                        {"bound", from.bound},
                        {"x_beside (1: given)", from.has_beside},
                        {"adapter_ids (1: given)", from.has_adapter_ids}};
  const bool counts = scheme_.places(shape_, from.bound).stride == 0;
  learn(comm_.meet(Call::kDispatch, facts, [&](int32_t r, Notice& notice) {
    notice.num_tokens = from.tokens.count;
    notice.pair_rows = counts ? routes_.sent[size_t(r)] : 0;
    notice.rows_needed = routes_.rows_needed;
    notice.rows_dropped = routes_.rows_dropped;
  }));
  const auto row_bytes = uint64_t(shape_.hidden * dtype_bytes(shape_.dtype));
  const auto send = [&](const void* outbox, void* to, uint64_t bytes) {
    scheme_.go(comm_, routes_, outbox, to, bytes);
    count_bytes(bytes, false);
  };
  comm_.in_step([&] {
    send(memory_.outbox_meta, memory_.guest_meta, uint64_t(meta_columns_) * sizeof(int32_t));
    send(memory_.outbox, memory_.guests, row_bytes);
    if (!from.has_beside) return;
    pack(from.beside, from.beside_scale, stream);
    send(memory_.outbox, memory_.beside, row_bytes);
  });
  unpack_meta();
  ++counters_.calls;
  guests_ = {routes_.num_guests,
             routes_.total_tokens,
             memory_.guests,
             from.has_beside ? memory_.beside : nullptr,
             memory_.ids,
             memory_.weights,
             from.has_adapter_ids ? memory_.adapter_ids : nullptr,
             memory_.partial};
  return guests_;
}

void Exchange::combine(const Homecoming& to, moec_stream stream) {
  const Fact facts[] = {{"ep (of those made with the comm)", number_},
                        {"d_guest_weights (1: given)", to.has_weights}};
  comm_.meet_plainly(Call::kCombine, facts);
  const auto bring = [&](const void* from, void* home, uint64_t bytes) {
    scheme_.come_back(comm_, routes_, from, home, bytes);
    count_bytes(bytes, true);
  };
  bring(memory_.partial, memory_.outbox,
        uint64_t(shape_.hidden * dtype_bytes(shape_.partial_dtype)));
  const int64_t K = shape_.top_k;
  if (to.has_weights) {
    bring(to.d_guest_weights, memory_.outbox_meta, uint64_t(K) * sizeof(float));
    const auto* const d_weights = reinterpret_cast<const float*>(memory_.outbox_meta);
    for (int64_t a = 0; to.d_routing_weights && a < routes_.num_tokens * K; ++a) {
      const int64_t row = routes_.slot_row[size_t(a)];
      to.d_routing_weights[a] = row < 0 ? 0.0f : to.scale * d_weights[row * K + a % K];
    }
  }
  ++counters_.calls;
  if (!to.y) return;
  backend_.sum_rows({routes_.num_tokens,
                     shape_.hidden,
                     routes_.width,
                     routes_.sum_index.data(),
                     {memory_.outbox, shape_.partial_dtype},
                     to.scale,
                     to.add,
                     {to.y, shape_.dtype}},
                    stream);
}

}  // namespace moec::ep
