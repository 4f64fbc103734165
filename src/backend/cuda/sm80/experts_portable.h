// SPDX-License-Identifier: Apache-2.0
// The experts on every GPU from sm_80 on: products and row kernels, one after the other.
#pragma once

#include "backend/cuda/device/pointer_table.h"
#include "backend/cuda/experts/experts_memory.h"
#include "backend/cuda/experts/experts_path.h"
#include "backend/cuda/rows/row_ops.h"
#include "backend/cuda/sm80/row_product.h"

namespace moec::cuda {

// The routed experts of a call, or its shared expert: a single group of all tokens.
struct PortableMlp {
  Rows rows;
  int64_t hidden = 0, inter = 0;
  moec_dtype dtype = 0;
  bool gated = false;
  RowOperand x;  // gathered tokens, or rows of their own
  DeviceMatrix gate, up, down;
  Preact pre;  // without its data

  int parts() const { return parts_of(gated); }
  Array elements(void* data) const { return {data, dtype}; }
  // Products with a matrix each, of so many rows.
  uint64_t flops(int products, int64_t rows_used) const {
    return uint64_t(products) * product_flops(rows_used, hidden, inter);
  }
};
PortableMlp routed_mlp(const moec_experts_desc& desc, const PlanView& plan,
                       const WeightsView& weights, const void* x, PointerTable& table);
PortableMlp shared_mlp(const moec_experts_desc& desc, int64_t num_tokens,
                       const WeightsView& weights, const void* x, PointerTable& table);

// pre [rows, parts, inter] = x W^T + bias; out [rows, hidden] = act W2^T + weight bias
void run_up(const Op& op, const PortableMlp& mlp, const Array& pre);
void run_down(const Op& op, const PortableMlp& mlp, const void* act, const float* bias_weight,
              const Array& out);

// experts_portable_backward.cpp
moec_size portable_backward_size(const moec_experts_desc& desc, bool wide);
void portable_backward(const Op& op, const ExpertsGradArgs& args, bool wide);

}  // namespace moec::cuda
