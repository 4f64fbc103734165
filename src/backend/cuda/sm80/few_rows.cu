// SPDX-License-Identifier: Apache-2.0
// few_rows_kernel: row products of coded matrices whose experts have few rows. Memory decides: each
// warp copies codes into a ring of its own and makes fragments of mma.sync of them in registers,
// features on the m side, rows on the n side. A CTA has one tile; the last one of a matrix begins
// so that it is whole.
//
// Codes along k:
//   tile     32 features x 16 rows
//   step     a lane has a piece, 16 bytes of codes, of each of four features g + 8 i. The k of
//            lanes c = 0 to 3 of a quad follow each other, and k is permuted alike in the rows:
//            lane c has the k of its pieces there, too
// Codes across k (along features):
//   tile     64 bytes of features x 8 rows
//   step     a lane has a piece, 8 bytes of codes, of each of eight k 8 c + i, of the features of
//            g. Two pieces of neighbouring k make pairs; fragments have 8 of k
// Both:
//   warps    four, which have every fourth step of k; their sums are added in their order
//   rows     as they are, from global memory
//   ring     kFewStages steps of 2 KiB a warp, refilled as they are read; at last it holds the sums
//   grid     tiles of features, row tiles of all groups, parts; surplus CTAs leave at once
//
// All formats share one kernel, since most of its instructions are those of all.
#include <algorithm>

#include "backend/cuda/sm80/few_rows_scales.cuh"
#include "backend/cuda/sm80/mma.cuh"

