// SPDX-License-Identifier: Apache-2.0
// Experts of many rows, whose codes become values in scratch in front of their product: some
// experts at a time, then the row GEMM of plain weights over the rows of these. Scratch is halved,
// and experts are decoded into one half while the product of the other one ends. Nothing here needs
// the headers of CUDA.
#pragma once

#include "backend/cuda/sm90/row_gemm_problem.h"

namespace moec::cuda {

struct WorkCounters;

// Experts of so many rows on average are decoded once: where kernels decode their codes anew for
// each tile, and where only those of the portable path would. With fewer rows it takes longer to
// make values than their products save.
constexpr int64_t kOnceRows = 1024, kOnceRowsElse = 64;
// Of values: little enough to stay in L2.
constexpr int64_t kDecodedBytes = int64_t(64) << 20;
constexpr int kDecodedTurns = 2;

// Room for the values of one turn. expert_bytes: of the largest operand.
int64_t decoded_turn_bytes(int64_t expert_bytes, int64_t num_experts);
// How many experts a turn decodes, so that turns are alike; 0: none are decoded so. has_kernel:
// row GEMMs decode these codes.
int experts_at_once(int64_t choice_rows, int64_t num_experts, int64_t expert_bytes,
                    int64_t turn_bytes, bool has_kernel);

// A path's scratch of a call.
struct DecodedScratch {
  WorkCounters* counters;
  void* pointers;      // of experts that are separate tensors
  void* values;        // kDecodedTurns times turn_bytes
  int64_t turn_bytes;  // 0: there is none
};

struct DecodedProduct {
  RowGemmProblem problem;  // of all experts, with the values of the first turn
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
// The problem of `count` experts from `first` on, whose values are those of a turn.
RowGemmProblem problem_of_turn(const DecodedProduct& product, int first, int count);

}  // namespace moec::cuda
