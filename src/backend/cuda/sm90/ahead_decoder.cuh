// SPDX-License-Identifier: Apache-2.0
// The warps that decode weights ahead of the tiles (ahead.h). A lane has eight neighbours of a line
// at a time, and of the lines behind it.
#pragma once

#include "backend/cuda/sm90/ahead_chunks.cuh"
#include "backend/cuda/sm90/epilogue.cuh"
#include "backend/cuda/sm90/line_runs.cuh"
#include "backend/cuda/sm90/weight_operand.cuh"

namespace moec::cuda {

// What nibbles of either part stand for: at a multiple of 64 in shared memory.
struct AheadNumbers {
  static constexpr int kBytes = 2 * kNumbersBytes;
  static __device__ void init(const AheadRowGemmParams& p, uint32_t memory) {
    store_numbers(p.source.lines, memory);
  }
};
// Behind C::kCodes: places of chunks, then numbers. Offsets.
template <typename C>
struct AheadMemory {
  static constexpr int kNumbers = (C::kCodes + AheadQueue::kBytes + 63) / 64 * 64;
  static constexpr int kBytes = kNumbers + AheadNumbers::kBytes - C::kCodes;
};

template <typename C, LineDecode kDecode, bool kFloats>
class AheadDecoder {
 public:
  __device__ AheadDecoder(const AheadRowGemmParams& p, uint32_t numbers)
      : p_(p), numbers_(numbers), walk_(p.group_offsets, p.num_experts), taken_(take()) {}

  // The codes of the next lines are on their way, those of the next quarter behind them.
  __device__ void run() {
    LineRuns runs;
    Run<kDecode> ahead[kAhead];
    Quarter q = quarter(runs);
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (i < q.lines) runs.load(ahead[i]);
    while (q.more) {
      wait_read(q);
      uint4* to = q.to;
      const moec_dtype scale_type = runs.scale_type();
#pragma unroll 1
      for (int first = 0; first < kQuarterLines - kAhead; first += kAhead)
        decode(runs, ahead, q.lines - first, q.lines - first - kAhead, q.numbers, scale_type, to);
      const Quarter next = quarter(runs);
      decode(runs, ahead, q.lines - kQuarterLines + kAhead, next.lines, q.numbers, scale_type, to);
      for (int i = 0; i < q.zeros; ++i)
        ptx::global_store(q.to + (q.first_zero + i) * kRunsOfLine, uint4{});
      announce(q);
      q = next;
    }
  }

 private:
  using LineRuns = Runs<kDecode, kFloats>;
  using Scheduler = typename C::Scheduler;
  static constexpr bool kFeatureLines = C::kMajor == Major::kK;
  static constexpr int kRunsOfLine = kAheadValues / kRunCodes, kQuarterLines = kAheadLines / 4;
  static constexpr int kAhead = MOEC_RUNS;
  static_assert(kQuarterLines % kAhead == 0);
  static constexpr bool kHalf = std::is_same_v<typename C::Element, __half>;

  struct Quarter {
    bool more;
    unsigned slot, generation;
    uint4* to;
    int lines;              // that this lane decodes
    int zeros, first_zero;  // lines that are zeros
    uint32_t numbers;
  };

