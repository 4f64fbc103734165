// SPDX-License-Identifier: Apache-2.0
// Warps that make elements of codes in lines inside a stage. A block of 64 x 64 codes lies as it
// does in memory, in lines of 32 bytes (nibbles) or 64, at the end of the 8 KiB that its elements
// take. A warp takes a batch of 16 lines at a time, a lane half a line of it, with one scale, which
// was fetched a k-block before. The elements of batch b cover no codes but those of batches up to
// b.
//
//   codes     for each stage: one arrival that announces the bytes
//   numbers   what nibbles stand for, of either part: 16 floats
#pragma once

#include "backend/cuda/sm90/line_words.h"
#include "backend/cuda/sm90/weight_decoder.cuh"

namespace moec::cuda {

template <typename C>
class LineDecoder {
 public:
  using Params = typename C::Params;
  using Codes = CodeBarriers<C::kStages>;
  static constexpr int kNumbersBytes = 16 * 4, kParts = 2;
  static constexpr int kBytes = Codes::kBytes + kParts * kNumbersBytes;

  // By all threads; a barrier follows.
  static __device__ void init(const Params& p, uint32_t memory) {
    if (threadIdx.x == 0) Codes(memory).init();
    const int part = int(threadIdx.x) / 16, code = int(threadIdx.x) % 16;
    if (part >= kParts) return;
    const float* const book = p.lines.codebooks[part];
    ptx::shared_store(memory + Codes::kBytes + 4 * threadIdx.x,
                      book ? __ldg(book + code) : p.lines.numbers[code]);
  }

  // warp: of C::kDecoders. turn: of C::kDecoderTurns.
  __device__ LineDecoder(const Params& p, uint32_t memory, int warp, int turn)
      : p_(p),
        codes_(memory),
        numbers_(memory + Codes::kBytes),
        warp_(warp),
        turn_(turn),
        lane_(int(threadIdx.x) & 31),
        to_(swizzled(lane_ / 2, lane_ % 2 * (kRunBytes / 16))) {}

  // A tile whose first k-block is in the ring's current stage.
  __device__ void begin(const typename C::Stages& ring, const RowTile& tile) {
    const int first = !decodes<C>(ring, turn_);
    if (first < p_.narrow_from) fetch(tile, first);
  }
  // k-block kb of the tile, in the ring's current stage, where that is this one's.
  __device__ void decode(const typename C::Stages& ring, const RowTile& tile, int kb) {
    if (!decodes<C>(ring, turn_)) return;
    if (kb >= p_.narrow_from) return pass_elements<C>(codes_, ring, lane_);
    uint32_t scales[kScales];
#pragma unroll
    for (int i = 0; i < kScales; ++i) scales[i] = next_[i];
    if (kb + C::kDecoderTurns < p_.narrow_from) fetch(tile, kb + C::kDecoderTurns);
    if (p_.lines.nested[0].book)
      look_up(tile, kb, scales);
    else
      convert(scales);
    codes_.wait(ring);
    decode_block(ring.operand_m() + warp_ * kBlockBytes,
                 place_of<C::kBlocks>(part(kb), 0, warp_).part, scales);
    announce_elements<C>(ring, lane_);
  }

 private:
  static constexpr bool kHalf = std::is_same_v<typename C::Element, __half>;
  static constexpr int kBatchLines = 16, kBatches = 4;  // of a block
  static constexpr int kScales = kBatches, kRunBytes = kLineRun * 2;

  __device__ int part(int kb) const { return kb >= p_.k_blocks_of_part; }

