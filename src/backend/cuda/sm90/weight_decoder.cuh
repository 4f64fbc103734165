// SPDX-License-Identifier: Apache-2.0
// Warps that make elements of codes inside a stage: here of signed bytes where each row of the
// matrix has one scale, in line_decoder.cuh of lines. A block of 64 x 64 codes lies as it does in
// memory, in rows of 64 bytes, in the upper half of the 8 KiB that its elements take; the elements
// come from its beginning on, each row a line of 128 bytes under the swizzle. Batch b of 16 rows
// is read before any of it is written, and covers no codes but those of batches up to b.
//
//   codes     for each stage: one arrival that announces the bytes
//   channels  for each warp: what the 64 channels of its block have in common
#pragma once

#include "backend/cuda/device/codes.cuh"
#include "backend/cuda/device/line_words.h"
#include "backend/cuda/sm90/epilogue.cuh"
#include "backend/cuda/sm90/weight_operand.cuh"

namespace moec::cuda {

__device__ __forceinline__ uint2 load_eight_bytes(uint32_t address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
  return v;
}

// The barriers of the stages' codes.
template <int kStages>
class CodeBarriers {
 public:
  static constexpr int kBytes = (8 * kStages + 15) / 16 * 16;
  __device__ explicit CodeBarriers(uint32_t memory) : memory_(memory) {}
  __device__ void init() const {
    for (int s = 0; s < kStages; ++s) ptx::barrier_init(memory_ + 8 * s, 1);
  }
  template <typename Stages>
  __device__ uint32_t of(const Stages& ring) const {
    return memory_ + 8 * ring.stage();
  }
  template <typename Stages>
  __device__ void wait(const Stages& ring) const {
    ptx::barrier_wait(of(ring), ring.phase());
  }

 private:
  uint32_t memory_;
};

// Whose turn it is to decode. Each has stages of its own, and so sees every phase of their codes'
// barriers: who passes one over could take codes of two phases ago for those it waits for.
template <typename C>
__device__ __forceinline__ bool decodes(const typename C::Stages& ring, int turn) {
  static_assert(C::kStages % C::kDecoderTurns == 0);
  return ring.stage() % C::kDecoderTurns == turn;
}

// By a warp that has written its elements of the ring's current stage.
template <typename C>
__device__ __forceinline__ void announce_elements(const typename C::Stages& ring, int lane) {
  ptx::fence_proxy_async();  // by the writer: one by those that multiply does not order its stores
  __syncwarp();
  if (lane == 0) ptx::barrier_arrive(ring.full());
}

// The same of a k-block of factors, whose elements lie where wgmma reads them.
template <typename C, typename Codes>
__device__ __forceinline__ void pass_elements(const Codes& codes, const typename C::Stages& ring,
                                              int lane) {
  codes.wait(ring);
  announce_elements<C>(ring, lane);
}

// What nibbles of either part stand for, to memory: 16 floats each. By all threads.
constexpr int kNumbersBytes = 16 * 4;
__device__ __forceinline__ void store_numbers(const CodedLines& lines, uint32_t memory) {
  const int part = int(threadIdx.x) / 16, code = int(threadIdx.x) % 16;
  if (part >= 2) return;
  const float* const book = lines.codebooks[part];
  ptx::shared_store(memory + 4 * threadIdx.x, book ? __ldg(book + code) : lines.numbers[code]);
}

// The scale at `at` of the stream, whose code is a byte. offset: *nested.offset.
__device__ __forceinline__ float nested_scale(const NestedScales& nested, float offset,
                                              uint32_t code, int64_t at) {
  const float factor = __ldg(nested.scales2 + (at >> nested.shift));
  return quant::product(__ldg(nested.book + code), factor) + offset;
}

// What the codes of channel n of an expert have in common.
__device__ __forceinline__ quant::BlockView of_expert(const ChannelArray& array, int expert) {
  if (!array.base) return {};
  const int64_t bytes = expert * array.expert_stride * dtype_bytes(array.dtype);
  return {static_cast<const char*>(array.base) + bytes, array.stride, 0, {}, {}, array.dtype};
}
template <class Format>
__device__ __forceinline__ typename Format::Block channel_of(const ExpertChannels& from, int expert,
                                                             int n) {
  quant::CodedView view;
  view.scales = of_expert(from.scales, expert);
  view.zeros = of_expert(from.zeros, expert);
  return Format::block(view, n, 0);
}

constexpr int kDecodedRows = 64, kChannelBytes = kDecodedRows * 8;  // of a block; of a warp

template <typename C>
class ChannelDecoder {
 public:
  using Codes = CodeBarriers<C::kStages>;
  static constexpr int kBytes = Codes::kBytes + C::kDecoderTurns * C::kDecoders * kChannelBytes;

  // By all threads; a barrier follows.
  static __device__ void init(const typename C::Params&, uint32_t memory) {
    if (threadIdx.x == 0) Codes(memory).init();
  }

