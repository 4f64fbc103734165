// SPDX-License-Identifier: Apache-2.0
// A layer whose experts lie on N ranks: its data, what each rank gives, and that in plain words.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "adapter_set.h"
#include "draw.h"
#include "oracle/moe_oracle.h"
#include "quantised.h"
#include "rank_threads.h"
#include "weight_sets.h"

namespace moec::test {

// The matrices of some experts in one format, each a tensor of its own; or none.
struct CodedExperts {
  QuantisedMatrix gate, up, down;
};

struct EpProblem {
  int ranks = 2, experts = 4, zero_experts = 0, top_k = 2;
  int hidden = 16, inter = 12, shared_inter = 0;
  uint32_t scheme = MOEC_EP_AUTO, shared = MOEC_SHARED_NONE, save = MOEC_SAVE_ALL;
  uint32_t weight_position = MOEC_WEIGHT_ON_OUTPUT, combine = MOEC_COMBINE_FP32_SLOT;
  uint32_t drop = MOEC_DROP_NONE;
  float capacity_factor = 0, output_scale = 0, grad_scale = 0;
  int align = 0;
  bool plain = false;       // experts without a gate projection
  bool jitter_x = false;    // the experts see the router's jittered x
  bool counts = true;       // the comm has all_to_all_v
  bool accumulate = false;  // d_x and parameter gradients hold 1/4 before
  moec_dtype dtype = MOEC_F32, grad_dtype = MOEC_F32;
  std::vector<int32_t> begin;  // [N+1]
  std::vector<int> tokens;     // [N]
  int64_t bound = 0;
  // Values: of rank r, or of all.
  std::vector<oracle::Vec> x, d_y, residual;  // [N] of [T,H]; residual may be empty
  std::vector<std::vector<int>> token_mask;   // [N] of [T], or empty
  oracle::Vec gate_weight, gate_bias, select_bias, shared_gate, output_bias;
  oracle::MlpWeights weights, shared_weights;  // of all experts
  CodedExperts codes;                          // of all experts, what `weights` holds; or none
  std::vector<oracle::Adapter> adapters;       // of all experts; or none
  AdapterLayout adapter_layout;
  std::vector<std::vector<int>> adapter_ids;  // [N] of [T], or empty

  int max_tokens() const;
  int64_t call_bound() const { return bound ? bound : max_tokens(); }
  int columns() const { return experts + zero_experts; }
  int owner(int id) const;  // -1: nobody
  oracle::MlpWeights weights_of(int begin, int end) const;
  CodedExperts codes_of(int begin, int end) const;
  std::vector<oracle::Adapter> adapters_of(int begin, int end) const;
  moec_router_desc router_desc() const;
  // Of the experts [begin, end); home: with the shared expert and identity experts, else without.
  moec_experts_desc experts_desc(int begin, int end, bool home) const;
};

EpProblem draw_ep_problem(int ranks, uint32_t scheme, Draw& draw);
void fill_values(EpProblem* problem, Draw& draw);
// The matrices in a format that takes their shapes, or the one named, with what they stand for as
// values; its name.
std::string quantise_weights(EpProblem* problem, Draw& draw, std::string_view name = {});
// Some adapters beside some of the matrices, and perhaps the one of each token.
void draw_adapters(EpProblem* problem, Draw& draw);

// Every output of one rank, by name.
using Outputs = std::map<std::string, std::vector<uint8_t>>;

// moec_layer with an ep, as one rank of a comm.
Outputs run_ep_layer(
    const EpProblem& problem, int rank, const moec_context* context, moec_comm* comm,
    moec_stream stream = nullptr, const std::function<void()>& wait_for_all = [] {});
inline Outputs run_ep_layer(const EpProblem& problem, const Rank& rank) {
  return run_ep_layer(problem, rank.rank, rank.context.get(), rank.comm.get(), rank.stream,
                      [&] { rank.wait_for_all(); });
}
// All ranks, on N threads: of a board, or of one that copies memory of the host.
std::vector<Outputs> run_ep_layers(const EpProblem& problem, RankBoard& board);
std::vector<Outputs> run_ep_layers(const EpProblem& problem);
// One process that runs the N ranges with moec_experts and adds their rows in rank order.
std::vector<Outputs> run_in_sequence(const EpProblem& problem);
// moec_layer without an ep on the concatenated batch.
Outputs run_one_layer(const EpProblem& problem);

// ---- ep_training.cpp: the loss before each step of plain gradient descent
EpProblem training_problem(int ranks, Draw& draw);
std::vector<double> train_ep(EpProblem problem, int rank, const moec_context* context,
                             moec_comm* comm, int steps);
std::vector<double> train_one(EpProblem problem, int steps);

}  // namespace moec::test
