// SPDX-License-Identifier: Apache-2.0
// Weight gradients: d[e](n, k) = sum over the expert's rows r of g(r, n) * x(r, k), as a product
// whose A is g read along n, whose B is x read along k, and whose summed index is the row.
#include <utility>

#include "backend/cpu/block_product.h"
#include "backend/cpu/tasks.h"
#include "core/dtype.h"

namespace moec::cpu {
namespace {

template <class T>
void scatter(const void* from, void* to, int64_t stride, int64_t count) {
  for (int64_t j = 0; j < count; ++j)
    static_cast<T*>(to)[j * stride] = static_cast<const T*>(from)[j];
}
template <class T>
void collect(const void* from, int64_t stride, void* to, int64_t count) {
  for (int64_t j = 0; j < count; ++j)
    static_cast<T*>(to)[j] = static_cast<const T*>(from)[j * stride];
}

// One finished block into d, row by row.
void store_block(const MatrixView& d, const Task& task, const BlockResult& c, bool accumulate) {
  const int64_t size = dtype_bytes(d.dtype), stride = d.col_stride;
  alignas(kLineBytes) char packed[kMaxTaskColumns * 4];
  alignas(kLineBytes) float old[kMaxTaskColumns];
  for (int64_t i = 0; i < task.rows; ++i) {
    char* const row =
        static_cast<char*>(d.data) + ((task.row0 + i) * d.row_stride + task.col0 * stride) * size;
    float* const values = c.c0 + i * c.ld;
    if (accumulate) {
      if (stride != 1)
        (size == 4 ? collect<uint32_t> : collect<uint16_t>)(row, stride, packed, task.cols);
      convert_to_f32(stride == 1 ? row : packed, d.dtype, old, task.cols);
      for (int64_t j = 0; j < task.cols; ++j) values[j] += old[j];
    }
    convert_from_f32(values, d.dtype, stride == 1 ? row : packed, task.cols);
    if (stride != 1)
      (size == 4 ? scatter<uint32_t> : scatter<uint16_t>)(packed, row, stride, task.cols);
  }
}

// d whose rows are the shorter step is written transposed: the same sums with g and x exchanged.
GroupedWgrad with_long_rows(GroupedWgrad w, ExpertMatrix& turned) {
  if (w.d->col_stride <= w.d->row_stride) return w;
  turned = *w.d;
  std::swap(turned.row_stride, turned.col_stride);
  std::swap(w.g, w.x);
  std::swap(w.n, w.k);
  w.d = &turned;
  return w;
}

}  // namespace

void grouped_wgrad(const ThreadPool& pool, const GroupedWgrad& wgrad, void* scratch) {
  ExpertMatrix turned;
  const GroupedWgrad w = with_long_rows(wgrad, turned);
  // An expert without rows still has to zero its gradient.
  const auto cut = [&](int64_t rows) {
    return TaskGrid(rows || !w.accumulate ? w.n : 0, w.k, kMaxTaskColumns);
  };
  run_tasks(
      pool, {w.num_experts, w.group_offsets, w.counts}, cut, scratch,
      [&](const Task& task, char* thread_scratch) {
        BlockProduct p;
        p.plan = plan_product(w.g.dtype, w.x.dtype, task.group_rows);
        const int64_t begin = task.group_begin;
        const auto rows_of = [&](const GemmRows& rows, int64_t lanes) {
          const int64_t shift = rows.gather ? 0 : begin * rows.stride;
          return PanelSource{static_cast<const char*>(rows.data) + shift * dtype_bytes(rows.dtype),
                             rows.dtype,
                             1,
                             rows.stride,
                             nullptr,
                             rows.gather ? rows.gather + begin : nullptr,
                             lanes,
                             task.group_rows};
        };
        p.num_terms = 1;
        p.terms[0].a = rows_of(w.g, w.n);
        p.terms[0].b.source = rows_of(w.x, w.k);
        p.terms[0].k = task.group_rows;
        p.row0 = task.row0;
        p.rows = task.rows;
        p.col0 = task.col0;
        p.cols = task.cols;
        store_block(w.d->expert(task.expert), task, run_block(p, thread_scratch), w.accumulate);
      });
}

std::string wgrad_kernel_name(moec_dtype dtype, int64_t rows) {
  return plan_product(dtype, dtype, rows).kernel->name;
}

}  // namespace moec::cpu
