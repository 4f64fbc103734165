// SPDX-License-Identifier: Apache-2.0
// few_rows_kernel: row products of coded matrices whose experts have few rows, of codes across k
// (few_lines.cu: along k). Memory decides: each warp copies codes into a ring of its own and makes
// fragments of mma.sync of them in registers, features on the m side, rows on the n side. A CTA has
// one tile; the last one of a matrix begins so that it is whole.
//
//   tile     64 bytes of features x 8 rows
//   step     a lane has a piece, 8 bytes of codes, of each of eight k 8 c + i, of the features of
//            g. Two pieces of neighbouring k make pairs; fragments have 8 of k
//   warps    four, which have every fourth step of k; their sums are added in their order
//   rows     as they are, from global memory
//   ring     kFewStages steps of 2 KiB a warp, refilled as they are read; at last it holds the sums
//   grid     tiles of features, row tiles of all groups, parts; surplus CTAs leave at once
//
// All formats share one kernel, since most of its instructions are those of all.
#include "backend/cuda/sm80/few_rows_tile.cuh"

namespace moec::cuda {
namespace {

using Form = FewForm<true>;

constexpr int kFewThreads = 128, kFewWarps = 4;
constexpr int kFewStride = kFewWarps * 64;  // of k, in the units of FewForm
constexpr int kFewStages = 2;
constexpr int kFewCtas = 4;          // a multiprocessor
constexpr uint32_t kFewSlot = 2048;  // bytes of a step

struct FewShared {
  alignas(128) char ring[kFewWarps][kFewStages][kFewSlot];
  alignas(128) float book[32];  // inside 256 bytes
};
static_assert(sizeof(FewShared::ring) >= sizeof(float) * kFewWarps * 8 * 128);  // sums

__device__ const uint4 kNoRow = {};  // a row that is not there

// The steps of a lane, whose k lies `own` behind that of its warp: from `first` on while they are
// below `limit`, which a warp leaves together; behind `end` is nothing.
struct FewSteps {
  int first, end, limit;
  __device__ FewSteps(const PortableGemm& p, Form form, int own)
      : first(few_warp() * 64 + own), end(form.units(int(p.k))), limit(end + own) {}
};

// Of a tile's rows that in column g; zeros where there is none.
struct FewOperand {
  const char* row;
  __device__ FewOperand(const PortableGemm& p, const PortableTile& t, int part, int count)
      : row(nullptr) {
    const int i = few_lane() / 4;
    if (i >= count) return;
    int64_t from = t.first_row + t.m0 + i;
    if (p.a.gather) from = p.a.gather[from];
    if (from < 0) return;
    row =
        ptx::kept(static_cast<const char*>(p.a.base) + 2 * (part * p.a_part + from * p.a.i_stride));
  }
  __device__ __forceinline__ uint4 at(bool inside, int k) const {
    return ptx::load_chunk(inside && row ? row + unsigned(k)
                                         : reinterpret_cast<const char*>(&kNoRow));
  }
};

// Copies codes: those of every eighth row.
class FewCodes {
 public:
  __device__ FewCodes(const PortableGemm& p, const PortableTile& t, int part, Form form)
      : steps_(p, form, few_lane() / 4 * 2), k_(steps_.first) {
    const Operand& b = p.b[part];
    const OperandCodes& codes = p.codes[part];
    pitch_ = unsigned(few_pitch(b, codes, form));
    first_ =
        few_codes(b, codes, t.group, form) + (unsigned(t.n0) >> form.nibbles) + few_lane() % 4 * 16;
    to_ = few_lane() / 4 * 256 + few_lane() % 4 * 16;
  }
  // Copies the next step, or nothing.
  __device__ __forceinline__ void fetch(uint32_t slot) {
    if (k_ < steps_.limit) {
      const char* const from = first_ + uint64_t(pitch_ / 2) * unsigned(k_);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        ptx::copy_async(slot + to_ + i * 64, from + uint64_t(pitch_) * (8u * i),
                        k_ + 16 * i < steps_.end ? 16 : 0);
      k_ += kFewStride;
    }
    ptx::copy_async_commit();
  }

