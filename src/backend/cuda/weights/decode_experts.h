// SPDX-License-Identifier: Apache-2.0
// The launches of a product whose experts are decoded once, in turns.
#pragma once

#include "backend/cuda/device/op.h"
#include "backend/cuda/sm90/decoded_experts.h"
#include "backend/cuda/sm90/work_counters.h"

namespace moec::cuda {

struct DecodeArgs {
  ExpertMatrix from[2];  // with arrays of pointers on the device
  CodeRuns runs[2];      // of each
  int parts;
  int64_t n, k;
  bool along_k;
  moec_dtype dtype;
  void* to;                      // part i of expert e of these: the (e * parts + i)-th matrix
  int first, count;              // experts
  const int32_t* group_offsets;  // of these: those without a row are left out
  WorkCounters::Gemm* counters;  // of the product that reads the values: cleared
};
cudaError_t launch_decode_experts(const DecodeArgs& args, int multiprocessors, cudaStream_t stream);

void launch_decoded(const Op& op, const DecodedProduct& product);

}  // namespace moec::cuda
