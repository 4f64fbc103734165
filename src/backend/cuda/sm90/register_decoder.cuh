// SPDX-License-Identifier: Apache-2.0
// Elements of coded weights as wgmma's A operand, made by the warps that multiply, for tiles of few
// rows: there the codes of a k-block take longer than its products. A block of 64 x 64 codes lies
// in its stage in lines along k, of 32 bytes (nibbles) or 64. A lane wants two rows of a block, and
// of every eight k two neighbours: the four lanes of a quad read the same codes, and each keeps its
// own.
//
//   numbers   what nibbles stand for, of either part: 16 floats; behind them a constant
#pragma once

#include "backend/cuda/sm90/line_words.h"
#include "backend/cuda/sm90/row_gemm_config.cuh"
#include "backend/cuda/sm90/weight_decoder.cuh"

namespace moec::cuda {

constexpr int kHalves = kTileK / kLineRun;  // of a line of a block
using Fragments = uint32_t[kSteps][4];      // of a block, by steps of 16 k

template <typename C>
class FragmentDecoder {
 public:
  using Params = typename C::Params;
  using Weights = typename C::Weights;
  static constexpr int kNumbersBytes = 16 * 4, kBytes = 2 * kNumbersBytes + 16;

  // By all threads; a barrier follows.
  static __device__ void init(const Params& p, uint32_t memory) {
    const int part = int(threadIdx.x) / 16, code = int(threadIdx.x) % 16;
    if (threadIdx.x == 0) ptx::shared_store(memory + 2 * kNumbersBytes, uint4{kLowest});
    if (part >= 2) return;
    const float* const book = p.lines.codebooks[part];
    const float number = book ? __ldg(book + code) : p.lines.numbers[code];
    ptx::shared_store(memory + 4 * threadIdx.x, number);
  }

  __device__ FragmentDecoder(const Params& p, uint32_t memory, int group)
      : p_(p),
        numbers_(memory),
        lowest_(ptx::shared_load_word(memory + 2 * kNumbersBytes)),
        group_(group),
        at_(group * Weights::kBlockStride + (warp_row() + lane() / 4) * Weights::kLineBytes) {}

  // Where the scales of a tile are, and those of its first k-block, or of all.
  __device__ void begin(const RowTile& tile) {
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      const BlockPlace place =
          place_of<C::kBlocks>(0, first_feature(p_, tile.feature_tile), group_ + 2 * block);
      const int own = place.feature + warp_row() + lane() / 4 + 8 * (quad_lane() >> 1);
      const int line = min(own, p_.features - 1);  // what comes of others is never stored
      if constexpr (kOfChannels) {
        next_[block] = of_channel(p_.channels[place.part], tile.expert, line);
      } else {
        const ExpertScales& form = p_.lines.scales[0];
        const ExpertScales& scales = p_.lines.scales[place.part];
        const int64_t of = (scales.first_line + line * form.line_step) >> form.line_shift;
        const int64_t first = tile.expert * form.expert_stride + of * form.line_stride;
        from_[block] = static_cast<const char*>(scales.base) + first * entry_bytes();
        fetch(block, 0);
      }
    }
  }

