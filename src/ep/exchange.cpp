// SPDX-License-Identifier: Apache-2.0
#include "ep/exchange.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace moec::ep {
namespace {

using ll = long long;
using ull = unsigned long long;

constexpr const char* kFactNames[] = {"ep (of those made with the comm)", "bound",
                                      "x_beside (1: given)", "adapter_ids (1: given)"};

}  // namespace

Exchange::Exchange(Communicator& comm, const Backend& backend, const Shape& shape,
                   std::unique_ptr<Peers> peers, std::atomic<uint64_t>& calls_of_scheme)
    : comm_(comm),
      backend_(backend),
      shape_(shape),
      scheme_(scheme_of(shape.scheme)),
      peers_(std::move(peers)),
      progress_(comm.queues() && !peers_, shape.timeout_ms),
      calls_of_scheme_(calls_of_scheme) {
  routes_.width = std::min(shape_.top_k, comm.size());
  for (auto* rows : {&routes_.sent, &routes_.sent_at, &routes_.received, &routes_.received_at})
    rows->resize(size_t(comm.size()));
}

// ---- what became of calls
void Exchange::require_progress() const {
  Progress::Late late;
  if (!progress_.is_late(late)) return;
  char why[180];
  std::snprintf(why, sizeof why,
                "a %s of rank %d waits for another rank: %llu dispatches and %llu combines have "
                "ended, none for %u ms, and %llu calls are queued",
                late.step == Progress::kCombine ? "combine" : "dispatch", comm_.rank(),
                ull(late.dispatches), ull(late.combines), shape_.timeout_ms, ull(late.queued));
  comm_.give_up(MOEC_E_TIMEOUT, why);
}

void Exchange::require_well() const {
  require_progress();
  comm_.require_well();
  if (peers_) return peers_->require_well();
  for (int32_t r = 0; r < comm_.size(); ++r)
    if (const int64_t fact = disagreements_[r].fact)
      comm_.disagree(r, kFactNames[fact - 1], disagreements_[r]);
}

Exchange::RowCounts Exchange::row_counts() const {
  RowCounts counts = {};
  for (int32_t r = 0; r < comm_.size(); ++r) {
    counts.needed = std::max(counts.needed, int64_t(overflows_[r].rows_needed));
    counts.dropped += overflows_[r].rows_dropped;
  }
  return counts;
}

// The last of a dispatch or a combine counts it. One that has nothing to do cannot.
template <class Last>
void Exchange::finish(Last last, Progress::Step step, moec_stream stream) {
  last.ended = progress_.ended(step);
  if (last.count() == 0) return backend_.between_ranks(last.ended, stream);
  backend_.between_ranks(last, stream);
}

// ---- dispatch
// Where each token goes, and the ids that go with it, unless the host has to count rows before.
void Exchange::route(const Departure& from, const RankHeader& header, CountUp begun,
                     moec_stream stream) {
  routes_.num_tokens = from.tokens.count;
  routes_.bound = from.bound;
  meta_columns_ = 2 * shape_.top_k + from.has_adapter_ids;
  if (!scheme_.sends_to_all()) plan(from.tokens, stream);
  if (!counts_rows()) return pack_ids(from, header, begun, stream);
  if (comm_.reach() == Reach::kStaged) comm_.wait(stream);
}

