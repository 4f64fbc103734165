// SPDX-License-Identifier: Apache-2.0
// Philox4x32-10, activations and scores of the oracle.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>

#include "moe_oracle.h"

namespace moec::oracle {
namespace {

constexpr double kUnbounded = std::numeric_limits<double>::infinity();

double sigmoid(double t) {
  return 1 / (1 + std::exp(-t));
}
double silu(double t) {
  return t * sigmoid(t);
}
double silu_grad(double t) {
  return sigmoid(t) * (1 + t * (1 - sigmoid(t)));
}

constexpr double kGeluC = 0.79788456080286535588;  // sqrt(2 / pi)
constexpr double kGeluA = 0.044715;
double gelu_tanh(double t) {
  return 0.5 * t * (1 + std::tanh(kGeluC * (t + kGeluA * t * t * t)));
}
double gelu_tanh_grad(double t) {
  const double th = std::tanh(kGeluC * (t + kGeluA * t * t * t));
  return 0.5 * (1 + th) + 0.5 * t * (1 - th * th) * kGeluC * (1 + 3 * kGeluA * t * t);
}
double gelu_erf(double t) {
  return 0.5 * t * (1 + std::erf(t / std::sqrt(2.0)));
}
double gelu_erf_grad(double t) {
  const double density = std::exp(-0.5 * t * t) / std::sqrt(2 * std::acos(-1.0));
  return 0.5 * (1 + std::erf(t / std::sqrt(2.0))) + t * density;
}

double clamp_gate(double t, double limit, Fault fault) {
  const double upper = std::min(t, limit);
  return fault == Fault::kGateLowerClamp ? std::max(upper, -limit) : upper;
}
double clamp_up(double t, double limit, Fault fault) {
  return fault == Fault::kNoUpClamp ? t : std::min(std::max(t, -limit), limit);
}
// 1 where a clamp to [low, limit] passes the gradient; boundaries are inclusive.
double passes(double t, double low, double limit, Fault fault) {
  if (fault == Fault::kClampGradExclusive) return t > low && t < limit ? 1 : 0;
  return t >= low && t <= limit ? 1 : 0;
}

double situ_up(const Activation& act, double u) {
  return act.linear_beta == 0 ? u : act.linear_beta * std::tanh(u / act.linear_beta);
}
double situ_up_grad(const Activation& act, double u) {
  if (act.linear_beta == 0) return 1;
  const double th = std::tanh(u / act.linear_beta);
  return 1 - th * th;
}

}  // namespace

// Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
uint32_t philox(uint64_t seed, uint64_t counter) {
  uint32_t c[4] = {static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), 0, 0};
  uint32_t k[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c[0];
    const uint64_t p1 = uint64_t{0xCD9E8D57u} * c[2];
    const uint32_t next[4] = {
        static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k[0], static_cast<uint32_t>(p1),
        static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k[1], static_cast<uint32_t>(p0)};
    std::copy(next, next + 4, c);
    k[0] += 0x9E3779B9u;
    k[1] += 0xBB67AE85u;
  }
  return c[0];
}

double jitter_factor(double jitter, uint64_t seed, uint64_t counter) {
  const double u = static_cast<double>(philox(seed, counter) >> 8) / 16777216.0;
  return 1 + jitter * (2 * u - 1);
}

