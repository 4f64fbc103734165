// SPDX-License-Identifier: Apache-2.0
// An instance of the row GEMM kernel (row_gemm.cuh): its types, what each warp does, where shared
// memory and registers go.
#pragma once

#include <type_traits>

#include "backend/cuda/sm90/epilogue_wide.cuh"
#include "backend/cuda/sm90/weight_operand.cuh"
#include "backend/cuda/sm90/wide_codes.cuh"

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
  // Of weights that are decoded in registers: tiles of up to 256 rows of half as many features,
  // whose codes have a ring of their own, or of few rows, whose stages have the codes in the place
  // of the elements. As many stages as two CTAs on a multiprocessor have room for.
  static constexpr bool kInRegisters = Weights::kInRegisters;
  static constexpr bool kWide = std::is_base_of_v<WideTile, Epilogue>,
                        kFew = kInRegisters && !kWide;
  static_assert(!kWide || (kInRegisters && !kGather));
  static constexpr int kCtas = kFew ? kFewRowsCtas : 1;
  static constexpr int kBytesM = kWide ? 0 : 4 * Weights::kBlockStride;
  static constexpr int kFewStages = kBytesM > kOperandMBytes / 4 ? 5 : 8;
  static constexpr int kStages = kFew ? kFewStages : Epilogue::kStages;
  using Stages = PairRing<Ring<kStages, kMaxRows, kBytesM>>;
  using CodeRing = WideCodes<2 * Weights::kBlockStride>;
  using Scheduler = RowScheduler<kMaxRows, kWide ? kWideStep : kRowStep>;
  static constexpr int kStaging = kStages * kStageBytes<kMaxRows, kBytesM>;  // offset
  static constexpr int kGroupStaging = Epilogue::kStagingBytes;
  static constexpr int kCodeRing = kStaging + 2 * kGroupStaging;                        // offset
  static constexpr int kBarriers = kCodeRing + (kWide ? CodeRing::kBytes : 0);          // offset
  static constexpr int kCodeBarriers = kBarriers + Stages::kBarrierBytes;               // offset
  static constexpr int kQueue = kCodeBarriers + (kWide ? CodeRing::kBarrierBytes : 0);  // offset
  static constexpr int kNumbers = kQueue + TileQueue::kBytes;                           // offset
  static constexpr int kPair = kNumbers + WorkNumbers::kBytes;  // offset of two barriers
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
  // Of wide tiles those that multiply send, and in the place of a warp that sends is one that loads
  // codes.
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
  static constexpr int kFinisherRegisters = 104, kSideRegisters = kFew ? 24 : 32,
                       kDecoderRegisters = kGather ? 56 : 64;
  static constexpr int kProducerRegisters = kWide           ? 56
                                            : kFew          ? (kGather ? 40 : 48)
                                            : kSideDecoders ? (kGather ? 48 : 32)
                                            : kSideLoader   ? 48 + kTaller
                                            : kGather       ? 72
                                                            : 40;
  static constexpr int kConsumerRegisters = kWide           ? 224
                                            : kFew          ? 96
                                            : kFinished     ? 168
                                            : kSideDecoders ? 160
                                            : kGather       ? 216 - kTaller
                                                            : 232;
};

}  // namespace moec::cuda
