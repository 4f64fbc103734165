// SPDX-License-Identifier: Apache-2.0
// Warps that make elements of codes in lines inside a stage. A block of 64 x 64 codes lies as it
// does in memory, in lines of 32 bytes (nibbles) or 64, at the end of the 8 KiB that its elements
// take. A lane takes whole lines, with one scale each, or halves of lines, and writes no element
// over codes that any lane has yet to read.
//
// A warp waits for itself more than for anything else, so its loop is short: how codes are decoded
// is known when it is compiled, and where scales lie is worked out once a tile.
//
//   codes     for each stage: one arrival that announces the bytes
//   numbers   what nibbles stand for, of either part: 16 floats
#pragma once

#include "backend/cuda/device/line_words.h"
#include "backend/cuda/sm90/weight_decoder.cuh"

namespace moec::cuda {

// The shared memory of all that decode.
template <typename C>
struct LineMemory {
  using Codes = CodeBarriers<C::kStages>;
  static constexpr int kBytes = Codes::kBytes + 2 * kNumbersBytes;

  // By all threads; a barrier follows.
  static __device__ void init(const typename C::Params& p, uint32_t memory) {
    if (threadIdx.x == 0) Codes(memory).init();
    store_numbers(p.lines, memory + Codes::kBytes);
  }
};

// kWhole: a line of 64 codes has one scale, and one lane takes it.
template <typename C, LineDecode kDecode, bool kWhole = false>
class LineDecoder {
 public:
  using Params = typename C::Params;
  using Memory = LineMemory<C>;

  // warp: of C::kDecoders. turn: of C::kDecoderTurns.
  __device__ LineDecoder(const Params& p, uint32_t memory, int warp, int turn)
      : p_(p), codes_(memory), numbers_(memory + Memory::Codes::kBytes), warp_(warp), turn_(turn) {}

  // A tile whose first k-block is in the ring's current stage.
  __device__ void begin(const typename C::Stages& ring, const RowTile& tile) {
    const int first = !decodes<C>(ring, turn_);
    part_ = -1;
    if (first < p_.narrow_from) fetch(tile, first);
  }
  // k-block kb of the tile, in the ring's current stage, where that is this one's.
  __device__ void decode(const typename C::Stages& ring, const RowTile& tile, int kb) {
    if (!decodes<C>(ring, turn_)) return;
    if (kb >= p_.narrow_from) return pass_elements<C>(codes_, ring, lane());
    uint32_t scales[kScales];
#pragma unroll
    for (int i = 0; i < kScales; ++i) scales[i] = next_[i];
    if (!stored()) convert(tile, kb, scales);
    if (kb + C::kDecoderTurns < p_.narrow_from) fetch(tile, kb + C::kDecoderTurns);
    decode_block(ring, numbers_ + matrix(part(kb)) * kNumbersBytes, scales);
    announce_elements<C>(ring, lane());
  }

 private:
  static constexpr bool kHalf = std::is_same_v<typename C::Element, __half>;
  static constexpr bool kFeatureLines = C::kMajor == Major::kK;
  static constexpr bool kNibbles = kDecode != LineDecode::kBytes;
  static constexpr int kLineBytes = kTileK >> kNibbles, kRunBytes = kLineRun * 2;
  static constexpr int kPlace = kBlockBytes - 64 * kLineBytes;  // of the codes in a block
  // Of a warp's batch of lines each lane has one, or a half.
  static constexpr int kBatchLines = kWhole ? 32 : 16, kScales = 64 / kBatchLines;
  static_assert(!kWhole || kNibbles);

  static __device__ int lane() { return int(threadIdx.x) & 31; }
  // The lane's line of a batch, and which half of it is its only or its first one. Lanes of whole
  // lines begin in different halves, and the lines of any eight of them are chosen so that neither
  // their codes nor their elements meet in a bank.
  static __device__ int line() {
    return kWhole ? (lane() & 19) | (lane() & 4) << 1 | (lane() & 8) >> 1 : lane() / 2;
  }
  static __device__ int half() { return kWhole ? lane() >> 2 & 1 : lane() & 1; }
  static __device__ int run() { return kWhole ? 0 : half() * kLineRun; }  // along the line