double activate(const Activation& act, double g, double u, Fault fault) {
  const double limit = act.limit;
  const auto round = [&](double value) { return round_to(act.steps, value); };
  const auto glu = [&](double gate) {
    return round(gate * round(sigmoid(round(act.alpha * gate))));
  };
  switch (act.kind) {
    case Act::kSwiglu:
      return round(round(silu(g)) * u);
    case Act::kGptoss:
      return round(round(clamp_up(u, limit, fault) + 1) * glu(clamp_gate(g, limit, fault)));
    case Act::kClampSwiglu:
      return round(round(silu(clamp_gate(g, limit, fault))) * clamp_up(u, limit, fault));
    case Act::kSwigluClamp:
      return round(clamp_gate(round(silu(g)), limit, fault) * clamp_up(u, limit, fault));
    case Act::kGegluTanh:
      return round(round(gelu_tanh(g)) * u);
    case Act::kGegluErf:
      return round(round(gelu_erf(g)) * u);
    case Act::kQuickGeglu:
      return round(glu(g) * round(u + act.offset));
    case Act::kSitu:
      return round(act.beta * std::tanh(g / act.beta) * sigmoid(g) * situ_up(act, u));
    case Act::kRelu2:
      return round(u > 0 ? u * u : 0);
    case Act::kSilu:
      return round(silu(u));
    case Act::kIdentity:
      return round(u);
  }
  return 0;
}

void activate_backward(const Activation& act, double g, double u, double* d_gate, double* d_up,
                       Fault fault) {
  const double limit = act.limit;
  const double gc = clamp_gate(g, limit, fault);
  const double uc = clamp_up(u, limit, fault);
  const double gate_passes = passes(g, -kUnbounded, limit, fault);
  const double up_passes = passes(u, -limit, limit, fault);
  switch (act.kind) {
    case Act::kSwiglu:
      *d_gate = u * silu_grad(g);
      *d_up = silu(g);
      break;
    case Act::kGptoss: {
      const double s = sigmoid(act.alpha * gc);
      *d_gate = (uc + 1) * s * (1 + act.alpha * gc * (1 - s)) * gate_passes;
      *d_up = gc * s * up_passes;
      break;
    }
    case Act::kClampSwiglu:
      *d_gate = uc * silu_grad(gc) * gate_passes;
      *d_up = silu(gc) * up_passes;
      break;
    case Act::kSwigluClamp:
      *d_gate = uc * silu_grad(g) * passes(silu(g), -kUnbounded, limit, fault);
      *d_up = clamp_gate(silu(g), limit, fault) * up_passes;
      break;
    case Act::kGegluTanh:
      *d_gate = u * gelu_tanh_grad(g);
      *d_up = gelu_tanh(g);
      break;
    case Act::kGegluErf:
      *d_gate = u * gelu_erf_grad(g);
      *d_up = gelu_erf(g);
      break;
    case Act::kQuickGeglu: {
      const double s = sigmoid(act.alpha * g);
      *d_gate = (u + act.offset) * s * (1 + act.alpha * g * (1 - s));
      *d_up = g * s;
      break;
    }
    case Act::kSitu: {
      const double th = std::tanh(g / act.beta);
      const double s = sigmoid(g);
      *d_gate = situ_up(act, u) * s * ((1 - th * th) + act.beta * th * (1 - s));
      *d_up = act.beta * th * s * situ_up_grad(act, u);
      break;
    }
    case Act::kRelu2:
      *d_gate = 0;
      *d_up = u > 0 ? 2 * u : 0;
      break;
    case Act::kSilu:
      *d_gate = 0;
      *d_up = silu_grad(u);
      break;
    case Act::kIdentity:
      *d_gate = 0;
      *d_up = 1;
      break;
  }
}

double score_value(Score score, double z) {
  switch (score) {
    case Score::kSoftmax:
      break;
    case Score::kSigmoid:
      return sigmoid(z);
    case Score::kSqrtSoftplus:
      return std::sqrt(std::max(z, 0.0) + std::log1p(std::exp(-std::fabs(z))));
    case Score::kIdentity:
      return z;
  }
  throw std::invalid_argument("score_value: softmax is no score of one logit");
}

double score_slope(Score score, double z, double value) {
  switch (score) {
    case Score::kSoftmax:
      break;
    case Score::kSigmoid:
      return value * (1 - value);
    case Score::kSqrtSoftplus:
      return value > 0 ? sigmoid(z) / (2 * value) : 0;
    case Score::kIdentity:
      return 1;
  }
  throw std::invalid_argument("score_slope: softmax is no score of one logit");
}

}  // namespace moec::oracle
