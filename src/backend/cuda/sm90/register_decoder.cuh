// SPDX-License-Identifier: Apache-2.0
// Elements of coded weights as wgmma's A operand, made by the warps that multiply, for tiles of few
// rows: there the codes of a k-block take longer than its products. A block of 64 x 64 codes lies
// in its stage in lines along k, of 32 bytes (nibbles) or 64. A lane wants two rows of a block, and
// of every eight k two neighbours: the four lanes of a quad read the same codes, and each keeps its
// own.
//
//   numbers   what nibbles stand for, of either part: 16 floats; behind them what the compiler is
//             not to know, which else works it out again, or fetches it, in every k-block
#pragma once

#include "backend/cuda/sm90/register_scales.cuh"

namespace moec::cuda {

constexpr int kHalves = kTileK / kLineRun;  // of a line of a block
using Fragments = uint32_t[kSteps][4];      // of a block, by steps of 16 k

// The memory of a CTA's decoders.
struct FragmentNumbers {
  static constexpr int kUnknown = 2 * kNumbersBytes, kBytes = kUnknown + 16;

  // By all threads; a barrier follows.
  static __device__ void init(const CodedRowGemmParams& p, uint32_t memory) {
    if (threadIdx.x == 0)
      ptx::shared_store(memory + kUnknown, uint4{kLowest, uint32_t(p.k_size - 1),
                                                 uint32_t(p.lines.scales[0].shift), 0});
    store_numbers(p.lines, memory);
  }
};

template <typename C>
class FragmentDecoder {
 public:
  using Params = typename C::Params;
  using Weights = typename C::Weights;

  __device__ FragmentDecoder(const Params& p, uint32_t memory, int group)
      : FragmentDecoder(p, memory, group, ptx::shared_load(memory + FragmentNumbers::kUnknown)) {}

  __device__ int lane() const { return thread_ & 31; }
  __device__ void begin(const RowTile& tile) { scales_.begin(tile); }
  // In front of a k-block.
  __device__ __forceinline__ void take_scales(int kb) { scales_.take(kb); }

  // The codes of one of the group's blocks in a stage.
  struct Codes {
    uint32_t words[2][kHalves][Weights::kNibbles ? 1 : 2], scale[2][kHalves];  // of two rows
    ValueTable table;                                                          // of a row

    __device__ void settle() {
#pragma unroll
      for (auto& row : words)
#pragma unroll
        for (auto& half : row)
#pragma unroll
          for (uint32_t& word : half) ptx::settle(word);
    }
  };
  template <int kBlock>
  __device__ __forceinline__ void take(uint32_t operand_m, int row, Codes& codes) const {
    const uint32_t at = operand_m + at_ + 2 * kBlock * Weights::kBlockStride +
                        row * kRowLines * Weights::kLineBytes;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      codes.scale[row][half] = scales_.template of<kBlock>(row, half);
      take_half(at + half * (Weights::kLineBytes / kHalves), codes.words[row][half]);
    }
  }
  // The same of a tile of many rows, without the scales.
  __device__ __forceinline__ void load(uint32_t stage, Codes& codes) const {
#pragma unroll
    for (int row = 0; row < 2; ++row)
#pragma unroll
      for (int half = 0; half < kHalves; ++half)
        take_half(stage + at_ + row * kRowLines * Weights::kLineBytes +
                      half * (Weights::kLineBytes / kHalves),
                  codes.words[row][half]);
  }
  // 0, when all of them have come: the compiler does not know that no thread's number is negative.
  __device__ __forceinline__ uint32_t zero_of(const Codes& codes) const {
    uint32_t all = 0;
#pragma unroll
    for (const auto& row : codes.words)
#pragma unroll
      for (const auto& half : row)
#pragma unroll
        for (const uint32_t word : half) all ^= word;
    return (all & uint32_t(thread_)) >> 31;
  }
  // A quarter of a k-block's elements: those of a row's half.
  __device__ __forceinline__ void make(int quarter, Codes& codes, Fragments& f) {
    const int row = quarter / 2, half = quarter % 2;
    if (half == 0)
#pragma unroll
      for (int h = 0; h < kHalves; ++h) codes.scale[row][h] = scales_.template of<0>(row, h);
    decode_half<0>(codes, codes.table, row, half, f);
#pragma unroll
    for (int i = 0; i < 4; ++i) ptx::settle(f[2 * half + i / 2][row + 2 * (i & 1)]);
  }
  // Of an adapter's factors, as they lie; k: of them, from this k-block on.
  __device__ __forceinline__ void take_factors(const RowTile& tile, int k, Fragments& f) const {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const auto of = scales_.line_of(tile, 0, row);
      const auto* const from =
          static_cast<const uint32_t*>(p_.factors.base[of.part]) +
          (tile.expert * p_.factors.expert_stride + of.line * p_.factors.line_stride) / 2;
#pragma unroll
      for (int i = 0; i < 2 * kSteps; ++i) {
        const int at = k + 8 * i + 2 * int(quad_lane());
        f[i / 2][row + 2 * (i & 1)] = at < p_.rank ? __ldg(from + at / 2) : 0;
      }
    }
  }
  // Their elements.
  template <int kBlock>
  __device__ __forceinline__ void decode(const Codes& codes, Fragments& f) const {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      ValueTable table;
#pragma unroll
      for (int half = 0; half < kHalves; ++half) decode_half<kBlock>(codes, table, row, half, f);
    }
  }

 private:
  static constexpr LineDecode kDecode = Weights::kDecode;
  static constexpr bool kPair = C::kBlocks == Blocks::kPair;
  static constexpr int kRowLines = kPair ? 64 : 8;  // between a thread's two lines in a stage
  static constexpr bool kF16 = std::is_same_v<typename C::Element, __half>;

  __device__ FragmentDecoder(const Params& p, uint32_t memory, int group, const uint4& unknown)
      : p_(p),
        numbers_(memory),
        lowest_(unknown.x),
        thread_(int(threadIdx.x) + int(unknown.w)),
        at_(kPair ? pair_line_of(group, thread_) * Weights::kLineBytes
                  : group * Weights::kBlockStride + row_of(thread_) * Weights::kLineBytes),
        scales_(p, group, thread_, int(unknown.y), int(unknown.z)) {}

  __device__ uint32_t quad_lane() const { return thread_ & 3; }
  template <int kBlock>
  static constexpr int part(int row) {
    return C::kBlocks == Blocks::kGated ? kBlock : kPair ? row : 0;
  }

  // Bytes t of four words of nibbles, or halves t of two eights of bytes, twice.
  template <int kWords>
  __device__ __forceinline__ void take_half(uint32_t at, uint32_t (&words)[kWords]) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = own(ptx::shared_load(at + 16 * i));
  }
  __device__ __forceinline__ uint32_t own(const uint4& all) const {
    const uint32_t t = quad_lane();
    const uint32_t own = Weights::kNibbles ? t | (t + 4) << 4 : 2 * t | (2 * t + 1) << 4;
    return permute(permute(all.x, all.y, own), permute(all.z, all.w, own), 0x5410);
  }

  template <int kBlock>
  __device__ __forceinline__ void decode_half(const Codes& codes, ValueTable& table, int row,
                                              int half, Fragments& f) const {
    constexpr int kPairs = kLineRun / 8;  // that a lane has of a half line
    if constexpr (kDecode == LineDecode::kTable) {
      if (half == 0 || scales_.in_halves())
        table = table_of(part<kBlock>(row), codes.scale[row][half]);
    }
    const FourPairs v = elements(table, codes.words[row][half], codes.scale[row], half);
#pragma unroll
    for (int j = 0; j < kPairs; ++j) f[(half * kPairs + j) / 2][row + 2 * (j & 1)] = v.pair[j];
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
  const uint32_t numbers_, lowest_;
  const int thread_;
  const uint32_t at_;  // of this lane's first row in a stage
  ScalesOf<C> scales_;
};

