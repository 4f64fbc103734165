// SPDX-License-Identifier: Apache-2.0
#include "ep/peers.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <utility>

#include "core/workspace.h"
#include "ep/exchange.h"

namespace moec::ep {
namespace {

constexpr const char* kPeerFactNames[kPeerFacts] = {
    "the step (1: before a second dispatch, 2: dispatch, 3: combine)", "x_beside (1: given)",
    "adapter_ids (1: given)", "d_guest_weights (1: given)", "bound"};
constexpr uint64_t kGathered = 512;  // bytes of a rank in gather()

struct Verdict {
  int32_t is_well;
  char text[400];
};

}  // namespace

Peers::Peers(Communicator& comm, const Backend& backend, const Shape& shape)
    : comm_(comm),
      backend_(backend),
      shape_(shape),
      blocks_(size_t(comm.size())),
      pages_(size_t(comm.size())) {
  free_closed_memory();
  const auto rank = size_t(comm.rank());
  map_.rank = comm.rank();
  map_.num_ranks = comm.size();
  map_.timeout_ns = uint64_t(shape.timeout_ms) * 1000000;
  map_.max_crews = shape.max_blocks;
  std::copy(shape.expert_begin.begin(), shape.expert_begin.end(), map_.expert_begin);
  lay_out();
  PeerTicket unused;
  mail_ = backend.peers().allocate(uint64_t(comm.size() + 1) * kGathered, unused);
  blocks_[rank] = backend.peers().allocate(bytes_, own_.memory);
  map_.block[rank] = static_cast<char*>(blocks_[rank].get());
  clear_words();
  own_.process = this_process();
  own_.has_windows = comm.has_windows();
  if (comm.size() == 1) return;
  try {
    pages_[rank] = std::make_unique<SharedPage>();
    std::snprintf(own_.page, sizeof own_.page, "%s", pages_[rank]->name().c_str());
  } catch (const Error&) {  // the others, which cannot map it, say so to all
  }
}

void Peers::clear_words() {
  backend_.zero(map_.block[map_.rank], zeroed_, nullptr);
  comm_.wait(nullptr);  // steps come on any stream, and of other ranks
}

void Peers::lay_out() {
  const auto ranks = uint64_t(map_.num_ranks), tokens = uint64_t(shape_.max_tokens);
  const auto slots = uint64_t(shape_.top_k), guests = ranks * tokens;
  const uint64_t row = uint64_t(shape_.hidden * dtype_bytes(shape_.dtype));
  const uint64_t partial = uint64_t(shape_.hidden * dtype_bytes(shape_.partial_dtype));
  uint64_t end = 0;
  const auto take = [&](uint64_t count, uint64_t bytes) {
    constexpr uint64_t kApart = 128;
    return std::exchange(end, round_up(end + count * bytes, kApart));
  };
  map_.words = take(2 * ranks * kPeerLanes, sizeof(uint64_t));
  map_.headers = take(ranks, sizeof(RankHeader));
  map_.lanes = take(kPeerLanes, sizeof(PeerLane));
  map_.broken = take(1, sizeof(uint32_t));
  zeroed_ = end;
  map_.owners = take(tokens, sizeof(uint32_t));
  map_.slot_owner = take(tokens * slots, sizeof(int32_t));
  map_.ids = take(guests * slots, sizeof(int32_t));
  map_.weights = take(guests * slots, sizeof(float));
  map_.adapter_ids = take(guests, sizeof(int32_t));
  map_.d_weights = take(tokens * slots, sizeof(float));
  map_.guests = take(guests, row);
  map_.beside = take(shape_.flags & MOEC_EP_FORWARD_ONLY ? 0 : guests, row);
  map_.partial = take(guests, partial);
  bytes_ = end;
}

Peers::~Peers() {
  backend_.peers().finish();
  close_window();
  const auto rank = size_t(map_.rank);
  PeerMemory own = std::move(blocks_[rank]);
  blocks_.clear();
  if (processes_.empty() || !pages_[rank]) return;  // nobody has it open
  for (const auto& page : pages_)
    if (page) page->is_closed_by(map_.rank) = 1;
  leave({std::move(own), std::move(pages_[rank]), processes_});
}

// ---- connecting
template <class T>
std::vector<T> Peers::gather(const T& own) {
  static_assert(sizeof(T) <= kGathered);
  std::vector<T> all(size_t(comm_.size()));
  const uint64_t bytes = all.size() * sizeof(T);
  if (comm_.reach() == Reach::kDirect) {
    comm_.all_gather(&own, all.data(), sizeof own, nullptr);
    return all;
  }
  char* const sent = static_cast<char*>(mail_.get());
  char* const received = sent + kGathered;
  backend_.copy(sent, &own, sizeof own, nullptr);
  comm_.all_gather(sent, received, sizeof own, nullptr);
  backend_.copy(all.data(), received, bytes, nullptr);
  comm_.wait(nullptr);
  return all;
}

void Peers::open(size_t rank, const Introduction& of) {
  MOEC_REQUIRE(of.process.host == own_.process.host, MOEC_E_UNSUPPORTED, "it is on another host");
  MOEC_REQUIRE(of.page[0], MOEC_E_UNSUPPORTED, "it has no page in /dev/shm");
  pages_[rank] = std::make_unique<SharedPage>(of.page);
  blocks_[rank] = backend_.peers().open(of.memory, of.process == own_.process);
  map_.block[rank] = static_cast<char*>(blocks_[rank].get());
}

std::string Peers::sharing(const std::vector<Introduction>& all) {
  constexpr unsigned char kShared[sizeof PeerTicket::unit] = {};
  for (size_t r = 1; r < all.size(); ++r)
    for (size_t other = 0; other < r; ++other)
      if (all[r].process.host == all[other].process.host &&
          std::memcmp(all[r].memory.unit, kShared, sizeof kShared) != 0 &&
          std::memcmp(all[r].memory.unit, all[other].memory.unit, sizeof kShared) == 0)
        return "ranks " + std::to_string(other) + " and " + std::to_string(r) + " share a GPU";
  return {};
}

// What went wrong on the first rank where something did; empty: body() was well on all.
template <class Body>
std::string Peers::try_on_all(const Body& body) {
  Verdict verdict = {true, {}};
  try {
    body();
  } catch (...) {
    verdict.is_well = false;
    std::snprintf(verdict.text, sizeof verdict.text, "%.399s", current_error().text);
  }
  const std::vector<Verdict> verdicts = gather(verdict);
  for (size_t r = 0; r < verdicts.size(); ++r)
    if (!verdicts[r].is_well) return "rank " + std::to_string(r) + " " + verdicts[r].text;
  return {};
}

std::string Peers::open_all(const std::vector<Introduction>& all) {
  for (const Introduction& one : all) processes_.push_back(one.process);
  const std::string trouble = try_on_all([&] {
    for (size_t r = 0; r < all.size(); ++r) try {
        if (int32_t(r) != map_.rank) open(r, all[r]);
      } catch (const Error& error) {
        MOEC_FAIL(MOEC_E_UNSUPPORTED, "does not reach the memory of rank %d: %s", int(r),
                  error.text);
      }
  });
  if (const auto& page = pages_[size_t(map_.rank)]) page->forget_name();
  if (trouble.empty()) {
    const auto apart =
        std::ranges::count_if(processes_, [&](const Process& one) { return one != own_.process; });
    way_ = apart ? "by CUDA IPC" : "as threads of one process";
    return {};
  }
  for (size_t r = 0; r < all.size(); ++r)
    if (int32_t(r) != map_.rank) blocks_[r].reset();
  try_on_all([] {});  // all have closed what they had opened
  processes_.clear();
  return trouble;
}

std::string Peers::open_windows(const std::vector<Introduction>& all) {
  for (size_t r = 0; r < all.size(); ++r)
    if (!all[r].has_windows) return "the comm of rank " + std::to_string(r) + " has none";
  const auto rank = size_t(map_.rank);
  blocks_[rank].reset();
  std::string trouble = try_on_all([&] {
    map_.block[rank] = static_cast<char*>(backend_.peers().adopt(bytes_, [&] {
      void* memory = nullptr;
      window_ = comm_.alloc_window(bytes_, &memory);
      return memory;
    }));
    clear_words();
  });
  if (trouble.empty())
    trouble = try_on_all([&] {
      std::vector<void*> reached(all.size());
      comm_.open_window(window_, reached);
      for (size_t r = 0; r < all.size(); ++r) {
        MOEC_REQUIRE(reached[r], MOEC_E_UNSUPPORTED, "does not reach that of rank %d", int(r));
        if (r != rank) map_.block[r] = static_cast<char*>(reached[r]);
      }
    });
  if (!trouble.empty()) close_window();
  return trouble;
}

void Peers::close_window() {
  if (void* const window = std::exchange(window_, nullptr)) comm_.close_window(window);
}

std::string Peers::connect(bool apart) {
  const std::vector<Introduction> all = gather(own_);
  if (const std::string shared = apart ? sharing(all) : ""; !shared.empty()) return shared;
  const std::string closed = open_all(all);
  const std::string trouble = closed.empty() ? "" : open_windows(all);
  mail_.reset();
  if (!trouble.empty()) return closed + "; windows: " + trouble;
  if (!closed.empty()) way_ = "by windows of the comm, because " + closed;
  return {};
}

// ---- steps
PeerDispatch Peers::dispatch_of(int64_t bound) const {
  PeerDispatch step = {};
  step.map = map_;
  step.bound = bound;
  step.hidden = shape_.hidden;
  step.top_k = shape_.top_k;
  step.x.dtype = shape_.dtype;
  return step;
}

PeerCombine Peers::combine_of(int64_t bound) const {
  PeerCombine step = {};
  step.map = map_;
  step.bound = bound;
  step.hidden = shape_.hidden;
  step.top_k = shape_.top_k;
  step.partial_dtype = shape_.partial_dtype;
  return step;
}

Peers::Blocks Peers::blocks() const {
  const PeerDevice& device = backend_.peers();
  return {device.crews(dispatch_of(shape_.max_tokens)),
          device.crews(combine_of(shape_.max_tokens))};
}

Guests Peers::dispatch(const Departure& from, moec_stream stream) {
  bound_ = from.bound;
  num_tokens_ = from.tokens.count;
  PeerDispatch step = dispatch_of(from.bound);
  step.num_tokens = from.tokens.count;
  step.expert_ids = from.tokens.expert_ids;
  step.routing_weights = from.tokens.routing_weights;
  step.has_adapter_ids = from.has_adapter_ids;
  step.adapter_ids = from.adapter_ids;
  step.x.data = const_cast<void*>(from.x);
  step.beside = {const_cast<void*>(from.beside), shape_.dtype};
  step.has_beside = from.has_beside;
  step.beside_scale = from.beside_scale;
  backend_.peers().run(step, stream);
  return {map_.num_ranks * bound_,
          -1,
          map_.own<void>(map_.guests),
          from.has_beside ? map_.own<void>(map_.beside) : nullptr,
          map_.own<int32_t>(map_.ids),
          map_.own<float>(map_.weights),
          from.has_adapter_ids ? map_.own<int32_t>(map_.adapter_ids) : nullptr,
          map_.own<void>(map_.partial)};
}

void Peers::combine(const Homecoming& to, moec_stream stream) {
  PeerCombine step = combine_of(bound_);
  step.num_tokens = num_tokens_;
  step.has_weights = to.has_weights;
  step.d_guest_weights = to.d_guest_weights;
  step.scale = to.scale;
  step.add = to.add;
  step.y = {to.y, shape_.dtype};
  step.d_routing_weights = to.d_routing_weights;
  backend_.peers().run(step, stream);
}

CapacityOfAll Peers::capacity_of_all(double factor, int32_t* to) const {
  return {map_.own<int32_t>(map_.headers),
          kHeaderWords,
          map_.num_ranks,
          shape_.num_experts,
          shape_.top_k,
          factor,
          to};
}

// ---- what became of them
void Peers::require_well() const {
  for (int32_t r = 0; r < map_.num_ranks; ++r) {
    const Disagreement& report = map_.reports[r];
    const int64_t fact = report.fact;
    if (fact == 0) continue;
    MOEC_REQUIRE(fact != kPeerTimeout, MOEC_E_TIMEOUT,
                 "in an earlier call rank %d did not come to a %s within %u ms. The ep is broken "
                 "now; make another one of the ranks that are left",
                 r, report.own == kPeerCombine ? "combine" : "dispatch", shape_.timeout_ms);
    MOEC_REQUIRE(fact != kPeerOrder, MOEC_E_INVALID_STATE,
                 "a graph combined a dispatch twice; expected one combine after each. The ep is "
                 "broken now; make another one");
    comm_.disagree(r, kPeerFactNames[fact - 1], report);
  }
}

}  // namespace moec::ep