  // ---- scales: as they are stored, 0 outside of the matrix. Those of two parts differ in where
  // they begin alone.
  struct ScalePlace {
    int part, lines;  // lines: from the first one of this lane to the end of the matrix
    int64_t first;    // entry of line 0
    int line;
  };
  __device__ __forceinline__ ScalePlace scale_place(const RowTile& tile, int kb) const {
    constexpr bool kFeatureLines = C::kMajor == Major::kK;
    const ExpertScales& form = p_.lines.scales[0];
    const int k = (kb - part(kb) * p_.k_blocks_of_part) * kTileK;
    const int features = (C::kBlocks == Blocks::kAlternating ? 2 : 1) * p_.features;
    const int line_end = kFeatureLines ? features : p_.k_size;
    const int end = kFeatureLines ? p_.k_size : features;
    const BlockPlace place =
        place_of<C::kBlocks>(part(kb), first_feature(p_, tile.feature_tile), warp_);
    const ExpertScales& scales = p_.lines.scales[place.part];
    const int at = (kFeatureLines ? k : place.feature) + lane_ % 2 * kLineRun;
    const int first = (kFeatureLines ? place.feature : k) + lane_ / 2;
    return {place.part, at < end ? line_end - first : 0,
            tile.expert * form.expert_stride + ((scales.first + at) >> form.shift),
            scales.first_line + first * form.line_step};
  }
  // entry(i, at): of batch i, whose scale is the at-th of the stack.
  template <class Entry>
  __device__ __forceinline__ void each_entry(const ScalePlace& place, const Entry& entry) const {
    const ExpertScales& form = p_.lines.scales[0];
#pragma unroll
    for (int i = 0; i < kBatches; ++i) {
      if (i * kBatchLines >= place.lines) continue;
      const int of = place.line + i * kBatchLines * form.line_step;
      entry(i, place.first + int64_t(of >> form.line_shift) * form.line_stride);
    }
  }
  template <class Stored>
  __device__ __forceinline__ void fetch_stored(const RowTile& tile, int kb) {
    const ScalePlace place = scale_place(tile, kb);
    const Stored* const from = static_cast<const Stored*>(p_.lines.scales[place.part].base);
#pragma unroll
    for (uint32_t& scale : next_) scale = 0;
    each_entry(place, [&](int i, int64_t at) { next_[i] = __ldg(from + at); });
  }
  // Scales of their codes.
  __device__ __forceinline__ void look_up(const RowTile& tile, int kb,
                                          uint32_t (&scales)[kScales]) const {
    const ScalePlace place = scale_place(tile, kb);
    const NestedScales& nested = p_.lines.nested[place.part];
    const float offset = __ldg(nested.offset);
    each_entry(place, [&](int i, int64_t at) {
      const float factor = __ldg(nested.scales2 + (at >> nested.shift));
      scales[i] =
          std::bit_cast<uint32_t>(quant::product(__ldg(nested.book + scales[i]), factor) + offset);
    });
  }
  __device__ void fetch(const RowTile& tile, int kb) {
    switch (dtype_bytes(p_.lines.scales[0].dtype)) {
      case 1:
        return fetch_stored<uint8_t>(tile, kb);
      case 2:
        return fetch_stored<uint16_t>(tile, kb);
      default:
        return fetch_stored<uint32_t>(tile, kb);
    }
  }
  // Into what elements are made with: pairs of their type, or fp32.
  template <class Body>
  static __device__ __forceinline__ void each_scale(uint32_t (&scales)[kScales], const Body& body) {
#pragma unroll
    for (uint32_t& scale : scales) scale = body(scale);
  }
  __device__ __forceinline__ void convert(uint32_t (&scales)[kScales]) const {
    const moec_dtype dtype = p_.lines.scales[0].dtype;
    if (p_.lines.decode == LineDecode::kPowers)
      each_scale(scales, [](uint32_t scale) { return power_pair(scale); });
    else if (p_.lines.decode == LineDecode::kIntegers)
      each_scale(scales, [](uint32_t scale) { return scale | scale << 16; });
    else if (dtype == MOEC_BF16)
      each_scale(scales, [](uint32_t scale) { return scale << 16; });
    else if (dtype != MOEC_F32)
      each_scale(scales,
                 [&](uint32_t scale) { return std::bit_cast<uint32_t>(scale_of(scale, dtype)); });
  }