 private:
  const FewSteps steps_;
  int k_;
  const char* first_;
  unsigned pitch_;  // bytes
  uint32_t to_;
};

// The blocks of a step.
struct FewBlocks {
  FewBlock block[8];
  __device__ __forceinline__ FewBlocks(FewScales<Form>& scales, int k, bool inside) {
    scales.convert(k, inside);
#pragma unroll
    for (int i = 0; i < 8; ++i) block[i] = scales.block(i);
  }
};

// slot: of the lane's pieces.
template <class Element, template <class> class Decoder>
__device__ __forceinline__ void multiply_few(FewSums& c, const FewContext& of, uint32_t slot,
                                             const FewBlocks& blocks, const uint4& x) {
  using Of = Decoder<Element>;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const uint2 p[4] = {
        ptx::shared_load_pair(slot + m * 1024), ptx::shared_load_pair(slot + m * 1024 + 256),
        ptx::shared_load_pair(slot + m * 1024 + 512), ptx::shared_load_pair(slot + m * 1024 + 768)};
    const uint4 low = {p[0].x, p[0].y, p[2].x, p[2].y};  // two pieces each
    const uint4 high = {p[1].x, p[1].y, p[3].x, p[3].y};
    Of of_low(of, blocks.block[4 * m]), of_high(of, blocks.block[4 * m + 1]);
#pragma unroll
    for (int run = 0; run < Of::kRuns; ++run) {
      if (run == Of::kRuns / 2) {
        of_low = Of(of, blocks.block[4 * m + 2]);
        of_high = Of(of, blocks.block[4 * m + 3]);
      }
      const FourPairs a = of_low.elements(low, run), b = of_high.elements(high, run);
      const int pair = 2 * m + run / (Of::kRuns / 2), first_sum = run % (Of::kRuns / 2) * 4;
      const uint32_t of_k = word_of(x, pair);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        mma_of_8<Element>(c[first_sum + j], permute(a.pair[j], b.pair[j], 0x5410),
                          permute(a.pair[j], b.pair[j], 0x7632), of_k);
    }
  }
}

// The sums of all warps to where they belong.
__device__ __forceinline__ void write_few(const PortableGemm& p, const PortableTile& t, Form form,
                                          const FewSums& c, int rows, float* sums) {
  const int lane = few_lane(), features = form.features(), of_warp = form.rows() * features;
  float* const own = sums + few_warp() * of_warp;
#pragma unroll
  for (int a = 0; a < 8; ++a) {
    if (a >= 4 && !form.nibbles) break;
    const int column = features / 8 * (lane / 4) + 2 * a;
#pragma unroll
    for (int i = 0; i < 4; ++i) own[(lane % 4 * 2 + i % 2) * features + column + i / 2] = c[a][i];
  }
  __syncthreads();
#pragma unroll 1
  for (int at = int(threadIdx.x); at < rows * features; at += kFewThreads) {
    float sum = sums[at];
#pragma unroll
    for (int w = 1; w < kFewWarps; ++w) sum += sums[at + w * of_warp];
    store_few(p, t, at / features, t.n0 + at % features, sum);
  }
}

__global__ __launch_bounds__(kFewThreads, kFewCtas) void few_rows_kernel(const PortableGemm p) {
  __shared__ FewShared shared;
  begin_kernel();
  const Form form(p);
  PortableTile t;
  t.part = int(blockIdx.z);
  t.n0 = min(int(blockIdx.x) * form.features(), int(p.n) - form.features());
  if (!find_few_rows(p.groups, int(blockIdx.y), form.rows(), t)) return;
  const int lane = few_lane(), count = int(min(t.m_end - t.m0, int64_t(form.rows())));
  const uint32_t ring = ptx::kept(ptx::shared_address(shared.ring[few_warp()]));
  const uint32_t last = ring + (kFewStages - 1) * kFewSlot;
  const uint32_t own = lane % 4 * 64 + lane / 4 * 8;
  const int last_part = p.sum ? p.parts - 1 : t.part;
  FewSums c = {};
#pragma unroll 1
  for (int part = t.part; part <= last_part; ++part) {
    const ExpertQuant& of = p.codes[part].quant;
    const uint32_t scheme = of.scheme;
    __syncthreads();  // the book of another part
    const FewContext context = few_context(p, part, shared.book);
    const FewSteps steps(p, form, lane % 4 * 16);
    FewCodes codes(p, t, part, form);
#pragma unroll 1
    for (uint32_t to = ring; to <= last; to += kFewSlot) codes.fetch(to);
    const FewOperand rows(p, t, part, count);
    const bool own_scales = of.scales.array.dtype == p.a.dtype;
    FewScales<Form> scales(p, part, t.group, int(t.n0), form, steps.end);
    const auto fetch_scales = [&](int at) {
#pragma unroll
      for (int i = 0; i < 8; ++i) scales.fetch(i, at);
    };
    fetch_scales(steps.first);
    __syncthreads();  // the book
    uint32_t at = ring;
#pragma unroll 1
    for (int k = steps.first; k < steps.limit; k += kFewStride) {
      const bool inside = k < steps.end;
      const uint4 x = rows.at(inside, k);
      const FewBlocks blocks(scales, k, inside);
      ptx::copy_async_wait<kFewStages - 1>();
      __syncwarp();
      fetch_scales(k + kFewStride);
      const auto multiply = [&]<template <class> class Decoder>() {
        multiply_few<__nv_bfloat16, Decoder>(c, context, at + own, blocks, x);
      };
      if (scheme == MOEC_SCHEME_MXFP4)
        multiply.template operator()<FewE2m1>();
      else if (scheme == MOEC_SCHEME_INT8)
        multiply.template operator()<FewBytes>();
      else if (scheme == MOEC_SCHEME_FP8)
        multiply.template operator()<FewFp8>();
      else if (scheme == MOEC_SCHEME_INT4 && own_scales)
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

}  // namespace

void few_rows_product(const Op& op, const PortableGemm& p) {
  if (!is_across(p)) return few_lines_product(op, p);
  const Form form(p);
  run(op, "portable product", few_rows_kernel, few_grid(p, form.rows(), form.features()),
      kFewThreads, 0, p);
}

}  // namespace moec::cuda
