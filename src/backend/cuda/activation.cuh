// SPDX-License-Identifier: Apache-2.0
// Activations of the tensor-core epilogues. SwiGLU has its own form, because its two
// special-function instructions are what an epilogue spends most on.
#pragma once

#include <moec/moec.h>

namespace moec::cuda {

// Two values of one row, slopes times d, of each activation at once.
struct ActivationGradients {
  float2 value, d_gate, d_up;
};

// 1 / (1 + exp(-x)). Two at a time share one reciprocal: 1 / a = b / (a b), so both must be of one
// row: the last bits of each depend on the other. The exponent is cut where a b could overflow;
// there the sigmoid is below 1e-18.
__device__ __forceinline__ float2 fast_sigmoids(float2 x) {
  const auto one_plus_exp = [](float v) {
    float e;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(fminf(v * -1.4426950408889634f, 60.0f)));
    return 1.0f + e;
  };
  const float a = one_plus_exp(x.x), b = one_plus_exp(x.y);
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(a * b));
  return {r * b, r * a};
}

// silu(g) * u; the derivative of silu is s + g s (1 - s), s = sigmoid(g).
struct Swiglu {
  const moec_activation& parameters;

  __device__ float2 values(float2 g, float2 u) const {
    const float2 s = fast_sigmoids(g);
    return {g.x * s.x * u.x, g.y * s.y * u.y};
  }
  __device__ float2 sigmoids(float2 g) const { return fast_sigmoids(g); }
  // d is the gradient of the value, s sigmoids(g).
  __device__ ActivationGradients gradients(float2 g, float2 u, float2 d, float2 s) const {
    const float2 silu = {g.x * s.x, g.y * s.y};
    return {{silu.x * u.x, silu.y * u.y},
            {d.x * u.x * (s.x + silu.x * (1.0f - s.x)), d.y * u.y * (s.y + silu.y * (1.0f - s.y))},
            {d.x * silu.x, d.y * silu.y}};
  }
};

// g' sigmoid(alpha (g' + cubic g'^3)) (u' + offset), g' = min(g, limit), |u'| <= limit: the form of
// MOEC_ACT_GPTOSS, MOEC_ACT_CLAMP_SWIGLU, MOEC_ACT_QUICK_GEGLU, MOEC_ACT_SWIGLU and
// MOEC_ACT_GEGLU_TANH, since (1 + tanh(x)) / 2 = sigmoid(2 x).
struct SigmoidGated {
  float alpha = 1, limit = __builtin_huge_valf(), offset = 0, cubic = 0;

  __device__ explicit SigmoidGated(const moec_activation& a) {
    const bool gptoss = a.kind == MOEC_ACT_GPTOSS, quick = a.kind == MOEC_ACT_QUICK_GEGLU;
    if (gptoss || quick) alpha = a.alpha;
    if (gptoss || a.kind == MOEC_ACT_CLAMP_SWIGLU) limit = a.limit;
    if (gptoss || quick) offset = gptoss ? 1.0f : a.offset;
    if (a.kind != MOEC_ACT_GEGLU_TANH) return;
    alpha = 1.5957691216f;  // 2 sqrt(2 / pi)
    cubic = 0.044715f;
  }

  // A NaN stays one.
  __device__ float gate(float g) const { return g > limit ? limit : g; }
  __device__ float up(float u) const {
    return (u > limit ? limit : u < -limit ? -limit : u) + offset;
  }
  __device__ float2 sigmoids(float2 g) const {
    const float2 c = {gate(g.x), gate(g.y)};
    return fast_sigmoids(
        {alpha * fmaf(cubic * c.x * c.x, c.x, c.x), alpha * fmaf(cubic * c.y * c.y, c.y, c.y)});
  }
  __device__ float2 values(float2 g, float2 u) const {
    const float2 c = {gate(g.x), gate(g.y)}, s = sigmoids(g);
    return {c.x * s.x * up(u.x), c.y * s.y * up(u.y)};
  }
  __device__ ActivationGradients gradients(float2 g, float2 u, float2 d, float2 s) const {
    const float2 c = {gate(g.x), gate(g.y)};
    const auto one = [&](float g, float c, float s, float u, float d, float& value, float& d_gate,
                         float& d_up) {
      const float glu = c * s, factor = up(u);
      value = glu * factor;
      const float slope = alpha * fmaf(3.0f * cubic * c, c, 1.0f);
      d_gate = g <= limit ? d * factor * (s + slope * glu * (1.0f - s)) : 0.0f;
      d_up = u <= limit && u >= -limit ? d * glu : 0.0f;
    };
    ActivationGradients r;
    one(g.x, c.x, s.x, u.x, d.x, r.value.x, r.d_gate.x, r.d_up.x);
    one(g.y, c.y, s.y, u.y, d.y, r.value.y, r.d_gate.y, r.d_up.y);
    return r;
  }
};

}  // namespace moec::cuda
