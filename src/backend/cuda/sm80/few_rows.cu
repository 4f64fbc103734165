// SPDX-License-Identifier: Apache-2.0
// few_rows_kernel: row products of coded matrices whose experts have few rows. Memory decides: each
// warp copies codes into a ring of its own and makes fragments of mma.sync of them in registers,
// features on the m side, rows on the n side.
//
//   tile     32 features x 16 rows; a CTA has some tiles of features one after the other
//   warps    four, which have every fourth step of k; their sums are added in their order
//   step     a lane has a piece, 16 bytes of codes, of each of four features g + 8 i. The k of
//            lanes c = 0 to 3 of a quad follow each other, and k is permuted alike in the rows:
//            lane c has the k of its pieces there, too
//   rows     from L1, which holds what the tiles of a CTA read again
//   ring     kFewStages steps of 2 KiB a warp, refilled as they are read
//   grid     runs of tiles, row tiles of all groups, parts; surplus CTAs leave at once
//
// All formats share one kernel, since most of its instructions are those of all.
#include <algorithm>

#include "backend/cuda/sm80/few_rows_scales.cuh"
#include "backend/cuda/sm80/mma.cuh"

namespace moec::cuda {
namespace {

constexpr int kFewThreads = 128, kFewWarps = 4, kFewStages = 3, kFewPieces = kFewFeatures / 8;

struct FewShared {
  uint4 ring[kFewStages][kFewWarps][kFewPieces][32];
  // Rows of sums; so long, the stores of a warp meet no bank twice.
  float sums[kFewWarps][kFewRows][kFewFeatures + 4];
  alignas(16) float book[16];
};

__device__ const uint4 kFewZeros[4] = {};  // rows that are not there

__device__ __forceinline__ int few_warp() {
  return int(threadIdx.x) / 32;
}
__device__ __forceinline__ int few_lane() {
  return int(threadIdx.x) & 31;
}

// The rows of blockIdx.y.
__device__ __forceinline__ bool find_few_rows(const PortableGemm& p, PortableTile& t) {
  int before = 0, index = int(blockIdx.y);
  t.group = 0;
  t.first_row = 0;
  t.m_end = p.groups.max_rows;
  if (p.groups.offsets) {
    for (int first = 0;; first += 32) {
      if (first >= p.groups.count) return false;
      const int e = first + few_lane();
      const int rows = e < p.groups.count ? p.groups.counts[e] : 0;
      const int own = (rows + kFewRows - 1) / kFewRows;
      int end = own;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, end, step);
        if (few_lane() >= step) end += other;
      }
      end += before;
      const unsigned found = __ballot_sync(~0u, index < end);
      if (found) {
        const int owner = __ffs(found) - 1;
        t.group = first + owner;
        index -= __shfl_sync(~0u, end - own, owner);
        t.m_end = __shfl_sync(~0u, rows, owner);
        t.first_row = p.groups.offsets[t.group];
        break;
      }
      before = __shfl_sync(~0u, end, 31);
    }
  }
  t.m0 = int64_t(index) * kFewRows;
  return t.m0 < t.m_end;
}

// What a CTA walks over: steps of k of one tile after the other. The last tile of a matrix begins
// so that it is a whole one.
struct FewRun {
  int n_end, n0, tiles;
  int k_end, steps;
  int piece;  // codes

  __device__ FewRun(const PortableGemm& p, int run_tiles, bool nibbles)
      : n_end(int(p.n)), k_end(int(p.k)), piece(nibbles ? 32 : 16) {
    n0 = int(blockIdx.x) * run_tiles * kFewFeatures;
    tiles = min(run_tiles, (n_end - n0 + kFewFeatures - 1) / kFewFeatures);
    steps = (k_end + 4 * piece - 1) / (4 * piece);
  }
  __device__ __forceinline__ int n_of(int tile) const {
    return min(n0 + tile * kFewFeatures, n_end - kFewFeatures);
  }
  __device__ __forceinline__ int k_of(int step) const {
    return (step * 4 + few_lane() % 4) * piece;
  }
};

// The next step of a warp.
struct FewPlace {
  int tile = 0, step = few_warp();
  __device__ explicit FewPlace(const FewRun& run) {
    if (step >= run.steps) tile = 1 << 30;  // none
  }
  __device__ __forceinline__ bool advance(const FewRun& run) {  // whether to another tile
    step += kFewWarps;
    if (step < run.steps) return false;
    step = few_warp();
    ++tile;
    return true;
  }
};

