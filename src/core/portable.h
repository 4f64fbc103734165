// SPDX-License-Identifier: Apache-2.0
// What compilers spell differently.
#pragma once

#if defined(__CUDACC__)
#define MOEC_HD __host__ __device__ inline
#else
#define MOEC_HD inline
#endif

#define MOEC_RESTRICT __restrict__

namespace moec {
inline constexpr int kCacheLine = 64;  // bytes; also the alignment of every region of a workspace
}
