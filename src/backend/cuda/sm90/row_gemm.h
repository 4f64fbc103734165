// SPDX-License-Identifier: Apache-2.0
// What is passed to the kernels of the row GEMMs, and their launch.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "backend/cuda/sm90/gate_form.h"
#include "backend/cuda/sm90/row_gemm_choice.h"

namespace moec::cuda {

// One tensor seen in boxes of 16, 32, .. 144 rows: whatever a tile needs is one copy.
constexpr int kRowBoxes = 9, kWindowRows = 16 * kRowBoxes;
struct RowMaps {
  CUtensorMap of_units[kRowBoxes];
};

// The launch, passed to the kernel as it is. What has no comment is as in RowGemmProblem.
struct RowGemmParams : RowGemmTiles {
  CUtensorMap weight_maps[2];  // gate, up (or one part each of k); plain operands use the first
  RowMaps rows;                // {k, part, row} of the row operand, when it is not gathered: in
                               // windows of kWindowRows rows (tensor_map.h)
  RowMaps out_maps, pre_maps;  // {feature, part, row} of out and pre
  CUtensorMap factor_maps[2];  // of adapters, as weight_maps; of one part where k has two
  RowMaps narrow_rows;         // {rank, 1, row}, as rows
  const void *x, *narrow;
  const int32_t* row_token;
  int64_t x_stride;
  const int32_t* group_offsets;
  int num_experts, features, k_size, rank;
  bool one_factor;  // for all experts
  void* out;
  int64_t out_stride;
  void *pre, *d_pre;
  const float* row_weight;
  float* d_weight_parts;
  bool keeps_act;
  int64_t max_rows;
  bool alternating;
  ExpertBias bias[2];
  GateForm form;  // of the activation
  Early early;
  unsigned* work_counter;  // null: work is dealt in turn
  unsigned* steps;         // null: clusters do not keep pace
  unsigned* done;
};

// Factors of adapters [features, rank], as RowGemmProblem has them.
struct LineFactors {
  const void* base[2];
  int64_t line_stride, expert_stride;  // elements
};
// The same with coded weights: of channels, or of lines.
struct CodedRowGemmParams : RowGemmParams {
  ExpertChannels channels[2];
  bool channels_along_k;  // a channel is an index of k, else a feature
  CodedLines lines;
  LineFactors factors;  // of wide tiles
};

// Whether the gradient of the down projection is made in two kernels (gradient_rows.cu).
inline bool has_gradient_rows(const RowGemmProblem& problem) {
  return problem.op == RowGemm::kGradDown && is_coded(problem);
}
// Why the sm_90a kernels cannot take this problem, or null.
const char* row_gemm_refuses(const RowGemmProblem& problem);
cudaError_t launch_row_gemm(const RowGemmProblem& problem, const RowGemmChoice& choice,
                            cudaStream_t stream);

}  // namespace moec::cuda
