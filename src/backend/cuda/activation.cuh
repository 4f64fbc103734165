// SPDX-License-Identifier: Apache-2.0
// Activations of the tensor-core epilogues. SwiGLU has its own form, because its two
// special-function instructions are what an epilogue spends most on.
#pragma once

#include <moec/moec.h>

namespace moec::cuda {

struct ActivationGradient {
  float value, d_gate, d_up;
};

// silu(g) * u; the derivative of silu is s + g s (1 - s), s = 1 / (1 + exp(-g)).
struct Swiglu {
  const moec_activation& parameters;

  static __device__ float sigmoid(float g) {
    return __fdividef(1.0f, 1.0f + exp2f_fast(g * -1.4426950408889634f));
  }
  __device__ float value(float g, float u) const { return g * sigmoid(g) * u; }
  // d is the gradient of the value.
  __device__ ActivationGradient gradient(float g, float u, float d) const {
    const float s = sigmoid(g), silu = g * s;
    return {silu * u, d * u * (s + silu * (1.0f - s)), d * silu};
  }

 private:
  static __device__ float exp2f_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
};

}  // namespace moec::cuda
