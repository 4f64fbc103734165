// SPDX-License-Identifier: Apache-2.0
// Products with codes of bf16 values that lie in lines along k.
#pragma once

#include <algorithm>

#include "backend/cpu/block_product.h"
#include "core/workspace.h"

namespace moec::cpu {

// Rows cut into A panels of almost equal size.
struct RowPanels {
  int64_t rows, per_panel, multiple;
  RowPanels(int64_t rows_, const ProductKernel& kernel)
      : rows(rows_),
        per_panel(div_up(div_up(rows_, div_up(rows_, kernel.max_rows)), kernel.row_multiple) *
                  kernel.row_multiple),
        multiple(kernel.row_multiple) {}
  int64_t count() const { return div_up(rows, per_panel); }
  int64_t padded(int64_t panel) const {
    return div_up(std::min(per_panel, rows - panel * per_panel), multiple) * multiple;
  }
};

// Few rows are multiplied with runs of codes where they lie: in fp32, or in pairs.
bool takes_codes(const BlockTerm& term, int64_t rows);
// Rows of pairs are multiplied with lines of values, which codes become: no panel is built.
bool takes_decoded(const ProductPlan& plan, const WeightSource& weight);

struct CodedTask {  // c (+)= A panels of `blocks` blocks * some columns
  const ProductPlan& plan;
  const BlockTerm& term;
  const RowPanels& panels;
  const char* a;  // of takes_decoded turned, where the instruction set turns rows
  char* b;        // scratch
  float* c;
  int64_t ld, col0, cols, block0;
  int blocks;
  bool accumulate;
};
struct ArrangedRows {  // rows of A in b, in the order in which values come from codes
  LineCodes codes = {};
  bool pairs = false;            // as bf16
  int64_t first = 0, count = 0;  // no count: nothing is there
  bool operator==(const ArrangedRows&) const = default;
};
// Where takes_codes.
void multiply_codes(const CodedTask& task, ArrangedRows& arranged);
// Where takes_decoded.
void multiply_decoded(const CodedTask& task);

}  // namespace moec::cpu
