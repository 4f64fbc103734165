// SPDX-License-Identifier: Apache-2.0
// The products of tiles of up to 256 rows whose weights those decode that multiply.
#pragma once

#include <type_traits>

#include "backend/cuda/sm90/column_decoder.cuh"
#include "backend/cuda/sm90/epilogue_wide.cuh"
#include "backend/cuda/sm90/register_decoder.cuh"

namespace moec::cuda {

// Of codes along k, or along the features.
template <typename C>
using WideDecoder =
    std::conditional_t<C::kMajor == Major::kK, FragmentDecoder<C>, ColumnDecoder<C>>;

__device__ __forceinline__ void copy_fragments(const Fragments& from, Fragments& to) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
#pragma unroll
    for (int i = 0; i < 4; ++i) to[step][i] = from[step][i];
}

// A k-block of a tile's kN rows is multiplied while the fragments of the next one are made, and the
// codes of the one behind it are loaded.
template <typename C, int kN>
__device__ __forceinline__ void multiply_wide(WideAccumulators& acc, typename C::Stages& ring,
                                              typename C::CodeRing& codes, WideDecoder<C>& decoder,
                                              const RowTile& tile, const typename C::Params& p) {
  const uint32_t n = operand_descriptor(ring.first_m(), kBlockBytes);
  Fragments even, odd;
  typename WideDecoder<C>::Codes own;
  const auto load = [&] {
    codes.wait_full();
    decoder.load(codes.stage(), own);
    own.settle();  // in front of what follows
    codes.release(decoder.zero_of(own));
  };
  const auto decode = [&](int quarter, Fragments& f) { decoder.make(quarter, own, f); };
  // meanwhile(step): of gradients behind the products of each step, since a warp waits at a product
  // for the one before. Of others the compiler has a better order.
  constexpr bool kBetween = C::kMajor == Major::kMN;
  const auto multiply_block = [&](int kb, const Fragments& f, const auto& meanwhile) {
    ring.wait_full();
    const uint32_t at_n = n + ring.ahead();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (kBetween || step == 0) wgmma_fence();
      wgmma_wide<kN>(acc, f[step], at_n + step * kStepK16<Major::kK>, step == 0 ? kb : 1);
      if (kBetween || step == kSteps - 1) wgmma_commit();
      if (kBetween) meanwhile(step);
    }
    ring.advance();
    if constexpr (!kBetween)
#pragma unroll
      for (int step = 0; step < kSteps; ++step) meanwhile(step);
    wgmma_wait<0>();
    ring.release_previous(decoder.lane());
  };
  const int last = p.narrow_from - 1;  // of codes
  const auto multiply_codes = [&](int kb, const Fragments& f, Fragments& next) {
    multiply_block(kb, f, [&](int step) {
      if (step == 0) decoder.take_scales(kb + 1);
      decode(step, next);
      if (step == kSteps - 1 && kb + 2 <= last) load();
    });
  };
  load();
  decoder.take_scales(0);
#pragma unroll
  for (int quarter = 0; quarter < kSteps; ++quarter) decode(quarter, even);
  if (last > 0) load();
  int kb = -(last & 1);  // the last one's fragments are the even ones
  if (kb < 0) copy_fragments(even, odd);
#pragma unroll 1
  for (; kb < last; kb += 2) {
    if (kb >= 0) multiply_codes(kb, even, odd);
    multiply_codes(kb + 1, odd, even);
  }
  multiply_block(last, even, [&](int step) {
    if (step == kSteps - 1 && p.rank > 0) decoder.take_factors(tile, 0, odd);
  });
#pragma unroll 1
  for (kb = p.narrow_from; kb < p.k_blocks; ++kb) {
    if (kb > p.narrow_from) decoder.take_factors(tile, (kb - p.narrow_from) * kTileK, odd);
    multiply_block(kb, odd, [](int) {});
  }
#pragma unroll
  for (float& sum : acc) asm volatile("" : "+f"(sum));
}

// A tile whose features this group has none of.
template <typename C>
__device__ __forceinline__ void pass_wide(typename C::Stages& ring, typename C::CodeRing& codes,
                                          const WideDecoder<C>& decoder,
                                          const typename C::Params& p) {
  for (int kb = 0; kb < p.k_blocks; ++kb) {
    if (kb < p.narrow_from) {
      codes.wait_full();
      codes.release();
    }
    ring.wait_full();
    ring.advance();
    ring.release_previous(decoder.lane());
  }
}

template <typename C>
__device__ __forceinline__ void consume_wide(const typename C::Params& p, TileQueue& queue,
                                             typename C::Stages& ring,
                                             const typename C::ConsumerGroup& group,
                                             uint32_t memory) {
  typename C::Epilogue epilogue;
  typename C::CodeRing codes(memory + C::kCodeRing, memory + C::kCodeBarriers);
  WideDecoder<C> decoder(p, memory + C::kCodes, group.index);
  RowTile tile, next;
  bool more = queue.take(tile);
  if (more) decoder.begin(tile);
  for (; more; tile = next) {
    const int feature =
        first_feature(p, tile.feature_tile) + C::Epilogue::kGroupFeatures * group.index;
    if (feature >= feature_end(p, tile)) {
      pass_wide<C>(ring, codes, decoder, p);
      epilogue.pass(p, tile, group);
      more = queue.take(next);
      if (more) decoder.begin(next);
      continue;
    }
    WideAccumulators acc;
    const auto multiply = [&]<int kN>(std::integral_constant<int, kN>) {
      multiply_wide<C, kN>(acc, ring, codes, decoder, tile, p);
    };
    switch ((tile.rows + kWideStep - 1) / kWideStep) {
      case 1:
      case 2:
      case 3:
      case 4:
        multiply(std::integral_constant<int, 128>());
        break;
      case 5:
        multiply(std::integral_constant<int, 160>());
        break;
      case 6:
        multiply(std::integral_constant<int, 192>());
        break;
      case 7:
        multiply(std::integral_constant<int, 224>());
        break;
      default:
        multiply(std::integral_constant<int, 256>());
    }
    more = queue.take(next);
    if (more) decoder.begin(next);
    C::Epilogue::add_biases(p, tile, group, acc);
    epilogue.finish(p, tile, group, acc);
  }
  epilogue.end(p, group);
}

}  // namespace moec::cuda
