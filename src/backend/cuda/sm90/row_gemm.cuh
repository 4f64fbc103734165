// SPDX-License-Identifier: Apache-2.0
// The row GEMM kernel for sm_90a: features on the m side of wgmma, rows (tokens) on the n side, so
// that a tile may have any number of rows.
//
//   grid     persistent, clusters of two CTAs, 384, 512 or 640 threads, one CTA on an SM
//   roles    warpgroups 1 and 2 multiply and run the epilogue. Of other warps one loads weights and
//            rows not gathered; one finds the tiles; one sends results. They are the first
//            of warpgroup 0, or of warpgroup 3 where all of warpgroup 0 gathers rows by cp.async;
//            there a fourth relays what has been gathered.
//            Where warpgroup 3 does the rest of the epilogue (grad down), it stores the results
//            itself, and the other two warps of warpgroup 0 gather.
//            Coded weights: two warpgroups behind the others decode stages in turn, and the last
//            warp of warpgroup 0 gathers; or those that multiply decode (row_gemm_few.cuh,
//            row_gemm_wide.cuh)
//   traffic  32 KiB of weights a k-block and tile, and 128 bytes a row. The two CTAs start tiles of
//            the same weights together. Where `shares`, each loads half of them for both: fewer
//            bytes leave L2, but a stage waits for the slower of two CTAs. Else each loads its own,
//            and their loaders meet
//   order    each output element is owned by one thread: deterministic
#pragma once

#include "backend/cuda/sm90/line_decoder.cuh"
#include "backend/cuda/sm90/lone_gatherer.cuh"
#include "backend/cuda/sm90/register_decoder.cuh"
#include "backend/cuda/sm90/row_producer.cuh"
#include "backend/cuda/sm90/wide_consumer.cuh"
#include "backend/cuda/sm90/wide_producer.cuh"

