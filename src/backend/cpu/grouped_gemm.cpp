// SPDX-License-Identifier: Apache-2.0
// Grouped products with rows of A per expert: forward and data gradient.
#include <algorithm>

#include "backend/cpu/block_product.h"
#include "backend/cpu/isa.h"
#include "backend/cpu/tasks.h"
#include "core/dtype.h"

namespace moec::cpu {
namespace {

moec_dtype weight_dtype(const GemmWeight& w) {
  return w.packed ? w.packed_dtype : w.matrix->dtype;
}

WeightSource weight_source(const GemmWeight& w, int64_t e, int64_t n, int64_t k) {
  WeightSource s;
  if (w.packed) {
    s.packed = static_cast<const char*>(w.packed) + e * w.packed_stride;
    s.packed_dtype = w.packed_dtype;
    s.packed_n = w.transposed ? k : n;
    s.packed_k = w.transposed ? n : k;
    s.transposed = w.transposed;
    return s;
  }
  const MatrixView view = w.matrix->expert(e);
  s.source = {view.data, view.dtype, view.row_stride, view.col_stride, nullptr, nullptr, n, k};
  if (w.transposed) std::swap(s.source.lane_stride, s.source.k_stride);
  return s;
}

}  // namespace

void grouped_gemm(const ThreadPool& pool, const GroupedGemm& g, void* scratch) {
  const int64_t columns = g.kind == GemmKind::kPair ? kMaxTaskColumns / 2 : kMaxTaskColumns;
  const auto cut = [&](int64_t rows) { return TaskGrid(rows, g.n, columns); };
  run_tasks(pool, {g.num_experts, g.group_offsets, g.counts}, cut, scratch,
            [&](const Task& task, char* thread_scratch) {
              BlockProduct p;
              p.plan = plan_product(g.a[0].dtype, weight_dtype(g.b[0]), task.group_rows);
              p.kind = g.kind;
              for (int i = 0; i < (g.kind == GemmKind::kSum ? 2 : 1); ++i)
                p.a[i] = {g.a[i].data,
                          g.a[i].dtype,
                          g.a[i].stride,
                          1,
                          g.a[i].gather,
                          nullptr,
                          task.group_begin + task.group_rows,
                          g.k};
              for (int i = 0; i < (g.kind == GemmKind::kSingle ? 1 : 2); ++i)
                p.b[i] = weight_source(g.b[i], task.expert, g.n, g.k);
              p.row0 = task.group_begin + task.row0;
              p.rows = task.rows;
              p.col0 = task.col0;
              p.cols = task.cols;
              p.k = g.k;
              const BlockResult c = run_block(p, thread_scratch);
              g.epilogue(g.context, {task.expert, task.slot, p.row0, p.rows, p.col0, p.cols, c.c0,
                                     c.c1, c.ld});
            });
}

const char* gemm_kernel_name(moec_dtype a, moec_dtype b, int64_t rows) {
  return plan_product(a, b, rows).kernel->name;
}

int64_t gemm_scratch_bytes(int32_t num_threads) {
  return num_threads * (kThreadScratch + int64_t(sizeof(TaskCursor)));
}

void convert_to_f32(const void* from, moec_dtype dtype, float* to, int64_t count) {
  tile_kernels().to_f32[dtype == MOEC_F32 ? 0 : dtype == MOEC_BF16 ? 1 : 2](from, to, count);
}

void convert_from_f32(const float* from, moec_dtype dtype, void* to, int64_t count) {
  tile_kernels().from_f32[dtype == MOEC_F32 ? 0 : dtype == MOEC_BF16 ? 1 : 2](from, to, count);
}

}  // namespace moec::cpu