  // warp: of C::kDecoders. turn: of C::kDecoderTurns.
  __device__ ChannelDecoder(const typename C::Params& p, uint32_t memory, int warp, int turn)
      : p_(p),
        codes_(memory),
        channels_(memory + Codes::kBytes + (turn * C::kDecoders + warp) * kChannelBytes),
        warp_(warp),
        turn_(turn),
        lane_(int(threadIdx.x) & 31) {}

  // A tile whose first k-block is in the ring's current stage.
  __device__ void begin(const typename C::Stages& ring, const RowTile& tile) {
    if (p_.channels_along_k) {
      const int first = !decodes<C>(ring, turn_);
      if (first < p_.narrow_from) fetch_of_k(tile.expert, first);
      return;
    }
    const BlockPlace place = place_of<C::kBlocks>(0, first_feature(p_, tile.feature_tile), warp_);
    fetch(tile.expert, place.part, place.feature,
          C::kBlocks == Blocks::kAlternating ? 2 * p_.features : p_.features);
    keep();
  }
  // k-block kb of the tile, in the ring's current stage, where that is this one's.
  __device__ void decode(const typename C::Stages& ring, const RowTile& tile, int kb) {
    if (!decodes<C>(ring, turn_)) return;
    if (kb >= p_.narrow_from) return pass_elements<C>(codes_, ring, lane_);
    if (p_.channels_along_k) {
      keep();
      if (kb + C::kDecoderTurns < p_.narrow_from) fetch_of_k(tile.expert, kb + C::kDecoderTurns);
    }
    codes_.wait(ring);
    // Whether a channel is a row of the block, or a column.
    const bool of_rows = (C::kMajor == Major::kK) != p_.channels_along_k;
    const uint32_t memory = ring.operand_m() + warp_ * kBlockBytes;
    of_rows ? decode_block<true>(memory) : decode_block<false>(memory);
    announce_elements<C>(ring, lane_);
  }

 private:
  using Format = typename C::Weights::Format;
  using Channel = typename Format::Block;
  static_assert(sizeof(Channel) == 8 && kSignedBytes<Format>);
  static constexpr int kBatchRows = 16, kTurns = 4;  // a turn: four rows, eight lanes each

  // Two channels a lane, from `first` on; none from `end` on.
  __device__ void fetch(int expert, int part, int first, int end) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int n = first + lane_ + 32 * i;
      next_[i] = n < end ? channel_of<Format>(p_.channels[part], expert, n) : Channel{};
    }
  }
  __device__ void fetch_of_k(int expert, int kb) {
    const int part = kb >= p_.k_blocks_of_part;
    fetch(expert, part, (kb - part * p_.k_blocks_of_part) * kTileK, p_.k_size);
  }
  // Zero points with the bias of codes, so that one subtraction, of whole numbers, takes off both.
  __device__ void keep() const {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Channel channel = next_[i];
      channel.zero = signed_base(channel.zero);
      ptx::shared_store(channels_ + 8 * (lane_ + 32 * i), std::bit_cast<float2>(channel));
    }
    __syncwarp();
  }
  __device__ Channel channel(int n) const {
    return std::bit_cast<Channel>(load_eight_bytes(channels_ + 8 * n));
  }

  template <bool kOfRows>
  __device__ __forceinline__ void decode_block(uint32_t block) const {
    const int row0 = lane_ / 8, chunk = lane_ % 8;
    Channel of_column[kOfRows ? 1 : 8];
    if constexpr (!kOfRows) {
#pragma unroll
      for (int i = 0; i < 8; ++i) of_column[i] = channel(8 * chunk + i);
    }
    const uint32_t from = block + C::Weights::place(p_) + 8 * lane_;
    uint2 next[kTurns];
    const auto load = [&](int first) {
#pragma unroll
      for (int i = 0; i < kTurns; ++i) next[i] = load_eight_bytes(from + 64 * (first + 4 * i));
    };
    load(0);
#pragma unroll 2
    for (int first = 0; first < kDecodedRows; first += kBatchRows) {
      uint2 codes[kTurns];
      Channel of_row[kTurns];
#pragma unroll
      for (int i = 0; i < kTurns; ++i) {
        codes[i] = next[i];
        if constexpr (kOfRows) of_row[i] = channel(first + 4 * i + row0);
      }
      if (first + kBatchRows < kDecodedRows) load(first + kBatchRows);
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kTurns; ++i) {
        float v[8];
        widen_biased(codes[i], v);
#pragma unroll
        for (int j = 0; j < 8; ++j)
          v[j] = Format::decode(v[j], kOfRows ? of_row[i] : of_column[kOfRows ? 0 : j]);
        ptx::shared_store(block + swizzled(uint32_t(first + 4 * i + row0), uint32_t(chunk)),
                          uint4{element_pair(v[0], v[1]), element_pair(v[2], v[3]),
                                element_pair(v[4], v[5]), element_pair(v[6], v[7])});
      }
    }
  }
  static __device__ uint32_t element_pair(float low, float high) {
    return pack<typename C::Element>(low, high);
  }

  const typename C::Params& p_;
  const Codes codes_;
  const uint32_t channels_;
  const int warp_, turn_, lane_;
  Channel next_[2];
};

}  // namespace moec::cuda
