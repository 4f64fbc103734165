// SPDX-License-Identifier: Apache-2.0
// The row GEMM of plain weights in the place of one of codes, where experts are decoded once.
// Nothing here needs the headers of CUDA.
#pragma once

#include "backend/cuda/sm90/row_gemm_problem.h"
#include "backend/cuda/weights/decoded_experts.h"

namespace moec::cuda {

struct WorkCounters;

// Of values in rows of the call that wait for a later product: turns of more experts end less often
// with a round of few tiles.
constexpr int64_t kMostRowBytes = int64_t(256) << 20;

// A path's scratch of a call.
struct DecodedScratch {
  WorkCounters* counters;
  void* pointers;  // of experts that are separate tensors
  void* values;    // of one turn
  int64_t bytes;   // of values; 0: there are none
};

struct DecodedProduct {
  RowGemmProblem problem;  // of all experts, with the values of a turn
  DecodedScratch scratch;
  DecodedExperts experts;

  bool is_used() const { return experts.is_used(); }
};
// The product of coded matrices [n,k] as one of their values, if its experts are to be decoded
// once; else it is not used. problem: what is set before set_matrices(). choice_rows: of RowGroups.
// refused: why row GEMMs do not take the codes, or null. Returns why they do not take the values,
// or null.
const char* set_decoded(DecodedProduct& to, const RowGemmProblem& problem, int64_t choice_rows,
                        int64_t n, int64_t k, const ExpertMatrix& first, const ExpertMatrix* second,
                        const DecodedScratch& scratch, const char* refused);

// How the parts of a product are decoded, if their codes lie in lines of whole runs of eight
// (code_lines.h). Returns whether they do.
bool set_decoded_lines(CodedLines& to, const DecodedProduct& product);
// The problem of `count` experts from `first` on, those of a turn.
RowGemmProblem problem_of_turn(const DecodedProduct& product, int first, int count);

}  // namespace moec::cuda