void Exchange::pack_ids(const Departure& from, const RankHeader& header, CountUp begun,
                        moec_stream stream) {
  const Tokens& tokens = from.tokens;
  PackIds pack = {};
  pack.num_tokens = tokens.count;
  pack.places = scheme_.sends_to_all() ? from.bound : routes_.num_sent;
  pack.top_k = shape_.top_k;
  pack.num_experts = shape_.num_experts;
  pack.columns = meta_columns_;
  pack.expert_ids = tokens.expert_ids;
  pack.routing_weights = tokens.routing_weights;
  pack.adapter_ids = from.adapter_ids;
  pack.token = routes_.token;
  pack.to = memory_.outbox_ids;
  if (counts_rows()) return backend_.between_ranks(pack, stream);
  const PickRows rows = own_rows(from);
  if (!scheme_.sends_to_all())
    return backend_.between_ranks(PackBlocks{pack, header, memory_.wanted, comm_.size(),
                                             places().stride, words_of_block(), begun, rows},
                                  stream);
  pack.to += kHeaderWords;
  SendToAll send = {};
  send.pack = pack;
  send.header = header;
  send.header_to = reinterpret_cast<RankHeader*>(memory_.outbox_ids);
  send.owners = memory_.owners;
  send.num_ranks = comm_.size();
  send.width = routes_.width;
  send.sum_index = routes_.sum_index;
  send.slot_row = routes_.slot_row;
  send.begun = begun;
  send.rows = rows;
  backend_.between_ranks(send, stream);
}

int64_t Exchange::words_of_block() const {
  const int64_t header = sizeof(RankHeader);
  const int64_t rows = few_rows() ? places().stride * int64_t(row_bytes()) : 0;
  return words_of_ids() + (rows + header - 1) / header * kHeaderWords;
}
RowBlocks Exchange::rows_in(int32_t* blocks) const {
  return {blocks + words_of_ids(), places().stride, words_of_block() * int64_t(sizeof(int32_t))};
}

// x on its way to where a collective takes it from; no row where it is there.
PickRows Exchange::own_rows(const Departure& from) const {
  const bool few = few_rows();
  const int64_t places = scheme_.sends_to_all() ? routes_.num_tokens : routes_.num_sent;
  return {{const_cast<void*>(from.x)},
          routes_.token,
          !few && lies_as_it_goes() ? 0 : places,
          int64_t(row_bytes()),
          few ? rows_in(memory_.outbox_ids) : RowBlocks{memory_.outbox}};
}

void Exchange::plan(const Tokens& tokens, moec_stream stream) {
  PlanRoutes plan = {};
  plan.num_tokens = tokens.count;
  plan.top_k = shape_.top_k;
  plan.num_ranks = comm_.size();
  plan.expert_ids = tokens.expert_ids;
  plan.routing_weights = tokens.routing_weights;
  plan.expert_begin = memory_.expert_begin;
  plan.stride = places().stride;
  plan.most = places().most;
  plan.by_weight = drops_by_weight();
  plan.wanted = counts_rows() ? counted_ : memory_.wanted;
  plan.token = routes_.token;
  plan.slot_row = routes_.slot_row;
  plan.sum_index = routes_.sum_index;
  plan.counts = memory_.counts;
  plan.keys = memory_.keys;
  backend_.between_ranks(plan, stream);
  routes_.num_sent = comm_.size() * plan.stride;
}

// What the notices say: guests from each rank, tokens of all. No notices: as many guests from each
// rank as there may be. Where the host counts, the own counts have come with the notices.
void Exchange::learn(const Notice* notices) {
  const Places places = this->places();
  routes_.num_guests = 0;
  routes_.longest = 0;
  routes_.total_tokens = notices ? 0 : -1;
  for (size_t r = 0; r < routes_.received.size(); ++r) {
    const Notice notice = notices ? notices[r] : Notice{};
    MOEC_REQUIRE(notice.rows.count >= 0 && notice.rows.count <= routes_.bound, MOEC_E_MISMATCH,
                 "rank %d sends %lld rows; expected at most the bound, %lld", int(r),
                 ll(notice.rows.count), ll(routes_.bound));
    routes_.received[r] = places.stride ? places.stride : notice.rows.count;
    routes_.received_at[r] = routes_.num_guests;
    routes_.num_guests += routes_.received[r];
    routes_.total_tokens += notice.num_tokens;
    routes_.longest = std::max(routes_.longest, notice.rows.longest);
    if (places.stride) continue;
    routes_.sent[r] = counted_[r];
    routes_.sent_at[r] = routes_.num_sent;
    routes_.num_sent += counted_[r];
  }
  if (counts_rows()) overflows_[comm_.rank()].add(routes_.longest, 0);
}

