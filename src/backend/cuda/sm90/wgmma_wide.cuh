// SPDX-License-Identifier: Apache-2.0
// wgmma with the A operand in registers, of 128 to 256 columns: D[64, N] += A[64, 16] * B[N, 16]^T.
// Fragments as in wgmma.cuh.
#pragma once

#include "backend/cuda/sm90/wgmma.cuh"

namespace moec::cuda {

constexpr int kWideTileN = 256;

// Operand lists: 16 registers for each 32 columns.
#define MOEC_P0 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define MOEC_P1 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define MOEC_P2 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define MOEC_P3 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define MOEC_P4 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define MOEC_P5 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define MOEC_P6 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define MOEC_P7 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define MOEC_Q1 MOEC_Q0 MOEC_P1
#define MOEC_Q2 MOEC_Q1 MOEC_P2
#define MOEC_Q3 MOEC_Q2 MOEC_P3
#define MOEC_Q4 MOEC_Q3 MOEC_P4
#define MOEC_Q5 MOEC_Q4 MOEC_P5
#define MOEC_Q6 MOEC_Q5 MOEC_P6
#define MOEC_Q7 MOEC_Q6 MOEC_P7
#define MOEC_Q0 MOEC_P0
#define MOEC_R4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define MOEC_R16(i) MOEC_R4(i), MOEC_R4(i + 4), MOEC_R4(i + 8), MOEC_R4(i + 12)
#define MOEC_R0 MOEC_R16(0)
#define MOEC_R1_ MOEC_R0, MOEC_R16(16)
#define MOEC_R2_ MOEC_R1_, MOEC_R16(32)
#define MOEC_R3_ MOEC_R2_, MOEC_R16(48)
#define MOEC_R4_ MOEC_R3_, MOEC_R16(64)
#define MOEC_R5_ MOEC_R4_, MOEC_R16(80)
#define MOEC_R6_ MOEC_R5_, MOEC_R16(96)
#define MOEC_R7_ MOEC_R6_, MOEC_R16(112)
#define MOEC_R0_ MOEC_R0
#define MOEC_WGMMA_A(n, p, r, a0, a1, a2, a3, b, s, type)                                       \
  asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, " s                                      \
               ", 0;\n"                                                                         \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" p "}, {" a0 \
               "," a1 "," a2 "," a3 "}, " b ", keep, 1, 1, 0;\n}"                               \
               : r                                                                              \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_desc), "r"(keep))
#define MOEC_WGMMA_N(n, c, ...) \
  if constexpr (kN == n) MOEC_WGMMA_A(n, MOEC_Q##c, MOEC_R##c##_, __VA_ARGS__, "bf16")
// Of bf16. b: low word of the descriptor of kN rows along k. keep = 0 overwrites d.
template <int kN>
__device__ __forceinline__ void wgmma_wide(float (&d)[kWideTileN / 2], const uint32_t (&a)[4],
                                           uint32_t b, int keep) {
  const uint64_t b_desc = uint64_t(kDescriptorHigh) << 32 | b;
  MOEC_WGMMA_N(128, 3, "%64", "%65", "%66", "%67", "%68", "%69");
  MOEC_WGMMA_N(160, 4, "%80", "%81", "%82", "%83", "%84", "%85");
  MOEC_WGMMA_N(192, 5, "%96", "%97", "%98", "%99", "%100", "%101");
  MOEC_WGMMA_N(224, 6, "%112", "%113", "%114", "%115", "%116", "%117");
  MOEC_WGMMA_N(256, 7, "%128", "%129", "%130", "%131", "%132", "%133");
}

#undef MOEC_WGMMA_N
#undef MOEC_WGMMA_A
#undef MOEC_R4
#undef MOEC_R16
#undef MOEC_R0
#undef MOEC_R0_
#undef MOEC_R1_
#undef MOEC_R2_
#undef MOEC_R3_
#undef MOEC_R4_
#undef MOEC_R5_
#undef MOEC_R6_
#undef MOEC_R7_
#undef MOEC_P0
#undef MOEC_P1
#undef MOEC_P2
#undef MOEC_P3
#undef MOEC_P4
#undef MOEC_P5
#undef MOEC_P6
#undef MOEC_P7
#undef MOEC_Q0
#undef MOEC_Q1
#undef MOEC_Q2
#undef MOEC_Q3
#undef MOEC_Q4
#undef MOEC_Q5
#undef MOEC_Q6
#undef MOEC_Q7

}  // namespace moec::cuda
