// SPDX-License-Identifier: Apache-2.0
// A golden file read through its row of families.h: what the oracle takes, and what it must give.
#pragma once

#include <string>
#include <vector>

#include "families.h"
#include "support/json.h"
#include "support/safetensors.h"

namespace moec::golden {

struct GoldenCase {
  const Family* family = nullptr;
  test::SafeTensors file;
  test::Json metadata;  // the file's "config"
  oracle::Config config;
  oracle::Inputs in;
  oracle::Vec d_y;
};

// The folder of the vectors is MOEC_GOLDEN_DIR, or the one of the source tree.
std::string golden_path(const std::string& file);
GoldenCase load_golden(const Family& family);

// One tensor of the file beside what was computed for it, in the file's layout.
struct Comparison {
  std::string name;  // "y", "g.x", "g.<parameter>"
  oracle::Vec got, expected;
  size_t columns;
};
// y and every gradient that the file has.
std::vector<Comparison> comparisons(const GoldenCase& golden, const oracle::Vec& y,
                                    const oracle::Gradients& gradients);

// ---- layouts ----
// A stack of matrices as stored: [E,N,K], or [E,K,N] with in_out; a bias has K = 1.
struct Stack {
  int experts, rows, inputs;
  bool in_out;
};
// Canonical gate and up [E,I,K] from a stored stack of 2I rows (I and no gate for kNone) and back.
void split_gate_up(const Stack& stack, GateLayout layout, const oracle::Vec& stored,
                   oracle::Vec* gate, oracle::Vec* up);
oracle::Vec join_gate_up(const Stack& stack, GateLayout layout, const oracle::Vec& gate,
                         const oracle::Vec& up);
// [E,N,K] from the stored order, and back.
oracle::Vec to_out_in(const Stack& stack, const oracle::Vec& stored);
oracle::Vec from_out_in(const Stack& stack, const oracle::Vec& canonical);

}  // namespace moec::golden