// Of one go() or come_back().
void Exchange::count_bytes(uint64_t row_bytes, bool homewards) {
  const Places places = this->places();
  uint64_t out = 0, in = 0;
  for (size_t r = 0; r < routes_.received.size(); ++r) {
    if (int32_t(r) == comm_.rank()) continue;
    out += uint64_t(places.stride ? places.stride : routes_.sent[r]) * row_bytes;
    in += uint64_t(routes_.received[r]) * row_bytes;
  }
  counters_.bytes_sent += homewards ? in : out;
  counters_.bytes_received += homewards ? out : in;
}

void Exchange::send_ids(moec_stream stream) {
  const uint64_t bytes = uint64_t(meta_columns_) * sizeof(int32_t);
  if (counts_rows()) {
    scheme_.go(comm_, routes_, memory_.outbox_ids, memory_.guest_ids, bytes, stream);
    return count_bytes(bytes, false);
  }
  const uint64_t block = uint64_t(words_of_block()) * sizeof(int32_t);
  if (scheme_.sends_to_all())
    comm_.all_gather(memory_.outbox_ids, memory_.guest_ids, block, stream);
  else
    comm_.all_to_all(memory_.outbox_ids, memory_.guest_ids, block, stream);
  counters_.bytes_sent += uint64_t(comm_.size() - 1) * block;
  counters_.bytes_received += uint64_t(comm_.size() - 1) * block;
}

// Rows times `scale` in the outbox, or where they are if nothing is to be done to them.
const void* Exchange::pack(const void* rows, float scale, moec_stream stream) {
  const bool to_all = scheme_.sends_to_all();
  const int64_t places = to_all ? routes_.num_tokens : routes_.num_sent;
  if (scale != 1.0f) {
    SumRows scaled = {};
    scaled.num_tokens = places;
    scaled.hidden = shape_.hidden;
    scaled.width = 1;
    scaled.index = routes_.token;
    scaled.rows = {const_cast<void*>(rows), shape_.dtype};
    scaled.scale = scale;
    scaled.y = {memory_.outbox, shape_.dtype};
    backend_.between_ranks(scaled, stream);
  } else if (!to_all) {
    backend_.between_ranks(PickRows{{const_cast<void*>(rows)},
                                    routes_.token,
                                    places,
                                    int64_t(row_bytes()),
                                    {memory_.outbox}},
                           stream);
  } else if (lies_as_it_goes()) {
    return rows;
  } else if (places) {
    backend_.copy(memory_.outbox, rows, uint64_t(places) * row_bytes(), stream);
  }
  return memory_.outbox;
}

void Exchange::send_rows(const void* rows, void* to, moec_stream stream) {
  scheme_.go(comm_, routes_, rows, to, row_bytes(), stream);
  count_bytes(row_bytes(), false);
}

void Exchange::unpack_ids(const RankHeader& header, moec_stream stream) {
  UnpackIds unpack = {};
  unpack.guests = routes_.num_guests;
  unpack.bound = places().stride;
  unpack.block = words_of_block();
  unpack.overflow = scheme_.sends_to_all() || counts_rows() ? nullptr : overflows_;
  unpack.top_k = shape_.top_k;
  unpack.columns = meta_columns_;
  unpack.expert_begin = expert_begin();
  unpack.expert_end = expert_end();
  unpack.from = memory_.guest_ids;
  unpack.own = header;
  unpack.disagreements = disagreements_;
  unpack.broken = memory_.broken;
  unpack.ids = memory_.ids;
  unpack.adapter_ids = memory_.adapter_ids;
  unpack.weights = memory_.weights;
  if (few_rows())
    unpack.rows = {rows_in(memory_.guest_ids),
                   nullptr,
                   routes_.num_guests,
                   int64_t(row_bytes()),
                   {memory_.guests}};
  finish(unpack, Progress::kDispatch, stream);
}

