// SPDX-License-Identifier: Apache-2.0
// Experts of many rows, whose codes become values in scratch in front of their product: some
// experts at a time, then the row GEMM of plain weights over the rows of these. Nothing here needs
// the headers of CUDA.
#pragma once

#include "backend/cuda/sm90/row_gemm_problem.h"

namespace moec::cuda {

struct WorkCounters;

// Who else multiplies codes: row GEMMs, which decode them anew for each tile; the portable path,
// where eight codes share a block; or it, slowly.
enum class Otherwise { kRowGemm, kPortable, kSlowly };
// Experts of so many rows on average are decoded once. With fewer rows it takes longer to make
// values than their products save (bench/results/h200/coded_trials.json).
constexpr int64_t kOnceRows[] = {1024, 128, 0};
constexpr int64_t once_rows(Otherwise otherwise) {
  return kOnceRows[int(otherwise)];
}
// Of values: little enough to stay in L2.
constexpr int64_t kDecodedBytes = int64_t(64) << 20;

// Room for the values of one turn. expert_bytes: of the largest operand.
int64_t decoded_bytes(int64_t expert_bytes, int64_t num_experts);
// How many experts a turn decodes, so that turns are alike; 0: none are decoded so.
int experts_at_once(int64_t choice_rows, int64_t num_experts, int64_t expert_bytes, int64_t bytes,
                    Otherwise otherwise);

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
  int at_once;
  const ExpertMatrix* from[2];  // the coded matrices: gate and up, or one
  bool joined;                  // columns of gate and up alternate: from[0] tells of both
  int parts;                    // matrices of an expert as they are decoded: [n,k], or [k,n]
  int64_t n, k;
  bool along_k;  // the axis along which values are contiguous, as codes are

  int64_t expert_values() const { return parts * n * k; }
  bool is_used() const { return at_once > 0; }
};
// The product of coded matrices [n,k] as one of their values, if its experts are to be decoded
// once; else it is not used. problem: what is set before set_matrices(). choice_rows: of RowGroups.
// refused: why row GEMMs do not take the codes, or null. Returns why they do not take the values,
// or null.
const char* set_decoded(DecodedProduct& to, const RowGemmProblem& problem, int64_t choice_rows,
                        int64_t n, int64_t k, const ExpertMatrix& first, const ExpertMatrix* second,
                        const DecodedScratch& scratch, const char* refused);

// Part `part` of what is decoded: where columns of gate and up alternate, both.
ExpertMatrix decoded_source(const DecodedProduct& product, int part);
// Whether the codes of runs of eight values are read together, and have one block.
struct CodeRuns {
  bool whole, one_block;
};
CodeRuns code_runs(const ExpertMatrix& matrix, bool along_k, int num_experts);
// Whether the portable path reads eight codes at once, and one block for them.
bool has_quick_chunks(const ExpertMatrix& matrix, bool along_k);
// The problem of `count` experts from `first` on, those of a turn.
RowGemmProblem problem_of_turn(const DecodedProduct& product, int first, int count);

}  // namespace moec::cuda
