// SPDX-License-Identifier: Apache-2.0
// Coded weights that warps of a row GEMM decode ahead of its tiles, once for all rows of an expert,
// into a ring in device memory from which bulk copies bring them as plain ones. A slot of the ring
// has a chunk of a weight tile: 256 lines of 256 values, lines as codes have them, along k or
// across. Chunks have one order, that of the tiles; warps take quarters of them in turn.
// Nothing here needs the headers of CUDA.
//
//   ready   quarters decoded into a slot since the kernel began
//   read    kAllRead for each chunk of a slot that all tiles of its weights have read
//
// Nobody waits for what another has yet to begin: quarters and tiles are taken in order, and a
// chunk waits only for tiles of earlier ones. So it does not matter how many CTAs are there.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

namespace moec::cuda {

constexpr int kAheadLines = 256, kAheadValues = 256;  // of a slot
constexpr int kAheadBlocks = 4;                       // k-blocks of a chunk, and its quarters
constexpr int64_t kAheadSlotBytes = kAheadLines * kAheadValues * 2;
constexpr unsigned kAllRead = 1u << 16;

// 0 before the kernel.
struct AheadCounters {
  static constexpr int kSlots = 512;
  unsigned taken;  // quarters
  unsigned ready[kSlots], read[kSlots];
};

// Experts of so many rows on average are decoded ahead, and of fewer than kAheadBelow
// (bench/results/h200/coded_trials.json): with fewer the warps that decode are too slow, and with
// more it costs little to decode in front of a product.
constexpr int64_t kAheadFrom = 400, kAheadBelow = 1024;

// Slots in so many bytes: a power of two, or none.
inline int ahead_slots(int64_t bytes) {
  return int(
      std::min(std::bit_floor(uint64_t(bytes / kAheadSlotBytes)), uint64_t(AheadCounters::kSlots)));
}
// As few as keep nobody waiting for himself: the chunks of two weight tiles of two parts. k: of the
// longer product.
constexpr int ahead_least_slots(int64_t k) {
  return 4 * int((k + kAheadValues - 1) / kAheadValues);
}
// Of k in all products. With fewer a tile has no chunk of as many k-blocks as there are stages.
constexpr int64_t kAheadShortest = kAheadValues;

}  // namespace moec::cuda
