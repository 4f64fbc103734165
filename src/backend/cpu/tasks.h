// SPDX-License-Identifier: Apache-2.0
// A grouped product cut into (expert, columns, rows) tasks that the threads of a pool take in
// order.
#pragma once

#include <algorithm>

#include "backend/cpu/block_product.h"

namespace moec::cpu {

struct Groups {
  int32_t num_experts;
  const int32_t *offsets, *counts;
  int64_t rows(int64_t e) const { return counts ? counts[e] : offsets[e + 1] - offsets[e]; }
};

// `rows` x `cols` cut into near-equal pieces; neighbouring tasks share columns.
struct TaskGrid {
  int64_t rows, cols, row_step, col_step;
  TaskGrid(int64_t rows_, int64_t cols_, int64_t max_columns)
      : rows(rows_),
        cols(cols_),
        row_step(even(rows_, kMaxTaskRows)),
        col_step(even(cols_, max_columns)) {}
  int64_t count() const { return rows && cols ? cuts(rows, row_step) * cuts(cols, col_step) : 0; }

 private:
  static int64_t cuts(int64_t n, int64_t step) { return (n + step - 1) / step; }
  // The step that gives the fewest pieces of at most `most`, equal up to a multiple of a panel.
  static int64_t even(int64_t n, int64_t most) {
    if (n == 0) return most;
    const int64_t piece = cuts(n, cuts(n, most));
    return cuts(piece, kPanelColumns) * kPanelColumns;
  }
};

struct Task {
  int32_t expert, slot;
  int64_t group_begin, group_rows;  // rows of the expert
  int64_t row0, rows, col0, cols;   // of the grid
};

// Where one thread stands in the ascending sequence of tasks; on a line of its own.
struct alignas(kLineBytes) TaskCursor {
  int64_t expert = 0, first = 0;  // the expert's first task
};

// cut(rows of an expert) -> its TaskGrid; body(task, scratch of the thread). Returns when all are
// done.
template <class Cut, class Body>
void run_tasks(const ThreadPool& pool, const Groups& groups, const Cut& cut, void* scratch,
               const Body& body) {
  int64_t tasks = 0;
  for (int64_t e = 0; e < groups.num_experts; ++e) tasks += cut(groups.rows(e)).count();
  char* const memory = static_cast<char*>(scratch);
  auto* const cursors = reinterpret_cast<TaskCursor*>(memory + pool.size() * kThreadScratch);
  std::fill_n(cursors, pool.size(), TaskCursor{});
  pool.parallel_for(tasks, [&](int32_t slot, int64_t i) {
    TaskCursor& at = cursors[slot];
    for (int64_t here; i >= at.first + (here = cut(groups.rows(at.expert)).count()); ++at.expert)
      at.first += here;
    const int64_t rows = groups.rows(at.expert);
    const TaskGrid grid = cut(rows);
    const int64_t across = (grid.rows + grid.row_step - 1) / grid.row_step;
    const int64_t row0 = (i - at.first) % across * grid.row_step;
    const int64_t col0 = (i - at.first) / across * grid.col_step;
    const Task task{int32_t(at.expert),
                    slot,
                    groups.offsets[at.expert],
                    rows,
                    row0,
                    std::min(grid.row_step, grid.rows - row0),
                    col0,
                    std::min(grid.col_step, grid.cols - col0)};
    body(task, memory + slot * kThreadScratch);
  });
}

}  // namespace moec::cpu
