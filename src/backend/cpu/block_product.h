// SPDX-License-Identifier: Apache-2.0
// One task of a grouped product: a block of rows and columns, summed over all of k, in one thread's
// scratch.
#pragma once

#include "backend/cpu/gemm.h"
#include "backend/cpu/pack.h"

// Offsets within a block are small:
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)
namespace moec::cpu {

// Rows: a multiple of every max_rows, so that padding stays inside. Columns: of all outputs
// together.
inline constexpr int kMaxTaskRows = 288, kMaxTaskColumns = 256;

// Sums in kSpanBlocks blocks of A at a time, so that A, one B panel chunk and c stay in the L2
// cache:
//   a  288 rows x 16 blocks        288 KiB (few rows: more blocks)
//   b  8 panels x 16 blocks        256 KiB
//   c  288 x 256 (+ 2 x 16) fp32   324 KiB
inline constexpr int64_t kScratchA = int64_t(kMaxTaskRows) * kSpanBlocks * kLineBytes;
inline constexpr int64_t kScratchB = kMaxTaskColumns / kPanelColumns * kSpanBlocks * kBlockBytes;
inline constexpr int64_t kLdSlack = 16;  // keeps rows of c off one cache set
inline constexpr int64_t kScratchC = int64_t(kMaxTaskRows) * (kMaxTaskColumns + 2 * kLdSlack) * 4;
inline constexpr int64_t kThreadScratch = kScratchA + kScratchB + kScratchC;

struct ProductPlan {  // the same for all tasks of one expert
  const TileKernels* tile;
  const ProductKernel* kernel;
  Compute compute;
};
// of one term; a product of several multiplies in bf16 only where each of them does.
ProductPlan plan_product(moec_dtype a, moec_dtype b, int64_t rows);
ProductPlan plan_f32();

struct BlockTerm {
  PanelSource a;
  WeightSource b;
  int64_t k = 0;
  int output = 0;
};

struct BlockProduct {
  static constexpr int kMostOutputs = 2;
  ProductPlan plan;
  int outputs = 1, num_terms = 0;
  BlockTerm terms[RowProduct::kMostTerms];
  int64_t row0 = 0, rows = 0, col0 = 0, cols = 0;  // col0 is a multiple of 32
};

struct BlockResult {
  float *c0, *c1;  // c1: null for one output
  int64_t ld;
};

BlockResult run_block(const BlockProduct& product, char* scratch);

}  // namespace moec::cpu
// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