namespace moec::cuda {
namespace {

constexpr int kFewThreads = 128, kFewWarps = 4, kFewStages = 2;
constexpr int kFewCtas = 4;                 // a multiprocessor
constexpr uint32_t kFewSlot = 2048;         // bytes of a step
constexpr int kFewStride = kFewWarps * 64;  // of k, in the units of FewForm

struct FewShared {
  alignas(128) char ring[kFewWarps][kFewStages][kFewSlot];
  alignas(128) float book[32];  // inside 256 bytes
};
static_assert(sizeof(FewShared::ring) >= sizeof(float) * kFewWarps * 8 * 128);  // sums

__device__ const uint4 kFewZeros[4] = {};  // rows that are not there

// The rows of row tile `index`, if there is one.
__device__ __forceinline__ bool find_few_rows(const RowGroups& groups, int index, int tile_rows,
                                              PortableTile& t) {
  t.group = 0;
  t.first_row = 0;
  t.m_end = groups.max_rows;
  for (int first = 0, before = 0; groups.offsets; first += 32) {
    if (first >= groups.count) return false;
    const int e = first + few_lane();
    const int rows = e < groups.count ? groups.counts[e] : 0;
    const int own = (rows + tile_rows - 1) / tile_rows;
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
  t.m0 = int64_t(index) * tile_rows;
  return t.m0 < t.m_end;
}

// The steps of a lane, whose k lies `own` behind that of its warp: from `first` on while they are
// below `limit`, which a warp leaves together; behind `end` is nothing.
struct FewSteps {
  int first, end, limit;
  template <class Form>
  __device__ FewSteps(const PortableGemm& p, Form form, int own)
      : first(few_warp() * 64 + own), end(form.units(int(p.k))), limit(end + own) {}
};

// Copies codes: along k the pieces that the lane reads, across k those of every eighth row.
template <class Form>
class FewCodes {
 public:
  __device__ FewCodes(const PortableGemm& p, const PortableTile& t, int part, Form form)
      : form_(form),
        steps_(p, form, form.across ? few_lane() / 4 * 2 : few_lane() % 4 * 16),
        k_(steps_.first) {
    const Operand& b = p.b[part];
    const OperandCodes& codes = p.codes[part];
    const ExpertQuant& of = codes.quant;
    const char* first = b.of_group(t.group);
    int64_t pitch = form_.across ? b.k_stride : b.i_stride;  // of rows of codes
    if (form.nibbles) {  // in rows of the bound matrix; others have their own
      const int64_t line = codes.transposed ? b.k_stride : b.i_stride;
      first += (t.group * of.expert_codes + of.rows.first * line) / 2;
      if (form_.across == codes.transposed) pitch *= of.rows.step;
      pitch /= 2;
    }
    pitch_ = unsigned(pitch);
    by_k_ = form_.across ? pitch_ / 2 : 1;
    const unsigned n = unsigned(t.n0);
    first_ = first + (form_.across ? (n >> form.nibbles) + few_lane() % 4 * 16
                                   : uint64_t(pitch_) * (n + few_lane() / 4));
    to_ = form_.across ? few_lane() / 4 * 256 + few_lane() % 4 * 16 : few_lane() * 16;
  }
  // Copies the next step, or nothing.
  __device__ __forceinline__ void fetch(uint32_t slot) {
    if (k_ < steps_.limit) {
      const char* const from = first_ + uint64_t(by_k_) * unsigned(k_);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool inside = k_ + (form_.across ? 16 * i : 0) < steps_.end;
        ptx::copy_async(slot + to_ + i * (form_.across ? 64 : 512),
                        from + uint64_t(pitch_) * (8u * i), inside ? 16 : 0);
      }
      k_ += kFewStride;
    }
    ptx::copy_async_commit();
  }

 private:
  const Form form_;
  const FewSteps steps_;
  int k_;
  const char* first_;
  unsigned pitch_, by_k_;  // bytes
  uint32_t to_;
};

// Of a tile's rows those in columns g and g + 8; zeros where there are none.
struct FewOperand {
  const char* rows[2];
  uint32_t bytes[2];  // for a unit of k
  template <class Form>
  __device__ FewOperand(const PortableGemm& p, const PortableTile& t, Form form, int part,
                        int count) {
#pragma unroll
    for (int y = 0; y < 2; ++y) {
      const int i = few_lane() / 4 + 8 * y;
      int64_t row = i < count ? t.first_row + t.m0 + i : -1;
      if (p.a.gather && row >= 0) row = p.a.gather[row];
      bytes[y] = row < 0 ? 0 : 1 << form.shift;
      const char* const first = static_cast<const char*>(p.a.base) + part * p.a_part * 2;
      rows[y] = ptx::kept(row < 0 ? reinterpret_cast<const char*>(kFewZeros)
                                  : first + row * p.a.i_stride * 2);
    }
  }
  __device__ __forceinline__ const char* at(int y, bool inside, int k) const {
    return inside ? rows[y] + uint64_t(bytes[y]) * unsigned(k)
                  : reinterpret_cast<const char*>(kFewZeros);
  }
};

using FewSums = float[8][4];  // along k of 2 x 16 features and 2 x 8 rows, else of 8 x 16 and 8

// The sums of the tile at t.n0 of all warps to where they belong.
template <class Form>
__device__ __forceinline__ void write_few(const PortableGemm& p, const PortableTile& t, Form form,
                                          const FewSums& c, int rows, float* sums) {
  const int lane = few_lane(), g = lane / 4, features = form.features();
  const int pitch = features + (form.across ? 0 : 4);
  float* const own = sums + few_warp() * form.rows() * pitch;
  const auto put = [&](int a, int row, int column) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      own[(row + lane % 4 * 2 + i % 2) * pitch + column + i / 2 * (form.across ? 1 : 8)] = c[a][i];
  };
  if (!form.across) {
#pragma unroll
    for (int a = 0; a < 4; ++a) put(a, a % 2 * 8, a / 2 * 16 + g);
  } else {
#pragma unroll
    for (int a = 0; a < 8; ++a)
      if (a < 4 || form.nibbles) put(a, 0, features / 8 * g + 2 * a);
  }
  __syncthreads();
  const Operand& bias = p.bias[t.part];
  char* const base = const_cast<char*>(static_cast<const char*>(p.c.base));
#pragma unroll 1
  for (int at = int(threadIdx.x); at < rows * features; at += kFewThreads) {
    const int i = at / features, column = at % features;
    const float* const from = sums + i * pitch + column;
    float sum = from[0];
#pragma unroll
    for (int w = 1; w < kFewWarps; ++w) sum += from[w * form.rows() * pitch];
    const int64_t row = t.first_row + t.m0 + i, n = t.n0 + column;
    if (bias.base || bias.pointers)
      sum += (p.bias_weight ? p.bias_weight[row] : 1.0f) *
             load_span<1>(bias.of_group(t.group), bias.dtype, n * bias.i_stride)[0];
    const int64_t to = row * p.c.i_stride + n * p.c.k_stride + t.part * p.c_part;
    store_span(base, p.c.dtype, to, Span<1>{sum});
  }
}

// slot: of the lane's pieces.
template <class Element, template <class> class Decoder, class Form>
__device__ __forceinline__ void multiply_few(FewSums& c, const FewContext& of, Form form,
                                             uint32_t slot, const FewBlocks& blocks,
                                             const uint4 (&x)[2][4], bool both) {
  using Of = Decoder<Element>;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    uint4 low, high;  // two pieces each where codes lie across k
    if (form.across) {
      const uint2 p[4] = {ptx::shared_load_pair(slot + m * 1024),
                          ptx::shared_load_pair(slot + m * 1024 + 256),
                          ptx::shared_load_pair(slot + m * 1024 + 512),
                          ptx::shared_load_pair(slot + m * 1024 + 768)};
      low = {p[0].x, p[0].y, p[2].x, p[2].y};
      high = {p[1].x, p[1].y, p[3].x, p[3].y};
    } else {
      low = ptx::shared_load(slot + m * 1024);
      high = ptx::shared_load(slot + m * 1024 + 512);
    }
    const int first = form.across ? 4 * m : 2 * m;
    Of of_low(of, blocks.at(first)), of_high(of, blocks.at(first + 1));
#pragma unroll
    for (int run = 0; run < Of::kRuns; ++run) {
      if (form.across && run == Of::kRuns / 2) {
        of_low = Of(of, blocks.at(4 * m + 2));
        of_high = Of(of, blocks.at(4 * m + 3));
      }
      const FourPairs a = of_low.elements(low, run), b = of_high.elements(high, run);
      if (form.across) {
        const int pair = 2 * m + run / (Of::kRuns / 2), first_sum = run % (Of::kRuns / 2) * 4;
        const uint32_t of_k = word_of(x[0][0], pair);
#pragma unroll
        for (int j = 0; j < 4; ++j)
          mma_of_8<Element>(c[first_sum + j], permute(a.pair[j], b.pair[j], 0x5410),
                            permute(a.pair[j], b.pair[j], 0x7632), of_k);
      } else {
        const uint32_t one[4] = {a.pair[0], b.pair[0], a.pair[1], b.pair[1]};
        const uint32_t two[4] = {a.pair[2], b.pair[2], a.pair[3], b.pair[3]};
        mma<Element>(c[2 * m], one, x[0][run].x, x[0][run].y);
        mma<Element>(c[2 * m], two, x[0][run].z, x[0][run].w);
        if (both) {
          mma<Element>(c[2 * m + 1], one, x[1][run].x, x[1][run].y);
          mma<Element>(c[2 * m + 1], two, x[1][run].z, x[1][run].w);
        }
      }
    }
  }
}

