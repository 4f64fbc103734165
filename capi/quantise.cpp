// SPDX-License-Identifier: Apache-2.0
// Making quantised weights.
#include "layer/quantise.h"

#include "boundary.h"

using namespace moec;
using namespace moec::capi;

moec_status moec_quantise_query(const moec_context* context, const moec_quantise_desc* desc,
                                moec_quantise_info* info, moec_quant* quant) {
  return guard(__func__, [&] {
    self<Context>(context, "context");
    const Quantisation made(read_sized(desc, "desc", 2));
    Out<moec_quantise_info> to(info, "info", 3);
    Out<moec_quant> quant_to(quant, "quant", 4);
    made.describe(*to, *quant_to);
    to.commit();
    quant_to.commit();
  });
}

moec_status moec_quantise(const moec_context* context, const moec_quantise_args* args,
                          moec_stream stream) {
  return guard(__func__, [&] {
    const Context& c = self<Context>(context, "context");
    moec_quantise_args own = read_sized(args, "args", 2);
    const Quantisation made(read_sized(own.desc, "args.desc", 2));
    const moec_quant quant = read_sized(own.quant, "args.quant", 2);
    own.quant = &quant;
    made.run(c, made.checked(c, own), stream);
  });
}
