// SPDX-License-Identifier: Apache-2.0
// Weight gradients: d[e](n, k) = sum over the expert's rows r of g(r, n) * x(r, k), as a product whose A
// is g read along n, whose B is x read along k, and whose summed index is the row.
#include "backend/cpu/block_product.h"
#include "backend/cpu/tasks.h"
#include "core/dtype.h"

namespace moec::cpu {
namespace {

// One finished block into d, whose columns are contiguous, strided, or the rows of a transposed layout.
void store_block(const MatrixView& d, const Task& task, const BlockResult& c, bool accumulate) {
  const int64_t size = dtype_bytes(d.dtype);
  for (int64_t i = 0; i < task.rows; ++i) {
    char* const row = static_cast<char*>(d.data) +
                      ((task.row0 + i) * d.row_stride + task.col0 * d.col_stride) * size;
    float* const values = c.c0 + i * c.ld;
    if (d.col_stride == 1 && !accumulate) {
      convert_from_f32(values, d.dtype, row, task.cols);
      continue;
    }
    for (int64_t j = 0; j < task.cols; ++j) {
      const int64_t at = j * d.col_stride;
      const float old = accumulate ? load_real(row, d.dtype, at) : 0.0f;
      store_real(row, d.dtype, at, old + values[j]);
    }
  }
}

}  // namespace

void grouped_wgrad(const ThreadPool& pool, const GroupedWgrad& w, void* scratch) {
  // An expert without rows still has to zero its gradient.
  const auto cut = [&](int64_t rows) {
    return TaskGrid(rows || !w.accumulate ? w.n : 0, w.k, kMaxTaskColumns);
  };
  run_tasks(pool, {w.num_experts, w.group_offsets, w.counts}, cut, scratch,
            [&](const Task& task, char* thread_scratch) {
              BlockProduct p;
              p.plan = plan_product(w.g.dtype, w.x.dtype, task.group_rows);
              const int64_t begin = task.group_begin;
              const auto rows_of = [&](const GemmRows& rows, int64_t lanes) {
                const int64_t shift = rows.gather ? 0 : begin * rows.stride;
                return PanelSource{
                    static_cast<const char*>(rows.data) + shift * dtype_bytes(rows.dtype),
                    rows.dtype, 1, rows.stride, nullptr, rows.gather ? rows.gather + begin : nullptr,
                    lanes, task.group_rows};
              };
              p.a[0] = rows_of(w.g, w.n);
              p.b[0].source = rows_of(w.x, w.k);
              p.row0 = task.row0;
              p.rows = task.rows;
              p.col0 = task.col0;
              p.cols = task.cols;
              p.k = task.group_rows;
              store_block(w.d->expert(task.expert), task, run_block(p, thread_scratch),
                          w.accumulate);
            });
}

}  // namespace moec::cpu
