// SPDX-License-Identifier: Apache-2.0
// Row GEMMs of an MLP, as choose() takes them, without a GPU.
#pragma once

#include "backend/cuda/sm90/row_gemm_choice.h"

namespace moec::cuda {

constexpr RowGemmDevice kDevice = {132};

// The operation of an MLP, gate and up in two parts.
inline RowGemmProblem problem(RowGemm op, int64_t rows, int64_t hidden, int64_t inter) {
  const bool of_hidden = op == RowGemm::kDown || op == RowGemm::kGradUp;
  RowGemmProblem p = {};
  p.op = op;
  p.features = of_hidden ? hidden : inter;
  p.k_size = of_hidden ? inter : hidden;
  p.parts = op == RowGemm::kGradUp ? 2 : 1;
  p.max_rows = rows;
  return p;
}

}  // namespace moec::cuda