// ---- products -----------------------------------------------------------------------------------
// The products of a block. Those of the block before it are done.
template <typename C, int kRegisters>
__device__ __forceinline__ void multiply_block(float (&acc)[kRegisters], const Fragments& f,
                                               uint32_t n, int kb) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
    wgmma<typename C::Element, Major::kK>(acc, f[step], n + step * kStepK16<Major::kK>,
                                          step == 0 ? kb : 1);
  wgmma_commit();
  wgmma_wait<1>();
}

// As multiply of tile_mma.cuh. The elements of a block are made while the products of the block
// before it, and of other warps, are under way; its codes are asked for in front of these, those of
// the second row where registers are left.
template <typename C>
__device__ __forceinline__ void multiply_coded(TileAccumulators<C::kMaxRows>& acc,
                                               typename C::Stages& ring,
                                               FragmentDecoder<C>& decoder, int k_blocks) {
  const uint32_t n = operand_descriptor(ring.first_m() + C::kBytesM, kBlockBytes);
  Fragments first, second;
  typename FragmentDecoder<C>::Codes codes;
  constexpr bool kBothEarly = !C::Weights::kNibbles;
  for (int kb = 0; kb < k_blocks; ++kb) {
    decoder.take_scales(kb);
    ring.wait_full();
    const uint32_t at_n = n + ring.ahead();
    decoder.template take<0>(ring.operand_m(), 0, codes);
    decoder.template take<0>(ring.operand_m(), 1, codes);
    decoder.template decode<0>(codes, first);
    decoder.template take<1>(ring.operand_m(), 0, codes);
    if constexpr (kBothEarly) decoder.template take<1>(ring.operand_m(), 1, codes);
    multiply_block<C>(acc.first, first, at_n, kb);
    if (kb > 0) ring.release_previous(decoder.lane());
    if constexpr (!kBothEarly) decoder.template take<1>(ring.operand_m(), 1, codes);
    decoder.template decode<1>(codes, second);
    multiply_block<C>(acc.second, second, at_n, kb);
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
    if constexpr (C::Epilogue::kGated) clear_outside(p, tile, group, acc);
    add_biases<typename C::Element, C::Epilogue::kGated>(p, tile, group, acc);
    epilogue.finish(p, tile, group, acc);
  }
}

}  // namespace moec::cuda
