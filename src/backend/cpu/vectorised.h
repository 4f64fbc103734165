// SPDX-License-Identifier: Apache-2.0
// One plain body, compiled for each instruction set by the compiler's own vectoriser; the set in
// use (isa.h) picks the copy. Every copy gives the same bits: bodies spell their fused
// multiply-adds and fix the order of their sums.
#pragma once

#include <algorithm>
#include <cstdint>

#include "backend/cpu/isa.h"
#include "core/chunks.h"

namespace moec::cpu {

#if defined(__x86_64__)
template <auto kBody, class... Args>
__attribute__((target("avx2,fma,f16c"), flatten)) void call_avx2(Args... args) {
  kBody(args...);
}
template <auto kBody, class... Args>
__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"),
               flatten)) void
call_avx512(Args... args) {
  kBody(args...);
}
#endif

// kBody(args...), compiled for the instruction set in use.
template <auto kBody, class... Args>
void vectorised(Args... args) {
#if defined(__x86_64__)
  const TileKernels* const kernels = &tile_kernels();
  if (kernels == &kTileAvx2) return call_avx2<kBody>(args...);
  if (kernels != &kTilePortable) return call_avx512<kBody>(args...);
#endif
  kBody(args...);
}

}  // namespace moec::cpu
