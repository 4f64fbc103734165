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
//            Two warpgroups decode k-blocks of coded weights in turn: the one that gathers and one
//            behind the others, or two behind them
//   traffic  32 KiB of weights a k-block and tile, and 128 bytes a row. The two CTAs start tiles of
//            the same weights together. Where `shares`, each loads half of them for both: fewer
//            bytes leave L2, but a stage waits for the slower of two CTAs. Else each loads its own,
//            and their loaders meet
//   order    each output element is owned by one thread: deterministic
#pragma once

#include "backend/cuda/sm90/line_decoder.cuh"
#include "backend/cuda/sm90/pace.cuh"
#include "backend/cuda/sm90/row_gemm_config.cuh"

namespace moec::cuda {

template <typename C>
constexpr int kSharedBytesOf() {
  if constexpr (C::kCoded) return C::kCodes + WeightDecoder<C>::kBytes;
  return C::kCodes;
}

// Until all rows of the tile's expert are in memory, for bulk copies too. By a whole warp; a warp
// that takes the tile from it by a barrier need not look again.
template <typename C>
__device__ __forceinline__ void wait_done(const RowGemmParams& p, const RowTile& tile) {
  const int rows = p.group_offsets[tile.expert + 1] - p.group_offsets[tile.expert];
  const unsigned all = unsigned(rows) * p.done_tiles;
  if (ptx::elect_one()) {
    while (ptx::load_acquire(p.done + tile.expert) < all) __nanosleep(64);
    ptx::fence_proxy_async_all();
  }
  __syncwarp();
}

template <typename C>
class RowProducer {
 public:
  using Params = typename C::Params;
  // pair_barrier: for the arrivals of the two loaders. codes: the memory of decoders.
  __device__ RowProducer(const Params& p, typename C::Stages& ring, uint32_t pair_barrier,
                         uint32_t codes)
      : p_(p), ring_(ring), pair_barrier_(pair_barrier), codes_(codes) {}

  // The next tile, and where its rows come from, are looked up early in this one.
  template <bool kGathers, typename Decoder = NoDecoder>
  __device__ void run(TileReader tiles, Decoder decoder = {}) {
    RowTile tile, next;
    bool more = tiles.next(tile);
    if (kGathers && more) find_tokens(tile);
    const int ask = min(6, p_.k_blocks - 1);
    int ahead = 0;  // k-blocks whose weights are on their way
    Pace pace(kGathers ? nullptr : p_.steps);
    if constexpr (!C::kGather) {
      if (p_.early == Early::kWeights) {
        if (more) ahead = load_first_weights(tile);
        if (!p_.done) ptx::grid_dependency_wait();
        if (p_.done && more) wait_done<C>(p_, tile);
      }
    }
    for (; more; tile = next) {
      if constexpr (kGathers) find_rows();
      decoder.begin(tile);
      for (int kb = 0; kb < p_.k_blocks; ++kb) {
        pace.keep(kb);
        if (!kGathers && !shared(tile) && kb % kMeet == 0) meet();
        ring_.wait_empty();
        if (!kGathers && ptx::elect_one()) {
          if (kb >= ahead) load_weights(ring_, tile, kb);
          load_rows(tile, kb);
        }
        if constexpr (kGathers) gather(tile, kb);
        if (kb % C::kDecoderTurns == 0) decoder.decode(ring_, tile, kb);
        ring_.advance();
        if (kb == 0) tiles.prepare();
        if (kb == ask) {
          more = tiles.next(next);
          if (kGathers && more) find_tokens(next);
        }
      }
      ahead = 0;
    }
    pace.leave();
    __syncwarp();
  }

 private:
  static constexpr int kMeet = 8;  // k-blocks
  // The two loaders of a pair wait for each other: what both want, they shall want at once. Each
  // arrives at its own barrier, too: or the one that comes first could be a whole phase late when
  // it looks, the other one having come to the next meeting, and would wait for ever.
  __device__ void meet() {
    if (ptx::elect_one()) {
      for (int rank = 0; rank < kClusterSize; ++rank) {
        ptx::barrier_arrive_cluster(ptx::cluster_address(pair_barrier_, rank));
      }
    }
    ptx::barrier_wait(pair_barrier_, pair_phase_);
    pair_phase_ ^= 1;
  }
  __device__ bool shared(const RowTile& tile) const { return p_.shares && tile.together; }
  __device__ int load_first_weights(const RowTile& tile) const {
    const int count = min(p_.k_blocks, C::kStages);
    typename C::Stages ring = ring_;
    for (int kb = 0; kb < count; ++kb, ring.advance()) {
      if (ptx::elect_one()) load_weights(ring, tile, kb);
    }
    return count;
  }
  __device__ int part(int kb) const { return kb >= p_.k_blocks_of_part; }
  __device__ int k(int kb) const { return (kb - part(kb) * p_.k_blocks_of_part) * kTileK; }
  static __device__ int units(const RowTile& tile) { return (tile.rows + kRowUnit - 1) / kRowUnit; }

