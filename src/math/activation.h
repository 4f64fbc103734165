// SPDX-License-Identifier: Apache-2.0
// Activations of an expert: value and slopes side by side, and the list of them. g is the gate's
// pre-activation, u the up projection's; a plain MLP has only u.
//
//   value(p, g, u, round)   round(v): v, or v rounded to the data type after each step (PER_OP)
//   slopes(p, g, u)         d value / d g, d value / d u; a clamp passes the gradient at its bound
//   keeps_gate, keeps_up    whether the gradient passes the clamp
//   sigmoid_form(p)         SigmoidForm, of those that have it
//
// No branches, so that loops over them vectorise. NaN gives NaN.
#pragma once

#include <moec/moec.h>

#include <optional>

#include "core/kinds.h"
#include "math/exp.h"

namespace moec::math {

struct Slopes {
  float gate, up;
};

struct ActivationInfo {
  uint32_t kind;
  const char* name;
  bool gated = true, clamps = false;
  // Which of moec_activation's parameters it reads, and what 0 stands for.
  bool uses_alpha = false, uses_limit = false, uses_offset = false, uses_beta = false;
  float default_alpha = 0, default_limit = 0, default_beta = 0;  // limit 0: must be given
};

// g' sigmoid(alpha (g' + cubic g'^3)) (u' + offset) with g' = min(g, limit), |u'| <= limit: what
// the activations with a sigmoid of the gate have in common. A backend may have one code for all.
struct SigmoidForm {
  float alpha = 1, cubic = 0, limit = __builtin_inff(), offset = 0;
};

struct NoRounding {
  MOEC_HD float operator()(float value) const { return value; }
};

MOEC_HD float at_most(float x, float bound) {
  return x > bound ? bound : x;
}
MOEC_HD float at_least(float x, float bound) {
  return x < bound ? bound : x;
}
MOEC_HD float clamp_both(float x, float bound) {
  return at_least(at_most(x, bound), -bound);
}
MOEC_HD bool within(float x, float bound) {
  return x <= bound && x >= -bound;
}

MOEC_HD float silu(float x) {
  return x * sigmoid(x);
}
MOEC_HD float silu_slope(float x) {
  const float s = sigmoid(x);
  return s * (1.0f + x * (1.0f - s));
}

// Normal distribution: P(X <= x). For a = |x|: P(X <= -a) = exp(-a^2 / 2) t P(t),
// t = 1 / (1 + 0.35 a); Chebyshev interpolant for a in [0, 14.5], remainder 4e-8.
MOEC_HD float normal_density(float x) {
  return 0.3989422804014327f * exp(-0.5f * x * x);  // 1 / sqrt(2 pi)
}
MOEC_HD float normal_cdf(float x) {
  const float a = magnitude(x), t = 1.0f / (1.0f + 0.35f * a);
  float p = fmaf(-0x1.e72234p-6f, t, 0x1.2c9d16p-3f);
  p = fmaf(p, t, -0x1.0baf34p-2f);
  p = fmaf(p, t, 0x1.52f6fep-3f);
  p = fmaf(p, t, -0x1.bfa466p-6f);
  p = fmaf(p, t, 0x1.b72474p-4f);
  p = fmaf(p, t, 0x1.e92a4ap-4f);
  p = fmaf(p, t, 0x1.1e8b68p-3f);
  p = fmaf(p, t, 0x1.1df060p-3f);
  const float tail = exp(-0.5f * a * a) * (t * p);
  const float body = 1.0f - tail;
  return x > 0.0f ? body : tail;
}

// gelu(x) ~ x (1 + tanh(c (x + 0.044715 x^3))) / 2, c = sqrt(2/pi); (1 + tanh z) / 2 = sigmoid(2z)
inline constexpr float kGeluRate = 1.5957691216057308f;  // 2 c
inline constexpr float kGeluCubic = 0.044715f;
MOEC_HD float gelu_tanh_gate(float x) {
  return sigmoid(kGeluRate * (x + kGeluCubic * (x * x * x)));
}
MOEC_HD float gelu_tanh_slope(float x) {
  const float s = gelu_tanh_gate(x);
  const float square = at_most(x * x, 1e30f);  // no infinity times a slope of 0
  return s + x * (s * (1.0f - s)) * (kGeluRate * (1.0f + 0.134145f * square));
}

// Of g s with s = sigmoid(alpha g). The slope of s comes first: it is 0 where alpha g overflows.
MOEC_HD float scaled_silu_slope(float alpha, float g, float s) {
  return s + alpha * (g * (s * (1.0f - s)));
}

struct NoClamp {
  MOEC_HD static bool keeps_gate(const moec_activation&, float) { return true; }
  MOEC_HD static bool keeps_up(const moec_activation&, float) { return true; }
};

struct Swiglu : NoClamp {
  static constexpr ActivationInfo kInfo = {.kind = MOEC_ACT_SWIGLU, .name = "swiglu"};
  MOEC_HD static SigmoidForm sigmoid_form(const moec_activation&) { return {}; }
  template <class Round>
  MOEC_HD static float value(const moec_activation&, float g, float u, Round round) {
    return round(round(silu(g)) * u);
  }
  MOEC_HD static Slopes slopes(const moec_activation&, float g, float u) {
    return {u * silu_slope(g), silu(g)};
  }
};

struct Gptoss {
  static constexpr ActivationInfo kInfo = {.kind = MOEC_ACT_GPTOSS,
                                           .name = "gptoss",
                                           .clamps = true,
                                           .uses_alpha = true,
                                           .uses_limit = true,
                                           .default_alpha = 1.702f,
                                           .default_limit = 7.0f};
  MOEC_HD static SigmoidForm sigmoid_form(const moec_activation& p) {
    return {.alpha = p.alpha, .limit = p.limit, .offset = 1};
  }
  template <class Round>
  MOEC_HD static float value(const moec_activation& p, float g, float u, Round round) {
    const float gate = at_most(g, p.limit), up = clamp_both(u, p.limit);
    const float glu = round(gate * round(sigmoid(round(p.alpha * gate))));
    return round(round(up + 1.0f) * glu);
  }
  MOEC_HD static Slopes slopes(const moec_activation& p, float g, float u) {
    const float gate = at_most(g, p.limit), up = clamp_both(u, p.limit);
    const float s = sigmoid(p.alpha * gate);
    const float d_gate = (up + 1.0f) * scaled_silu_slope(p.alpha, gate, s);
    const float d_up = gate * s;
    return {keeps_gate(p, g) ? d_gate : 0.0f, keeps_up(p, u) ? d_up : 0.0f};
  }
  MOEC_HD static bool keeps_gate(const moec_activation& p, float g) { return g <= p.limit; }
  MOEC_HD static bool keeps_up(const moec_activation& p, float u) { return within(u, p.limit); }
};

struct ClampSwiglu {  // clamped before silu
  static constexpr ActivationInfo kInfo = {
      .kind = MOEC_ACT_CLAMP_SWIGLU, .name = "clamp_swiglu", .clamps = true, .uses_limit = true};
  MOEC_HD static SigmoidForm sigmoid_form(const moec_activation& p) { return {.limit = p.limit}; }
  template <class Round>
  MOEC_HD static float value(const moec_activation& p, float g, float u, Round round) {
    return round(round(silu(at_most(g, p.limit))) * clamp_both(u, p.limit));
  }
  MOEC_HD static Slopes slopes(const moec_activation& p, float g, float u) {
    const float gate = at_most(g, p.limit);
    const float d_gate = clamp_both(u, p.limit) * silu_slope(gate), d_up = silu(gate);
    return {keeps_gate(p, g) ? d_gate : 0.0f, keeps_up(p, u) ? d_up : 0.0f};
  }
  MOEC_HD static bool keeps_gate(const moec_activation& p, float g) { return g <= p.limit; }
  MOEC_HD static bool keeps_up(const moec_activation& p, float u) { return within(u, p.limit); }
};

struct SwigluClamp {  // clamped after silu
  static constexpr ActivationInfo kInfo = {
      .kind = MOEC_ACT_SWIGLU_CLAMP, .name = "swiglu_clamp", .clamps = true, .uses_limit = true};
  template <class Round>
  MOEC_HD static float value(const moec_activation& p, float g, float u, Round round) {
    return round(at_most(round(silu(g)), p.limit) * clamp_both(u, p.limit));
  }
  MOEC_HD static Slopes slopes(const moec_activation& p, float g, float u) {
    const float d_gate = clamp_both(u, p.limit) * silu_slope(g), d_up = at_most(silu(g), p.limit);
    return {keeps_gate(p, g) ? d_gate : 0.0f, keeps_up(p, u) ? d_up : 0.0f};
  }
  MOEC_HD static bool keeps_gate(const moec_activation& p, float g) { return silu(g) <= p.limit; }
  MOEC_HD static bool keeps_up(const moec_activation& p, float u) { return within(u, p.limit); }
};

struct GegluTanh : NoClamp {
  static constexpr ActivationInfo kInfo = {.kind = MOEC_ACT_GEGLU_TANH, .name = "geglu_tanh"};
  MOEC_HD static SigmoidForm sigmoid_form(const moec_activation&) {
    return {.alpha = kGeluRate, .cubic = kGeluCubic};
  }
  template <class Round>
  MOEC_HD static float value(const moec_activation&, float g, float u, Round round) {
    return round(round(g * gelu_tanh_gate(g)) * u);
  }
  MOEC_HD static Slopes slopes(const moec_activation&, float g, float u) {
    return {u * gelu_tanh_slope(g), g * gelu_tanh_gate(g)};
  }
};

struct GegluErf : NoClamp {
  static constexpr ActivationInfo kInfo = {.kind = MOEC_ACT_GEGLU_ERF, .name = "geglu_erf"};
  template <class Round>
  MOEC_HD static float value(const moec_activation&, float g, float u, Round round) {
    return round(round(g * normal_cdf(g)) * u);
  }
  MOEC_HD static Slopes slopes(const moec_activation&, float g, float u) {
    const float cdf = normal_cdf(g);
    return {u * (cdf + g * normal_density(g)), g * cdf};
  }
};

struct QuickGeglu : NoClamp {
  static constexpr ActivationInfo kInfo = {.kind = MOEC_ACT_QUICK_GEGLU,
                                           .name = "quick_geglu",
                                           .uses_alpha = true,
                                           .uses_offset = true,
                                           .default_alpha = 1.702f};
  MOEC_HD static SigmoidForm sigmoid_form(const moec_activation& p) {
    return {.alpha = p.alpha, .offset = p.offset};
  }
  template <class Round>
  MOEC_HD static float value(const moec_activation& p, float g, float u, Round round) {
    const float glu = round(g * round(sigmoid(round(p.alpha * g))));
    return round(glu * round(u + p.offset));
  }
  MOEC_HD static Slopes slopes(const moec_activation& p, float g, float u) {
    const float s = sigmoid(p.alpha * g);
    return {(u + p.offset) * scaled_silu_slope(p.alpha, g, s), g * s};
  }
};

struct Situ : NoClamp {  // its references evaluate it in fp32 throughout
  static constexpr ActivationInfo kInfo = {
      .kind = MOEC_ACT_SITU, .name = "situ", .uses_beta = true, .default_beta = 4.0f};
  template <class Round>
  MOEC_HD static float value(const moec_activation& p, float g, float u, Round round) {
    return round(bounded(g, p.beta) * sigmoid(g) * bounded(u, p.linear_beta));
  }
  MOEC_HD static Slopes slopes(const moec_activation& p, float g, float u) {
    const float s = sigmoid(g), b = bounded(g, p.beta), up = bounded(u, p.linear_beta);
    const float d_gate = up * s * (bounded_slope(b, p.beta) + b * (1.0f - s));
    return {d_gate, b * s * bounded_slope(up, p.linear_beta)};
  }