  __device__ int part(int kb) const { return kb >= p_.k_blocks_of_part; }
  // Of gate and up the one that the warp's block is of.
  __device__ int matrix(int part) const { return place_of<C::kBlocks>(part, 0, warp_).part; }
  // Whether scales are used as they are stored.
  __device__ bool stored() const {
    return kDecode == LineDecode::kPowers || kDecode == LineDecode::kIntegers ||
           (p_.lines.scales[0].dtype == MOEC_F32 && !p_.lines.nested[0].book);
  }

  // ---- scales: as they are stored, 0 behind the end of k. What comes of features outside of the
  // matrix is never stored; they have the scale of its last one.
  // What they have in common in a part of a tile's k-blocks.
  __device__ void start(const RowTile& tile, int part) {
    const ExpertScales& form = p_.lines.scales[0];
    const BlockPlace place =
        place_of<C::kBlocks>(part, first_feature(p_, tile.feature_tile), warp_);
    const ExpertScales& scales = p_.lines.scales[place.part];
    const int last = (C::kBlocks == Blocks::kAlternating ? 2 : 1) * p_.features - 1;
    part_ = part;
    from_ = static_cast<const char*>(scales.base) +
            tile.expert * form.expert_stride * dtype_bytes(form.dtype);
    first_ = scales.first;
    first_line_ = scales.first_line;
    if constexpr (kFeatureLines) {
#pragma unroll
      for (int i = 0; i < kScales; ++i)
        of_[i] = entry_of_line(min(place.feature + line() + i * kBatchLines, last));
    } else {
      of_[0] = uint32_t(first_ + min(place.feature + run(), last)) >> form.shift;
    }
  }
  __device__ uint32_t entry_of_line(int line) const {
    const ExpertScales& form = p_.lines.scales[0];
    return uint32_t(first_line_ + line * form.line_step >> form.line_shift) *
           uint32_t(form.line_stride);
  }
  // entry(i, at): the scale of batch i is the at-th of the expert's.
  template <class Entry>
  __device__ __forceinline__ void each_entry(int kb, const Entry& entry) const {
    const int k = (kb - part(kb) * p_.k_blocks_of_part) * kTileK;
    if constexpr (kFeatureLines) {
      if (k + run() >= p_.k_size) return;
      const uint32_t at = uint32_t(first_ + k + run()) >> p_.lines.scales[0].shift;
#pragma unroll
      for (int i = 0; i < kScales; ++i) entry(i, of_[i] + at);
    } else {
#pragma unroll
      for (int i = 0; i < kScales; ++i) {
        const int line_k = k + line() + i * kBatchLines;
        if (line_k < p_.k_size) entry(i, entry_of_line(line_k) + of_[0]);
      }
    }
  }
  template <class Stored>
  __device__ __forceinline__ void fetch_stored(int kb) {
    const Stored* const from = reinterpret_cast<const Stored*>(from_);
#pragma unroll
    for (uint32_t& scale : next_) scale = 0;
    each_entry(kb, [&](int i, uint32_t at) { next_[i] = __ldg(from + at); });
  }
  __device__ __forceinline__ void fetch(const RowTile& tile, int kb) {
    if (part(kb) != part_) start(tile, part(kb));
    if constexpr (kDecode == LineDecode::kPowers) {
      fetch_stored<uint8_t>(kb);
    } else if constexpr (kDecode == LineDecode::kIntegers) {
      fetch_stored<uint16_t>(kb);
    } else {
      const int bytes = dtype_bytes(p_.lines.scales[0].dtype);
      bytes == 4 ? fetch_stored<uint32_t>(kb)
                 : (bytes == 2 ? fetch_stored<uint16_t>(kb) : fetch_stored<uint8_t>(kb));
    }
  }
  // To fp32, scales of another type or codes of scales.
  __device__ void convert(const RowTile& tile, int kb, uint32_t (&scales)[kScales]) const {
    const NestedScales& nested = p_.lines.nested[matrix(part(kb))];
    const int64_t first = tile.expert * p_.lines.scales[0].expert_stride;
    if (!nested.book) {
#pragma unroll
      for (uint32_t& scale : scales)
        scale = std::bit_cast<uint32_t>(quant::scale_of(scale, p_.lines.scales[0].dtype));
      return;
    }
    const float offset = __ldg(nested.offset);
    each_entry(kb, [&](int i, uint32_t at) {
      scales[i] = std::bit_cast<uint32_t>(nested_scale(nested, offset, scales[i], first + at));
    });
  }

