// SPDX-License-Identifier: Apache-2.0
// The m operand of a row GEMM: weights as they lie in memory, plain or coded, and the bulk copies
// that bring them into a stage.
#pragma once

#include "backend/cuda/sm90/row_gemm.h"
#include "backend/cuda/sm90/tile_ring.cuh"
#include "quant/format.h"

namespace moec::cuda {

// Each kind says where in its block a copy lies and how many bytes of a stage are copied, and where
// on the contiguous axis of its map a position is.

// Elements: copies put them where wgmma reads them.
template <Major kMajor_>
struct PlainWeights {
  using Params = RowGemmParams;
  static constexpr Major kMajor = kMajor_;
  static constexpr bool kCoded = false, kInRegisters = false;
  static constexpr int kCopyBlocks = kMajor == Major::kK ? 2 : 1;  // blocks of one copy
  static constexpr int kBlockStride = kBlockBytes;                 // in a stage
  static __device__ int place(const Params&) { return 0; }
  static __device__ int bytes(const Params&) { return kOperandMBytes; }
  static __device__ int column(const Params&, int position) { return position; }
};

// Codes of one byte, a channel for each row of the matrix. A block of them arrives in the upper
// half of the place where warps write its elements (weight_decoder.cuh).
template <class Format_, Major kMajor_>
struct CodedWeights {
  using Format = Format_;
  using Params = CodedRowGemmParams;
  static constexpr Major kMajor = kMajor_;
  static constexpr bool kCoded = true, kInLines = false, kInRegisters = false;
  static constexpr int kCopyBlocks = 1, kBlockStride = kBlockBytes;
  static __device__ int place(const Params&) { return kBlockBytes / 2; }
  static __device__ int bytes(const Params&) { return kOperandMBytes / 2; }
  static __device__ int column(const Params&, int position) { return position; }
  static_assert(quant::ChannelFormats::index(Format::kInfo.scheme) >= 0);
};

// Lines of bytes or of nibbles, at the end of the place of their elements (line_decoder.cuh).
template <Major kMajor_>
struct CodedWeights<LineFormats, kMajor_> {
  using Params = CodedRowGemmParams;
  static constexpr Major kMajor = kMajor_;
  static constexpr bool kCoded = true, kInLines = true, kInRegisters = false;
  static constexpr int kCopyBlocks = 1, kBlockStride = kBlockBytes;
  static __device__ int nibbles(const Params& p) { return p.lines.decode != LineDecode::kBytes; }
  static __device__ int place(const Params& p) {
    return kBlockBytes - (kBlockBytes / 2 >> nibbles(p));
  }
  static __device__ int bytes(const Params& p) { return kOperandMBytes / 2 >> nibbles(p); }
  static __device__ int column(const Params& p, int position) { return position >> nibbles(p); }
};

// Lines or channels, whose elements the warps that multiply make in their registers: a stage holds
// the codes and nothing else, and so there are more stages.
template <LineDecode kDecode_, Major kMajor_>
struct InRegisters {
  using Params = CodedRowGemmParams;
  static constexpr Major kMajor = kMajor_;
  static constexpr bool kCoded = false, kInRegisters = true;
  static constexpr LineDecode kDecode = kDecode_;
  static constexpr int kNibbles = kDecode != LineDecode::kBytes && kDecode != LineDecode::kSigned;
  static constexpr int kLineBytes = kTileK >> kNibbles;
  static constexpr int kCopyBlocks = 1, kBlockStride = 64 * kLineBytes;
  static __device__ int place(const Params&) { return 0; }
  static __device__ int bytes(const Params&) { return 4 * kBlockStride; }
  static __device__ int column(const Params&, int position) { return position >> kNibbles; }
};
// Along k (register_decoder.cuh). kWholeLines: a line of a block has one scale, which is fp32, or
// of integers of the weights' type.
template <LineDecode kDecode, bool kWholeLines_>
struct RegisterWeights : InRegisters<kDecode, Major::kK> {
  static constexpr bool kWholeLines = kWholeLines_;
};
// Along the features, of a gradient (column_decoder.cuh). kF32Scales: scales are numbers of fp32,
// else of any type, or codes; those of powers and integers are as ever.
template <LineDecode kDecode, bool kF32Scales_>
struct ColumnWeights : InRegisters<kDecode, Major::kMN> {
  static constexpr bool kF32Scales = kF32Scales_;
};

// Of codes along the features the first of two of a block that a thread has; the other is behind
// it. A unit of 16 bits has two bytes, or four nibbles, of which a warp takes two.
template <typename Weights>
__device__ __forceinline__ int column_feature(int thread) {
  const int warp = thread >> 5 & 3, unit = (thread & 31) / 4;
  return Weights::kNibbles ? 32 * (warp / 2) + 4 * unit + 2 * (warp & 1) : 16 * warp + 2 * unit;
}

// What the four 64-feature blocks are. Warpgroup g multiplies blocks g and 2 + g.
enum class Blocks {
  kPlain,       // consecutive features
  kGated,       // two of gate, two of up
  kPair,        // of a wide tile: one of gate, one of up, of which each warpgroup has halves
  kAlternating  // features of gate and up in turn: 128 consecutive ones for each warpgroup
};

// Where the m operand of one k-block starts. A map has the dimensions {k, feature, expert} when it
// is K-major and {feature, k, expert} when it is MN-major.
struct OperandM {
  const CUtensorMap* maps;  // two: gate and up; the plain operand uses maps[part]
  int part;
  int feature, k, expert;
  bool shared;  // the other CTA of the pair wants the same: each loads half of it for both
};

// Which part a block is of, and where its features begin there.
struct BlockPlace {
  int part, feature;
};
template <Blocks kForm>
__device__ __forceinline__ BlockPlace place_of(int part, int feature, int block) {
  return {kForm == Blocks::kGated ? block / 2 : part,
          kForm == Blocks::kAlternating
              ? 2 * feature + 128 * (block % 2) + 64 * (block / 2)
              : feature + 64 * (kForm == Blocks::kGated ? block % 2 : block)};
}

// By one thread.
template <typename Weights, Blocks kForm>
__device__ __forceinline__ void load_operand_m(const typename Weights::Params& p, uint32_t dst,
                                               uint32_t barrier, const OperandM& from) {
  const auto load = [&](int block, bool shared) {
    const BlockPlace place = place_of<kForm>(from.part, from.feature, block);
    const bool along_k = Weights::kMajor == Major::kK;
    const int column = Weights::column(p, along_k ? from.k : place.feature);
    const ptx::Coordinate at = {column, along_k ? place.feature : from.k, from.expert};
    load_block(dst + block * Weights::kBlockStride + Weights::place(p), from.maps + place.part,
               barrier, at, shared);
  };
  // Not one loop whose bounds are known only now: that becomes 75 instructions in front of the last
  // copy, with a choice for each of them.
  if (from.shared) {
    const int begin = 2 * pair_rank();
#pragma unroll
    for (int i = 0; i < 2; i += Weights::kCopyBlocks) load(begin + i, true);
  } else {
#pragma unroll
    for (int block = 0; block < 4; block += Weights::kCopyBlocks) load(block, false);
  }
}

}  // namespace moec::cuda