  // The codes of one of the group's blocks in a stage, and the scales of the next k-block. Of a
  // channel, which has one for both halves, a base is in the place of the second scale.
  struct Codes {
    uint32_t words[2][kHalves][Weights::kNibbles ? 1 : 2], scale[2][kHalves];  // of two rows
  };
  template <int kBlock>
  __device__ __forceinline__ void take(uint32_t operand_m, int kb, Codes& codes) {
    const uint32_t own = converted<kBlock>(next_[kBlock], kb);
    if constexpr (!kOfChannels) fetch(kBlock, kb + 1);
    const uint32_t at = operand_m + at_ + 2 * kBlock * Weights::kBlockStride;
#pragma unroll
    for (int row = 0; row < 2; ++row)
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        codes.scale[row][half] = of_quad(own, 2 * row + half);
        take_half(at + 8 * row * Weights::kLineBytes + half * (Weights::kLineBytes / kHalves),
                  codes.words[row][half]);
      }
  }
  // Their elements.
  template <int kBlock>
  __device__ __forceinline__ void decode(const Codes& codes, Fragments& f) const {
    constexpr int kPairs = kLineRun / 8;  // that a lane has of a half line
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      ValueTable table;
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        if constexpr (kDecode == LineDecode::kTable) {
          if (half == 0 || in_halves()) table = table_of(part<kBlock>(), codes.scale[row][half]);
        }
        const FourPairs v = elements(table, codes.words[row][half], codes.scale[row], half);
#pragma unroll
        for (int j = 0; j < kPairs; ++j) f[(half * kPairs + j) / 2][row + 2 * (j & 1)] = v.pair[j];
      }
    }
  }

 private:
  static constexpr LineDecode kDecode = Weights::kDecode;
  static constexpr bool kOfChannels = kDecode == LineDecode::kSigned;
  static constexpr bool kF16 = std::is_same_v<typename C::Element, __half>;

  static __device__ int lane() { return int(threadIdx.x) & 31; }
  static __device__ int quad_lane() { return lane() & 3; }
  static __device__ int warp_row() { return (int(threadIdx.x) >> 5 & 3) * 16; }
  static __device__ uint32_t of_quad(uint32_t word, int t) { return __shfl_sync(~0u, word, t, 4); }
  template <int kBlock>
  static constexpr int part() {
    return C::kBlocks == Blocks::kGated ? kBlock : 0;
  }

  // Whether the halves of a line have scales of their own.
  __device__ bool in_halves() const { return kTileK >> p_.lines.scales[0].shift > 1; }
  // Powers and integers have scales of one type: exponents, or the weights'.
  __device__ int entry_bytes() const {
    if constexpr (kDecode == LineDecode::kPowers) return 1;
    if constexpr (kDecode == LineDecode::kIntegers) return 2;
    return dtype_bytes(p_.lines.scales[0].dtype);
  }
  // Lane t of a quad has the scale of half t % 2 of the quad's first row, or of its second. Behind
  // k_size rows are zeros.
  __device__ int entry(int kb) const {
    const int k = min(kb * kTileK + (quad_lane() & 1) * kLineRun, p_.k_size - 1);
    return k >> p_.lines.scales[0].shift;
  }
  __device__ __forceinline__ void fetch(int block, int kb) {
    const int bytes = entry_bytes();
    const char* const at = from_[block] + entry(kb) * bytes;
    if (bytes == 4)
      next_[block] = __ldg(reinterpret_cast<const uint32_t*>(at));
    else if (bytes == 2)
      next_[block] = __ldg(reinterpret_cast<const uint16_t*>(at));
    else
      next_[block] = __ldg(reinterpret_cast<const uint8_t*>(at));
  }
  // As look_up of LineDecoder: the scale of a code, which is a byte.
  template <int kBlock>
  __device__ __forceinline__ float looked_up(uint32_t code, int kb) const {
    const NestedScales& nested = p_.lines.nested[part<kBlock>()];
    const auto* const base = static_cast<const char*>(p_.lines.scales[part<kBlock>()].base);
    const int64_t at = from_[kBlock] - base + entry(kb);
    const float factor = __ldg(nested.scales2 + (at >> nested.shift));
    return quant::product(__ldg(nested.book + code), factor) + __ldg(nested.offset);
  }
  // The scale of a channel in the even lanes of a quad, its base in the odd ones.
  static __device__ uint32_t of_channel(const ExpertChannels& channels, int expert, int n) {
    const auto channel = channel_of<quant::Int8>(channels, expert, n);
    return std::bit_cast<uint32_t>(quad_lane() & 1 ? signed_base(channel.zero) : channel.scale);
  }
  template <int kBlock>
  __device__ __forceinline__ uint32_t converted(uint32_t scale, int kb) const {
    if constexpr (kDecode == LineDecode::kPowers) return power_pair(scale);
    if constexpr (kDecode == LineDecode::kIntegers) return scale | scale << 16;
    if constexpr (kDecode == LineDecode::kSigned) return scale;
    const moec_dtype dtype = p_.lines.scales[0].dtype;
    if (dtype == MOEC_F32) [[likely]]
      return scale;
    return std::bit_cast<uint32_t>(p_.lines.nested[0].book ? looked_up<kBlock>(scale, kb)
                                                           : scale_of(scale, dtype));
  }

  // Bytes t of four words of nibbles, or halves t of two eights of bytes, twice.
  template <int kWords>
  static __device__ __forceinline__ void take_half(uint32_t at, uint32_t (&words)[kWords]) {
    const uint32_t t = quad_lane();
    const uint32_t own = Weights::kNibbles ? t | (t + 4) << 4 : 2 * t | (2 * t + 1) << 4;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const uint4 all = ptx::shared_load(at + 16 * i);
      words[i] = permute(permute(all.x, all.y, own), permute(all.z, all.w, own), 0x5410);
    }
  }

  template <int kWords>
  __device__ __forceinline__ FourPairs elements(const ValueTable& table,
                                                const uint32_t (&words)[kWords],
                                                const uint32_t (&scales)[kHalves], int half) const {
    const uint32_t scale = scales[half];
    if constexpr (kDecode == LineDecode::kTable)
      return table.look_up(words[0], p_.lines.high_first);
    else if constexpr (kDecode == LineDecode::kPowers)
      return powers(words[0], scale);
    else if constexpr (kDecode == LineDecode::kIntegers)
      return integers<kF16>(words[0], scale, lowest_);
    else if constexpr (kDecode == LineDecode::kSigned)
      return signed_bytes<kF16>(words[0], words[1], std::bit_cast<float>(scales[0]),
                                std::bit_cast<float>(scales[1]));
    else
      return bytes<kF16>(words[0], words[1], std::bit_cast<float>(scale));
  }
  // A quad makes the table of a row, of both halves, together.
  __device__ __forceinline__ ValueTable table_of(int part, uint32_t scale_bits) const {
    using quant::product;
    const float4 v =
        std::bit_cast<float4>(ptx::shared_load(numbers_ + part * kNumbersBytes + 16 * quad_lane()));
    const float scale = std::bit_cast<float>(scale_bits);
    const uint32_t first = rounded_pair<kF16>(product(v.x, scale), product(v.y, scale));
    const uint32_t second = rounded_pair<kF16>(product(v.z, scale), product(v.w, scale));
    ValueTable own, table;
    own.set(0, first, second);
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      table.low[q] = of_quad(own.low[0], q);
      table.high[q] = of_quad(own.high[0], q);
    }
    return table;
  }

  const Params& p_;
  const uint32_t numbers_, lowest_;  // the compiler does not see what the latter is
  const int group_;
  const uint32_t at_;    // of this lane's first row in a stage
  const char* from_[2];  // the scales of its rows
  uint32_t next_[2];
};

