// SPDX-License-Identifier: Apache-2.0
// Experts whose codes become values in scratch in front of their product: some experts at a time,
// then a product of plain weights over the rows of these. Nothing here needs the headers of CUDA.
#pragma once

#include "backend/weights.h"
#include "core/json_text.h"
#include "quant/format.h"

namespace moec::cuda {

// Who else multiplies codes: row GEMMs of Hopper, which decode them anew for each tile; the
// portable path, where eight codes share a block; or it, slowly.
enum class Otherwise { kRowGemm, kPortable, kSlowly };
// Experts of so many rows on average are decoded once. With fewer rows it takes longer to make
// values than their products save (bench/results/h200/coded_trials.json).
constexpr int64_t kOnceRows[] = {1024, 128, 0};
// Several small experts share the turns of a row GEMM: of at most so many bytes of values.
constexpr int64_t kSmallExpert = int64_t(8) << 20, kOnceRowsOfSmall = 512;
constexpr int64_t once_rows(Otherwise otherwise, int64_t expert_bytes) {
  const bool small = otherwise == Otherwise::kRowGemm && expert_bytes <= kSmallExpert;
  return small ? kOnceRowsOfSmall : kOnceRows[int(otherwise)];
}
// Of values: little enough to stay in L2.
constexpr int64_t kDecodedBytes = int64_t(64) << 20;

// Room for the values of one turn. expert_bytes: of the largest operand.
int64_t decoded_bytes(int64_t expert_bytes, int64_t num_experts);
// The same for a description, of a gate and up; 0 where its weights have no codes, or no products
// of 16 bits.
int64_t decoded_bytes(const moec_experts_desc& desc);
// How many experts a turn decodes, so that turns are alike; 0: none are decoded so.
int experts_at_once(int64_t choice_rows, int64_t num_experts, int64_t expert_bytes, int64_t bytes,
                    Otherwise otherwise);

// The coded matrices [n,k] of a product, and the values of one turn.
struct DecodedExperts {
  const ExpertMatrix* from[2];  // gate and up, or one
  bool joined;                  // columns of gate and up alternate: from[0] tells of both
  int parts;                    // matrices of an expert as they are decoded: [n,k], or [k,n]
  int64_t n, k;
  bool along_k;      // the axis along which values are contiguous, as codes are
  moec_dtype dtype;  // of values
  void* values;
  int at_once;

  bool is_used() const { return at_once > 0; }
  int64_t expert_values() const { return parts * n * k; }
  int64_t expert_bytes() const { return expert_values() * dtype_bytes(dtype); }
  // Part `part` of what is decoded: where columns of gate and up alternate, both.
  ExpertMatrix source(int part) const;
  // The matrix of values in the place of from[i], of the experts of a turn.
  ExpertMatrix values_of(int i) const;
};
// joined: as above. values and at_once are left to the caller.
DecodedExperts decoded_experts(int64_t n, int64_t k, const ExpertMatrix& first,
                               const ExpertMatrix* second, bool joined, moec_dtype dtype);
bool may_be_decoded(const ExpertMatrix& first, const ExpertMatrix* second);
// How it is described.
JsonObject decoding_kernel(const std::string& step, const DecodedExperts& experts);

// Whether the codes of runs of eight values are read together, and have one block.
struct CodeRuns {
  bool whole, one_block;
};
// in_words: codes of each expert begin where runs may be read together.
CodeRuns code_runs(const ExpertMatrix& matrix, bool along_k, bool in_words);
// Of pointers of the host; of a matrix as PointerTable::device() gives it.
bool begins_in_words(const ExpertArray& array, int num_experts);
bool begins_in_words(const ExpertMatrix& matrix);
// Where the codes of line l of a matrix begin: at first + l * line, in codes.
struct CodePlaces {
  int64_t first, line;
};
CodePlaces code_places(const ExpertMatrix& matrix, bool along_k);
// Nibbles along k or n in words of eight, where each column has scales and zero points of its own.
using ColumnFormats = quant::FormatList<quant::Awq, quant::Gptq<1>, quant::Gptq<2>>;
// Whether those of eight columns are read together. matrix: as PointerTable::device() gives it.
bool has_columns(const ExpertMatrix& matrix, bool along_k);
// Whether eight lines from a multiple of eight on have one group.
bool has_groups_of_runs(const ExpertMatrix& matrix);

}  // namespace moec::cuda
