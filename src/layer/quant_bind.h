// SPDX-License-Identifier: Apache-2.0
// Codes and what makes values of them, as a matrix of a weight set binds them. Shapes and types are
// checked; no value is read.
#pragma once

#include "layer/quant_check.h"

namespace moec {

// Where what is bound goes: addresses of the tensors of one expert each, and all memory.
struct CodesPlace {
  const Context& context;
  int64_t experts;
  void**& pointers;
  MemorySet& memory;
};
// `parts`: 2 where the rows are those of gate and of up.
void bind_codes(const CodesPlace& place, const CodedShape& shape, int parts,
                const moec_matrix& from, ExpertMatrix& to);
// Entries of CodesPlace::pointers that bind_codes() may fill for quant, with `each` a tensor of one
// expert each.
int64_t quant_entries(const moec_quant& quant, int64_t each);

}  // namespace moec
