// SPDX-License-Identifier: Apache-2.0
// Auxiliary losses.
#include "boundary.h"
#include "layer/ep.h"
#include "layer/rows.h"

using namespace moec;
using namespace moec::capi;

moec_status moec_loss_forward(const moec_context* context, const moec_loss_args* args,
                              moec_stream stream) {
  return guard(__func__, [&] {
    const Context& c = self<Context>(context, "context");
    const moec_loss_args own = read_sized(args, "args", 2);
    loss_forward(c, own, own.comm ? &object<Comm>(own.comm, "args.comm", 2) : nullptr, stream);
  });
}

moec_status moec_loss_backward(const moec_context* context, const moec_loss_args* args,
                               moec_stream stream) {
  return guard(__func__, [&] {
    const Context& c = self<Context>(context, "context");
    const moec_loss_args own = read_sized(args, "args", 2);
    loss_backward(c, own, own.comm ? &object<Comm>(own.comm, "args.comm", 2) : nullptr, stream);
  });
}
