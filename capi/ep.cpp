// SPDX-License-Identifier: Apache-2.0
// Communicators and expert parallelism. A failure to read a struct is told to the other ranks.
#include "layer/ep.h"

#include "boundary.h"
#include "text_out.h"

using namespace moec;
using namespace moec::capi;

moec_status moec_comm_create(const moec_context* context, const moec_comm_desc* desc,
                             const moec_comm_callbacks* callbacks, moec_comm** out) {
  return guard(__func__, [&] {
    const Context& c = self<Context>(context, "context");
    moec_comm*& result = required(out, "out", 4);
    const moec_comm_desc own = read_sized(desc, "desc", 2);
    result = to_handle<moec_comm>(new Comm(c, own, read_sized(callbacks, "callbacks", 3)));
  });
}

void moec_comm_free(moec_comm* comm) {
  free_handle<Comm>(comm);
}

moec_status moec_comm_abort(const moec_comm* comm) {
  return guard(__func__, [&] { self<Comm>(comm, "comm").transport().abort(); });
}

moec_status moec_comm_sum(moec_comm* comm, const moec_tensor* in_out, moec_stream stream) {
  return guard(__func__, [&] {
    Comm& c = self<Comm>(comm, "comm");
    const moec_tensor& tensor = ep::prepare(c.transport(), ep::Call::kSum, [&]() -> const auto& {
      return required(in_out, "in_out", 2);
    });
    c.sum(tensor, stream);
  });
}

moec_status moec_ep_create(moec_comm* comm, const moec_ep_desc* desc, moec_ep** out) {
  return guard(__func__, [&] {
    Comm& c = self<Comm>(comm, "comm");
    const moec_ep_desc own = ep::prepare(c.transport(), ep::Call::kCreate, [&] {
      required(out, "out", 3);
      return read_sized(desc, "desc", 2);
    });
    *out = to_handle<moec_ep>(new Ep(c, own));
  });
}

void moec_ep_free(moec_ep* ep) {
  free_handle<Ep>(ep);
}

moec_status moec_ep_query(const moec_ep* ep, moec_ep_info* out) {
  return guard(__func__, [&] {
    const Ep& e = self<Ep>(ep, "ep");
    Out<moec_ep_info> info(out, "out", 2);
    e.query(*info);
    info.commit();
  });
}

moec_status moec_ep_describe(const moec_ep* ep, char* buffer, uint64_t bytes, uint64_t* need) {
  return guard(__func__, [&] {
    const Ep& e = self<Ep>(ep, "ep");
    uint64_t& to = required(need, "need", 4);
    write_text(e.describe(), buffer, bytes, to);
  });
}

moec_status moec_ep_dispatch(moec_ep* ep, moec_ep_args* args, moec_stream stream) {
  return guard(__func__, [&] {
    Ep& e = self<Ep>(ep, "ep");
    moec_ep_args own =
        e.exchange().prepare(ep::Call::kDispatch, [&] { return read_sized(args, "args", 2); });
    e.dispatch(own, stream);
    write_bytes(args, &own, sizeof own);
  });
}

moec_status moec_ep_combine(moec_ep* ep, const moec_ep_args* args, moec_stream stream) {
  return guard(__func__, [&] {
    Ep& e = self<Ep>(ep, "ep");
    e.combine(e.exchange().prepare(ep::Call::kCombine, [&] { return read_sized(args, "args", 2); }),
              stream);
  });
}

moec_status moec_ep_poll(const moec_ep* ep, moec_ep_state* out) {
  return guard(__func__, [&] {
    const Ep& e = self<Ep>(ep, "ep");
    Out<moec_ep_state> state(out, "out", 2);
    e.poll(*state);
    state.commit();
  });
}
