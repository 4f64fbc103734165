// SPDX-License-Identifier: Apache-2.0
// One call of the experts whose weights are INT8 codes, in any layout, and the same call with the
// values that these codes stand for.
#pragma once

#include <moec/moec.h>

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "oracle/moe_oracle.h"

namespace moec::test {

struct CodedCase {
  moec_dtype dtype = MOEC_BF16, scale_dtype = MOEC_F32;
  uint32_t gate_layout = MOEC_GATE_SPLIT;
  uint32_t gate_up_orientation = MOEC_OUT_IN, down_orientation = MOEC_OUT_IN;
  bool asymmetric = false, bias = false, per_expert = false;
  bool unlike_up = false;  // scales of another type, zero points where the others have none
  bool coded_gate_up = true, coded_down = true;
  int tokens = 40, hidden = 64, inter = 48;
  oracle::Act act = oracle::Act::kGptoss;
  uint32_t save = MOEC_SAVE_PREACT;

  std::string text() const;
};

constexpr int kCodedExperts = 5, kCodedTopK = 2;

// The codes of one matrix [E,N,K] and what they stand for.
struct CodedMatrix {
  oracle::Vec codes, scales, zeros, values, bias;  // [E,N,K], [E,N], [E,N], [E,N,K], [E,N]
};
struct CodedProblem {
  explicit CodedProblem(const CodedCase& coded_case);

  CodedCase c;
  oracle::Config config;
  CodedMatrix gate, up, down;
  oracle::Inputs in;  // with the values
  oracle::Route route;
  oracle::Plan plan;
  oracle::Vec d_y;
};

struct CodedResults {
  moec_status status = MOEC_OK;
  std::string message;  // where status is another
  oracle::Vec y, d_x, d_routing_weights;
  oracle::Vec terms;                        // of d_routing_weights (GradientTerms), the oracle's
  std::set<std::string> forward, backward;  // kernels, as describe names them
};
enum class Held { kCodes, kValues };  // what the bound weights are
// Forward, and backward unless save is MOEC_SAVE_NONE.
CodedResults run(const moec_context* context, const CodedProblem& problem, Held held,
                 uint32_t save);
// The oracle's, of the values.
CodedResults reference(const CodedProblem& problem);

}  // namespace moec::test
