// SPDX-License-Identifier: Apache-2.0
// Activations of the tensor-core epilogues. SwiGLU has its own form, because its two
// special-function instructions are what an epilogue spends most on.
#pragma once

#include "backend/cuda/sm90/row_gemm.h"

namespace moec::cuda {

// Two values of one row, slopes times d, of each activation at once.
struct ActivationGradients {
  float2 value, d_gate, d_up;
};

// The smaller, the larger of both; a NaN if one is.
__device__ __forceinline__ float at_most(float x, float bound) {
  float r;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(bound));
  return r;
}
__device__ __forceinline__ float at_least(float x, float bound) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(bound));
  return r;
}

// x or 0, without a branch.
__device__ __forceinline__ float only_if(bool condition, float x) {
  float r;
  asm("{\n.reg .pred p;\nsetp.ne.s32 p, %1, 0;\nselp.f32 %0, %2, 0f00000000, p;\n}"
      : "=f"(r)
      : "r"(int(condition)), "f"(x));
  return r;
}

// 1 / (1 + 2^x). Two at a time share one reciprocal: 1 / a = b / (a b), so both must be of one row:
// the last bits of each depend on the other. x is cut where a b could overflow; there the result is
// 1e-18, and what it is multiplied by is cut, too. A NaN is left to that.
__device__ __forceinline__ float2 fast_sigmoids(float2 x) {
  const auto one_plus_exp2 = [](float v) {
    float e;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(fminf(v, GateForm::kMostExponent)));
    return 1.0f + e;
  };
  const float a = one_plus_exp2(x.x), b = one_plus_exp2(x.y);
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(a * b));
  return {r * b, r * a};
}

// Of one alone.
__device__ __forceinline__ float fast_sigmoid(float x) {
  float e, r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(fminf(x, GateForm::kMostExponent)));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.0f + e));
  return r;
}

// The derivative of c s, where that of s is rate s (1 - s). Far above 0 there is nothing but
// rounding in 1 - s, and it is multiplied by c no larger than there.
__device__ __forceinline__ float sigmoid_slope(float s, float rate, float near) {
  return s + rate * (near * s) * (1.0f - s);
}

// silu(g) * u.
struct Swiglu {
  const GateForm& form;

  static constexpr float kFar = GateForm::kMostExponent / GateForm::kLog2E;
  static __device__ float gate(float g) { return at_least(g, -kFar); }
  __device__ float2 sigmoids(float2 g) const {
    return fast_sigmoids({g.x * -GateForm::kLog2E, g.y * -GateForm::kLog2E});
  }
  __device__ float2 values(float2 g, float2 u) const {
    const float2 s = sigmoids(g);
    return {gate(g.x) * s.x * u.x, gate(g.y) * s.y * u.y};
  }
  // d is the gradient of the value, s sigmoids(g).
  __device__ ActivationGradients gradients(float2 g, float2 u, float2 d, float2 s) const {
    const float2 c = {gate(g.x), gate(g.y)}, silu = {c.x * s.x, c.y * s.y};
    const float2 slope = {sigmoid_slope(s.x, 1.0f, at_most(c.x, kFar)),
                          sigmoid_slope(s.y, 1.0f, at_most(c.y, kFar))};
    return {{silu.x * u.x, silu.y * u.y},
            {d.x * u.x * slope.x, d.y * u.y * slope.y},
            {d.x * silu.x, d.y * silu.y}};
  }
};

// The form that all have. Its parameters are operands where they lie, in the kernel's constants.
struct SigmoidGated {
  const GateForm& form;

  __device__ float gate(float g) const { return at_least(at_most(g, form.limit), form.lowest); }
  __device__ float up(float u) const {
    return at_least(at_most(u, form.limit), -form.limit) + form.offset;
  }
  __device__ float2 sigmoids(float2 g) const {
    const float2 c = {gate(g.x), gate(g.y)};
    return fast_sigmoids({c.x * fmaf(form.exponent[1] * c.x, c.x, form.exponent[0]),
                          c.y * fmaf(form.exponent[1] * c.y, c.y, form.exponent[0])});
  }
  __device__ float2 values(float2 g, float2 u) const {
    const float2 s = sigmoids(g);
    return {gate(g.x) * s.x * up(u.x), gate(g.y) * s.y * up(u.y)};
  }
  __device__ float value(float g, float u) const {
    const float c = gate(g);
    return c * fast_sigmoid(c * fmaf(form.exponent[1] * c, c, form.exponent[0])) * up(u);
  }
  __device__ ActivationGradients gradients(float2 g, float2 u, float2 d, float2 s) const {
    const auto one = [&](float g, float u, float d, float s, float& value, float& d_gate,
                         float& d_up) {
      const float c = gate(g), near = at_most(c, -form.lowest), glu = c * s, factor = up(u);
      const float rate = fmaf(form.slope[1] * near, near, form.slope[0]);
      const bool open = form.limit == INFINITY;  // NaN gives NaN
      value = glu * factor;
      d_gate = only_if(open || g <= form.limit, d * factor * sigmoid_slope(s, rate, near));
      d_up = only_if(open || fabsf(u) <= form.limit, d * glu);
    };
    ActivationGradients r;
    one(g.x, u.x, d.x, s.x, r.value.x, r.d_gate.x, r.d_up.x);
    one(g.y, u.y, d.y, s.y, r.value.y, r.d_gate.y, r.d_up.y);
    return r;
  }
};

}  // namespace moec::cuda
