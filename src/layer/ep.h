// SPDX-License-Identifier: Apache-2.0
// What stands behind moec_comm and moec_ep: checks of arguments around src/ep.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "ep/exchange.h"
#include "layer/context.h"

namespace moec {

class Comm final : public Object {
 public:
  static constexpr Kind kKind = Kind::kComm;
  Comm(const Context& context, const moec_comm_desc& desc, const moec_comm_callbacks& callbacks);

  const Context& context() const { return *context_; }
  ep::Communicator& transport() const { return *transport_; }
  // in_out = the sum over all ranks, in rank order.
  void sum(const moec_tensor& in_out, moec_stream stream);

 private:
  Ref<const Context> context_;
  std::optional<Block> mailbox_;        // where callbacks queue
  std::optional<SharedBlock> staging_;  // where they take memory of the host
  std::unique_ptr<ep::Communicator> transport_;
};

class Ep final : public Object {
 public:
  static constexpr Kind kKind = Kind::kEp;
  Ep(Comm& comm, const moec_ep_desc& desc);

  const Context& context() const { return comm_->context(); }
  ep::Communicator& transport() const { return comm_->transport(); }
  ep::Exchange& exchange() const { return *exchange_; }

  void query(moec_ep_info& info) const;
  std::string describe() const;
  void dispatch(moec_ep_args& args, moec_stream stream);
  void combine(const moec_ep_args& args, moec_stream stream);
  void poll(moec_ep_state& state) const;
  // T and the bound of a call: E_SHAPE, E_INVALID_ARG.
  int64_t checked_bound(int64_t bound, int64_t num_tokens) const;

 private:
  void make_exchange(const moec_ep_desc& desc, std::unique_ptr<ep::Peers> peers);
  void connect(const moec_ep_desc& desc, std::unique_ptr<ep::Peers> peers);
  void agree(const ep::Shape& shape);
  ep::Departure checked_departure(const moec_ep_args& args) const;
  ep::Homecoming checked_homecoming(const moec_ep_args& args) const;

  Ref<Comm> comm_;
  std::unique_ptr<ep::Exchange> exchange_;
  ep::Choice choice_ = {};
  std::optional<Block> memory_;
  std::optional<SharedBlock> shared_;
};

// Queues: values [count] become their sums over all ranks; `scratch` has room for them N times.
template <class T>
void sum_over_ranks(const Context& context, ep::Communicator& transport, T* values, int64_t count,
                    T* scratch, moec_stream stream) {
  transport.all_gather(values, scratch, uint64_t(count) * sizeof(T), stream);
  context.backend().between_ranks(AddRanks<T>{count, transport.size(), scratch, values}, stream);
}

}  // namespace moec
