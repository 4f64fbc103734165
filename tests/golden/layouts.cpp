// SPDX-License-Identifier: Apache-2.0
// Weight layouts of checkpoints to and from the oracle's canonical form.
#include <utility>

#include "golden_case.h"

namespace moec::golden {
namespace {

size_t stored_index(const Stack& s, int e, int row, int input) {
  const int index =
      s.in_out ? (e * s.inputs + input) * s.rows + row : (e * s.rows + row) * s.inputs + input;
  return static_cast<size_t>(index);
}

// Rows of the stored matrix that hold gate i and up i.
std::pair<int, int> rows_of(GateLayout layout, int inter, int i) {
  switch (layout) {
    case GateLayout::kUpThenGate:
      return {inter + i, i};
    case GateLayout::kInterleaved:
      return {2 * i, 2 * i + 1};
    case GateLayout::kNone:
      return {-1, i};
    default:
      return {i, inter + i};
  }
}

template <typename Visit>
void visit_gate_up(const Stack& s, GateLayout layout, Visit visit) {
  const bool gated = layout != GateLayout::kNone;
  const int inter = gated ? s.rows / 2 : s.rows;
  for (int e = 0; e < s.experts; ++e) {
    for (int i = 0; i < inter; ++i) {
      const auto [gate_row, up_row] = rows_of(layout, inter, i);
      for (int k = 0; k < s.inputs; ++k) {
        const auto canonical = static_cast<size_t>((e * inter + i) * s.inputs + k);
        visit(canonical, gated ? stored_index(s, e, gate_row, k) : 0, stored_index(s, e, up_row, k),
              gated);
      }
    }
  }
}

}  // namespace

void split_gate_up(const Stack& stack, GateLayout layout, const oracle::Vec& stored,
                   oracle::Vec* gate, oracle::Vec* up) {
  const bool gated = layout != GateLayout::kNone;
  const int inter = gated ? stack.rows / 2 : stack.rows;
  up->assign(static_cast<size_t>(stack.experts * inter * stack.inputs), 0.0);
  gate->assign(gated ? up->size() : 0, 0.0);
  visit_gate_up(stack, layout, [&](size_t to, size_t gate_from, size_t up_from, bool has_gate) {
    (*up)[to] = stored[up_from];
    if (has_gate) (*gate)[to] = stored[gate_from];
  });
}

oracle::Vec join_gate_up(const Stack& stack, GateLayout layout, const oracle::Vec& gate,
                         const oracle::Vec& up) {
  oracle::Vec stored(gate.size() + up.size(), 0.0);
  if (stored.empty()) return stored;
  visit_gate_up(stack, layout, [&](size_t from, size_t gate_to, size_t up_to, bool has_gate) {
    stored[up_to] = up[from];
    if (has_gate) stored[gate_to] = gate[from];
  });
  return stored;
}

oracle::Vec to_out_in(const Stack& s, const oracle::Vec& stored) {
  oracle::Vec canonical;
  canonical.reserve(stored.size());
  for (int e = 0; e < s.experts; ++e)
    for (int n = 0; n < s.rows; ++n)
      for (int k = 0; k < s.inputs; ++k) canonical.push_back(stored[stored_index(s, e, n, k)]);
  return canonical;
}

oracle::Vec from_out_in(const Stack& s, const oracle::Vec& canonical) {
  oracle::Vec stored(canonical.size());
  if (stored.empty()) return stored;
  size_t from = 0;
  for (int e = 0; e < s.experts; ++e)
    for (int n = 0; n < s.rows; ++n)
      for (int k = 0; k < s.inputs; ++k) stored[stored_index(s, e, n, k)] = canonical[from++];
  return stored;
}

}  // namespace moec::golden