  // ---- codes
  // word(codes) -> elements, of each of a half line's four words of nibbles, two at a time.
  template <class Word>
  static __device__ __forceinline__ void decode_half(uint32_t to, const uint4& codes,
                                                     const Word& word) {
    store(to, 0, word(codes.x), word(codes.y));
    store(to, 2, word(codes.z), word(codes.w));
  }
  static __device__ __forceinline__ void store(uint32_t to, int j, const FourPairs& first,
                                               const FourPairs& second) {
    const auto at = [&](int j, const FourPairs& v) {
      ptx::shared_store(to ^ j << 4, uint4{v.pair[0], v.pair[1], v.pair[2], v.pair[3]});
    };
    at(j, first);
    at(j + 1, second);
  }
  __device__ __forceinline__ void decode_block(const typename C::Stages& ring, uint32_t numbers,
                                               const uint32_t (&scales)[kScales]) const {
    const uint32_t block = ring.operand_m() + warp_ * kBlockBytes;
    const uint32_t from = block + kPlace + line() * kLineBytes + half() * (kLineBytes / 2);
    const uint32_t to = block + swizzled(line(), half() * (kRunBytes / 16));
    if constexpr (kWhole) {
      ValueTable table = table_of(numbers, scales[0]);
      codes_.wait(ring);
      decode_whole(from, to, table, numbers, scales[1]);
    } else {
      codes_.wait(ring);
      if constexpr (kNibbles)
        decode_nibbles(from, to, numbers, scales);
      else
        decode_bytes(from, to, scales);
    }
  }
  // Lines 48 and on have their elements where all codes were.
  __device__ __forceinline__ void decode_whole(uint32_t from, uint32_t to, ValueTable& table,
                                               uint32_t numbers, uint32_t next_scale) const {
    const uint32_t other = from ^ kLineBytes / 2, other_to = to ^ kRunBytes;
    const auto half = [&](uint32_t to, const uint4& codes) {
      decode_half(to, codes,
                  [&](uint32_t word) { return table.look_up(word, p_.lines.high_first); });
    };
    const uint4 first = ptx::shared_load(from), second = ptx::shared_load(other);
    half(to, first);
    const uint4 third = ptx::shared_load(from + kBatchLines * kLineBytes);
    const uint4 fourth = ptx::shared_load(other + kBatchLines * kLineBytes);
    half(other_to, second);
    table = table_of(numbers, next_scale);
    __syncwarp();
    half(to + kBatchLines * 128, third);
    half(other_to + kBatchLines * 128, fourth);
  }
  __device__ __forceinline__ void decode_nibbles(uint32_t from, uint32_t to, uint32_t numbers,
                                                 const uint32_t (&scales)[kScales]) const {
    uint4 codes[kScales];
#pragma unroll
    for (int i = 0; i < kScales; ++i)
      codes[i] = ptx::shared_load(from + i * kBatchLines * kLineBytes);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kScales; ++i) {
      const uint32_t at = to + i * kBatchLines * 128;
      if constexpr (kDecode == LineDecode::kPowers) {
        const MagnitudeTable table = powers_of(power_pair(scales[i]));
        decode_half(at, codes[i], [&](uint32_t word) { return table.look_up(word); });
      } else if constexpr (kDecode == LineDecode::kIntegers) {
        const uint32_t scale = scales[i] | scales[i] << 16;
        decode_half(at, codes[i], [&](uint32_t word) { return integers<kHalf>(word, scale); });
      } else {
        const ValueTable table = table_of(numbers, scales[i]);
        decode_half(at, codes[i],
                    [&](uint32_t word) { return table.look_up(word, p_.lines.high_first); });
      }
    }
  }
  // Two batches at a time: the elements of a batch cover no codes but those of batches up to it.
  __device__ __forceinline__ void decode_bytes(uint32_t from, uint32_t to,
                                               const uint32_t (&scales)[kScales]) const {
#pragma unroll
    for (int first = 0; first < kScales; first += 2) {
      uint4 codes[2][2];
#pragma unroll
      for (int b = 0; b < 2; ++b)
#pragma unroll
        for (int w = 0; w < 2; ++w)
          codes[b][w] = ptx::shared_load(from + (first + b) * kBatchLines * kLineBytes + 16 * w);
      __syncwarp();
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const uint32_t at = to + (first + b) * kBatchLines * 128;
        const float scale = std::bit_cast<float>(scales[first + b]);
        const auto of = [&](uint32_t low, uint32_t high) { return bytes<kHalf>(low, high, scale); };
        const auto &low = codes[b][0], &high = codes[b][1];
        store(at, 0, of(low.x, low.y), of(low.z, low.w));
        store(at, 2, of(high.x, high.y), of(high.z, high.w));
      }
    }
  }
  static __device__ __forceinline__ ValueTable table_of(uint32_t numbers, uint32_t scale_bits) {
    const float scale = std::bit_cast<float>(scale_bits);
    ValueTable table;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const float4 v = std::bit_cast<float4>(ptx::shared_load(numbers + 16 * q));
      table.set(q, rounded_pair<kHalf>(quant::product(v.x, scale), quant::product(v.y, scale)),
                rounded_pair<kHalf>(quant::product(v.z, scale), quant::product(v.w, scale)));
    }
    return table;
  }

  const Params& p_;
  const typename Memory::Codes codes_;
  const uint32_t numbers_;
  const int warp_, turn_;
  int part_, first_, first_line_;
  const char* from_;                          // the scales of the part's expert
  uint32_t of_[kFeatureLines ? kScales : 1];  // entry of each line, or of where lines begin
  uint32_t next_[kScales];
};

