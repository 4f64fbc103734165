// SPDX-License-Identifier: Apache-2.0
// few_rows_kernel: row products of coded matrices whose experts have few rows. Memory decides: each
// warp copies codes into a ring of its own and makes fragments of mma.sync of them in registers,
// features on the m side, rows on the n side.
//
//   tile     32 features x 16 rows, one a CTA; the last one of a matrix begins so that it is whole
//   warps    four, which have every fourth step of k; their sums are added in their order
//   step     a lane has a piece, 16 bytes of codes, of each of four features g + 8 i. The k of
//            lanes c = 0 to 3 of a quad follow each other, and k is permuted alike in the rows:
//            lane c has the k of its pieces there, too
//   rows     as they are, from global memory
//   ring     kFewStages steps of 2 KiB a warp, refilled as they are read
//   grid     tiles of features, row tiles of all groups, parts; surplus CTAs leave at once
//
// All formats share one kernel, since most of its instructions are those of all.
#include <algorithm>

#include "backend/cuda/sm80/few_rows_scales.cuh"
#include "backend/cuda/sm80/mma.cuh"

namespace moec::cuda {
namespace {

constexpr int kFewThreads = 128, kFewWarps = 4, kFewStages = 2, kFewPieces = kFewFeatures / 8;
constexpr int kFewCtas = 4;  // a multiprocessor

struct FewShared {
  uint4 ring[kFewStages][kFewWarps][kFewPieces][32];
  // Rows of sums; so long, the stores of a warp meet no bank twice.
  float sums[kFewWarps][kFewRows][kFewFeatures + 4];
  alignas(128) float book[32];  // inside 256 bytes
};

__device__ const uint4 kFewZeros[4] = {};  // rows that are not there

__device__ __forceinline__ int few_warp() {
  return int(threadIdx.x) / 32;
}
__device__ __forceinline__ int few_lane() {
  return int(threadIdx.x) & 31;
}

// The rows of row tile `index`, if there is one.
__device__ __forceinline__ bool find_few_rows(const RowGroups& groups, int index, PortableTile& t) {
  t.group = 0;
  t.first_row = 0;
  t.m_end = groups.max_rows;
  for (int first = 0, before = 0; groups.offsets; first += 32) {
    if (first >= groups.count) return false;
    const int e = first + few_lane();
    const int rows = e < groups.count ? groups.counts[e] : 0;
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
      t.first_row = groups.offsets[t.group];
      break;
    }
    before = __shfl_sync(~0u, end, 31);
  }
  t.m0 = int64_t(index) * kFewRows;
  return t.m0 < t.m_end;
}

// Steps of a lane, as bytes of codes of a row: from `first` on while they are below `limit`, which
// a warp leaves together; behind `end` is nothing.
constexpr int kFewStride = kFewWarps * 64;
struct FewSteps {
  int first, end, limit;

  __device__ FewSteps(const PortableGemm& p, bool nibbles) : end(int(p.k) >> nibbles) {
    first = few_warp() * 64 + few_lane() % 4 * 16;
    limit = end + few_lane() % 4 * 16;
  }
};

class FewCodes {
 public:
  // n: of the lane's first piece.
  __device__ FewCodes(const Operand& b, const ExpertQuant& of, int group, const FewSteps& steps,
                      int n, bool nibbles)
      : steps_(steps), k_(steps.first) {
    const char* first = b.of_group(group);
    if (nibbles) {  // in rows of the bound matrix; others have their own
      first += (group * of.expert_codes + of.rows.first * b.i_stride) / 2;
      pitch_ = unsigned(of.rows.step * b.i_stride / 2);
    } else {
      pitch_ = unsigned(b.i_stride);
    }
    first_ = first + uint64_t(pitch_) * unsigned(n);
  }
  // Copies the next step, or nothing.
  __device__ __forceinline__ void fetch(uint32_t slot) {
    if (k_ < steps_.limit) {
      const char* const from = first_ + k_;
      const uint32_t bytes = k_ < steps_.end ? 16 : 0;
#pragma unroll
      for (int i = 0; i < kFewPieces; ++i)
        ptx::copy_async(slot + i * 512, from + uint64_t(pitch_) * (8u * i), bytes);
      k_ += kFewStride;
    }
    ptx::copy_async_commit();
  }

