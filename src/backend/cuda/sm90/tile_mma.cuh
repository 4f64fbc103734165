// SPDX-License-Identifier: Apache-2.0
// Multiply-accumulate of one tile by one consumer warpgroup: two accumulators of 64 features each
// (blocks `group` and 2 + group of the m operand: a gate and an up block, or two plain ones)
// against the n operand that both warpgroups share.
#pragma once

#include "backend/cuda/sm90/tile_ring.cuh"

namespace moec::cuda {

template <int kColumns>
struct TileAccumulators {
  float first[kColumns / 2], second[kColumns / 2];
};
using Accumulators = TileAccumulators<kMaxTileN>;

// Steps kBegin to kEnd of 16 k of a k-block. keep = 0: nothing is accumulated yet.
template <typename Element, int kN, Major kMajorM, Major kMajorN, int kBegin, int kEnd,
          int kRegisters>
__device__ __forceinline__ void multiply_steps(float (&acc)[kRegisters], uint32_t m, uint32_t n,
                                               int keep) {
  wgmma<Element, kN, kMajorM, kMajorN, kEnd - kBegin>(
      acc, m + kBegin * kStepK16<kMajorM>, n + kBegin * kStepK16<kMajorN>, kBegin == 0 ? keep : 1);
}

// All k-blocks of a tile; the last one is left in flight for finish_multiply. The queue of the
// tensor cores is short: who issues a whole k-block waits about as long as it takes. So the stage
// of k-block kb - 1, for which the loads are waiting, is given back when kb has begun, and only
// then the rest of kb is issued: the first accumulator's products, then the second's, as taking
// turns costs energy. kBlocks: 1 leaves out the second accumulator. kFences: the n operand was
// written by cp.async, that is by ordinary stores, and no warp relays it. behind(kb) runs while
// k-block kb is multiplied; it must not touch the accumulators.
constexpr int kFirstSteps = 1, kSteps = kTileK / 16;  // of 16 k

template <typename Element, int kN, int kBlocks, Major kMajorM, Major kMajorN, bool kFences,
          int kColumns, typename Stages, typename Behind>
__device__ __forceinline__ void multiply(TileAccumulators<kColumns>& acc, Stages& ring, int group,
                                         int k_blocks, Behind behind) {
  const int lane = threadIdx.x & 31;
  const uint32_t first = operand_descriptor(ring.first_m(), kBlockBytes);
  const uint32_t m = first + group * (kBlockBytes >> 4), n = first + (kOperandMBytes >> 4);
  const auto multiply_block = [&](int kb) {
    ring.wait_full();
    if constexpr (kFences) ptx::fence_proxy_async();
    wgmma_fence();
    const uint32_t first_m = m + ring.ahead(), at_n = n + ring.ahead();
    multiply_steps<Element, kN, kMajorM, kMajorN, 0, kFirstSteps>(acc.first, first_m, at_n, kb);
    wgmma_commit();
    wgmma_wait<1>();
    if (kb > 0) ring.release_previous(lane);
    multiply_steps<Element, kN, kMajorM, kMajorN, kFirstSteps, kSteps>(acc.first, first_m, at_n, 1);
    if constexpr (kBlocks > 1) {
      const uint32_t second_m = first_m + (2 * kBlockBytes >> 4);
      multiply_steps<Element, kN, kMajorM, kMajorN, 0, kSteps>(acc.second, second_m, at_n, kb);
    }
    wgmma_commit();
    behind(kb);
    ring.advance();
  };
  if constexpr (kBlocks > 1) {
#pragma unroll 1  // else the compiler makes two copies of what is long enough
    for (int kb = 0; kb < k_blocks; ++kb) multiply_block(kb);
  } else {
    for (int kb = 0; kb < k_blocks; ++kb) multiply_block(kb);
  }
}

// All products are done. What reads the accumulators stays behind the wait: where a tile leaves
// some of them undefined, the compiler would otherwise move an operation on them in front of it.
template <int kColumns>
__device__ __forceinline__ void wait_products(TileAccumulators<kColumns>& acc) {
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) {
    asm volatile("" : "+f"(acc.first[i]), "+f"(acc.second[i]));
  }
}

// Wait for the accumulators and free the last stage. Between multiply and this there is time to
// spend.
template <int kColumns, typename Stages>
__device__ __forceinline__ void finish_multiply(TileAccumulators<kColumns>& acc,
                                                const Stages& ring) {
  wait_products(acc);
  ring.release_previous(threadIdx.x & 31);
}

// The k-blocks of a tile none of whose features this warpgroup has.
template <typename Stages, typename Behind>
__device__ __forceinline__ void pass_over(Stages& ring, int k_blocks, Behind behind) {
  for (int kb = 0; kb < k_blocks; ++kb) {
    ring.wait_full();
    behind(kb);
    ring.advance();
    ring.release_previous(threadIdx.x & 31);
  }
}

// multiply with the number of columns known only now: the next multiple of kRowStep.
template <typename Element, Major kMajorM, bool kFences, int kColumns, typename Stages,
          typename Behind>
__device__ __forceinline__ void multiply_rows(TileAccumulators<kColumns>& acc, Stages& ring,
                                              int group, int k_blocks, int rows, Behind behind) {
#define MOEC_CASE(n)                                                                              \
  case n:                                                                                         \
    if constexpr (kRowStep * n <= Stages::kRows) {                                                \
      multiply<Element, kRowStep * n, 2, kMajorM, Major::kK, kFences>(acc, ring, group, k_blocks, \
                                                                      behind);                    \
    }                                                                                             \
    break
  switch ((rows + kRowStep - 1) / kRowStep) {
    MOEC_CASE(1);
    MOEC_CASE(2);
    MOEC_CASE(3);
    MOEC_CASE(4);
    MOEC_CASE(5);
    MOEC_CASE(6);
    MOEC_CASE(7);
    MOEC_CASE(8);
    MOEC_CASE(9);
    MOEC_CASE(10);
    MOEC_CASE(11);
    MOEC_CASE(12);
    MOEC_CASE(13);
    MOEC_CASE(14);
    MOEC_CASE(15);
    MOEC_CASE(16);
    MOEC_CASE(17);
    MOEC_CASE(18);
  }
#undef MOEC_CASE
}

}  // namespace moec::cuda