  __device__ void load_weights(const typename C::Stages& ring, const RowTile& tile, int kb) const {
    const uint32_t row_bytes = C::kGather ? 0 : units(tile) * kRowUnit * 128;
    uint32_t arrived = ring.full();
    if constexpr (C::kCoded) {
      arrived = codes_.of(ring);
      ptx::barrier_arrive_expect(arrived, C::Weights::bytes(p_));
      if (C::kAnnounces) ptx::barrier_arrive_expect(ring.full(), row_bytes);
    } else {
      ptx::barrier_arrive_expect(arrived, C::Weights::bytes(p_) + row_bytes);
    }
    const OperandM from{p_.weight_maps, part(kb),    first_feature(p_, tile.feature_tile),
                        k(kb),          tile.expert, shared(tile)};
    load_operand_m<typename C::Weights, C::kBlocks>(p_, ring.operand_m(), arrived, from);
  }
  // Behind the tile's rows are zeros, whose products take less energy than those of any rows.
  __device__ void load_rows(const RowTile& tile, int kb) const {
    if constexpr (!C::kGather) {
      ptx::tensor_load(
          ring_.operand_n(), &p_.rows.of_units[units(tile) - 1], ring_.full(),
          ptx::Coordinate4{k(kb), part(kb), kWindowRows - tile.rows, tile.row_begin + tile.rows});
    }
  }

  // Thread t copies chunk t % 8 of rows row0 + kRowsAtOnce * i, zeros for padding rows. Past the
  // tile's end the operand keeps what it held: what comes of that is never stored. The row past an
  // odd end is the last one again, so that the two rows of a register never differ in being
  // defined.
  static __device__ int copied_rows(const RowTile& tile) { return (tile.rows + 1) & ~1; }
  __device__ void find_tokens(const RowTile& tile) {
    if constexpr (C::kGather) {
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const int row = row0_ + C::kRowsAtOnce * i;
        const int from = tile.row_begin + min(row, tile.rows - 1);
        token_[i] = row < copied_rows(tile) ? __ldg(p_.row_token + from) : 0;
      }
    }
  }
  __device__ void find_rows() {
    const char* const x = static_cast<const char*>(p_.x) + (threadIdx.x & 7) * 16;
    const uint32_t stride = uint32_t(p_.x_stride * 2);
    present_ = 0;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      from_[i] = x + uint64_t(uint32_t(max(token_[i], 0))) * stride;
      present_ |= (token_[i] >= 0) << i;
    }
    padded_ = __any_sync(~0u, present_ != (1u << kCopies) - 1);
  }
  // This loop feeds the tensor cores: an address is kept for each row and only advanced, and unless
  // there are padding rows or k ends, a copy is decided by the number of rows alone.
  __device__ void gather(const RowTile& tile, int kb) {
    const uint32_t to = ring_.operand_n() + swizzled(row0_, threadIdx.x & 7);
    const int left = copied_rows(tile) - row0_;
    if (padded_ || (kb + 1) * kTileK > p_.k_size) {
      gather_padded(left, kb, to);
    } else {
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const int row = C::kRowsAtOnce * i;
        ptx::copy_async_if(left > row, to + row * 128, from_[i], keep_);
        from_[i] += kTileK * 2;
      }
    }
    ptx::copy_async_arrive(C::kFences ? ring_.full() : ring_.landed());
  }
  __device__ void gather_padded(int left, int kb, uint32_t to) {
    const bool inside = kb * kTileK + (threadIdx.x & 7) * 8 < p_.k_size;
    const uint32_t present = inside ? present_ : 0;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int row = C::kRowsAtOnce * i;
      if (left > row) {
        ptx::copy_async(to + row * 128, from_[i], present & (1u << i) ? 16 : 0, keep_);
      }
      from_[i] += kTileK * 2;
    }
  }

  const Params& p_;
  typename C::Stages& ring_;
  uint32_t pair_barrier_, pair_phase_ = 0;
  const CodeBarriers<C::kStages> codes_;
  uint64_t keep_ = ptx::policy_keep();
  static constexpr int kCopies = C::kGather ? C::kMaxRows / C::kRowsAtOnce : 1;
  const int row0_ = int(threadIdx.x) / 8 - 4 * C::kFirstGather;  // the first row of this lane
  const char* from_[kCopies];
  int token_[kCopies];
  uint32_t present_;  // bit i: row i is one of x
  bool padded_;       // not all are
};

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
                                        uint32_t barriers, uint32_t codes, uint32_t staging) {
  const uint32_t begun = barriers + 8;
  RowProducer<C> producer(p, ring, barriers, codes);
  if (warp == C::kRelay) {
    for (RowTile tile; queue.take(tile);) {
      for (int kb = 0; kb < p.k_blocks; ++kb) ring.relay();
    }
  } else if (warp == C::kLoader) {
    producer.template run<false>(TileReader(queue, begun));
  } else if (warp == C::kFinder) {
    TileDealer(
        typename C::Scheduler(p.group_offsets, p.num_experts, p.feature_tiles, p.band_length),
        numbers, queue)
        .run(begun, p.early == Early::kNothing, [&](const RowTile& tile) {
          if (!C::kGather && p.done) wait_done<C>(p, tile);
        });
  } else if (warp == C::kSender) {
    if constexpr (!C::kFinished) send_pieces<typename C::Epilogue>(p, queue, staging);
  } else if (warp < kProducers / 32) {
    if constexpr (C::kGather && C::kCoded) {
      producer.template run<true>(TileReader(queue),
                                  WeightDecoder<C>(p, codes, warp - C::kFirstGather, 0));
    } else if constexpr (C::kGather) {
      producer.template run<true>(TileReader(queue));
    }
  }
}