class FewCodes {
 public:
  __device__ FewCodes(const Operand& b, const ExpertQuant& of, int group, const FewRun& run)
      : at_(run), nibbles_(run.piece == 32) {
    from_ = b.of_group(group);
    if (nibbles_) {  // in rows of the bound matrix; others have their own
      from_ += (group * of.expert_codes + of.rows.first * b.i_stride) / 2;
      pitch_ = int(of.rows.step * b.i_stride / 2);
    } else {
      pitch_ = int(b.i_stride);
    }
    from_ += int64_t(run.n_of(0) + few_lane() / 4) * pitch_;
  }
  // Copies the next step, or nothing.
  __device__ __forceinline__ void fetch(const FewRun& run, uint32_t slot) {
    if (at_.tile < run.tiles) {
      const int k = run.k_of(at_.step);
      const uint32_t bytes = k < run.k_end ? 16 : 0;
      const char* const from = from_ + (bytes ? nibbles_ ? k / 2 : k : 0);
#pragma unroll
      for (int i = 0; i < kFewPieces; ++i)
        ptx::copy_async(slot + i * 512, from + int64_t(8 * i) * pitch_, bytes);
      if (at_.advance(run)) from_ += int64_t(run.n_of(at_.tile) - run.n_of(at_.tile - 1)) * pitch_;
    }
    ptx::copy_async_commit();
  }

 private:
  FewPlace at_;
  const bool nibbles_;
  const char* from_;
  int pitch_;  // bytes
};

// Of a tile's 16 rows those in columns g and g + 8; zeros where there are none.
struct FewOperand {
  int rows[2];
  __device__ FewOperand(const PortableGemm& p, const PortableTile& t) {
#pragma unroll
    for (int y = 0; y < 2; ++y) {
      const int row = int(t.m0) + few_lane() / 4 + 8 * y;
      rows[y] = row < t.m_end ? t.first_row + row : -1;
      if (p.a.gather && rows[y] >= 0) rows[y] = p.a.gather[rows[y]];
    }
  }
  __device__ __forceinline__ const uint4* at(const PortableGemm& p, int y, int k) const {
    const auto* const first = static_cast<const uint16_t*>(p.a.base) + k;
    return rows[y] >= 0 && k < int(p.k)
               ? reinterpret_cast<const uint4*>(first + rows[y] * p.a.i_stride)
               : kFewZeros;
  }
};

// The sums of the tile at t.n0, of all warps, to where they belong: a column each lane.
__device__ __forceinline__ void write_few(const PortableGemm& p, const PortableTile& t,
                                          const FewShared& shared) {
  const int64_t n = t.n0 + few_lane();
  const Operand& bias = p.bias[t.part];
  float added = 0;
  if (bias.base || bias.pointers)
    added = load_span<1>(bias.of_group(t.group), bias.dtype, n * bias.i_stride)[0];
  const int rows = int(min(t.m_end - t.m0, int64_t(kFewRows)));
  char* const base = const_cast<char*>(static_cast<const char*>(p.c.base));
#pragma unroll 1
  for (int i = few_warp(); i < rows; i += kFewWarps) {
    float sum = shared.sums[0][i][few_lane()];
#pragma unroll
    for (int w = 1; w < kFewWarps; ++w) sum += shared.sums[w][i][few_lane()];
    const int64_t row = t.first_row + t.m0 + i;
    sum += (p.bias_weight ? p.bias_weight[row] : 1.0f) * added;
    const int64_t at = row * p.c.i_stride + n * p.c.k_stride + t.part * p.c_part;
    store_span(base, p.c.dtype, at, Span<1>{sum});
  }
}

using FewSums = float[2][2][4];  // of features, of rows

template <class Element, template <class> class Decoder>
__device__ __forceinline__ void multiply_few(FewSums& c, const FewContext& of, uint32_t slot,
                                             const FewBlock (&blocks)[kFewPieces],
                                             const uint4 (&x)[2][4], bool both) {
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const uint4 of_low = ptx::shared_load(slot + m * 1024),
                of_high = ptx::shared_load(slot + m * 1024 + 512);
    const Decoder<Element> low(of, blocks[2 * m]), high(of, blocks[2 * m + 1]);
#pragma unroll
    for (int run = 0; run < Decoder<Element>::kRuns; ++run) {
      const FourPairs a = low.elements(of_low, run), b = high.elements(of_high, run);
      const uint32_t first[4] = {a.pair[0], b.pair[0], a.pair[1], b.pair[1]};
      const uint32_t second[4] = {a.pair[2], b.pair[2], a.pair[3], b.pair[3]};
      mma<Element>(c[m][0], first, x[0][run].x, x[0][run].y);
      mma<Element>(c[m][0], second, x[0][run].z, x[0][run].w);
      if (both) {
        mma<Element>(c[m][1], first, x[1][run].x, x[1][run].y);
        mma<Element>(c[m][1], second, x[1][run].z, x[1][run].w);
      }
    }
  }
}

