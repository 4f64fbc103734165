// SPDX-License-Identifier: Apache-2.0
// What this machine can do at most, measured beside every benchmark.
#pragma once

#include <string>

namespace moec::bench {

struct MachineLimits {
  int threads = 0;
  double fma_f32 = 0;     // FLOP/s from registers, widest vectors, all threads
  double dot_bf16 = 0;    // vdpbf16ps likewise; 0: not here
  double amx_bf16 = 0;    // tile registers, random data; 0: not here
  double read_bytes = 0;  // bytes/s of DRAM: two lines 1 KiB apart, prefetched 32 KiB ahead
  std::string cpu;        // as /proc/cpuinfo names it

  // The fastest bf16 unit with fp32 sums: bf16 widened to fp32 counts as one.
  double bf16() const {
    const double vector = dot_bf16 > fma_f32 ? dot_bf16 : fma_f32;
    return amx_bf16 > vector ? amx_bf16 : vector;
  }
};

// Each figure is the best of several short trials on `threads` threads at once; about a second.
MachineLimits measure_limits(int threads);

}  // namespace moec::bench
