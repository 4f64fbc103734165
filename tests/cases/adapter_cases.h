// SPDX-License-Identifier: Apache-2.0
// Layers with adapters: layouts, storages, types, ranks and what else a description has.
#pragma once

#include <ostream>
#include <vector>

#include "oracle/moe_oracle.h"
#include "support/adapter_set.h"

namespace moec::test {

struct AdapterCase {
  const char* name;
  uint32_t gate_layout = MOEC_GATE_SPLIT;  // of the weights
  AdapterLayout adapters = {};
  std::vector<int> ranks = {4};  // of each adapter
  int tokens = 60, hidden = 77, inter = 45;
  uint32_t save = MOEC_SAVE_PREACT;
  oracle::Act activation = oracle::Act::kSwiglu;
  oracle::WeightPosition position = oracle::WeightPosition::kOutput;
  oracle::Shared shared = oracle::Shared::kNone;
  uint32_t orientation = MOEC_OUT_IN;
  bool biases = false, ids = false, accumulate = false, frozen = false, some_absent = false;
  bool on_hopper = false;  // of 16 bits, Hopper's kernels take it: products add up all terms
  int zero_experts = 0;
};
inline void PrintTo(const AdapterCase& c, std::ostream* out) {
  *out << c.name;
}

constexpr auto kCompact = FactorStorage::kCompact, kPeft = FactorStorage::kPeft,
               kTurned = FactorStorage::kTurned, kGaps = FactorStorage::kGaps;
constexpr moec_dtype kF32 = MOEC_F32, kF16 = MOEC_F16, kBf16 = MOEC_BF16;
const AdapterCase kCases[] = {
    {.name = "split", .ranks = {7}},
    {.name = "rank_1", .ranks = {1}, .save = MOEC_SAVE_INPUT},
    {.name = "rank_16_as_bound",
     .gate_layout = MOEC_GATE_THEN_UP,
     .adapters = {MOEC_GATE_THEN_UP, true, false, kCompact, kBf16},
     .ranks = {16},
     .hidden = 64,
     .inter = 32,
     .on_hopper = true},
    {.name = "peft",
     .gate_layout = MOEC_GATE_THEN_UP,
     .adapters = {MOEC_GATE_THEN_UP, true, false, kPeft, kF32},
     .ranks = {16},
     .save = MOEC_SAVE_INPUT,
     .frozen = true},
    {.name = "rank_64_turned",
     .gate_layout = MOEC_UP_THEN_GATE,
     .adapters = {MOEC_UP_THEN_GATE, true, false, kTurned, kBf16},
     .ranks = {64},
     .biases = true,
     .frozen = true},
    {.name = "rank_200",
     .gate_layout = MOEC_GATE_INTERLEAVED,
     .adapters = {MOEC_GATE_INTERLEAVED, true, false, kPeft, kBf16},
     .ranks = {200},
     .orientation = MOEC_IN_OUT,
     .biases = true},
    {.name = "rank_512",  // the most
     .gate_layout = MOEC_GATE_THEN_UP,
     .adapters = {MOEC_GATE_THEN_UP, true, false, kPeft, kBf16},
     .ranks = {512},
     .tokens = 12,
     .hidden = 48,
     .inter = 40,
     .save = MOEC_SAVE_ALL},
    {.name = "gaps_other_layout",
     .gate_layout = MOEC_GATE_INTERLEAVED,
     .adapters = {MOEC_GATE_THEN_UP, true, false, kGaps, kF16},
     .ranks = {9},
     .accumulate = true},
    {.name = "one_a_for_all",
     .adapters = {MOEC_GATE_THEN_UP, true, true, kCompact, kBf16},
     .ranks = {8},
     .accumulate = true},
    {.name = "one_a_for_all_by_stride",
     .adapters = {MOEC_GATE_SPLIT, false, true, kGaps, kF32},
     .ranks = {5, 3}},
    {.name = "three_adapters",
     .adapters = {MOEC_GATE_SPLIT, false, false, kPeft, kBf16},
     .ranks = {3, 16, 1},
     .save = MOEC_SAVE_INPUT,
     .biases = true},
    {.name = "ids",
     .adapters = {MOEC_GATE_THEN_UP, true, false, kCompact, kBf16},
     .ranks = {3, 16, 1},
     .biases = true,
     .ids = true},
    {.name = "some_absent", .ranks = {3, 5}, .some_absent = true},
    {.name = "on_activation",
     .ranks = {6},
     .position = oracle::WeightPosition::kActivation,
     .biases = true},
    {.name = "on_input",
     .adapters = {MOEC_GATE_THEN_UP, true, false, kPeft, kF32},
     .ranks = {6},
     .save = MOEC_SAVE_INPUT,
     .position = oracle::WeightPosition::kInput,
     .biases = true},
    {.name = "on_input_preact", .ranks = {6}, .position = oracle::WeightPosition::kInput},
    {.name = "shared_softmax2",
     .ranks = {6},
     .shared = oracle::Shared::kSoftmax2,
     .biases = true,
     .zero_experts = 2},
    {.name = "shared_sigmoid", .ranks = {12}, .shared = oracle::Shared::kSigmoidGate},
    {.name = "plain_mlp",
     .gate_layout = MOEC_GATE_NONE,
     .adapters = {MOEC_GATE_NONE, false, false, kCompact, kBf16},
     .ranks = {8},
     .activation = oracle::Act::kRelu2,
     .biases = true},
    {.name = "gptoss",
     .gate_layout = MOEC_GATE_INTERLEAVED,
     .adapters = {MOEC_GATE_INTERLEAVED, true, false, kPeft, kF32},
     .ranks = {8},
     .activation = oracle::Act::kGptoss,
     .orientation = MOEC_IN_OUT,
     .biases = true},
    {.name = "many_rows", .ranks = {16}, .tokens = 420, .save = MOEC_SAVE_ALL},
    {.name = "one_token", .ranks = {16}, .tokens = 1},
    {.name = "for_inference", .ranks = {16}, .save = MOEC_SAVE_NONE},
};

// Two tiles of rows and several k-blocks, the last of which are partly
// outside; narrow rows of one and of two tiles and k-blocks, whole or not.
const AdapterCase kHopperCases[] = {
    {.name = "rank_16",
     .gate_layout = MOEC_GATE_THEN_UP,
     .adapters = {MOEC_GATE_THEN_UP, true, false, kCompact, kBf16},
     .ranks = {16},
     .tokens = 420,
     .hidden = 136,
     .inter = 200,
     .on_hopper = true},
    {.name = "rank_9_columns_in_turn",
     .gate_layout = MOEC_GATE_INTERLEAVED,
     .adapters = {MOEC_GATE_INTERLEAVED, true, false, kPeft, kF32},
     .ranks = {9},
     .tokens = 300,
     .hidden = 136,
     .inter = 72,
     .activation = oracle::Act::kGptoss,
     .orientation = MOEC_IN_OUT,
     .biases = true,
     .accumulate = true,
     .on_hopper = true},
    {.name = "rank_40_columns_in_turn_other_layout",
     .gate_layout = MOEC_GATE_INTERLEAVED,
     .adapters = {MOEC_GATE_THEN_UP, true, false, kTurned, kBf16},
     .ranks = {40},
     .hidden = 72,
     .inter = 136,
     .save = MOEC_SAVE_INPUT,
     .orientation = MOEC_IN_OUT,
     .frozen = true,
     .on_hopper = true},
    {.name = "rank_100",
     .gate_layout = MOEC_UP_THEN_GATE,
     .adapters = {MOEC_UP_THEN_GATE, true, false, kTurned, kBf16},
     .ranks = {100},
     .tokens = 200,
     .hidden = 72,
     .inter = 136,
     .save = MOEC_SAVE_INPUT,
     .frozen = true,
     .on_hopper = true},
    {.name = "one_a_for_all",
     .gate_layout = MOEC_GATE_THEN_UP,
     .adapters = {MOEC_GATE_THEN_UP, true, true, kCompact, kF16},
     .ranks = {24},
     .tokens = 150,
     .hidden = 64,
     .inter = 64,
     .accumulate = true,
     .on_hopper = true},
    {.name = "one_a_for_all_in_out",
     .gate_layout = MOEC_GATE_THEN_UP,
     .adapters = {MOEC_GATE_THEN_UP, true, true, kGaps, kF32},
     .ranks = {8},
     .tokens = 150,
     .hidden = 64,
     .inter = 72,
     .orientation = MOEC_IN_OUT,
     .on_hopper = true},
    {.name = "rank_64_turned_in_out",
     .gate_layout = MOEC_GATE_THEN_UP,
     .adapters = {MOEC_GATE_THEN_UP, true, false, kTurned, kBf16},
     .ranks = {64},
     .tokens = 900,
     .hidden = 96,
     .inter = 40,
     .orientation = MOEC_IN_OUT,
     .biases = true,
     .on_hopper = true},
    {.name = "rank_128_rows_in_turn",
     .gate_layout = MOEC_GATE_INTERLEAVED,
     .adapters = {MOEC_GATE_INTERLEAVED, true, false, kGaps, kF16},
     .ranks = {128},
     .hidden = 200,
     .inter = 136,
     .biases = true,
     .on_hopper = true},
};

}  // namespace moec::test