 private:
  const FewSteps& steps_;
  int k_;
  const char* first_;
  unsigned pitch_;  // bytes
};

// Of a tile's 16 rows those in columns g and g + 8; zeros where there are none.
struct FewOperand {
  const char* rows[2];
  uint32_t bytes[2];  // for each of the codes
  __device__ FewOperand(const PortableGemm& p, const PortableTile& t, int count, bool nibbles) {
#pragma unroll
    for (int y = 0; y < 2; ++y) {
      const int i = few_lane() / 4 + 8 * y;
      int64_t row = i < count ? t.first_row + t.m0 + i : -1;
      if (p.a.gather && row >= 0) row = p.a.gather[row];
      bytes[y] = row < 0 ? 0 : nibbles ? 4 : 2;
      rows[y] = ptx::kept(row < 0 ? reinterpret_cast<const char*>(kFewZeros)
                                  : static_cast<const char*>(p.a.base) + row * p.a.i_stride * 2);
    }
  }
  __device__ __forceinline__ const char* at(int y, bool inside, int k) const {
    return inside ? rows[y] + uint64_t(bytes[y]) * unsigned(k)
                  : reinterpret_cast<const char*>(kFewZeros);
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

__global__ __launch_bounds__(kFewThreads, kFewCtas)  //
    void few_rows_kernel(const PortableGemm p) {
  __shared__ FewShared shared;
  begin_kernel();
  PortableTile t;
  if (!find_few_rows(p.groups, int(blockIdx.y), t)) return;
  t.part = int(blockIdx.z);
  t.n0 = min(int(blockIdx.x) * kFewFeatures, int(p.n) - kFewFeatures);
  const ExpertQuant& of = p.codes[t.part].quant;
  const uint32_t scheme = of.scheme;
  const bool is_book = scheme == MOEC_SCHEME_CODEBOOK4;
  const bool nibbles = scheme != MOEC_SCHEME_INT8 && scheme != MOEC_SCHEME_FP8;
  const int warp = few_warp(), lane = few_lane(), n = int(t.n0) + lane / 4;
  if (threadIdx.x < 32) shared.book[lane] = is_book ? of.codebook[lane % 16] : float(lane - 15);
  const FewSteps steps(p, nibbles);
  FewCodes codes(p.b[t.part], of, t.group, steps, n, nibbles);
  const uint32_t ring = ptx::kept(ptx::shared_address(&shared.ring[0][warp][0][lane]));
  const uint32_t last = ring + (kFewStages - 1) * uint32_t(sizeof(shared.ring[0]));
#pragma unroll 1
  for (uint32_t to = ring; to <= last; to += uint32_t(sizeof(shared.ring[0]))) codes.fetch(to);
  const int count = int(min(t.m_end - t.m0, int64_t(kFewRows)));
  const FewOperand rows(p, t, count, nibbles);
  const bool both = count > 8;
  const FewContext context = {ptx::shared_address(shared.book), is_book ? 0 : 7, is_book ? 30 : 2,
                              p.b[t.part].dtype == MOEC_F8_E5M2};
  const bool own_scales = of.scales.array.dtype == p.a.dtype;
  FewScales<kFewPieces> scales(of, t.group, p.b[t.part].i_stride, nibbles, steps.end, n);
  scales.fetch(steps.first);
  __syncthreads();  // the book
  FewSums c = {};
  uint32_t at = ring;
#pragma unroll 1
  for (int k = steps.first; k < steps.limit; k += kFewStride) {
    const bool inside = k < steps.end;
    uint4 x[2][4];
    const auto load_rows = [&](int y) {
      const char* const from = rows.at(y, inside, k);
      x[y][0] = ptx::load_chunk(from);
      x[y][1] = ptx::load_chunk(from + 16);
      if (!nibbles) return;
      x[y][2] = ptx::load_chunk(from + 32);
      x[y][3] = ptx::load_chunk(from + 48);
    };
    load_rows(0);
    if (both) load_rows(1);
    FewBlock blocks[kFewPieces];
    scales.take(k, inside, blocks);
    ptx::copy_async_wait<kFewStages - 1>();
    scales.fetch(k + kFewStride);
    const auto multiply = [&]<template <class> class Decoder>() {
      multiply_few<__nv_bfloat16, Decoder>(c, context, at, blocks, x, both);
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
    codes.fetch(at);
    at = at == last ? ring : at + uint32_t(sizeof(shared.ring[0]));
  }
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int y = 0; y < 2; ++y)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        shared.sums[warp][8 * y + lane % 4 * 2 + i % 2][16 * m + lane / 4 + i / 2 * 8] = c[m][y][i];
  __syncthreads();
  write_few(p, t, shared);
}

}  // namespace

void few_rows_product(const Op& op, const PortableGemm& p) {
  // Groups with rows, and their row tiles, at most.
  const int64_t groups =
      p.groups.offsets ? std::min(int64_t(p.groups.count), p.groups.max_rows) : 1;
  const int64_t row_tiles = (p.groups.max_rows - groups) / kFewRows + groups;
  const dim3 grid(unsigned((p.n + kFewFeatures - 1) / kFewFeatures), unsigned(row_tiles),
                  unsigned(p.parts));
  run(op, "portable product", few_rows_kernel, grid, kFewThreads, 0, p);
}

}  // namespace moec::cuda
