// SPDX-License-Identifier: Apache-2.0
// portable_mma_kernel: grouped products of aligned 16-bit operands on the tensor cores; operand b
// may be codes of them, or fp32 that is rounded to them.
//
//   tile     128 x 128 x 32, 8 warps of 64 x 32, two CTAs a multiprocessor; products of rows past
//            the end of a group are left out
//   copies   cp.async in four stages; tails and rows outside a group arrive as zeros. Coded and
//            fp32: as mma_coded.cuh and mma_rounded.cuh say
//   grid     portable_grid(); surplus CTAs of row products leave at once
#pragma once

#include <type_traits>

#include "backend/cuda/sm80/mma_coded.cuh"
#include "backend/cuda/sm80/mma_rounded.cuh"

namespace moec::cuda {
namespace {

constexpr int kPiecesM = 4, kPiecesN = 2;  // of 16 rows and columns, a warp
constexpr int kWarpsN = kPortableTile / (16 * kPiecesN);
static_assert(kPortableThreads == 32 * kWarpsN * kPortableTile / (16 * kPiecesM));
using WarpTile = float[kPiecesM][2 * kPiecesN][4];

// Where the copies are: tiles of both operands, k block after k block, part after part.
template <bool kAlongKOfA, class LoaderOfB>
struct Copies {
  TileLoader<kAlongKOfA> a;
  LoaderOfB b;
  const int k_end;
  int k0 = 0;
  const int64_t a_part, b_part;

  __device__ Copies(const PortableGemm& p, const PortableTile& t, const LoaderOfB& of_b)
      : a(p.a, t, t.m0, t.m_end, t.first_row),
        b(of_b),
        k_end(int(t.k_end)),
        a_part(a.part_step(p.a_part * 2, k_end)),
        b_part(b.part_step(p.parts == 2 ? p.b[1].of_group(t.group) - p.b[0].of_group(t.group) : 0,
                           k_end)) {}
  __device__ void next(uint32_t stage) {
    a.load(stage, k0, k_end);
    b.load(stage + kMmaTileBytes, k0, k_end);
    k0 = k0 + kMmaDepth < k_end ? k0 + kMmaDepth : 0;
    a.advance(k0, k_end, a_part);
    b.advance(k0, k_end, b_part);
  }
};

// Format: of operand b; void: its elements; RoundedElements: in fp32.
template <typename Element, class Format, bool kAlongK, bool kWeightGradient>
__device__ __forceinline__ auto loader_of_b(const PortableGemm& p, const PortableTile& t) {
  if constexpr (std::is_void_v<Format>) {
    const int64_t first_row = kWeightGradient ? t.first_row : 0;
    return TileLoader<kAlongK>(p.b[t.part], t, t.n0, p.n, first_row);
  } else if constexpr (std::is_same_v<Format, RoundedElements>) {
    return RoundedTileLoader<Element, kAlongK>(p, t);
  } else {
    return CodedTileLoader<Element, Format, kAlongK>(p, t);
  }
}

template <typename Element, class Format, bool kAlongKOfA, bool kAlongKOfB, bool kWeightGradient>
__global__ __launch_bounds__(kPortableThreads, std::is_void_v<Format> ? 2 : 1)  //
    void portable_mma_kernel(const PortableGemm p) {
  extern __shared__ __align__(128) char memory[];
  begin_kernel();
  PortableTile t;
  if (!find_tile<kWeightGradient>(p, t)) return;
  const uint32_t stages = ptx::shared_address(memory);
  const auto stage = [&](int i) { return stages + uint32_t(i % kMmaStages) * 2 * kMmaTileBytes; };
  const int blocks =
      int((t.k_end + kMmaDepth - 1) / kMmaDepth) * (p.sum && !kWeightGradient ? p.parts : 1);
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  const int m = warp / kWarpsN * 16 * kPiecesM, n = warp % kWarpsN * 16 * kPiecesN;
  const int pieces = int(min(int64_t(kPiecesM), (t.m_end - t.m0 - m + 15) / 16));  // <= 0: none
  WarpTile c = {};
  if (blocks > 0) {
    auto of_b = loader_of_b<Element, Format, kAlongKOfB, kWeightGradient>(p, t);
    Copies<kAlongKOfA, decltype(of_b)> copies(p, t, of_b);
    for (int i = 0; i < kMmaStages - 1; ++i) {
      if (i < blocks) copies.next(stage(i));
      ptx::copy_async_commit();
    }
    Fragments<kAlongKOfA, false, kPiecesM> a(m);
    Fragments<kAlongKOfB, true, kPiecesN> b(n);
    const auto multiply = [&](int count) {
#pragma unroll 1
      for (int i = 0; i < blocks; ++i) {
        ptx::copy_async_wait<kMmaStages - 2>();
        __syncthreads();
        if (i + kMmaStages - 1 < blocks) copies.next(stage(i + kMmaStages - 1));
        ptx::copy_async_commit();
#pragma unroll
        for (int step = 0; step < kMmaDepth / 16; ++step) {
          b.load(stage(i) + kMmaTileBytes, step);
          a.load(stage(i), step, count);
#pragma unroll
          for (int y = 0; y < kPiecesM; ++y)
#pragma unroll
            for (int x = 0; x < 2 * kPiecesN; ++x)
              if (y < count)
                mma<Element>(c[y][x], a.values[y], b.values[x / 2][x % 2 * 2],
                             b.values[x / 2][x % 2 * 2 + 1]);
        }
      }
    };
    if (pieces == kPiecesM)
      multiply(kPiecesM);
    else
      multiply(pieces);
  }
  ptx::copy_async_wait<0>();
  __syncthreads();  // the stages are read: the tile takes their place
  float* const tile = reinterpret_cast<float*>(memory);
#pragma unroll
  for (int i = 0; i < kPiecesM; ++i)
#pragma unroll
    for (int j = 0; j < 2 * kPiecesN; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        stage_pair(tile, m + 16 * i + 8 * half + lane / 4, n + 8 * j + lane % 4 * 2,
                   c[i][j][2 * half], c[i][j][2 * half + 1]);
  __syncthreads();
  write_tile<kWeightGradient>(p, t, tile);
}

static_assert(kMmaSharedBytes >= kPortableTileBytes);

using Kernel = void(const PortableGemm);

void launch(const Op& op, const PortableGemm& p, bool weight_gradient, Kernel* kernel,
            std::atomic<uint64_t>& allowed) {
  check(allow_shared_memory(kernel, kMmaSharedBytes, allowed), "portable product");
  const dim3 grid = portable_grid(p, weight_gradient);
  run(op, "portable product", kernel, grid, kPortableThreads, kMmaSharedBytes, p);
}

template <typename Element, class Format>
void launch_rows(const Op& op, const PortableGemm& p) {
  static std::atomic<uint64_t> allowed[2];
  if (p.b[0].k_stride == 1)
    launch(op, p, false, portable_mma_kernel<Element, Format, true, true, false>, allowed[0]);
  else
    launch(op, p, false, portable_mma_kernel<Element, Format, true, false, false>, allowed[1]);
}

}  // namespace
}  // namespace moec::cuda