namespace moec::cuda {

template <typename C>
constexpr int kSharedBytesOf() {
  if constexpr (C::kCoded) return C::kCodes + WeightDecoders<C>::kBytes;
  if constexpr (C::kInRegisters && C::kMajor == Major::kMN)
    return C::kCodes + FragmentNumbers::kBytes + ColumnScales<C>::kBytes;
  if constexpr (C::kInRegisters) return C::kCodes + FragmentNumbers::kBytes;
  return C::kCodes;
}

// What is held of a finished tile leaves in pieces, spread over the k-blocks of the next one. The
// first waits for the second k-block, when two are queued at the tensor cores.
template <typename C>
__device__ __forceinline__ void consume(const typename C::Params& p, TileQueue& queue,
                                        typename C::Stages& ring,
                                        const typename C::ConsumerGroup& group) {
  using Epilogue = typename C::Epilogue;
  Epilogue epilogue;
  const int stride = max(1, p.k_blocks / Epilogue::kPieces);
  int piece = Epilogue::kPieces, due = 0;
  const auto behind = [&](int kb) {
    if (piece == Epilogue::kPieces || kb < due) return;
    epilogue.copy_piece(p, group, piece++);
    due += stride;
  };
  const auto leave = [&] {
    while (piece < Epilogue::kPieces) epilogue.copy_piece(p, group, piece++);
  };
  // Not at the k-blocks of the other group: the tensor cores are short of work where both move
  // results at once.
  const auto held = [&] {
    piece = 0;
    due = (stride + 1) / 2 - (stride > 1 ? group.index : 0);
  };
  RowTile tile, next;
  for (bool more = queue.take(tile); more; tile = next) {
    const int feature = group_feature(p, tile, group.index), end = feature_end(p, tile);
    if (Epilogue::kSkipsOutside && feature >= end) {
      pass_over(ring, p.k_blocks, behind);
      more = queue.take(next);
      leave();
      if constexpr (C::kFinished) {
        epilogue.hand_nothing(group);
        held();
      }
      continue;
    }
    TileAccumulators<C::kMaxRows> acc;
    if (!Epilogue::kGated && feature + 128 >= end) {  // of two blocks, one is inside
      multiply<typename C::Element, C::kMaxRows, 1, C::kMajor, Major::kK, C::kFences>(
          acc, ring, group.index, p.k_blocks, behind);
    } else {
      multiply_rows<typename C::Element, C::kMajor, C::kFences>(acc, ring, group.index, p.k_blocks,
                                                                tile.rows, behind);
    }
    more = queue.take(next);
    leave();
    finish_multiply(acc, ring);
    if constexpr (C::kCoded && Epilogue::kGated) clear_outside(p, tile, group, acc);
    if constexpr (Epilogue::kBiased) {
      add_biases<typename C::Element, Epilogue::kGated>(p, tile, group, acc);
    }
    epilogue.finish(p, tile, group, acc);
    held();
  }
  leave();
}

// The part of a warp that is not a consumer's.
template <typename C>
__device__ __forceinline__ void produce(const typename C::Params& p, int warp, TileQueue& queue,
                                        typename C::Stages& ring, const WorkNumbers& numbers,
                                        uint32_t memory) {
  const uint32_t barriers = memory + C::kPair, codes = memory + C::kCodes;
  const uint32_t begun = barriers + 8;
  RowProducer<C> producer(p, ring, barriers, codes);
  if (warp == C::kRelay) {
    for (RowTile tile; queue.take(tile);) {
      for (int kb = 0; kb < p.k_blocks; ++kb) ring.relay();
    }
  } else if (warp == C::kLoader) {
    if constexpr (C::kWide)
      WideRowLoader<C>(p, ring).run(TileReader(queue, begun));
    else
      producer.template run<false>(TileReader(queue, begun));
  } else if (warp == C::kFinder) {
    TileDealer(
        typename C::Scheduler(p.group_offsets, p.num_experts, p.feature_tiles, p.band_length),
        numbers, queue)
        .run(begun, p.early == Early::kNothing, [&](const RowTile& tile) {
          if (!C::kGather && !C::Epilogue::kGated && p.done) wait_done<C>(p, tile);
        });
  } else if (warp == C::kSender) {
    if constexpr (C::kWide)
      load_wide_codes<C>(p, queue, memory);
    else if constexpr (!C::kFinished)
      send_pieces<typename C::Epilogue>(p, queue, memory + C::kStaging);
  } else if (warp >= C::kFirstGather && warp < C::kFirstGather + C::kGatherWarps) {
    if constexpr (C::kLoneGatherer)
      LoneGatherer<C>(p, ring, memory + C::kRowTable).run(queue);
    else if constexpr (C::kGather)
      producer.template run<true>(TileReader(queue));
  }
}

// A warp that decodes and nothing else, of those behind the others.
template <typename C>
__device__ __forceinline__ void decode_tiles(int warp, const typename C::Params& p,
                                             TileQueue& queue, typename C::Stages& ring,
                                             uint32_t codes) {
  WeightDecoders<C>::with(p, codes, warp % 4, warp / 4, [&](auto decoder) {
    for (RowTile tile; queue.take(tile);) {
      decoder.begin(ring, tile);
      for (int kb = 0; kb < p.k_blocks; ++kb, ring.advance()) decoder.decode(ring, tile, kb);
    }
  });
}

template <typename C>
__global__ __cluster_dims__(kClusterSize, 1, 1)
    __launch_bounds__(C::kAllThreads,
                      C::kCtas) void row_gemm_kernel(const __grid_constant__ typename C::Params p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32_t memory = ptx::shared_address(shared);
  const int warp = __shfl_sync(~0u, int(threadIdx.x) / 32, 0);
  typename C::Stages ring(memory, memory + C::kBarriers, p.shares);
  const WorkNumbers numbers(memory + C::kNumbers, p.work_counter);
  TileQueue queue(memory + C::kQueue);
  if constexpr (C::kCoded) WeightDecoders<C>::init(p, memory + C::kCodes);
  if constexpr (C::kInRegisters) FragmentNumbers::init(p, memory + C::kCodes);
  if (threadIdx.x == 0) {
    ring.init(C::kFull, C::kLanded);
    if constexpr (C::kWide)
      typename C::CodeRing(memory + C::kCodeRing, memory + C::kCodeBarriers).init();
    numbers.init();
    queue.init(C::kQueueReaders);
    ptx::barrier_init(memory + C::kPair, kClusterSize);
    ptx::barrier_init(memory + C::kPair + 8, 1);
    if constexpr (C::kFinished) C::Epilogue::Finisher::init(memory + C::kStaging);
    ptx::fence_barrier_init();
  }
  ptx::cluster_sync();
  if (p.early != Early::kNothing) {
    ptx::grid_dependency_launch();
  } else if (warp != C::kFinder) {  // the one that finds tiles waits by itself
    ptx::grid_dependency_wait();
    ptx::grid_dependency_launch();
  }
  const uint32_t staging = memory + C::kStaging;
  if (warp < kProducers / 32) {
    ptx::registers_release<C::kProducerRegisters>();
    produce<C>(p, warp, queue, ring, numbers, memory);
  } else if (C::kSideDecoders > 0 && warp >= C::kFirstDecoder) {
    if constexpr (C::kSideDecoders > 0) {
      ptx::registers_release<C::kDecoderRegisters>();
      decode_tiles<C>(warp - C::kFirstDecoder, p, queue, ring, memory + C::kCodes);
    }
  } else if (warp >= kThreads / 32) {
    if constexpr (C::kSideLoader) {
      ptx::registers_release<C::kSideRegisters>();
      produce<C>(p, warp, queue, ring, numbers, memory);
    }
    if constexpr (C::kFinished) {
      ptx::registers_release<C::kFinisherRegisters>();
      C::Epilogue::Finisher::run(p, queue, staging, int(threadIdx.x) - kThreads);
    }
  } else {
    ptx::registers_acquire<C::kConsumerRegisters>();
    const int index = warp / 4 - 1;
    const typename C::ConsumerGroup group{
        {index, int(threadIdx.x) & 127, staging + index * C::kGroupStaging}};
    if constexpr (C::kWide)
      consume_wide<C>(p, queue, ring, group, memory);
    else if constexpr (C::kInRegisters)
      consume_coded<C>(p, queue, ring, group, memory + C::kCodes);
    else
      consume<C>(p, queue, ring, group);
  }
  ptx::grid_dependency_wait();
  ptx::cluster_sync();  // no CTA may leave while its neighbour still signals it
}

}  // namespace moec::cuda
