// SPDX-License-Identifier: Apache-2.0
// The ways to run the experts. Each takes the calls that its kernels can do; the first of the table
// in experts.cpp that takes a call runs it. All keep the same things in `saved`, so that forward
// and backward of one step may go different ways.
#pragma once

#include <vector>

#include "backend/cuda/device/op.h"

namespace moec::cuda {

struct ExpertsPath {
  const char* name;  // for MOEC_CUDA_KERNELS and describe
  bool hopper;       // kernels of compute capability 9.0 only
  // Why it never takes such a description, or null.
  const char* (*refuses)(const moec_experts_desc& desc);
  // Queue the whole call, or say why not before anything is queued.
  const char* (*forward)(const Op& op, const ExpertsArgs& args);
  const char* (*backward)(const Op& op, const ExpertsGradArgs& args);
  void (*measure)(const moec_experts_desc& desc, moec_size& forward, moec_size& backward);
  const char* kernels;  // JSON members that say its kernels and tiles
};

extern const ExpertsPath kSmallPath;  // experts_small.cpp: few tokens
extern const ExpertsPath kFastPath;   // experts_fast.cpp: wgmma
// experts_portable.cpp: everything; the second where no path is Hopper's (Intermediates: wide)
extern const ExpertsPath kPortablePath, kPortableWidePath;

// In the order of the table: those that a device has and MOEC_CUDA_KERNELS allows. Throws when that
// leaves none.
std::vector<const ExpertsPath*> experts_paths(int major, int minor);

// Products of one matrix over all rows.
inline uint64_t product_flops(int64_t rows, int64_t hidden, int64_t inter) {
  return 2 * uint64_t(rows) * uint64_t(hidden * inter);
}

}  // namespace moec::cuda
