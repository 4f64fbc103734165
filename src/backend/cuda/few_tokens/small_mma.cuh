// SPDX-License-Identifier: Apache-2.0
// mma.sync m16n8k16: D[16, 8] += A[16, 16] * B[8, 16]^T by one warp, fp32 accumulators, and how its
// operands come from memory. Of lane l, with g = l / 4 and c = l % 4:
//   A  rows g, g + 8 x k 2c, 2c + 1 (and 8 more)     B  column g x k 2c, 2c + 1 (and 8 more)
//   D  rows g (elements 0, 1) and g + 8 (2, 3) x columns 2c, 2c + 1
#pragma once

#include "backend/cuda/device/element.cuh"

namespace moec::cuda {

template <typename Element>
__device__ __forceinline__ void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                    uint32_t a3, uint32_t b0, uint32_t b1) {
#define MOEC_MMA(type)                                                                \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                 \
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                       \
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1))
  if constexpr (__is_same(Element, __nv_bfloat16)) {
    MOEC_MMA("bf16");
  } else {
    MOEC_MMA("f16");
  }
#undef MOEC_MMA
}

// Both products of 32 k: lane c has k 8c .. 8c + 7 of weight rows g (w0) and g + 8 (w1) and of
// operand row g (x), so k is permuted alike in the two operands.
template <typename Element>
__device__ __forceinline__ void multiply(float (&d)[4], uint4 w0, uint4 w1, uint4 x) {
  mma<Element>(d, w0.x, w1.x, w0.y, w1.y, x.x, x.y);
  mma<Element>(d, w0.z, w1.z, w0.w, w1.w, x.z, x.w);
}

// An 8x8 matrix of 16-bit elements, row l / 4 in lane l, transposed among the lanes.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t pair) {
  uint32_t r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(pair));
  return r;
}

// 16 bytes that are read once: past L1, and with their neighbours on the way to L2.
__device__ __forceinline__ uint4 load_once(const void* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}
// 16 bytes of an operand, or zeros. Not a choice after the load, which would wait for it. kShared:
// others of this multiprocessor read them too; else they may have been written by an earlier grid
// since this one began, and are not looked for in L1.
template <bool kShared>
__device__ __forceinline__ uint4 load_operand(const void* from, bool present) {
  uint4 v;
#define MOEC_LOAD(cache)                                                 \
  asm volatile(                                                          \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"                        \
      "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n" \
      "@p ld.global." cache ".v4.u32 {%0, %1, %2, %3}, [%4];\n}"         \
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)                   \
      : "l"(from), "r"(int(present))                                     \
      : "memory")
  if constexpr (kShared) {
    MOEC_LOAD("ca");
  } else {
    MOEC_LOAD("cg");
  }
#undef MOEC_LOAD
  return v;
}

}  // namespace moec::cuda
