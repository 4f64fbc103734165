// SPDX-License-Identifier: Apache-2.0
// The memory of an exchange. The outbox serves both ways: rows that go, and partial rows that come
// back.
#include <algorithm>
#include <cstring>

#include "ep/exchange.h"

namespace moec::ep {

int64_t Exchange::most_guests() const {
  return scheme_.most_guests(shape_, comm_.size(), shape_.max_tokens);
}

Exchange::Memory Exchange::lay_out(Arena& arena) const {
  const auto sent = uint64_t(scheme_.most_sent(shape_, comm_.size(), shape_.max_tokens));
  const auto guests = uint64_t(most_guests()), tokens = uint64_t(shape_.max_tokens);
  const auto hidden = uint64_t(shape_.hidden), slots = uint64_t(shape_.top_k);
  const auto ranks = uint64_t(comm_.size()), headers = 3 * ranks * uint64_t(kHeaderWords);
  const uint64_t partial = hidden * uint64_t(dtype_bytes(shape_.partial_dtype));
  const uint64_t beside_ids =
      std::min(bytes_of_guests(shape_.max_tokens), most_few()) / sizeof(int32_t) + headers;
  Memory memory = {};
  memory.outbox = arena.take(sent * std::max(row_bytes(), partial), 0);
  memory.outbox_ids = arena.take_array<int32_t>(sent * (2 * slots + 1) + beside_ids, 0);
  memory.guests = arena.take(guests * row_bytes(), 0);
  memory.beside =
      shape_.flags & MOEC_EP_FORWARD_ONLY ? nullptr : arena.take(guests * row_bytes(), 0);
  memory.guest_ids = arena.take_array<int32_t>(guests * (2 * slots + 1) + beside_ids, 0);
  memory.ids = arena.take_array<int32_t>(guests * slots, 0);
  memory.adapter_ids = arena.take_array<int32_t>(guests, 0);
  memory.weights = arena.take_array<float>(guests * slots, 0);
  memory.partial = arena.take(guests * partial, 0);
  memory.sum_index = arena.take_array<int32_t>(tokens * uint64_t(routes_.width), 0);
  memory.slot_row = arena.take_array<int32_t>(tokens * slots, 0);
  if (!scheme_.sends_to_all()) {
    const int64_t N = comm_.size(), T = shape_.max_tokens;
    memory.token = arena.take_array<int32_t>(sent, 0);
    memory.wanted = arena.take_array<int32_t>(ranks, 0);
    memory.counts = arena.take_array<int32_t>(PlanRoutes::count_words(N, T), 0);
    if (drops_by_weight()) memory.keys = arena.take(PlanRoutes::key_bytes(N, T), 0);
  }
  memory.expert_begin = arena.take_array<int32_t>(ranks + 1, 0);
  memory.owners = arena.take_array<int32_t>(uint64_t(shape_.num_experts), 0);
  memory.broken = arena.take_array<int32_t>(1, 0);
  memory.progress = arena.take_array<uint64_t>(Progress::kCounts, 0);
  return memory;
}

uint64_t Exchange::bytes() const {
  if (peers_) return peers_->bytes();
  Arena arena;
  lay_out(arena);
  return arena.size().base;
}

uint64_t Exchange::shared_bytes() const {
  return uint64_t(comm_.size()) * (sizeof(Overflow) + sizeof(Disagreement) + sizeof(int32_t)) +
         Progress::kSteps * sizeof(Progress::Shown);
}

void Exchange::set_memory(void* memory, void* shared) {
  std::memset(shared, 0, shared_bytes());
  auto* const shown = static_cast<Progress::Shown*>(shared);
  overflows_ = reinterpret_cast<Overflow*>(shown + Progress::kSteps);
  disagreements_ = reinterpret_cast<Disagreement*>(overflows_ + comm_.size());
  counted_ = reinterpret_cast<int32_t*>(disagreements_ + comm_.size());
  if (peers_) return peers_->set_reports(disagreements_);
  Arena arena(memory, 0);
  memory_ = lay_out(arena);
  routes_.sum_index = memory_.sum_index;
  routes_.slot_row = memory_.slot_row;
  routes_.token = memory_.token;
  if (comm_.reach() != Reach::kDirect)  // places that no token fills are sent, too
    backend_.zero(memory, bytes(), nullptr);
  backend_.zero(memory_.broken, sizeof(int32_t), nullptr);
  backend_.zero(memory_.progress, Progress::kCounts * sizeof(uint64_t), nullptr);
  progress_.set_memory(memory_.progress, shown);
  backend_.copy(memory_.expert_begin, shape_.expert_begin.data(),
                shape_.expert_begin.size() * sizeof(int32_t), nullptr);
  std::vector<int32_t> owners;
  for (int32_t r = 0; r < comm_.size(); ++r)
    owners.insert(owners.end(), shape_.expert_begin[size_t(r) + 1] - shape_.expert_begin[size_t(r)],
                  r);
  backend_.copy(memory_.owners, owners.data(), owners.size() * sizeof(int32_t), nullptr);
  comm_.wait(nullptr);  // calls come on any stream
}

}  // namespace moec::ep