  // ---- codes
  // decode(codes, scale, store) of the batches [kFirst, kFirst + kCount) of a block: kWords x 16
  // bytes of codes; store(j, elements) takes the j-th eight of their elements. All codes are read
  // before any element is written, and what one batch waits for the others fill.
  template <int kWords, int kFirst, int kCount, class Decode>
  __device__ __forceinline__ void decode_batches(uint32_t block, const uint32_t* scales,
                                                 const Decode& decode) const {
    constexpr int kPlace = kBlockBytes - kBatches * 512 * kWords;
    uint4 codes[kCount][kWords];
#pragma unroll
    for (int b = 0; b < kCount; ++b)
#pragma unroll
      for (int w = 0; w < kWords; ++w)
        codes[b][w] =
            ptx::shared_load(block + kPlace + ((kFirst + b) * 32 + lane_) * 16 * kWords + 16 * w);
    __syncwarp();
#pragma unroll
    for (int b = 0; b < kCount; ++b) {
      const uint32_t to = block + (kFirst + b) * kBatchLines * 128 + to_;
      decode(codes[b], scales[kFirst + b], [&](int j, const FourPairs& v) {
        ptx::shared_store(to ^ j << 4, uint4{v.pair[0], v.pair[1], v.pair[2], v.pair[3]});
      });
    }
  }
  // word(codes) -> elements, of each of a lane's four words, two at a time.
  template <class Word, class Store>
  static __device__ __forceinline__ void each_word(const uint4& codes, const Word& word,
                                                   const Store& store) {
    const FourPairs first = word(codes.x), second = word(codes.y);
    store(0, first);
    store(1, second);
    const FourPairs third = word(codes.z), fourth = word(codes.w);
    store(2, third);
    store(3, fourth);
  }
  template <class Decode>
  __device__ __forceinline__ void decode_nibbles(uint32_t block, const uint32_t* scales,
                                                 const Decode& decode) const {
    decode_batches<1, 0, kBatches>(block, scales, decode);
  }
  __device__ __forceinline__ void decode_block(uint32_t block, int part,
                                               const uint32_t* scales) const {
    switch (p_.lines.decode) {
      case LineDecode::kPowers:
        return decode_nibbles(
            block, scales, [&](const uint4(&codes)[1], uint32_t scale, const auto& store) {
              each_word(codes[0], [&](uint32_t word) { return powers(word, scale); }, store);
            });
      case LineDecode::kIntegers:
        return decode_nibbles(
            block, scales, [&](const uint4(&codes)[1], uint32_t scale, const auto& store) {
              each_word(
                  codes[0], [&](uint32_t word) { return integers<kHalf>(word, scale); }, store);
            });
      case LineDecode::kTable: {
        const bool high_first = p_.lines.high_first;
        return decode_nibbles(
            block, scales, [&](const uint4(&codes)[1], uint32_t scale, const auto& store) {
              const ValueTable table =
                  table_of(numbers_ + part * kNumbersBytes, std::bit_cast<float>(scale));
              each_word(
                  codes[0], [&](uint32_t word) { return table.look_up(word, high_first); }, store);
            });
      }
      case LineDecode::kBytes: {
        const auto decode = [&](const uint4(&codes)[2], uint32_t scale, const auto& store) {
          const float factor = std::bit_cast<float>(scale);
          const auto of = [&](uint32_t first, uint32_t second) {
            return bytes<kHalf>(first, second, factor);
          };
          const FourPairs first = of(codes[0].x, codes[0].y), second = of(codes[0].z, codes[0].w);
          store(0, first);
          store(1, second);
          const FourPairs third = of(codes[1].x, codes[1].y), fourth = of(codes[1].z, codes[1].w);
          store(2, third);
          store(3, fourth);
        };
        decode_batches<2, 0, 2>(block, scales, decode);
        return decode_batches<2, 2, 2>(block, scales, decode);
      }
      case LineDecode::kSigned:
        return;  // in no line
    }
  }
  static __device__ __forceinline__ ValueTable table_of(uint32_t numbers, float scale) {
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
  const Codes codes_;
  const uint32_t numbers_;
  const int warp_, turn_, lane_;
  const uint32_t to_;  // in a batch's elements: the first 16 bytes of this lane
  uint32_t next_[kScales];
};

template <typename C, bool kInLines = C::Weights::kInLines>
struct WeightDecoderOf {
  using Type = ChannelDecoder<C>;
};
template <typename C>
struct WeightDecoderOf<C, true> {
  using Type = LineDecoder<C>;
};
template <typename C>
using WeightDecoder = typename WeightDecoderOf<C>::Type;

}  // namespace moec::cuda