// A warp that decodes and nothing else, of those behind the others.
template <typename C>
__device__ __forceinline__ void decode_tiles(int warp, const typename C::Params& p,
                                             TileQueue& queue, typename C::Stages& ring,
                                             uint32_t codes) {
  const int turn = warp / 4 + C::kDecoderTurns - C::kSideDecoders;  // behind that of gatherers
  WeightDecoder<C> decoder(p, codes, warp % 4, turn);
  for (RowTile tile; queue.take(tile);) {
    decoder.begin(tile);
    for (int kb = 0; kb < p.k_blocks; ++kb, ring.advance()) {
      if (kb % C::kDecoderTurns == turn) decoder.decode(ring, tile, kb);
    }
  }
}

template <typename C>
__global__ __cluster_dims__(kClusterSize, 1, 1)
    __launch_bounds__(C::kAllThreads,
                      1) void row_gemm_kernel(const __grid_constant__ typename C::Params p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32_t memory = ptx::shared_address(shared);
  const int warp = __shfl_sync(~0u, int(threadIdx.x) / 32, 0);
  typename C::Stages ring(memory, memory + C::kBarriers, p.shares);
  const WorkNumbers numbers(memory + C::kNumbers, p.work_counter);
  TileQueue queue(memory + C::kQueue);
  if constexpr (C::kCoded) WeightDecoder<C>::init(p, memory + C::kCodes);
  if (threadIdx.x == 0) {
    ring.init(C::kFull, C::kLanded);
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
    produce<C>(p, warp, queue, ring, numbers, memory + C::kPair, memory + C::kCodes, staging);
  } else if (C::kSideDecoders > 0 && warp >= C::kFirstDecoder) {
    if constexpr (C::kSideDecoders > 0) {
      ptx::registers_release<C::kDecoderRegisters>();
      decode_tiles<C>(warp - C::kFirstDecoder, p, queue, ring, memory + C::kCodes);
    }
  } else if (warp >= kThreads / 32) {
    if constexpr (C::kSideLoader) {
      ptx::registers_release<C::kSideRegisters>();
      produce<C>(p, warp, queue, ring, numbers, memory + C::kPair, memory + C::kCodes, staging);
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
    consume<C>(p, queue, ring, group);
  }
  ptx::grid_dependency_wait();
  ptx::cluster_sync();  // no CTA may leave while its neighbour still signals it
}

}  // namespace moec::cuda