template <class Form>
__global__ __launch_bounds__(kFewThreads, kFewCtas)  //
    void few_rows_kernel(const PortableGemm p) {
  __shared__ FewShared shared;
  begin_kernel();
  const Form form(p);
  PortableTile t;
  if (!find_few_rows(p.groups, int(blockIdx.y), form.rows(), t)) return;
  t.part = int(blockIdx.z);
  t.n0 = min(int(blockIdx.x) * form.features(), int(p.n) - form.features());
  const int lane = few_lane(), count = int(min(t.m_end - t.m0, int64_t(form.rows())));
  const bool both = count > 8;
  const uint32_t ring = ptx::kept(ptx::shared_address(shared.ring[few_warp()]));
  const uint32_t last = ring + (kFewStages - 1) * kFewSlot;
  const uint32_t own = form.across ? lane % 4 * 64 + lane / 4 * 8 : lane * 16;
  const int last_part = p.sum ? p.parts - 1 : t.part;
  FewSums c = {};
#pragma unroll 1
  for (int part = t.part; part <= last_part; ++part) {
    const ExpertQuant& of = p.codes[part].quant;
    const uint32_t scheme = of.scheme;
    const bool is_book = scheme == MOEC_SCHEME_CODEBOOK4;
    __syncthreads();  // the book of another part
    if (threadIdx.x < 32) shared.book[lane] = is_book ? of.codebook[lane % 16] : float(lane - 15);
    const FewSteps steps(p, form, lane % 4 * 16);
    FewCodes<Form> codes(p, t, part, form);
#pragma unroll 1
    for (uint32_t to = ring; to <= last; to += kFewSlot) codes.fetch(to);
    const FewOperand rows(p, t, form, part, count);
    const FewContext context = {ptx::shared_address(shared.book), is_book ? 0 : 7, is_book ? 30 : 2,
                                p.b[part].dtype == MOEC_F8_E5M2};
    const bool own_scales = of.scales.array.dtype == p.a.dtype;
    FewScales<Form> scales(p, part, t.group, int(t.n0), form, steps.end);
    scales.fetch(steps.first);
    __syncthreads();  // the book
    uint32_t at = ring;
#pragma unroll 1
    for (int k = steps.first; k < steps.limit; k += kFewStride) {
      const bool inside = k < steps.end;
      uint4 x[2][4];
      const auto load_rows = [&](int y) {
        const char* const from = rows.at(y, inside, k);
        x[y][0] = ptx::load_chunk(from);
        if (form.across) return;
        x[y][1] = ptx::load_chunk(from + 16);
        if (!form.nibbles) return;
        x[y][2] = ptx::load_chunk(from + 32);
        x[y][3] = ptx::load_chunk(from + 48);
      };
      load_rows(0);
      if (both) load_rows(1);
      FewBlocks blocks;
      scales.take(k, inside, blocks);
      ptx::copy_async_wait<kFewStages - 1>();
      __syncwarp();
      scales.fetch(k + kFewStride);
      const auto multiply = [&]<template <class> class Decoder>() {
        multiply_few<__nv_bfloat16, Decoder>(c, context, form, at + own, blocks, x, both);
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
      __syncwarp();
      codes.fetch(at);
      at = at == last ? ring : at + kFewSlot;
    }
  }
  __syncthreads();  // the rings
  write_few(p, t, form, c, count, reinterpret_cast<float*>(shared.ring));
}

template <class Form>
void launch_few_rows(const Op& op, const PortableGemm& p) {
  const Form form(p);
  // Groups with rows, and their row tiles, at most.
  const int64_t groups =
      p.groups.offsets ? std::min(int64_t(p.groups.count), p.groups.max_rows) : 1;
  const int64_t row_tiles = (p.groups.max_rows - groups) / form.rows() + groups;
  const dim3 grid(unsigned((p.n + form.features() - 1) / form.features()), unsigned(row_tiles),
                  p.sum ? 1 : unsigned(p.parts));
  run(op, "portable product", few_rows_kernel<Form>, grid, kFewThreads, 0, p);
}

}  // namespace

void few_rows_product(const Op& op, const PortableGemm& p) {
  if (is_across(p))
    launch_few_rows<FewForm<true>>(op, p);
  else
    launch_few_rows<FewForm<false>>(op, p);
}

}  // namespace moec::cuda
