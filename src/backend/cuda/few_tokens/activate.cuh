// SPDX-License-Identifier: Apache-2.0
// The activation of one gate and up, of any gated kind, in fp32.
#pragma once

#include "math/activation.h"

namespace moec::cuda {

inline __device__ __noinline__ float activate(const moec_activation& a, float g, float u) {
  float value = 0;
  math::Activations::for_each([&]<class Kind>() {
    if (Kind::kInfo.gated && a.kind == Kind::kInfo.kind) {
      value = Kind::value(a, g, u, math::NoRounding{});
    }
  });
  return value;
}

}  // namespace moec::cuda