// body(decoder) with the one for these codes.
template <typename C>
struct ChannelDecoders : ChannelDecoder<C> {
  template <class Body>
  static __device__ __forceinline__ void with(const typename C::Params& p, uint32_t memory,
                                              int warp, int turn, const Body& body) {
    body(ChannelDecoder<C>(p, memory, warp, turn));
  }
};
template <typename C>
struct LineDecoders : LineMemory<C> {
  template <class Body>
  static __device__ __forceinline__ void with(const typename C::Params& p, uint32_t memory,
                                              int warp, int turn, const Body& body) {
    const auto run = [&]<LineDecode kDecode, bool kWhole>() {
      body(LineDecoder<C, kDecode, kWhole>(p, memory, warp, turn));
    };
    const ExpertScales(&scales)[2] = p.lines.scales;
    constexpr int kBits = std::countr_zero(unsigned(kTileK));
    const bool whole =
        scales[0].shift >= kBits && scales[0].first % kTileK == 0 && scales[1].first % kTileK == 0;
    switch (p.lines.decode) {
      case LineDecode::kTable:
        return whole ? run.template operator()<LineDecode::kTable, true>()
                     : run.template operator()<LineDecode::kTable, false>();
      case LineDecode::kPowers:
        return run.template operator()<LineDecode::kPowers, false>();
      case LineDecode::kIntegers:
        return run.template operator()<LineDecode::kIntegers, false>();
      case LineDecode::kBytes:
        return run.template operator()<LineDecode::kBytes, false>();
      case LineDecode::kSigned:
        return;  // in no line
    }
  }
};
template <typename C>
using WeightDecoders =
    std::conditional_t<C::Weights::kInLines, LineDecoders<C>, ChannelDecoders<C>>;

}  // namespace moec::cuda
