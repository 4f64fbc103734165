// SPDX-License-Identifier: Apache-2.0
// One case per enumerator and trap of the two descriptors, with mutations that each case must
// notice. The oracle's own tests check the gradients of every case by finite differences and that
// every mutation shows; the tests of the C API run the same cases against the oracle.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "oracle/moe_oracle.h"

namespace moec::oracle {

struct Mutation {
  std::string name;
  std::function<void(Config*, Inputs*)> apply;
};

struct FeatureCase {
  std::string name;
  Config config;
  Inputs in;
  Vec d_y;
  Vec d_logits_in;             // may be empty
  bool differentiable = true;  // false: rounds, or sits on a kink or a tie
  std::vector<Mutation> mutations;
};

// H = 12, I = 10, E = 8, K = 3, T = 11 (67 where few tokens would not tell mutants apart); all
// data are fp32 values.
std::vector<FeatureCase> router_cases();
std::vector<FeatureCase> selection_cases();
std::vector<FeatureCase> expert_cases();
std::vector<FeatureCase> all_cases();

// ---- for writing cases ----
// A case with softmax, top-3 and swiglu experts without biases; `name` seeds its data.
FeatureCase base_case(const std::string& name, int tokens = 11);
Vec random_values(const std::string& seed, size_t count, double scale = 1);  // fp32 values
void round_to_all(Vec* values);  // to what bf16 and fp16 both hold
void add_expert_biases(FeatureCase* c, double scale = 0.5);
void add_shared(FeatureCase* c, Shared shared, int inter, Act act);
void mutate(FeatureCase* c, const std::string& name, std::function<void(Config*, Inputs*)> apply);
void mutate(FeatureCase* c, const std::string& name, Fault fault);

}  // namespace moec::oracle
