// SPDX-License-Identifier: Apache-2.0
// Permute and unpermute.
#include "layer/rows.h"

#include "boundary.h"

using namespace moec;
using namespace moec::capi;

namespace {

// All four have the same shape: a context, and arguments that name a plan.
template <class Args>
moec_status call_rows(const char* site, const moec_context* context, const Args* args,
                      moec_stream stream,
                      void (*run)(const Context&, const Plan&, const Args&, moec_stream)) {
  return guard(site, [&] {
    const Context& c = self<Context>(context, "context");
    const Args own = read_sized(args, "args", 2);
    run(c, object<Plan>(own.plan, "args.plan", 2), own, stream);
  });
}

}  // namespace

moec_status moec_permute(const moec_context* context, const moec_permute_args* args,
                         moec_stream stream) {
  return call_rows(__func__, context, args, stream, permute);
}

moec_status moec_unpermute(const moec_context* context, const moec_unpermute_args* args,
                           moec_stream stream) {
  return call_rows(__func__, context, args, stream, unpermute);
}

moec_status moec_permute_backward(const moec_context* context, const moec_permute_grad_args* args,
                                  moec_stream stream) {
  return call_rows(__func__, context, args, stream, permute_backward);
}

moec_status moec_unpermute_backward(const moec_context* context,
                                    const moec_unpermute_grad_args* args, moec_stream stream) {
  return call_rows(__func__, context, args, stream, unpermute_backward);
}