  static __device__ int lane() { return int(threadIdx.x) & 31; }
  __device__ int chunks() const { return p_.parts * p_.chunks_of_part; }
  __device__ unsigned take() const { return lane() == 0 ? atomicAdd(&p_.counters->taken, 1u) : 0u; }
  // The next quarter, and its runs.
  __device__ Quarter quarter(LineRuns& runs) {
    Quarter q = {};
    const unsigned taken = __shfl_sync(~0u, taken_, 0);
    taken_ = take();
    const unsigned chunk = taken / kAheadBlocks;
    const int quarter = int(taken % kAheadBlocks);
    q.more = walk_.seek(int(chunk), [&](int, int rows) {
      return int(Scheduler::bands(rows, p_.band_length)) * p_.feature_tiles * chunks();
    });
    if (!q.more) return q;
    const unsigned index = walk_.index;
    const int tile = int(index / unsigned(chunks())), of_tile = int(index % unsigned(chunks()));
    const int feature_tile = int(unsigned(tile) % unsigned(p_.feature_tiles));
    const int of_k = of_tile >= p_.chunks_of_part;
    const int k0 = (of_tile - of_k * p_.chunks_of_part) * (kAheadBlocks * kTileK);
    const int begin = first_feature(p_, feature_tile);
    const int end =
        C::Epilogue::kGated ? p_.features : min(p_.features, first_feature(p_, feature_tile + 1));
    q.slot = chunk & unsigned(p_.slots - 1);
    q.generation = chunk >> p_.slots_shift;
    q.to = p_.ring + (q.slot * kAheadLines + quarter * kQuarterLines) * kRunsOfLine + lane();
    int part;
    uint32_t line, run;
    if constexpr (kFeatureLines) {
      const BlockPlace place = place_of<C::kBlocks>(of_k, begin, quarter);
      const int k = k0 + kRunCodes * lane();
      part = place.part;
      line = uint32_t(place.feature);
      run = uint32_t(k) / kRunCodes;
      const int lines = max(0, min(kQuarterLines, end - place.feature));
      q.lines = k < p_.k_size ? lines : 0;
      q.zeros = k < p_.k_size || k >= p_.k_blocks_of_part * kTileK ? 0 : lines;
    } else {
      const BlockPlace place = place_of<C::kBlocks>(of_k, begin, lane() / 8);
      const int columns = C::kBlocks == Blocks::kAlternating ? 2 : 1;
      const int feature = place.feature + kRunCodes * (lane() % 8);
      const int k = k0 + quarter * kTileK;
      part = place.part;
      line = uint32_t(k);
      run = uint32_t(feature) / kRunCodes;
      const int lines = max(0, min(kQuarterLines, p_.k_size - k));
      q.lines = feature < columns * end ? lines : 0;
      q.zeros = k < p_.k_size ? kQuarterLines - lines : 0;
      q.first_zero = lines;
    }
    q.numbers = numbers_ + part * kNumbersBytes;
    runs = LineRuns(p_.source, part, walk_.expert, line, run, 1);
    runs.prefetch(lane(), q.lines);
    return q;
  }
  // kAhead lines, of which `left` are there, while those behind them are loaded.
  __device__ __forceinline__ void decode(LineRuns& runs, Run<kDecode> (&ahead)[kAhead], int left,
                                         int ahead_left, uint32_t numbers, moec_dtype scale_type,
                                         uint4*& to) const {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const Run<kDecode> run = ahead[i];
      if (i < ahead_left) runs.load(ahead[i]);
      const FourPairs v = elements_of<kDecode, kHalf, kFloats>(run, scale_type, numbers,
                                                               p_.source.lines.high_first);
      if (i < left)
        ptx::global_store(to + i * kRunsOfLine, uint4{v.pair[0], v.pair[1], v.pair[2], v.pair[3]});
    }
    to += kAhead * kRunsOfLine;
  }
  __device__ void wait_read(const Quarter& q) const {
    if (q.generation > 0 && lane() == 0) {
      const unsigned all = q.generation * kAllRead;
      while (ptx::load_acquire(p_.counters->read + q.slot) < all) __nanosleep(300);
    }
    __syncwarp();
  }
  // What the warp has stored is there for bulk copies.
  __device__ void announce(const Quarter& q) const {
    ptx::fence_proxy_async_all();
    __syncwarp();
    if (lane() == 0) ptx::add_release(p_.counters->ready + q.slot, 1);
  }

  const AheadRowGemmParams& p_;
  const uint32_t numbers_;
  ExpertWalk walk_;
  unsigned taken_;  // the next quarter's number, in lane 0
};

// One warp.
template <typename C>
__device__ __forceinline__ void decode_ahead(const AheadRowGemmParams& p, uint32_t numbers) {
  const auto run = [&]<LineDecode kDecode, bool kFloats>() {
    AheadDecoder<C, kDecode, kFloats>(p, numbers).run();
  };
  const CodedLines& lines = p.source.lines;
  const bool floats = lines.scales[0].dtype == MOEC_F32 &&
                      (p.parts_of_source == 1 || lines.scales[1].dtype == MOEC_F32);
  switch (lines.decode) {
    case LineDecode::kTable:
      return floats ? run.template operator()<LineDecode::kTable, true>()
                    : run.template operator()<LineDecode::kTable, false>();
    case LineDecode::kPowers:
      return run.template operator()<LineDecode::kPowers, false>();
    case LineDecode::kIntegers:
      return run.template operator()<LineDecode::kIntegers, false>();
    case LineDecode::kBytes:
      return floats ? run.template operator()<LineDecode::kBytes, true>()
                    : run.template operator()<LineDecode::kBytes, false>();
    case LineDecode::kSigned:
      return floats ? run.template operator()<LineDecode::kSigned, true>()
                    : run.template operator()<LineDecode::kSigned, false>();
  }
}

}  // namespace moec::cuda
