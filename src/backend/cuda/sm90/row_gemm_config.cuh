// SPDX-License-Identifier: Apache-2.0
// An instance of the row GEMM kernel (row_gemm.cuh): its types, what each warp does, where shared
// memory and registers go.
#pragma once

#include "backend/cuda/sm90/epilogue.cuh"
#include "backend/cuda/sm90/weight_operand.cuh"

namespace moec::cuda {

template <typename Element_, typename Weights_, bool kGather_, typename Epilogue_,
          Blocks kBlocks_ = Epilogue_::kGated ? Blocks::kGated : Blocks::kPlain,
          typename ConsumerGroup_ = Group>
struct RowGemmConfig {
  using Element = Element_;
  using Weights = Weights_;
  using Params = typename Weights::Params;
  using Epilogue = Epilogue_;
  static constexpr Major kMajor = Weights::kMajor;
  static constexpr bool kGather = kGather_, kCoded = Weights::kCoded;
  static constexpr Blocks kBlocks = kBlocks_;
  using ConsumerGroup = ConsumerGroup_;
  static constexpr int kMaxRows = Epilogue::kMaxRows;
  // Of weights that are decoded in registers a stage has the codes alone. As many stages as two
  // CTAs on a multiprocessor have room for.
  static constexpr bool kInRegisters = Weights::kInRegisters;
  static constexpr int kCtas = kInRegisters ? kFewRowsCtas : 1;
  static constexpr int kBytesM = 4 * Weights::kBlockStride;
  static constexpr int kFewStages = kBytesM > kOperandMBytes / 4 ? 5 : 8;
  static constexpr int kStages = kInRegisters ? kFewStages : Epilogue::kStages;
  using Stages = PairRing<Ring<kStages, kMaxRows, kBytesM>>;
  using Scheduler = RowScheduler<kMaxRows>;
  static constexpr int kStaging = kStages * kStageBytes<kMaxRows, kBytesM>;  // offset
  static constexpr int kGroupStaging = Epilogue::kStagingBytes;
  static constexpr int kBarriers = kStaging + 2 * kGroupStaging;    // offset
  static constexpr int kQueue = kBarriers + Stages::kBarrierBytes;  // offset
  static constexpr int kNumbers = kQueue + TileQueue::kBytes;       // offset
  static constexpr int kPair = kNumbers + WorkNumbers::kBytes;      // offset of two barriers
  // Offsets of the places of rows that one warp gathers, and of a decoder's memory.
  static constexpr int kRowTable = kPair + 16;
  static constexpr int kCodes = kRowTable + (kCoded && kGather ? 4 * (kMaxRows + 16) : 0);
  // Whether a fourth warpgroup does the rest of the epilogue, or loads, finds tiles and sends.
  static constexpr bool kFinished = requires { typename Epilogue::Finisher; };
  static constexpr bool kSideLoader = kGather && !kFinished && !kCoded;
  static_assert(!kCoded || !kFinished);
  // Two warpgroups behind the others decode stages in turn, and one warp gathers.
  static constexpr int kDecoderTurns = 2;
  static constexpr int kSideDecoders = kCoded ? kDecoderTurns : 0;  // warpgroups
  static constexpr int kFirstDecoder = kThreads / 32;               // warp
  static constexpr bool kLoneGatherer = kCoded && kGather;
  static constexpr int kAllThreads =
      kThreads + (kFinished + kSideLoader + kSideDecoders) * kGroupThreads;
  // Warps that gather rows.
  static constexpr int kFirstGather = kLoneGatherer ? 3 : (kFinished ? 2 : 0);
  static constexpr int kGatherWarps =
      kLoneGatherer ? 1 : (kGather ? kProducers / 32 - kFirstGather : 0);
  static constexpr int kRowsAtOnce = 4 * kGatherWarps;  // that they copy: eight lanes a row
  static constexpr int kDecoders = kCoded ? 4 : 0;      // warps that decode a k-block
  // Warps with a task of their own. Without one that relays, those that multiply fence.
  static constexpr int kNoWarp = -1, kLoader = kSideLoader ? kThreads / 32 : 0;
  static constexpr int kFinder = kLoader + 1, kSender = kFinished ? kNoWarp : kLoader + 2;
  static constexpr int kRelay = kSideLoader ? kLoader + 3 : kNoWarp;
  static constexpr bool kFences = kGather && kRelay == kNoWarp;
  // Arrivals at the barriers of a stage (tile_ring.cuh).
  static constexpr bool kAnnounces = !kCoded || !kGather;  // the loader, bytes of this barrier
  static constexpr int kGatherers = 32 * kGatherWarps;
  static constexpr int kLanded = kRelay == kNoWarp ? 0 : kGatherers;
  static constexpr int kFull = kAnnounces + (kFences ? kGatherers : kGather) + kDecoders;
  // All warps that work on tiles, without the one that finds them: one loads, one or four send, one
  // may relay, others gather, decode or multiply.
  static constexpr int kQueueReaders =
      kConsumerWarps + kGatherWarps + 1 + (kFinished ? 4 : 1) + kSideLoader + 4 * kSideDecoders;
  // Registers of a thread: at most 504 for three warpgroups together, 512 for four, 480 for five.
  // Two CTAs: 240 for three, 256 for four.
  static constexpr int kTaller = kMaxRows > kMaxTileN ? 8 : 0;  // for one more address of a row
  static constexpr int kFinisherRegisters = 104, kSideRegisters = kInRegisters ? 24 : 32,
                       kDecoderRegisters = kGather ? 56 : 64;
  static constexpr int kProducerRegisters = kInRegisters    ? (kGather ? 40 : 48)
                                            : kSideDecoders ? (kGather ? 48 : 32)
                                            : kSideLoader   ? 48 + kTaller
                                            : kGather       ? 72
                                                            : 40;
  static constexpr int kConsumerRegisters = kInRegisters    ? 96
                                            : kFinished     ? 168
                                            : kSideDecoders ? 160
                                            : kGather       ? 216 - kTaller
                                                            : 232;
};

}  // namespace moec::cuda
