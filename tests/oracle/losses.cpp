// SPDX-License-Identifier: Apache-2.0
// Auxiliary losses of the oracle with their gradients at the logits.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>

#include "moe_oracle.h"

namespace moec::oracle {
namespace {

bool counted(const Mask& mask, size_t t) {
  return mask.empty() || mask[t] != 0;
}

// Probabilities of one row for the balance losses, and what their backward needs.
struct Probs {
  Vec p, slope;  // slope: derivative of the unnormalised score at its logit
  double divisor = 1;
  bool softmax = true;
};
Probs probs_of(Score score, const double* z, size_t experts) {
  if (info_of(score).negative)
    throw std::invalid_argument("aux_loss: a balance loss has a score that is never negative");
  Probs out;
  out.softmax = score == Score::kSoftmax;
  const double largest = *std::max_element(z, z + experts);
  double sum = 0;
  for (size_t e = 0; e < experts; ++e) {
    double s = 0;
    double slope = 0;
    if (score == Score::kSoftmax) {
      s = std::exp(z[e] - largest);
    } else {
      s = score_value(score, z[e]);
      slope = score_slope(score, z[e], s);
    }
    out.p.push_back(s);
    out.slope.push_back(slope);
    sum += s;
  }
  out.divisor = out.softmax ? sum : sum + 1e-20;
  for (double& p : out.p) p /= out.divisor;
  return out;
}

// d_p [E] -> adds to d_z [E]. For q = s / S: ds = dq / S - sum(dq q) / S.
void probs_backward(const Probs& probs, const Vec& d_p, double* d_z) {
  double dot = 0;
  for (size_t e = 0; e < d_p.size(); ++e) dot += d_p[e] * probs.p[e];
  for (size_t e = 0; e < d_p.size(); ++e)
    d_z[e] += probs.softmax ? probs.p[e] * (d_p[e] - dot)
                            : (d_p[e] - dot) / probs.divisor * probs.slope[e];
}

// Adds 1 at the top_k largest entries, NaN first, ties to the lowest id.
void count_top_k(const Vec& p, int top_k, Vec* counts) {
  std::vector<size_t> order(p.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return std::isnan(p[a]) ? !std::isnan(p[b]) : p[a] > p[b];
  });
  for (size_t k = 0; k < static_cast<size_t>(top_k); ++k) (*counts)[order[k]] += 1;
}

// L = factor * sum_e n_e * sum_t p[t,e] over rows [first, last) of every layer, factor from N rows.
template <typename Factor>
void balance(const LossConfig& c, const std::vector<Vec>& logits, const Mask& mask,
             const std::vector<int64_t>& given, size_t first, size_t last, Factor factor,
             Loss* loss) {
  const auto experts = static_cast<size_t>(c.experts);
  Vec counts(experts, 0.0);
  Vec sums(experts, 0.0);
  double rows = 0;
  for (const Vec& layer : logits) {
    for (size_t t = first; t < last; ++t) {
      if (!counted(mask, t)) continue;
      const Probs probs = probs_of(c.score, &layer[t * experts], experts);
      count_top_k(probs.p, c.top_k, &counts);
      for (size_t e = 0; e < experts; ++e) sums[e] += probs.p[e];
      rows += 1;
    }
  }
  if (rows == 0) return;
  if (!given.empty()) counts.assign(given.begin(), given.end());
  const double f = c.coefficient * factor(rows);
  for (size_t e = 0; e < experts; ++e) loss->value += f * counts[e] * sums[e];
  Vec d_p(experts);
  for (size_t e = 0; e < experts; ++e) d_p[e] = f * counts[e];
  for (size_t l = 0; l < logits.size(); ++l)
    for (size_t t = first; t < last; ++t)
      if (counted(mask, t))
        probs_backward(probs_of(c.score, &logits[l][t * experts], experts), d_p,
                       &loss->d_logits[l][t * experts]);
}

void z_loss(const LossConfig& c, const Vec& logits, const Mask& mask, Loss* loss) {
  const auto experts = static_cast<size_t>(c.experts);
  const size_t tokens = logits.size() / experts;
  double rows = 0;
  for (size_t t = 0; t < tokens; ++t) rows += counted(mask, t) ? 1 : 0;
  rows = std::max(rows, 1.0);
  for (size_t t = 0; t < tokens; ++t) {
    if (!counted(mask, t)) continue;
    const double* z = &logits[t * experts];
    const double largest = *std::max_element(z, z + experts);
    double sum = 0;
    for (size_t e = 0; e < experts; ++e) sum += std::exp(z[e] - largest);
    const double lse = largest + std::log(sum);
    loss->value += c.coefficient * lse * lse / rows;
    for (size_t e = 0; e < experts; ++e)
      loss->d_logits[0][t * experts + e] += c.coefficient * 2 * lse / rows * std::exp(z[e] - lse);
  }
}

}  // namespace

Loss aux_loss(const LossConfig& config, const std::vector<Vec>& logits, const Mask& mask,
              const std::vector<int64_t>& counts) {
  Loss loss;
  for (const Vec& layer : logits) loss.d_logits.emplace_back(layer.size(), 0.0);
  const double experts = config.experts;
  const double k = config.fault == Fault::kLossDivisor ? 1.0 / config.top_k : 1.0;
  const size_t tokens = logits[0].size() / static_cast<size_t>(config.experts);
  LossConfig c = config;
  if (c.kind == LossKind::kMixtral) {
    c.score = Score::kSoftmax;
    balance(c, logits, mask, {}, 0, tokens, [&](double n) { return k * experts / (n * n); }, &loss);
  } else if (c.kind == LossKind::kSwitch) {
    const double slots = c.fault == Fault::kLossDivisor ? 1 : c.top_k;
    balance(
        c, logits, mask, counts, 0, tokens, [&](double n) { return experts / (slots * n * n); },
        &loss);
  } else if (c.kind == LossKind::kSequence) {
    const auto length = static_cast<size_t>(c.seq_len);
    c.coefficient /= static_cast<double>(tokens / length);
    for (size_t first = 0; first < tokens; first += length)
      balance(
          c, logits, mask, {}, first, first + length,
          [&](double n) { return experts / (c.top_k * n * n); }, &loss);
  } else {
    z_loss(c, logits[0], mask, &loss);
  }
  return loss;
}

}  // namespace moec::oracle
