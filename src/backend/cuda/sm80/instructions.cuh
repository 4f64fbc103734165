// SPDX-License-Identifier: Apache-2.0
// Inline instructions of the portable kernels that device/ptx.cuh does not have.
#pragma once

#include <vector_types.h>

#include <cstdint>

namespace moec::cuda::ptx {

// Copies 16 bytes past L1, or nothing.
__device__ __forceinline__ void copy_async_if(bool wanted, uint32_t dst, const void* src) {
  asm volatile(
      "{\n.reg .pred p;\n"
      "setp.ne.b32 p, %0, 0;\n"
      "@p cp.async.cg.shared.global [%1], [%2], 16;\n}" ::"r"(int(wanted)),
      "r"(dst), "l"(src)
      : "memory");
}
// Copies 4 or 8 bytes, which L1 keeps with their neighbours, or nothing.
template <int kBytes>
__device__ __forceinline__ void copy_async_few(bool wanted, uint32_t dst, const void* src) {
  asm volatile(
      "{\n.reg .pred p;\n"
      "setp.ne.b32 p, %0, 0;\n"
      "@p cp.async.ca.shared.global [%1], [%2], %3;\n}" ::"r"(int(wanted)),
      "r"(dst), "l"(src), "n"(kBytes)
      : "memory");
}
// Asks L2 for a line of global memory.
__device__ __forceinline__ void prefetch(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}
// Loads 1, 2 or 4 bytes of global memory, or nothing.
template <int kBytes>
__device__ __forceinline__ void load_bits_if(bool wanted, uint32_t& bits, const void* from) {
#define MOEC_LOAD_IF(type)                                                                   \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\n@p ld.global." type " %0, [%2];\n}" \
               : "+r"(bits)                                                                  \
               : "r"(int(wanted)), "l"(from))
  if constexpr (kBytes == 4)
    MOEC_LOAD_IF("b32");
  else if constexpr (kBytes == 2)
    MOEC_LOAD_IF("u16");
  else
    MOEC_LOAD_IF("u8");
#undef MOEC_LOAD_IF
}
// 16 bytes of global memory that no kernel writes meanwhile.
__device__ __forceinline__ uint4 load_chunk(const char* from) {
  uint4 v;
  asm("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(from));
  return v;
}
// Copies `bytes`, at most 16, which L1 keeps with their neighbours, and zeros up to 16.
__device__ __forceinline__ void copy_async_kept(uint32_t dst, const void* src, uint32_t bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes)
               : "memory");
}
// 16 bytes of codes, which are read once, or nothing.
__device__ __forceinline__ void load_codes_if(bool wanted, uint4& v, const char* from) {
  asm volatile(
      "{\n.reg .pred p;\n"
      "setp.ne.b32 p, %4, 0;\n"
      "@p ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%5];\n}"
      : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
      : "r"(int(wanted)), "l"(from));
}
#if __CUDA_ARCH__ >= 890
// Two e4m3 as half precision, the lower one first.
__device__ __forceinline__ uint32_t e4m3_halves(uint16_t codes) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
  return halves;
}
#endif
// The same number, which the compiler keeps in a register and does not make again.
__device__ __forceinline__ uint32_t kept(uint32_t x) {
  uint32_t r;
  asm volatile("mov.b32 %0, %1;" : "=r"(r) : "r"(x));
  return r;
}
__device__ __forceinline__ const char* kept(const char* x) {
  const char* r;
  asm volatile("mov.b64 %0, %1;" : "=l"(r) : "l"(x));
  return r;
}

}  // namespace moec::cuda::ptx
