// SPDX-License-Identifier: Apache-2.0
// Row products of coded matrices by kernels of plain values: some experts are decoded at a time.
#pragma once

#include "backend/cuda/sm80/row_product.h"
#include "backend/cuda/weights/decode_experts.h"

namespace moec::cuda {

struct RowsScratch {
  ProductCounters* counters;  // that nobody reads
  void* values;               // of one turn
  int64_t bytes;              // of values; 0: there are none
};

class DecodedRows {
 public:
  // product: as row_product() has it, which outlives this. Used where its codes would go through
  // tiles of fp32, and its values through the tensor cores.
  DecodedRows(const RowProduct& product, const ProductOutput& output, const RowsScratch& scratch);
  bool is_used() const { return experts_.is_used(); }
  void launch(const Op& op) const;
  const DecodedExperts& experts() const { return experts_; }
  ProductKernel kernel() const;  // of values

 private:
  RowProduct of_turn(int first, int count, ExpertMatrix (&values)[2]) const;

  const RowProduct& product_;
  const ProductOutput& output_;
  const RowsScratch& scratch_;
  DecodedExperts experts_ = {};
};

}  // namespace moec::cuda
