// SPDX-License-Identifier: Apache-2.0
// The products of tiles of up to 256 rows whose weights those decode that multiply.
#pragma once

#include "backend/cuda/sm90/epilogue_wide.cuh"
#include "backend/cuda/sm90/register_decoder.cuh"

namespace moec::cuda {

// A k-block of a tile's kN rows is multiplied while the next one is decoded, and the codes of the
// one behind it are loaded.
template <typename C, int kN>
__device__ __forceinline__ void multiply_wide(WideAccumulators& acc, typename C::Stages& ring,
                                              typename C::CodeRing& codes,
                                              FragmentDecoder<C>& decoder, int k_blocks) {
  const uint32_t n = operand_descriptor(ring.first_m(), kBlockBytes);
  Fragments even, odd;
  typename FragmentDecoder<C>::Codes own;
  const auto load = [&] {
    codes.wait_full();
    decoder.load(codes.stage(), own);
    for (auto& row : own.words)  // in front of what follows
      for (auto& half : row)
        for (uint32_t& word : half) asm volatile("" : "+r"(word));
    codes.release();
  };
  const auto decode = [&](int kb, Fragments& f) {
    decoder.take_scales(kb);
    decoder.add_scales(own);
    decoder.template decode<0>(own, f);
#pragma unroll
    for (int step = 0; step < kSteps; ++step)  // likewise
      asm volatile("" : "+r"(f[step][0]), "+r"(f[step][1]), "+r"(f[step][2]), "+r"(f[step][3]));
  };
  const auto multiply_block = [&](int kb, const Fragments& f, Fragments& next) {
    ring.wait_full();
    if constexpr (C::kFences) ptx::fence_proxy_async();
    const uint32_t at_n = n + ring.ahead();
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      wgmma_wide<typename C::Element, kN>(acc, f[step], at_n + step * kStepK16<Major::kK>,
                                          step == 0 ? kb : 1);
    wgmma_commit();
    ring.advance();
    decode(kb + 1, next);  // behind the last one of what is there: no branch moves registers
    if (kb + 2 < k_blocks) load();
    wgmma_wait<0>();
    ring.release_previous(decoder.lane());
  };
  load();
  decode(0, even);
  if (k_blocks > 1) load();
#pragma unroll 1
  for (int kb = 0; kb < k_blocks; kb += 2) {
    multiply_block(kb, even, odd);
    if (kb + 1 < k_blocks) multiply_block(kb + 1, odd, even);
  }
#pragma unroll
  for (int i = 0; i < kWideTileN / 2; ++i) asm volatile("" : "+f"(acc[i]));
}

template <typename C>
__device__ __forceinline__ void consume_wide(const typename C::Params& p, TileQueue& queue,
                                             typename C::Stages& ring,
                                             const typename C::ConsumerGroup& group,
                                             uint32_t memory) {
  typename C::Epilogue epilogue;
  typename C::CodeRing codes(memory + C::kCodeStages, memory + C::kCodeBarriers);
  FragmentDecoder<C> decoder(p, memory + C::kCodes, group.index);
  RowTile tile, next;
  bool more = queue.take(tile);
  if (more) decoder.begin(tile);
  for (; more; tile = next) {
    const int feature =
        first_feature(p, tile.feature_tile) + C::Epilogue::kGroupFeatures * group.index;
    if (feature >= feature_end(p, tile)) {
      for (int kb = 0; kb < p.k_blocks; ++kb) {
        codes.wait_full();
        codes.release();
        ring.wait_full();
        ring.advance();
        ring.release_previous(decoder.lane());
      }
      epilogue.pass(p, tile, group);
      more = queue.take(next);
      if (more) decoder.begin(next);
      continue;
    }
    WideAccumulators acc;
#define MOEC_CASE(n)                                                        \
  case n:                                                                   \
    multiply_wide<C, kWideStep * n>(acc, ring, codes, decoder, p.k_blocks); \
    break
    switch ((tile.rows + kWideStep - 1) / kWideStep) {
      case 1:
        MOEC_CASE(2);
        MOEC_CASE(3);
        MOEC_CASE(4);
        MOEC_CASE(5);
        MOEC_CASE(6);
        MOEC_CASE(7);
        MOEC_CASE(8);
    }
#undef MOEC_CASE
    more = queue.take(next);
    if (more) decoder.begin(next);
    C::Epilogue::add_biases(p, tile, group, acc);
    epilogue.finish(p, tile, group, acc);
  }
  epilogue.end(p, group);
}

}  // namespace moec::cuda
