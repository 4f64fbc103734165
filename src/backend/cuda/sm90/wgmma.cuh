// SPDX-License-Identifier: Apache-2.0
// wgmma: D[64, N] += A[64, 16] * B[N, 16]^T by one warpgroup, both operands in shared memory with
// the 128-byte swizzle, fp32 accumulators.
//
// Fragment of D: element i of thread t (warp w = t / 32 % 4, lane l = t % 32) is
//   row    16 w + l / 4 + 8 * (i / 2 % 2)
//   column 8 * (i / 4) + 2 * (l % 4) + i % 2
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace moec::cuda {

constexpr int kMaxTileN = 128;   // columns of one accumulator: 64 registers a thread
constexpr int kTallTileN = 144;  // where a kernel has registers for them

// Order in which an operand lies in shared memory. Both forms are made of 8 x 128-byte atoms.
enum class Major {
  kK,  // each row holds 64 consecutive k of one m (or n)
  kMN  // each row holds 64 consecutive m (or n) of one k
};

// Descriptor of an operand. Low word: address / 16 in bits 0..13, leading offset / 16 in 16..29.
// High word: stride offset / 16 in 0..13, swizzle of 128 bytes = 1 in 30..31. The stride offset is
// the distance of 8-row atoms; the leading offset, the distance of 64-element panels, matters in
// the MN-major form only. Only the low word varies. The address needs its mask: in the second CTA
// of a cluster it has bit 24 set.
constexpr uint32_t kDescriptorHigh = (1024 >> 4) | 1u << 30;
__device__ __forceinline__ uint32_t operand_descriptor(uint32_t address, uint32_t panel_bytes) {
  return (address >> 4 & 0x3fff) | (panel_bytes >> 4) << 16;
}
// What 16 further k add to a descriptor.
template <Major kMajor>
constexpr uint32_t kStepK16 = (kMajor == Major::kK ? 32 : 2048) >> 4;

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Operand lists: four registers for each 8 columns.
#define MOEC_P0 "%0,%1,%2,%3"
#define MOEC_P1 MOEC_P0 ",%4,%5,%6,%7"
#define MOEC_P2 MOEC_P1 ",%8,%9,%10,%11"
#define MOEC_P3 MOEC_P2 ",%12,%13,%14,%15"
#define MOEC_P4 MOEC_P3 ",%16,%17,%18,%19"
#define MOEC_P5 MOEC_P4 ",%20,%21,%22,%23"
#define MOEC_P6 MOEC_P5 ",%24,%25,%26,%27"
#define MOEC_P7 MOEC_P6 ",%28,%29,%30,%31"
#define MOEC_P8 MOEC_P7 ",%32,%33,%34,%35"
#define MOEC_P9 MOEC_P8 ",%36,%37,%38,%39"
#define MOEC_P10 MOEC_P9 ",%40,%41,%42,%43"
#define MOEC_P11 MOEC_P10 ",%44,%45,%46,%47"
#define MOEC_P12 MOEC_P11 ",%48,%49,%50,%51"
#define MOEC_P13 MOEC_P12 ",%52,%53,%54,%55"
#define MOEC_P14 MOEC_P13 ",%56,%57,%58,%59"
#define MOEC_P15 MOEC_P14 ",%60,%61,%62,%63"
#define MOEC_P16 MOEC_P15 ",%64,%65,%66,%67"
#define MOEC_P17 MOEC_P16 ",%68,%69,%70,%71"
#define MOEC_R(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define MOEC_R0 MOEC_R(0)
#define MOEC_R1 MOEC_R0, MOEC_R(4)
#define MOEC_R2 MOEC_R1, MOEC_R(8)
#define MOEC_R3 MOEC_R2, MOEC_R(12)
#define MOEC_R4 MOEC_R3, MOEC_R(16)
#define MOEC_R5 MOEC_R4, MOEC_R(20)
#define MOEC_R6 MOEC_R5, MOEC_R(24)
#define MOEC_R7 MOEC_R6, MOEC_R(28)
#define MOEC_R8 MOEC_R7, MOEC_R(32)
#define MOEC_R9 MOEC_R8, MOEC_R(36)
#define MOEC_R10 MOEC_R9, MOEC_R(40)
#define MOEC_R11 MOEC_R10, MOEC_R(44)
#define MOEC_R12 MOEC_R11, MOEC_R(48)
#define MOEC_R13 MOEC_R12, MOEC_R(52)
#define MOEC_R14 MOEC_R13, MOEC_R(56)
#define MOEC_R15 MOEC_R14, MOEC_R(60)
#define MOEC_R16 MOEC_R15, MOEC_R(64)
#define MOEC_R17 MOEC_R16, MOEC_R(68)
#define MOEC_STEP(keep, a, b, ta, tb, n, type, p)                                                \
  "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {" p "}, " a ", " b ", " keep \
  ", 1, 1, " ta ", " tb ";\n"
#define MOEC_STEPS1(ta, tb, a0, b0, a1, b1, a2, b2, a3, b3, ...) \
  MOEC_STEP("keep", a0, b0, ta, tb, __VA_ARGS__)
#define MOEC_STEPS3(ta, tb, a0, b0, a1, b1, a2, b2, a3, b3, ...) \
  MOEC_STEP("keep", a0, b0, ta, tb, __VA_ARGS__)                 \
  MOEC_STEP("on", a1, b1, ta, tb, __VA_ARGS__)                   \
  MOEC_STEP("on", a2, b2, ta, tb, __VA_ARGS__)
#define MOEC_STEPS4(ta, tb, a0, b0, a1, b1, a2, b2, a3, b3, ...)   \
  MOEC_STEPS3(ta, tb, a0, b0, a1, b1, a2, b2, a3, b3, __VA_ARGS__) \
  MOEC_STEP("on", a3, b3, ta, tb, __VA_ARGS__)
#define MOEC_DESCRIPTORS(i) \
  "l"(descriptor(a + i * kStepK16<kA>)), "l"(descriptor(b + i * kStepK16<kB>))
#define MOEC_DESCRIPTORS1 MOEC_DESCRIPTORS(0)
#define MOEC_DESCRIPTORS3 MOEC_DESCRIPTORS1, MOEC_DESCRIPTORS(1), MOEC_DESCRIPTORS(2)
#define MOEC_DESCRIPTORS4 MOEC_DESCRIPTORS3, MOEC_DESCRIPTORS(3)
#define MOEC_WGMMA(steps, r, s, ...)                                                             \
  asm volatile("{\n.reg .pred keep, on;\nsetp.ne.b32 keep, " s ", 0;\nsetp.eq.b32 on, " s ", " s \
               ";\n" MOEC_STEPS##steps(__VA_ARGS__) "}"                                          \
               : MOEC_R##r                                                                       \
               : "r"(keep), "n"(int(kA)), "n"(int(kB)), MOEC_DESCRIPTORS##steps)
#define MOEC_WGMMA_TYPE(steps, n, i, ...)                       \
  if constexpr (kSteps == steps) {                              \
    if constexpr (kBf16)                                        \
      MOEC_WGMMA(steps, i, __VA_ARGS__, #n, "bf16", MOEC_P##i); \
    else                                                        \
      MOEC_WGMMA(steps, i, __VA_ARGS__, #n, "f16", MOEC_P##i);  \
  }
#define MOEC_WGMMA_N(n, ...)           \
  if constexpr (kN == n) {             \
    MOEC_WGMMA_TYPE(1, n, __VA_ARGS__) \
    MOEC_WGMMA_TYPE(3, n, __VA_ARGS__) \
    MOEC_WGMMA_TYPE(4, n, __VA_ARGS__) \
  }

// kSteps neighbouring steps of 16 k: 1, 3 or 4. keep = 0 overwrites d, so that the first one needs
// no cleared accumulators. a and b are low words of the first one's descriptors. One statement has
// all steps, because the compiler takes long for each that has so many operands.
template <typename Element, int kN, Major kA, Major kB, int kSteps, int kRegisters>
__device__ __forceinline__ void wgmma(float (&d)[kRegisters], uint32_t a, uint32_t b, int keep) {
  static_assert(kN <= 2 * kRegisters && (kSteps == 1 || kSteps == 3 || kSteps == 4));
  constexpr bool kBf16 = sizeof(Element) == 2 && __is_same(Element, __nv_bfloat16);
  static_assert(kBf16 || __is_same(Element, __half));
  const auto descriptor = [](uint32_t low) { return uint64_t(kDescriptorHigh) << 32 | low; };
  MOEC_WGMMA_N(8, 0, "%4", "%5", "%6", "%7", "%8", "%9", "%10", "%11", "%12", "%13", "%14")
  MOEC_WGMMA_N(16, 1, "%8", "%9", "%10", "%11", "%12", "%13", "%14", "%15", "%16", "%17", "%18")
  MOEC_WGMMA_N(24, 2, "%12", "%13", "%14", "%15", "%16", "%17", "%18", "%19", "%20", "%21", "%22")
  MOEC_WGMMA_N(32, 3, "%16", "%17", "%18", "%19", "%20", "%21", "%22", "%23", "%24", "%25", "%26")
  MOEC_WGMMA_N(40, 4, "%20", "%21", "%22", "%23", "%24", "%25", "%26", "%27", "%28", "%29", "%30")
  MOEC_WGMMA_N(48, 5, "%24", "%25", "%26", "%27", "%28", "%29", "%30", "%31", "%32", "%33", "%34")
  MOEC_WGMMA_N(56, 6, "%28", "%29", "%30", "%31", "%32", "%33", "%34", "%35", "%36", "%37", "%38")
  MOEC_WGMMA_N(64, 7, "%32", "%33", "%34", "%35", "%36", "%37", "%38", "%39", "%40", "%41", "%42")
  MOEC_WGMMA_N(72, 8, "%36", "%37", "%38", "%39", "%40", "%41", "%42", "%43", "%44", "%45", "%46")
  MOEC_WGMMA_N(80, 9, "%40", "%41", "%42", "%43", "%44", "%45", "%46", "%47", "%48", "%49", "%50")
  MOEC_WGMMA_N(88, 10, "%44", "%45", "%46", "%47", "%48", "%49", "%50", "%51", "%52", "%53", "%54")
  MOEC_WGMMA_N(96, 11, "%48", "%49", "%50", "%51", "%52", "%53", "%54", "%55", "%56", "%57", "%58")
  MOEC_WGMMA_N(104, 12, "%52", "%53", "%54", "%55", "%56", "%57", "%58", "%59", "%60", "%61", "%62")
  MOEC_WGMMA_N(112, 13, "%56", "%57", "%58", "%59", "%60", "%61", "%62", "%63", "%64", "%65", "%66")
  MOEC_WGMMA_N(120, 14, "%60", "%61", "%62", "%63", "%64", "%65", "%66", "%67", "%68", "%69", "%70")
  MOEC_WGMMA_N(128, 15, "%64", "%65", "%66", "%67", "%68", "%69", "%70", "%71", "%72", "%73", "%74")
  MOEC_WGMMA_N(136, 16, "%68", "%69", "%70", "%71", "%72", "%73", "%74", "%75", "%76", "%77", "%78")
  MOEC_WGMMA_N(144, 17, "%72", "%73", "%74", "%75", "%76", "%77", "%78", "%79", "%80", "%81", "%82")
}

// The same with the A operand in registers, of 32 columns. Its fragment is that of D with two
// elements each in the place of one: a[0] and a[1] of rows t / 4 and 8 more, columns 2 (t % 4) and
// the next; a[2] and a[3] of columns 8 further on.
#define MOEC_WGMMA_A(type)                                                     \
  asm volatile(                                                                \
      "{\n.reg .pred keep;\nsetp.ne.b32 keep, %21, 0;\n"                       \
      "wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type " {" MOEC_P3 \
      "}, {%16,%17,%18,%19}, %20, keep, 1, 1, %22;\n}"                         \
      : MOEC_R3                                                                \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_desc), "r"(keep), "n"(int(kB)))
template <typename Element, Major kB>
__device__ __forceinline__ void wgmma(float (&d)[16], const uint32_t (&a)[4], uint32_t b,
                                      int keep) {
  const uint64_t b_desc = uint64_t(kDescriptorHigh) << 32 | b;
  if constexpr (__is_same(Element, __nv_bfloat16))
    MOEC_WGMMA_A("bf16");
  else
    MOEC_WGMMA_A("f16");
}

#undef MOEC_WGMMA_A
#undef MOEC_WGMMA_N
#undef MOEC_WGMMA_TYPE
#undef MOEC_WGMMA
#undef MOEC_DESCRIPTORS4
#undef MOEC_DESCRIPTORS3
#undef MOEC_DESCRIPTORS1
#undef MOEC_DESCRIPTORS
#undef MOEC_STEPS4
#undef MOEC_STEPS3
#undef MOEC_STEPS1
#undef MOEC_STEP
#undef MOEC_R0
#undef MOEC_R1
#undef MOEC_R2
#undef MOEC_R3
#undef MOEC_R4
#undef MOEC_R5
#undef MOEC_R6
#undef MOEC_R7
#undef MOEC_R8
#undef MOEC_R9
#undef MOEC_R10
#undef MOEC_R11
#undef MOEC_R12
#undef MOEC_R13
#undef MOEC_R14
#undef MOEC_R15
#undef MOEC_R16
#undef MOEC_R17
#undef MOEC_R
#undef MOEC_P0
#undef MOEC_P1
#undef MOEC_P2
#undef MOEC_P3
#undef MOEC_P4
#undef MOEC_P5
#undef MOEC_P6
#undef MOEC_P7
#undef MOEC_P8
#undef MOEC_P9
#undef MOEC_P10
#undef MOEC_P11
#undef MOEC_P12
#undef MOEC_P13
#undef MOEC_P14
#undef MOEC_P15
#undef MOEC_P16
#undef MOEC_P17

}  // namespace moec::cuda
