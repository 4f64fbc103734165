// SPDX-License-Identifier: Apache-2.0
// Grouped matrix products over the rows of experts: forward, data gradient, weight gradient.
//
// Rows of expert e are [group_offsets[e], group_offsets[e] + counts[e]); other rows are neither
// read nor written. All products accumulate in fp32, for each element in ascending order of the
// summed index, by a kernel that depends on the instruction set, the dtypes and the rows of the
// expert only: results have the same bits for every number of threads, and for packed and unpacked
// weights.
#pragma once

#include <cstdint>
#include <string>

#include "backend/product.h"
#include "core/thread_pool.h"

namespace moec::cpu {

// ---- B: one weight matrix of every expert
struct GemmWeight {
  const ExpertMatrix* matrix = nullptr;  // read where it is; of a packed one only the type
  const void* packed = nullptr;  // expert e at packed + e * packed_stride bytes, 64-byte aligned
  int64_t packed_stride = 0;
  bool transposed = false;  // B(n, k) is W(k, n): the data gradient
};

// Bytes of the packed copy of one [n, k] matrix of the type of `matrix`; a multiple of 64.
int64_t packed_matrix_bytes(const ExpertMatrix& matrix, int64_t n, int64_t k);
// Write the packed copies of experts [first, first + count) in parallel, that of expert first + i
// to `to + i * stride`; every byte of them. Tails are zero.
void pack_experts(const ThreadPool& pool, const ExpertMatrix& matrix, int64_t first, int64_t count,
                  int64_t n, int64_t k, void* to, int64_t stride);

// ---- A: activations
struct GemmRows {
  const void* data = nullptr;  // element (row, k) at data + row * stride + k
  moec_dtype dtype = 0;
  int64_t stride = 0;
  const int32_t* gather = nullptr;  // optional: read row gather[row] instead; negative reads zeros
};

// Finished fp32 values of rows [row0, row0 + rows) and columns [col0, col0 + cols), in scratch that
// the epilogue may overwrite; element (i, j) at c0[i * ld + j]. col0 is a multiple of 32. How a
// problem is cut into tiles depends on n, k and the expert's rows, not on the number of threads.
struct FinishedTile {
  int32_t expert, slot;  // slot < pool.size(): this thread's scratch of the caller
  int64_t row0, rows, col0, cols;
  float *c0, *c1;  // output 0, and output 1 or null
  int64_t ld;
};
using GemmEpilogue = void (*)(void* context, const FinishedTile& tile);

struct GemmTerm {  // adds a b^T to an output
  GemmRows a;
  GemmWeight b;
  int64_t k = 0;
  int output = 0;
};

// A RowProduct of these operands: the same rules for the order of its terms.
struct GroupedGemm {
  int32_t num_experts = 0;
  const int32_t* group_offsets = nullptr;  // [E+1]
  const int32_t* counts = nullptr;         // [E], or null: all rows up to the next offset
  int64_t n = 0;                           // columns of each output
  int outputs = 1, num_terms = 0;
  GemmTerm terms[RowProduct::kMostTerms];
  GemmEpilogue epilogue = nullptr;
  void* context = nullptr;

  void add(const GemmTerm& term) { terms[num_terms++] = term; }
};

struct GroupedWgrad {  // d[e](n, k) (+)= sum over rows r of e of g(r, n) * x(r, k)
  int32_t num_experts = 0;
  const int32_t* group_offsets = nullptr;
  const int32_t* counts = nullptr;
  int64_t n = 0, k = 0;
  GemmRows g, x;
  const ExpertMatrix* d = nullptr;  // f32, bf16 or f16; written through its strides, one rounding
  bool accumulate = false;  // add to what is there; an expert without rows: unchanged, else zero
};

// Scratch of one call: gemm_scratch_bytes(pool.size()), 64-byte aligned, not shared by calls.
int64_t gemm_scratch_bytes(int32_t num_threads);
void grouped_gemm(const ThreadPool& pool, const GroupedGemm& gemm, void* scratch);
void grouped_wgrad(const ThreadPool& pool, const GroupedWgrad& wgrad, void* scratch);

// Which kernel an expert with `rows` rows gets, such as "amx bf16 32x32", or "avx2 codes 1x16"
// where codes are multiplied as they lie; for describe().
std::string gemm_kernel_name(const GroupedGemm& gemm, int64_t rows);
std::string wgrad_kernel_name(moec_dtype dtype, int64_t rows);

// ---- rows of values, vectorised: one rounding to nearest even
void convert_to_f32(const void* from, moec_dtype dtype, float* to, int64_t count);
void convert_from_f32(const float* from, moec_dtype dtype, void* to, int64_t count);

}  // namespace moec::cpu
