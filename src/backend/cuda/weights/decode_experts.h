// SPDX-License-Identifier: Apache-2.0
// The values of some experts' codes, on the device.
#pragma once

#include <algorithm>

#include "backend/cuda/device/op.h"
#include "backend/cuda/weights/decoded_experts.h"

namespace moec::cuda {

// What the CTAs of a product count together, in device memory.
struct ProductCounters {
  unsigned work;   // that was taken
  unsigned steps;  // that all clusters have made (sm90/pace.cuh)
};

struct DecodeArgs {
  ExpertMatrix from[2];  // with arrays of pointers on the device
  CodeRuns runs[2];      // of each
  bool columns;          // of all: has_columns()
  int parts;
  int64_t n, k;
  bool along_k;
  moec_dtype dtype;
  void* to;                      // part i of expert e of these: the (e * parts + i)-th matrix
  int first, count;              // experts
  const int32_t* group_offsets;  // of these: those without a row are left out
  int64_t max_rows;              // of all experts together
  ProductCounters* counters;     // of the product that reads the values: cleared

  // Of the matrices of a turn, at most so many are decoded.
  uint32_t busy_matrices() const { return uint32_t(std::min<int64_t>(count, max_rows) * parts); }
};
// What all turns have in common: all but from and what it tells, the experts, rows and counters.
inline DecodeArgs decode_args(const DecodedExperts& experts) {
  DecodeArgs args = {};
  args.parts = experts.parts;
  args.n = experts.n;
  args.k = experts.k;
  args.along_k = experts.along_k;
  args.dtype = experts.dtype;
  args.to = experts.values;
  return args;
}
// What args.from tells.
inline void set_sources(DecodeArgs& args) {
  args.columns = true;
  for (int i = 0; i < args.parts; ++i) {
    const ExpertMatrix& from = args.from[i];
    args.runs[i] = code_runs(from, args.along_k, begins_in_words(from));
    args.columns = args.columns && has_columns(from, args.along_k);
  }
}
cudaError_t launch_decode_experts(const DecodeArgs& args, int multiprocessors, cudaStream_t stream);
cudaError_t launch_decode_columns(const DecodeArgs& args, int multiprocessors, cudaStream_t stream);
inline cudaError_t launch_decode(const DecodeArgs& args, int multiprocessors, cudaStream_t stream) {
  return (args.columns ? launch_decode_columns : launch_decode_experts)(args, multiprocessors,
                                                                        stream);
}

}  // namespace moec::cuda
