// SPDX-License-Identifier: Apache-2.0
// The fields that hold routing weights, by either of their names: one source records libraries
// whose headers differ in them.
#pragma once

#include <moec/moec.h>

namespace moec::bits {

template <typename Arguments>
moec_tensor& routing_weights(Arguments& a) {
  if constexpr (requires { a.routing_weights; })
    return a.routing_weights;
  else
    return a.weights;
}

template <typename Arguments>
moec_tensor& d_routing_weights(Arguments& a) {
  if constexpr (requires { a.d_routing_weights; })
    return a.d_routing_weights;
  else
    return a.d_weights;
}

}  // namespace moec::bits
