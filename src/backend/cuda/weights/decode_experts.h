// SPDX-License-Identifier: Apache-2.0
// The values of some experts' codes, on the device.
#pragma once

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
  int parts;
  int64_t n, k;
  bool along_k;
  moec_dtype dtype;
  void* to;                      // part i of expert e of these: the (e * parts + i)-th matrix
  int first, count;              // experts
  const int32_t* group_offsets;  // of these: those without a row are left out
  ProductCounters* counters;     // of the product that reads the values: cleared
};
// What all turns have in common: all but from, runs, the experts and counters.
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
cudaError_t launch_decode_experts(const DecodeArgs& args, int multiprocessors, cudaStream_t stream);

}  // namespace moec::cuda