// ---- products -----------------------------------------------------------------------------------
// As multiply of tile_mma.cuh. The elements of a block are made while the products of the block
// before it, and of other warps, are under way; those of the block before that are done.
template <int kBlock, typename C, int kRegisters>
__device__ __forceinline__ void multiply_block(float (&acc)[kRegisters], typename C::Stages& ring,
                                               FragmentDecoder<C>& decoder, Fragments& f,
                                               uint32_t n, int kb) {
  typename FragmentDecoder<C>::Codes codes;
  decoder.template take<kBlock>(ring.operand_m(), kb, codes);
  decoder.template decode<kBlock>(codes, f);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
    wgmma<typename C::Element, Major::kK>(acc, f[step], n + step * kStepK16<Major::kK>,
                                          step == 0 ? kb : 1);
  wgmma_commit();
  wgmma_wait<1>();
}

template <typename C>
__device__ __forceinline__ void multiply_coded(TileAccumulators<C::kMaxRows>& acc,
                                               typename C::Stages& ring,
                                               FragmentDecoder<C>& decoder, int k_blocks) {
  const uint32_t n = operand_descriptor(ring.first_m() + C::kBytesM, kBlockBytes);
  Fragments first, second;
  for (int kb = 0; kb < k_blocks; ++kb) {
    ring.wait_full();
    const uint32_t at_n = n + ring.ahead();
    multiply_block<0>(acc.first, ring, decoder, first, at_n, kb);
    if (kb > 0) ring.release_previous(threadIdx.x & 31);
    multiply_block<1>(acc.second, ring, decoder, second, at_n, kb);
    ring.advance();
  }
}

// As consume of row_gemm.cuh: for every tile the products of all its rows and of both blocks, since
// ptxas serialises, without a word, products whose accumulators meet those of another number of
// columns.
template <typename C>
__device__ __forceinline__ void consume_coded(const typename C::Params& p, TileQueue& queue,
                                              typename C::Stages& ring,
                                              const typename C::ConsumerGroup& group,
                                              uint32_t codes) {
  typename C::Epilogue epilogue;
  FragmentDecoder<C> decoder(p, codes, group.index);
  RowTile tile, next;
  bool more = queue.take(tile);
  if (more) decoder.begin(tile);
  for (; more; tile = next) {
    const bool outside = group_feature(p, tile, group.index) >= feature_end(p, tile);
    TileAccumulators<C::kMaxRows> acc;
    if (outside)
      pass_over(ring, p.k_blocks, [](int) {});
    else
      multiply_coded<C>(acc, ring, decoder, p.k_blocks);
    more = queue.take(next);
    if (more) decoder.begin(next);
    if (outside) continue;
    finish_multiply(acc, ring);
    add_biases<typename C::Element, C::Epilogue::kGated>(p, tile, group, acc);
    epilogue.finish(p, tile, group, acc);
  }
}

}  // namespace moec::cuda