 private:
  MOEC_HD static float bounded(float x, float beta) {  // beta 0: no bound
    const float y = beta * tanh(x / (beta > 0.0f ? beta : 1.0f));
    return beta > 0.0f ? y : x;
  }
  MOEC_HD static float bounded_slope(float value, float beta) {
    return tanh_slope(beta > 0.0f ? value / (beta > 0.0f ? beta : 1.0f) : 0.0f);
  }
};

struct Relu2 : NoClamp {
  static constexpr ActivationInfo kInfo = {.kind = MOEC_ACT_RELU2, .name = "relu2", .gated = false};
  template <class Round>
  MOEC_HD static float value(const moec_activation&, float, float u, Round round) {
    const float positive = at_least(u, 0.0f);
    return round(positive * positive);
  }
  MOEC_HD static Slopes slopes(const moec_activation&, float, float u) {
    return {0.0f, 2.0f * at_least(u, 0.0f)};
  }
};

struct Silu : NoClamp {
  static constexpr ActivationInfo kInfo = {.kind = MOEC_ACT_SILU, .name = "silu", .gated = false};
  template <class Round>
  MOEC_HD static float value(const moec_activation&, float, float u, Round round) {
    return round(silu(u));
  }
  MOEC_HD static Slopes slopes(const moec_activation&, float, float u) {
    return {0.0f, silu_slope(u)};
  }
};

struct Identity : NoClamp {
  static constexpr ActivationInfo kInfo = {
      .kind = MOEC_ACT_IDENTITY, .name = "identity", .gated = false};
  template <class Round>
  MOEC_HD static float value(const moec_activation&, float, float u, Round round) {
    return round(u);
  }
  MOEC_HD static Slopes slopes(const moec_activation&, float, float) { return {0.0f, 1.0f}; }
};

using Activations = KindList<Swiglu, Gptoss, ClampSwiglu, SwigluClamp, GegluTanh, GegluErf,
                             QuickGeglu, Situ, Relu2, Silu, Identity>;
static_assert(Activations::in_order());

inline constexpr const ActivationInfo& activation_info(uint32_t kind) {
  return Activations::kInfos[kind];
}

// The sigmoid form of an activation, if it has one.
inline std::optional<SigmoidForm> sigmoid_form(const moec_activation& p) {
  std::optional<SigmoidForm> form;
  Activations::with(p.kind, [&]<class Kind>() {
    if constexpr (requires { Kind::sigmoid_form(p); }) form = Kind::sigmoid_form(p);
  });
  return form;
}

}  // namespace moec::math
