// SPDX-License-Identifier: Apache-2.0
// The steps that adapters add to a program. An MLP without adapters at a place gets none of them,
// and each record_narrow function then returns null; else the narrow rows that it had computed.
// is_added: a product has them as a term.
#pragma once

#include "experts/memory.h"

namespace moec::experts {

void record_copies(const AdaptersView& adapters, const AdapterMemory& memory, Program& program);
const void* record_narrow_x(const Mlp& mlp, bool is_added, void* to, Program& program);
const void* record_narrow_act(const Mlp& mlp, const void* act, bool is_added, void* to,
                              Program& program);
// Backward: d_y B of down, and d_gate Bg + d_up Bu.
const void* record_narrow_d_y(const Mlp& mlp, const Array& d_y, bool is_added, void* to,
                              Program& program);
const void* record_narrow_d_pre(const Mlp& mlp, const PartRows& d_pre, bool is_added, void* to,
                                Program& program);

// Which gradients of the factors of a list are wanted.
struct WantedFactors {
  bool a, b;
  bool any() const { return a || b; }
};
WantedFactors wanted_of(const FactorList& gradients);

RowOperand part_rows(const Mlp& mlp, const void* rows, int64_t stride);
uint64_t narrow_flops(const Mlp& mlp, const LowRank& factors, int64_t in, int64_t out);

}  // namespace moec::experts