Guests Exchange::dispatch(const Departure& from, moec_stream stream) {
  require_well();
  guests_ = {};
  if (peers_) {
    guests_ = peers_->dispatch(from, stream);
    count_call();
    return guests_;
  }
  const int64_t values[kFacts] = {number_, from.bound, from.has_beside, from.has_adapter_ids};
  RankHeader header = {};
  Fact facts[kFacts];
  for (size_t i = 0; i < kFacts; ++i) {
    facts[i] = {kFactNames[i], values[i]};
    header.facts[i] = values[i];
  }
  header.num_tokens = from.tokens.count;
  const bool meets = this->meets(Call::kDispatch);
  if (meets) comm_.require_waiting(stream);
  const bool is_captured = comm_.queues() && backend_.capturing(stream);
  prepare(Call::kDispatch, [&] {
    comm_.require_capturable(stream);
    route(from, header, progress_.begun(Progress::kDispatch, is_captured), stream);
  });
  progress_.queue(Progress::kDispatch, is_captured);
  try {
    const Communicator::Rows rows = {from.tokens.count, counts_rows() ? counted_ : nullptr};
    learn(meets ? comm_.meet(Call::kDispatch, facts, rows, stream) : nullptr);
  } catch (...) {
    progress_.take_back(Progress::kDispatch);
    throw;
  }
  comm_.in_step([&] {
    if (counts_rows()) pack_ids(from, header, {}, stream);
    send_ids(stream);
    if (counts_rows())
      send_rows(pack(from.x, 1.0f, stream), memory_.guests, stream);
    else if (!few_rows())
      send_rows(lies_as_it_goes() ? from.x : memory_.outbox, memory_.guests, stream);
    if (from.has_beside)
      send_rows(pack(from.beside, from.beside_scale, stream), memory_.beside, stream);
    unpack_ids(header, stream);
  });
  count_call();
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

CapacityOfAll Exchange::capacity_of_all(double factor, int32_t* to) const {
  if (peers_) return peers_->capacity_of_all(factor, to);
  return {memory_.guest_ids,
          words_of_block(),
          comm_.size(),
          shape_.num_experts,
          shape_.top_k,
          factor,
          to};
}

// ---- combine
void Exchange::combine(const Homecoming& to, moec_stream stream) {
  if (peers_) {
    guests_ = {};  // what the views show is of the next dispatch from now on
    peers_->combine(to, stream);
    return count_call();
  }
  const Fact facts[] = {{kFactNames[0], number_}, {"d_guest_weights (1: given)", to.has_weights}};
  prepare(Call::kCombine, [&] { comm_.require_capturable(stream); });
  if (!comm_.queues()) comm_.meet(Call::kCombine, facts);
  const bool is_captured = comm_.queues() && backend_.capturing(stream);
  backend_.between_ranks(progress_.begun(Progress::kCombine, is_captured), stream);
  progress_.queue(Progress::kCombine, is_captured);
  const auto bring = [&](const void* from, void* home, uint64_t bytes) {
    scheme_.come_back(comm_, routes_, from, home, bytes, stream);
    count_bytes(bytes, true);
  };
  bring(memory_.partial, memory_.outbox,
        uint64_t(shape_.hidden * dtype_bytes(shape_.partial_dtype)));
  if (to.has_weights) {
    bring(to.d_guest_weights, memory_.outbox_ids, uint64_t(shape_.top_k) * sizeof(float));
    if (to.d_routing_weights)
      backend_.between_ranks(BringWeights{routes_.num_tokens * shape_.top_k, shape_.top_k,
                                          reinterpret_cast<const float*>(memory_.outbox_ids),
                                          routes_.slot_row, to.scale, to.d_routing_weights},
                             stream);
  }
  count_call();
  SumRows sum = {};
  sum.num_tokens = to.y ? routes_.num_tokens : 0;
  sum.hidden = shape_.hidden;
  sum.width = routes_.width;
  sum.index = routes_.sum_index;
  sum.rows = {memory_.outbox, shape_.partial_dtype};
  sum.scale = to.scale;
  sum.add = to.add;
  sum.y = {to.y, shape_.dtype};
  sum.broken = memory_.broken;
  finish(sum, Progress::kCombine, stream);
}

}  // namespace moec::ep
