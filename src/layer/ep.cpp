// SPDX-License-Identifier: Apache-2.0
#include "layer/ep.h"

#include <algorithm>
#include <cmath>

#include "core/checksum.h"
#include "core/dtype.h"
#include "core/json_text.h"
#include "layer/check.h"

namespace moec {
namespace {

using ll = long long;

std::vector<int32_t> checked_ranges(const moec_ep_desc& desc, int32_t ranks) {
  MOEC_REQUIRE(ranks <= desc.num_experts, MOEC_E_INVALID_ARG,
               "desc.num_experts is %d for %d ranks; expected an expert or more for each",
               desc.num_experts, ranks);
  std::vector<int32_t> begin(size_t(ranks) + 1);
  for (int64_t r = 0; r <= ranks; ++r)
    begin[size_t(r)] =
        desc.expert_begin ? desc.expert_begin[r] : int32_t(int64_t(desc.num_experts) * r / ranks);
  MOEC_REQUIRE(begin.front() == 0 && begin.back() == desc.num_experts, MOEC_E_INVALID_ARG,
               "desc.expert_begin starts with %d and ends with %d; expected 0 and num_experts, %d",
               begin.front(), begin.back(), desc.num_experts);
  for (size_t r = 0; r < size_t(ranks); ++r)
    MOEC_REQUIRE(begin[r] < begin[r + 1], MOEC_E_INVALID_ARG,
                 "desc.expert_begin gives rank %d the experts [%d,%d); expected one or more",
                 int(r), begin[r], begin[r + 1]);
  return begin;
}

ep::Shape checked_shape(const moec_ep_desc& desc, int32_t ranks, uint32_t scheme) {
  check_flags("desc.flags", desc.flags, MOEC_EP_FORWARD_ONLY);
  check_at_least("desc.hidden", desc.hidden, 1);
  check_at_least("desc.max_tokens", desc.max_tokens, 1);
  const int64_t num_ids = checked_num_ids(desc.num_experts, desc.num_zero_experts);
  check_range("desc.top_k", desc.top_k, 1, num_ids);
  check_enum("desc.overflow", desc.overflow, MOEC_EP_DROP_BY_WEIGHT);
  check_at_least("desc.pair_rows", desc.pair_rows, 0);
  MOEC_REQUIRE(scheme == MOEC_EP_ROWS || (!desc.pair_rows && !desc.overflow), MOEC_E_INVALID_ARG,
               "desc.pair_rows is %lld and desc.overflow is %u; only MOEC_EP_ROWS has them, and "
               "the scheme is %u",
               ll(desc.pair_rows), desc.overflow, scheme);
  MOEC_REQUIRE(is_real(desc.dtype), MOEC_E_DTYPE, "desc.dtype is 0x%x; expected f32, f16 or bf16",
               desc.dtype);
  const moec_dtype partial = desc.partial_dtype ? desc.partial_dtype : desc.dtype;
  MOEC_REQUIRE(partial == desc.dtype || partial == MOEC_F32, MOEC_E_DTYPE,
               "desc.partial_dtype is 0x%x; expected 0, desc.dtype or f32", desc.partial_dtype);
  const float scale = desc.grad_scale == 0 ? 1 : desc.grad_scale;
  MOEC_REQUIRE(std::isfinite(scale) && scale > 0, MOEC_E_INVALID_ARG,
               "desc.grad_scale is %g; expected a finite number above 0", double(scale));
  check_range("desc.max_blocks", desc.max_blocks, 0, kPeerLanes);
  const int64_t rows = checked_rows("ranks * desc.max_tokens * desc.top_k",
                                    checked_product("ranks * desc.max_tokens * desc.top_k",
                                                    ranks * int64_t(desc.top_k), desc.max_tokens));
  checked_product("rows * hidden", 64 * rows, desc.hidden);
  return {desc.hidden,
          desc.max_tokens,
          desc.pair_rows ? std::min(desc.pair_rows, desc.max_tokens) : desc.max_tokens,
          desc.num_experts,
          desc.num_zero_experts,
          desc.top_k,
          desc.flags,
          scheme,
          desc.overflow,
          desc.dtype,
          partial,
          scale,
          checked_ranges(desc, ranks),
          desc.timeout_ms ? desc.timeout_ms : 600000,
          desc.max_blocks};
}

moec_tensor view_of(const Context& context, void* data, moec_dtype dtype, int64_t rows,
                    int64_t columns) {
  moec_tensor view = {};
  if (!data) return view;
  view.data = data;
  view.device_type = context.device_type();
  view.device_id = context.device_id();
  view.dtype = dtype;
  view.ndim = 2;
  view.shape[0] = rows;
  view.shape[1] = columns;
  view.strides[0] = columns;
  view.strides[1] = 1;
  return view;
}

}  // namespace

Comm::Comm(const Context& context, const moec_comm_desc& desc, const moec_comm_callbacks& callbacks)
    : Object(kKind), context_(context) {
  check_flags("desc.flags", desc.flags, 0);
  check_at_least("desc.size", desc.size, 1);
  check_range("desc.rank", desc.rank, 0, desc.size - 1);
  check_flags("callbacks.flags", callbacks.flags, MOEC_COMM_DEVICE | MOEC_COMM_CAPTURE);
  const bool queues = callbacks.flags & MOEC_COMM_DEVICE;
  MOEC_REQUIRE(queues || !callbacks.flags, MOEC_E_INVALID_ARG,
               "callbacks.flags are 0x%x; MOEC_COMM_CAPTURE goes with MOEC_COMM_DEVICE",
               callbacks.flags);
  MOEC_REQUIRE(!queues || !context.on_host(), MOEC_E_UNSUPPORTED,
               "callbacks.flags are 0x%x on %s; expected 0 there", callbacks.flags,
               context.name().text);
  MOEC_REQUIRE(callbacks.all_gather && callbacks.all_to_all, MOEC_E_INVALID_ARG,
               "callbacks.all_gather or callbacks.all_to_all is NULL; both are required");
  const int windows = !!callbacks.window_alloc + !!callbacks.window_open + !!callbacks.window_close;
  MOEC_REQUIRE(
      windows % 3 == 0, MOEC_E_INVALID_ARG,
      "callbacks has %d of window_alloc, window_open and window_close; expected all or none",
      windows);
  const ep::Reach reach = context.on_host() ? ep::Reach::kDirect
                          : queues          ? ep::Reach::kQueued
                                            : ep::Reach::kStaged;
  const uint64_t bytes = ep::Communicator::memory_bytes(reach, desc.size);
  void* memory = nullptr;
  if (reach == ep::Reach::kQueued) memory = mailbox_.emplace(context, bytes, nullptr).data();
  if (reach == ep::Reach::kStaged) memory = staging_.emplace(context, bytes).data();
  transport_ = std::make_unique<ep::Communicator>(
      desc, callbacks, reach, context.backend(),
      [&context](moec_stream stream) { context.synchronize(stream); }, memory);
}

void Comm::sum(const moec_tensor& in_out, moec_stream stream) {
  ep::Communicator& transport = *transport_;
  transport.require_well();
  int64_t count = 0;
  const auto checked = [&] {
    transport.require_capturable(stream);
    check_tensor("in_out", in_out);
    check_device("in_out", in_out, *context_);
    count = tensor_numel(in_out);
    MOEC_REQUIRE(in_out.dtype == MOEC_F32 || in_out.dtype == MOEC_I32 || in_out.dtype == MOEC_I64,
                 MOEC_E_DTYPE, "in_out has dtype %s; expected f32, i32 or i64",
                 dtype_name(in_out.dtype));
    const auto bytes = uint64_t(checked_product("ranks * bytes of in_out", transport.size(),
                                                count * dtype_bytes(in_out.dtype)));
    return std::make_unique<Workspace>(*context_, moec_buffer{}, 0, stream, bytes);
  };
  const auto scratch = ep::prepare(transport, ep::Call::kSum, checked);
  const ep::Fact facts[] = {{"elements of in_out", count}, {"dtype of in_out", in_out.dtype}};
  if (!transport.queues()) transport.meet(ep::Call::kSum, facts);
  void* const data = static_cast<char*>(in_out.data) + in_out.byte_offset;
  const auto sum_as = [&]<class T>(T*) {
    sum_over_ranks(*context_, transport, static_cast<T*>(data), count,
                   reinterpret_cast<T*>(scratch->extra()), stream);
  };
  if (in_out.dtype == MOEC_F32) return sum_as(static_cast<float*>(nullptr));
  if (in_out.dtype == MOEC_I32) return sum_as(static_cast<int32_t*>(nullptr));
  sum_as(static_cast<int64_t*>(nullptr));
}

Ep::Ep(Comm& comm, const moec_ep_desc& desc) : Object(kKind), comm_(comm) {
  ep::Communicator& transport = comm.transport();
  transport.require_well();
  std::unique_ptr<ep::Peers> peers;
  ep::prepare(transport, ep::Call::kCreate, [&] {
    check_enum("desc.scheme", desc.scheme, MOEC_EP_EXACT);
    if (!ep::may_be_peers(desc.scheme, transport)) return make_exchange(desc, nullptr);
    peers = std::make_unique<ep::Peers>(transport, context().backend(),
                                        checked_shape(desc, transport.size(), MOEC_EP_PEER));
  });
  agree(peers ? peers->shape() : exchange_->shape());
  if (peers) connect(desc, std::move(peers));
  exchange_->set_number(transport.number_ep());
}

void Ep::make_exchange(const moec_ep_desc& desc, std::unique_ptr<ep::Peers> peers) {
  ep::Communicator& comm = transport();
  choice_ = peers ? ep::Choice{MOEC_EP_PEER, "the ranks reach each other's memory " + peers->way()}
                  : ep::choose_scheme(desc.scheme, comm);
  const bool has_own_memory = peers != nullptr;
  exchange_ = std::make_unique<ep::Exchange>(comm, context().backend(),
                                             checked_shape(desc, comm.size(), choice_.scheme),
                                             std::move(peers), context().calls_of(choice_.scheme));
  if (!has_own_memory) memory_.emplace(context(), exchange_->bytes(), nullptr);
  shared_.emplace(context(), exchange_->shared_bytes());
  exchange_->set_memory(has_own_memory ? nullptr : memory_->data(), shared_->data());
}

// All ranks come to the same end.
void Ep::connect(const moec_ep_desc& desc, std::unique_ptr<ep::Peers> peers) {
  const std::string trouble = peers->connect(desc.scheme == MOEC_EP_AUTO);
  MOEC_REQUIRE(trouble.empty() || desc.scheme != MOEC_EP_PEER, MOEC_E_UNSUPPORTED,
               "%s; take MOEC_EP_GATHER, or AUTO", trouble.c_str());
  if (!trouble.empty()) peers.reset();
  ep::prepare(transport(), ep::Call::kCreate, [&] { make_exchange(desc, std::move(peers)); });
  if (!trouble.empty()) choice_.why += "; " + trouble;
  agree(exchange_->shape());
}

// Another rank that refuses, or that has another desc, is named to all.
void Ep::agree(const ep::Shape& s) {
  const uint64_t ranges =
      checksum(s.expert_begin.data(), s.expert_begin.size() * sizeof s.expert_begin[0]);
  const ep::Fact facts[] = {{"desc.hidden", s.hidden},
                            {"desc.max_tokens", s.max_tokens},
                            {"desc.num_experts", s.num_experts},
                            {"desc.num_zero_experts", s.num_zero},
                            {"desc.top_k", s.top_k},
                            {"the scheme", s.scheme},
                            {"desc.dtype", s.dtype},
                            {"desc.partial_dtype", s.partial_dtype},
                            {"desc.pair_rows", s.pair_rows},
                            {"desc.overflow", s.overflow},
                            {"desc.flags", s.flags},
                            {"the bits of desc.grad_scale", std::bit_cast<int32_t>(s.grad_scale)},
                            {"the hash of desc.expert_begin", int64_t(ranges)},
                            {"desc.timeout_ms", s.timeout_ms},
                            {"desc.max_blocks", s.max_blocks}};
  transport().meet(ep::Call::kCreate, facts);
}

void Ep::query(moec_ep_info& info) const {
  info.scheme = choice_.scheme;
  info.expert_begin = exchange_->expert_begin();
  info.expert_end = exchange_->expert_end();
  info.max_guests = exchange_->most_guests();
  info.memory = exchange_->bytes();
}

std::string Ep::describe() const {
  const ep::Shape& s = exchange_->shape();
  std::string ranges;
  for (const int32_t begin : s.expert_begin)
    ranges += (ranges.empty() ? "" : ", ") + std::to_string(begin);
  JsonObject object;
  object.add("scheme", exchange_->scheme().name())
      .add("why", choice_.why)
      .add("transport", ep::reach_name(transport().reach()))
      .add("rank", transport().rank())
      .add("ranks", transport().size())
      .add_json("expert_begin", "[" + ranges + "]")
      .add("max_tokens", s.max_tokens)
      .add("pair_rows", s.pair_rows)
      .add("max_guests", exchange_->most_guests())
      .add("memory", int64_t(exchange_->bytes()));
  if (const ep::Peers* const peers = exchange_->peers()) {
    const ep::Peers::Blocks blocks = peers->blocks();
    JsonObject counts;
    counts.add("dispatch", blocks.dispatch).add("combine", blocks.combine);
    object.add_json("blocks", "{" + counts.members() + "}");
  }
  return "{" + object.members() + "}";
}

int64_t Ep::checked_bound(int64_t bound, int64_t num_tokens) const {
  const int64_t most = exchange_->shape().max_tokens;
  check_range("args.bound", bound, 0, most);
  if (bound == 0) bound = most;
  MOEC_REQUIRE(num_tokens <= bound, MOEC_E_SHAPE, "x has %lld tokens; the bound is %lld",
               ll(num_tokens), ll(bound));
  return bound;
}

ep::Departure Ep::checked_departure(const moec_ep_args& args) const {
  const ep::Shape& s = exchange_->shape();
  check_flags("args.flags", args.flags, 0);
  TensorCheck check(context());
  const int64_t T = check.tokens("x", args.x), H = s.hidden, K = s.top_k;
  ep::Departure from = {};
  from.bound = checked_bound(args.bound, T);
  from.x = check.in("x", args.x, {T, H}, {s.dtype}).data;
  from.beside = check.optional_in("x_beside", args.x_beside, {T, H}, {s.dtype}).data;
  from.has_beside = !is_absent(args.x_beside);
  MOEC_REQUIRE(!from.has_beside || !(s.flags & MOEC_EP_FORWARD_ONLY), MOEC_E_INVALID_ARG,
               "x_beside is given; the ep was made with MOEC_EP_FORWARD_ONLY");
  from.tokens.count = T;
  from.tokens.expert_ids = check.in("expert_ids", args.expert_ids, {T, K}, kId);
  from.tokens.routing_weights = static_cast<const float*>(
      check.optional_in("routing_weights", args.routing_weights, {T, K}, kFloat).data);
  check.finish();
  return from;
}

void Ep::dispatch(moec_ep_args& args, moec_stream stream) {
  exchange_->require_well();
  const ep::Departure from =
      exchange_->prepare(ep::Call::kDispatch, [&] { return checked_departure(args); });
  const ep::Guests guests = exchange_->dispatch(from, stream);
  const ep::Shape& s = exchange_->shape();
  const auto view = [&](void* data, moec_dtype dtype, int64_t columns) {
    return view_of(context(), data, dtype, guests.count, columns);
  };
  args.guests = view(guests.rows, s.dtype, s.hidden);
  args.guests_beside = view(guests.beside, s.dtype, s.hidden);
  args.guest_ids = view(guests.ids, MOEC_I32, s.top_k);
  args.guest_weights = view(guests.weights, MOEC_F32, s.top_k);
  args.partial = view(guests.partial, s.partial_dtype, s.hidden);
  args.total_tokens = guests.total_tokens;
}

ep::Homecoming Ep::checked_homecoming(const moec_ep_args& args) const {
  const ep::Shape& s = exchange_->shape();
  check_flags("args.flags", args.flags, MOEC_EP_ADD);
  MOEC_REQUIRE(exchange_->has_guests(), MOEC_E_INVALID_STATE,
               "there was no dispatch; call moec_ep_dispatch before");
  TensorCheck check(context());
  const int64_t T = exchange_->num_tokens(), G = exchange_->guests().count, K = s.top_k;
  ep::Homecoming to = {};
  to.has_weights = !is_absent(args.d_guest_weights);
  to.d_guest_weights = static_cast<const float*>(
      check.optional_in("d_guest_weights", args.d_guest_weights, {G, K}, kFloat).data);
  if (!to.has_weights) check.absent("d_routing_weights", args.d_routing_weights, "d_guest_weights");
  to.d_routing_weights = static_cast<float*>(
      check.optional_out("d_routing_weights", args.d_routing_weights, {T, K}, kFloat).data);
  to.y = check.optional_out("y", args.y, {T, s.hidden}, {s.dtype}).data;
  to.add = args.flags & MOEC_EP_ADD;
  check.finish();
  return to;
}

void Ep::combine(const moec_ep_args& args, moec_stream stream) {
  exchange_->require_well();
  exchange_->combine(
      exchange_->prepare(ep::Call::kCombine, [&] { return checked_homecoming(args); }), stream);
}

void Ep::poll(moec_ep_state& state) const {
  const ep::Exchange::Counters& counters = exchange_->counters();
  transport().ask();
  try {
    exchange_->require_well();
  } catch (const Error& error) {
    state.status = error.code;
    std::snprintf(state.message, sizeof state.message, "%.255s", error.text);
  }
  state.calls = counters.calls;
  const ep::Exchange::RowCounts rows = exchange_->row_counts();
  state.rows_needed = rows.needed;
  state.rows_dropped = rows.dropped;
  state.bytes_sent = counters.bytes_sent;
  state.bytes_received = counters.bytes_received;
}

}  // namespace moec
