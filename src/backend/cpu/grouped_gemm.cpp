// SPDX-License-Identifier: Apache-2.0
// Grouped products with rows of A per expert: forward and data gradient.
#include <algorithm>
#include <utility>

#include "backend/cpu/coded_product.h"
#include "backend/cpu/isa.h"
#include "backend/cpu/packed_form.h"
#include "backend/cpu/tasks.h"
#include "core/dtype.h"

namespace moec::cpu {
namespace {

WeightSource weight_source(const GemmWeight& w, int64_t e, int64_t n, int64_t k) {
  const ExpertMatrix& matrix = *w.matrix;
  WeightSource s;
  if (w.packed) {
    s.packed = {static_cast<const char*>(w.packed) + e * w.packed_stride,
                &packed_form(matrix),
                matrix.dtype,
                w.transposed ? k : n,
                w.transposed ? n : k,
                w.transposed,
                matrix.is_rounded()};
    return s;
  }
  s.source = {matrix.values.expert(e),
              matrix.dtype,
              matrix.row_stride,
              matrix.col_stride,
              nullptr,
              nullptr,
              n,
              k};
  if (matrix.is_coded()) s.source.coded = matrix.coded(e);
  s.source.rounds = matrix.is_rounded();
  if (w.transposed) std::swap(s.source.lane_stride, s.source.k_stride);
  s.source.transposed = w.transposed;
  return s;
}

PanelSource row_source(const GemmRows& a, int64_t end, int64_t k) {
  return {a.data, a.dtype, a.stride, 1, a.gather, nullptr, end, k};
}

void set_terms(const GroupedGemm& g, int64_t expert, int64_t end, BlockTerm* terms) {
  for (int i = 0; i < g.num_terms; ++i) {
    const GemmTerm& term = g.terms[i];
    terms[i] = {row_source(term.a, end, term.k), weight_source(term.b, expert, g.n, term.k), term.k,
                term.output};
  }
}

ProductPlan plan_terms(const GroupedGemm& g, const BlockTerm* terms, int64_t rows) {
  const auto by_codes = [&](const BlockTerm& term) { return takes_codes(term, rows); };
  if (std::all_of(terms, terms + g.num_terms, by_codes)) return plan_f32();
  ProductPlan plan = plan_product(g.terms[0].a.dtype, g.terms[0].b.matrix->dtype, rows);
  for (int i = 1; i < g.num_terms && plan.compute == Compute::kBf16; ++i)
    plan = plan_product(g.terms[i].a.dtype, g.terms[i].b.matrix->dtype, rows);
  return plan;
}

}  // namespace

void grouped_gemm(const ThreadPool& pool, const GroupedGemm& g, void* scratch) {
  const auto cut = [&](int64_t rows) { return TaskGrid(rows, g.n, kMaxTaskColumns / g.outputs); };
  run_tasks(pool, {g.num_experts, g.group_offsets, g.counts}, cut, scratch,
            [&](const Task& task, char* thread_scratch) {
              BlockProduct p;
              p.outputs = g.outputs;
              p.num_terms = g.num_terms;
              set_terms(g, task.expert, task.group_begin + task.group_rows, p.terms);
              p.plan = plan_terms(g, p.terms, task.group_rows);
              p.row0 = task.group_begin + task.row0;
              p.rows = task.rows;
              p.col0 = task.col0;
              p.cols = task.cols;
              const BlockResult c = run_block(p, thread_scratch);
              g.epilogue(g.context, {task.expert, task.slot, p.row0, p.rows, p.col0, p.cols, c.c0,
                                     c.c1, c.ld});
            });
}

std::string gemm_kernel_name(const GroupedGemm& g, int64_t rows) {
  BlockTerm terms[RowProduct::kMostTerms];
  set_terms(g, 0, rows, terms);
  const ProductPlan plan = plan_terms(g, terms, rows);
  if (takes_decoded(plan, terms[0].b)) return plan.tile->pair_name;
  if (plan.compute != Compute::kF32 || !takes_codes(terms[0], rows)) return plan.kernel->name;
  return plan.tile->isa + std::string(" codes ") + std::to_string(std::max<int64_t>(rows, 1)) +
         'x' + std::to_string(kDotLines);
}

int64_t gemm_scratch_bytes(int32_t num_threads) {
  return num_threads * (kThreadScratch + int64_t(sizeof(TaskCursor)));
}

void convert_to_f32(const void* from, moec_dtype dtype, float* to, int64_t count) {
  tile_kernels().to_f32[int(plain_load(dtype))](from, to, count);
}

void convert_from_f32(const float* from, moec_dtype dtype, void* to, int64_t count) {
  tile_kernels().from_f32[int(plain_load(dtype))](from, to, count);
}

}  // namespace moec::cpu