// run_tiles: of features, that a CTA has.
__global__ __launch_bounds__(kFewThreads, 4)  //
    void few_rows_kernel(const PortableGemm p, const int run_tiles) {
  __shared__ FewShared shared;
  begin_kernel();
  PortableTile t;
  if (!find_few_rows(p, t)) return;
  t.part = int(blockIdx.z);
  const ExpertQuant& of = p.codes[t.part].quant;
  const uint32_t scheme = of.scheme;
  const bool is_book = scheme == MOEC_SCHEME_CODEBOOK4;
  if (threadIdx.x < 16)
    shared.book[threadIdx.x] = is_book ? of.codebook[threadIdx.x] : float(int(threadIdx.x) - 8);
  const FewRun run(p, run_tiles, scheme != MOEC_SCHEME_INT8 && scheme != MOEC_SCHEME_FP8);
  const int warp = few_warp(), lane = few_lane();
  FewCodes codes(p.b[t.part], of, t.group, run);
  const uint32_t ring = ptx::kept(ptx::shared_address(&shared.ring[0][warp][0][lane]));
  const auto slot = [&](int i) { return ring + i * uint32_t(sizeof(shared.ring[0])); };
#pragma unroll 1
  for (int i = 0; i < kFewStages; ++i) codes.fetch(run, slot(i));
  const FewOperand rows(p, t);
  const bool both = t.m_end - t.m0 > 8;
  const FewContext context = {ptx::shared_address(shared.book), is_book,
                              p.b[t.part].dtype == MOEC_F8_E5M2};
  const bool own_scales = of.scales.array.dtype == p.a.dtype;
  FewScales<kFewPieces> scales(of, t.group, p.b[t.part].i_stride, uint32_t(run.k_end));
  FewPlace next(run);  // whose scales are fetched
  const auto fetch_scales = [&] {
    if (next.tile >= run.tiles) return;
    if (next.step == warp) scales.begin(run.n_of(next.tile) + lane / 4);
    scales.fetch(uint32_t(run.k_of(next.step)));
    next.advance(run);
  };
  fetch_scales();
  __syncthreads();  // the book
  int at = 0;       // slot
#pragma unroll 1
  for (int tile = 0; tile < run.tiles; ++tile) {
    FewSums c = {};
#pragma unroll 1
    for (int step = warp; step < run.steps; step += kFewWarps) {
      const int k = run.k_of(step);
      uint4 x[2][4];
      const auto load_rows = [&](int y) {
        const uint4* const from = rows.at(p, y, k);
        x[y][0] = from[0];
        x[y][1] = from[1];
        if (run.piece == 16) return;
        x[y][2] = from[2];
        x[y][3] = from[3];
      };
      load_rows(0);
      if (both) load_rows(1);
      FewBlock blocks[kFewPieces];
      scales.take(run.n_of(tile) + lane / 4, uint32_t(k), blocks);
      ptx::copy_async_wait<kFewStages - 1>();
      fetch_scales();
      const auto multiply = [&]<template <class> class Decoder>() {
        multiply_few<__nv_bfloat16, Decoder>(c, context, slot(at), blocks, x, both);
      };
      if (scheme == MOEC_SCHEME_MXFP4)
        multiply.template operator()<FewE2m1>();
      else if (scheme == MOEC_SCHEME_INT8)
        multiply.template operator()<FewBytes>();
      else if (scheme == MOEC_SCHEME_FP8)
        multiply.template operator()<FewFp8>();
      else if (!is_book && own_scales)
        multiply.template operator()<FewIntegers>();
      else
        multiply.template operator()<FewBook>();
      codes.fetch(run, slot(at));
      at = at + 1 < kFewStages ? at + 1 : 0;
    }
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int y = 0; y < 2; ++y)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          shared.sums[warp][8 * y + lane % 4 * 2 + i % 2][16 * m + lane / 4 + i / 2 * 8] =
              c[m][y][i];
    __syncthreads();
    t.n0 = run.n_of(tile);
    write_few(p, t, shared);
    __syncthreads();
  }
}

}  // namespace

void few_rows_product(const Op& op, const PortableGemm& p) {
  // Groups with rows, and their row tiles, at most.
  const int64_t groups =
      p.groups.offsets ? std::min(int64_t(p.groups.count), p.groups.max_rows) : 1;
  const int64_t row_tiles = (p.groups.max_rows - groups) / kFewRows + groups;
  // Enough CTAs for three turns of four on each multiprocessor, if it can be.
  const int64_t tiles = (p.n + kFewFeatures - 1) / kFewFeatures;
  const int64_t turns = groups * tiles * p.parts / (12 * int64_t(op.multiprocessors));
  const int run_tiles = int(std::clamp(turns, int64_t(1), int64_t(8)));
  const dim3 grid(unsigned((tiles + run_tiles - 1) / run_tiles), unsigned(row_tiles),
                  unsigned(p.parts));
  run(op, "portable product", few_rows_kernel, grid, kFewThreads, 0, p, run_tiles);
}

}  // namespace moec::cuda
