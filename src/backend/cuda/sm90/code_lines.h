// SPDX-License-Identifier: Apache-2.0
// Codes in lines along the contiguous axis, in blocks of at least kLineRun positions: where their
// scales lie, and how elements are made of them. Nothing here needs the headers of CUDA.
#pragma once

#include "backend/cuda/sm90/row_gemm_problem.h"

namespace moec::cuda {

// Scales of a matrix's lines, of which `part` is one; alternating: and of the next one, too.
// Returns why they are no such lines, or null.
const char* set_lines(CodedLines& to, int part, const ExpertMatrix& m, bool alternating);
// How elements of the matrix's type are made of its codes; clears the rest.
void set_decode(CodedLines& to, const ExpertMatrix& m);

}  // namespace moec::cuda
