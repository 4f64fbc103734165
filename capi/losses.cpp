// SPDX-License-Identifier: Apache-2.0
// Auxiliary losses.
#include "boundary.h"
#include "layer/rows.h"

using namespace moec;
using namespace moec::capi;

moec_status moec_loss_forward(const moec_context* context, const moec_loss_args* args,
                              moec_stream stream) {
  return guard(__func__, [&] {
    loss_forward(self<Context>(context, "context"), read_sized(args, "args", 2), stream);
  });
}

moec_status moec_loss_backward(const moec_context* context, const moec_loss_args* args,
                               moec_stream stream) {
  return guard(__func__, [&] {
    loss_backward(self<Context>(context, "context"), read_sized(args, "args", 2), stream);
  });
}
