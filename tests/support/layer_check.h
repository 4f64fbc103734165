// SPDX-License-Identifier: Apache-2.0
// A run of the library against the oracle: every output and every gradient, worst row.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "compare.h"
#include "layer_runner.h"
#include "oracle/parameters.h"

namespace moec::test {

// Types of a layer, and the largest row error of each, forward and every gradient.
struct Type {
  const char* name;
  moec_dtype dtype;
  double tolerance;
};
inline constexpr Type kTypes[] = {
    {"f32", MOEC_F32, 2e-5}, {"bf16", MOEC_BF16, 1e-2}, {"f16", MOEC_F16, 2e-3}};

struct OracleRun {
  oracle::Layer layer;
  oracle::Gradients grads;
};
inline OracleRun run_oracle(const oracle::Config& config, const oracle::Inputs& in,
                            const oracle::Vec& d_y, const oracle::Vec& d_logits_in) {
  OracleRun run{oracle::forward(config, in), {}};
  run.grads = oracle::backward(config, in, run.layer, d_y, d_logits_in);
  return run;
}

// The problem as such a run rounds it: what products read in 16 bits, and what a backend declares
// to round between its products, is part of what a layer computes. Against the exact oracle,
// kTypicalRow and twice the tolerance hold.
inline oracle::Config as_rounded(oracle::Config config, const InnerRounding& rounding) {
  config.experts.operands = rounding.operands;
  config.experts.between = rounding.between;
  return config;
}

// Below its least normal value a type holds multiples of its least value: storing one takes up to
// half of that, which is much of a small gradient in f16.
inline double lost_by_storing(moec_dtype type) {
  return type == MOEC_F16 ? 0x1p-25 : 0;
}
inline double lost_by_storing(const LayerRun& run, const std::string& gradient) {
  if (gradient.find('.') != gradient.npos) return lost_by_storing(run.grad_dtype);  // experts.gate
  // Experts store one, to which the router adds.
  return gradient == "x" || gradient == "router_x" ? 2 * lost_by_storing(run.dtype) : 0;
}
// What a comparison of a tensor allows for: row_error's terms and floor, and what storing took from
// each value but 0.
struct Allowed {
  double lost = 0;
  const oracle::Vec* terms = nullptr;
  double floor = 0;
  oracle::Vec shifts(oracle::Vec ref) const {
    if (lost == 0) return {};
    for (double& value : ref) value = value == 0 ? 0 : lost;
    return ref;
  }
};

// EXPECTs equal ids and a row error of at most `tolerance` everywhere; returns the worst error.
// Logits can hold NaN or -inf where the case plants them, so they are not compared here.
inline double expect_matches(const LayerRun& run, const OracleRun& reference,
                             const oracle::Config& config, const oracle::Inputs& in,
                             double tolerance, double floor = kRowFloor) {
  EXPECT_EQ(run.status, MOEC_OK) << run.message;
  if (run.status != MOEC_OK) return 0;
  EXPECT_TRUE(run.neighbours_untouched) << "memory before a buffer was written";
  EXPECT_EQ(run.expert_ids, reference.layer.route.ids);
  double worst = 0;
  const auto compare = [&](const char* name, const oracle::Vec& got, const oracle::Vec& ref,
                           size_t columns, const Allowed& allowed = {}) {
    const oracle::Vec none, &terms = allowed.terms ? *allowed.terms : none;
    const RowError error =
        row_error(got, ref, columns, std::max(floor, allowed.floor), terms, allowed.shifts(ref));
    EXPECT_LE(error.error, tolerance) << name << ": " << error;
    worst = std::max(worst, error.error);
  };
  const auto slots = static_cast<size_t>(config.router.top_k);
  const auto hidden = static_cast<size_t>(config.experts.hidden);
  compare("y", run.y, reference.layer.y, hidden, {.lost = lost_by_storing(run.dtype)});
  compare("routing_weights", run.routing_weights, reference.layer.route.weights, slots);
  const oracle::Gradients& want = reference.grads;
  if (run.grads.x.empty()) return worst;  // forward only
  compare("d_routing_weights", run.grads.routing_weights, want.routing_weights, slots,
          {.terms = &want.terms.routing_weights});
  // What comes of those has their errors.
  const double cancelled = norm_of(want.terms.routing_weights) / norm_of(want.routing_weights);
  const double least = floor * std::max(1.0, std::isfinite(cancelled) ? cancelled : 1.0);
  oracle::Gradients sizes;
  sizes.experts = want.terms.experts;
  sizes.shared = want.terms.shared;
  oracle::for_each_parameter(
      config, in, run.grads,
      [&](const std::string& name, const oracle::Vec&, const oracle::Vec& got, size_t columns) {
        const auto named = [&](const oracle::Gradients& all) {
          const oracle::Vec* found = nullptr;
          oracle::for_each_parameter(
              config, in, all,
              [&](const char* other, const oracle::Vec&, const oracle::Vec& values, size_t) {
                if (name == other) found = &values;
              });
          return found;
        };
        const oracle::Vec& ref = *named(want);
        const bool bias = name == "shared_gate_bias", of_router = name.starts_with("gate_");
        compare(name.c_str(), got, ref, columns,
                {.lost = lost_by_storing(run, name),
                 .terms = named(sizes),
                 .floor = bias        ? floor_of_sums(ref, want.shared_gate, hidden)
                          : of_router ? least
                                      : 0});
      });
  return worst;
}

}  // namespace moec::test
