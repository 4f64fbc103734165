// SPDX-License-Identifier: Apache-2.0
// portable_mma_kernel: grouped products of aligned 16-bit operands on the tensor cores; operand b
// may be codes of them, or fp32 that is rounded to them.
//
//   tile     128 x 128 x 32, 8 warps of 64 x 32, two CTAs a multiprocessor; of coded and fp32
//            operands 256 x 128 x 32, 8 warps of 64 x 64. Warps without rows multiply nothing
//   copies   cp.async in four stages; what lies behind the end of k arrives as zeros. Coded and
//            fp32: as mma_coded.cuh and mma_rounded.cuh say
//   grid     portable_grid(); surplus CTAs of row products leave at once
#pragma once

#include <type_traits>

#include "backend/cuda/sm80/mma_coded.cuh"
#include "backend/cuda/sm80/mma_rounded.cuh"

namespace moec::cuda {
namespace {

constexpr int kPiecesM = 4;  // of 16 rows, a warp

// Format: of operand b; void: its elements; RoundedElements: in fp32.
template <class Format>
constexpr bool kMakes = !std::is_void_v<Format>;
template <class Format>
using ShapeOf = std::conditional_t<kMakes<Format>, MadeShape, MmaShape<kPortableTile, false>>;
template <class Format, bool kAlongK>
struct LoaderOf {
  using B = CodedTileLoader<Format>;
};
template <bool kAlongK>
struct LoaderOf<RoundedElements, kAlongK> {
  using B = RoundedTileLoader;
};
template <bool kAlongK>
struct LoaderOf<void, kAlongK> {
  using B = TileLoader<kAlongK, kPortableTile, false>;
};

// Where the copies are: tiles of both operands, k block after k block, part after part.
template <class Shape, class A, class B, bool kMakesB>
struct Copies {
  A a;
  B b;
  const int k_end;
  int k0 = 0;
  const int64_t a_part, b_part = 0;

  __device__ Copies(const PortableGemm& p, const PortableTile& t, const B& of_b)
      : a(p.a, t, t.m0, t.m_end, t.first_row),
        b(of_b),
        k_end(int(t.k_end)),
        a_part(a.part_step(p.a_part * 2, k_end)),
        b_part(part_of_b(p, t)) {}
  __device__ int64_t part_of_b(const PortableGemm& p, const PortableTile& t) const {
    if constexpr (kMakesB)
      return 0;
    else
      return b.part_step(p.parts == 2 ? p.b[1].of_group(t.group) - p.b[0].of_group(t.group) : 0,
                         k_end);
  }
  // Copies a k block.
  __device__ void next(uint32_t stage) {
    a.load(stage, k0, k_end);
    if constexpr (kMakesB)
      b.fetch(stage + Shape::kBytesOfA, k0, k_end);
    else
      b.load(stage + Shape::kBytesOfA, k0, k_end);
    k0 = k0 + kMmaDepth < k_end ? k0 + kMmaDepth : 0;
    a.advance(k0, k_end, a_part);
    if constexpr (!kMakesB) b.advance(k0, k_end, b_part);
  }
};

// AlongKOfB: as Fragments has it.
template <class Format, bool kAlongKOfA, class AlongKOfB, bool kWeightGradient>
__global__ __launch_bounds__(kPortableThreads, kMakes<Format> ? 1 : 2)  //
    void portable_mma_kernel(const PortableGemm p) {
  using Shape = ShapeOf<Format>;
  extern __shared__ __align__(128) char memory[];
  begin_kernel();
  PortableTile t;
  if (!(kWeightGradient ? find_weight_tile(p, t) : find_row_tile<Shape::kRows>(p, t))) return;
  const uint32_t stages = ptx::kept(ptx::shared_address(memory));
  const auto stage = [&](int i) { return Shape::stage(stages, i); };
  const int blocks =
      int((t.k_end + kMmaDepth - 1) / kMmaDepth) * (p.sum && !kWeightGradient ? p.parts : 1);
  constexpr int kPiecesN = kMakes<Format> ? 4 : 2;  // of 16 columns, a warp
  constexpr int kWarpsN = kPortableTile / (16 * kPiecesN);
  static_assert(kPortableThreads == 32 * kWarpsN * Shape::kRows / (16 * kPiecesM));
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  const int m = warp / kWarpsN * 16 * kPiecesM, n = warp % kWarpsN * 16 * kPiecesN;
  const int pieces = int(min(int64_t(kPiecesM), (t.m_end - t.m0 - m + 15) / 16));  // <= 0: none
  float c[kPiecesM][2 * kPiecesN][4] = {};
  if (blocks > 0) {
    AlongKOfB along_k;
    if constexpr (std::is_same_v<AlongKOfB, bool>) along_k = p.b[0].k_stride == 1;
    using B = typename LoaderOf<Format, std::is_same_v<AlongKOfB, std::true_type>>::B;
    const auto loader_of_b = [&] {
      if constexpr (kMakes<Format>)
        return B(p, t, along_k);
      else
        return B(p.b[t.part], t, t.n0, p.n, kWeightGradient ? t.first_row : 0);
    };
    using A = TileLoader<kAlongKOfA, Shape::kRows, kMakes<Format>>;
    Copies<Shape, A, B, kMakes<Format>> copies(p, t, loader_of_b());
    Fragments<std::bool_constant<kAlongKOfA>, false, kPiecesM> a(m, {});
    Fragments<AlongKOfB, true, kPiecesN> b(n, along_k);
    const auto copy = [&](int block) {
      if (block < blocks) copies.next(stage(block));
      ptx::copy_async_commit();
    };
    // All blocks but the last kPending.
    const auto arrived = [&]<int kPending>(std::integral_constant<int, kPending>) {
      ptx::copy_async_wait<kPending>();
      __syncthreads();
    };
    const auto multiply = [&]<class Element>(int block, int count) {
      const uint32_t of = stage(block), of_b = Shape::tile_of_b(stages, block);
#pragma unroll
      for (int step = 0; step < kMmaDepth / 16; ++step) {
        b.load(of_b, step);
        a.load(of, step, count);
#pragma unroll
        for (int y = 0; y < kPiecesM; ++y)
#pragma unroll
          for (int x = 0; x < 2 * kPiecesN; ++x)
            if (y < count)
              mma<Element>(c[y][x], a.values[y], b.values[x / 2][x % 2 * 2],
                           b.values[x / 2][x % 2 * 2 + 1]);
      }
    };
    constexpr int kAhead = kMmaStages - 1;
    with_element(p.a.dtype, [&]<class Element>() {
      if constexpr (kMakes<Format>) {  // one copy of what makes elements; few branches
#pragma unroll 1
        for (int i = 0; i < kAhead - 1; ++i) copy(i);
#pragma unroll 1
        for (int i = -1; i < blocks; ++i) {
          arrived(std::integral_constant<int, kAhead - 2>());  // the next block, too
          copy(i + kAhead);
          if (i + 1 < blocks)
            copies.b.template make<Element>(Shape::tile_of_b(stages, i + 1),
                                            stage(i + 1) + Shape::kBytesOfA, copies.k_end);
          if (i < 0 || pieces <= 0) continue;
          if (pieces > 1)
            multiply.template operator()<Element>(i, kPiecesM);
          else
            multiply.template operator()<Element>(i, 1);
        }
      } else {  // the fewest instructions in each loop
#pragma unroll 1
        for (int i = 0; i < kAhead; ++i) copy(i);
        const auto multiply_all = [&](int count) {
#pragma unroll 1
          for (int i = 0; i < blocks; ++i) {
            arrived(std::integral_constant<int, kAhead - 1>());
            copy(i + kAhead);
            multiply.template operator()<Element>(i, count);
          }
        };
        if (pieces == kPiecesM)
          multiply_all(kPiecesM);
        else
          multiply_all(pieces);
      }
    });
  }
  ptx::copy_async_wait<0>();
  float* const tile = reinterpret_cast<float*>(memory);
#pragma unroll 1
  for (int first = 0; first < Shape::kRows; first += kPortableTile, t.m0 += kPortableTile) {
    __syncthreads();  // the stages, or the rows before, are read: the tile takes their place
    const bool own = m / kPortableTile * kPortableTile == first;
#pragma unroll
    for (int i = 0; i < kPiecesM; ++i)
#pragma unroll
      for (int j = 0; j < 2 * kPiecesN; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          if (own)
            stage_pair(tile, m - first + 16 * i + 8 * half + lane / 4, n + 8 * j + lane % 4 * 2,
                       c[i][j][2 * half], c[i][j][2 * half + 1]);
    __syncthreads();
    write_tile(p, t, tile, kWeightGradient);
  }
}

using Kernel = void(const PortableGemm);

template <class Shape>
void launch(const Op& op, const PortableGemm& p, bool weight_gradient, Kernel* kernel,
            std::atomic<uint64_t>& allowed) {
  static_assert(Shape::kSharedBytes >= kPortableTileBytes);
  check(allow_shared_memory(kernel, Shape::kSharedBytes, allowed), "portable product");
  const dim3 grid = portable_grid(p, weight_gradient, Shape::kRows);
  run(op, "portable product", kernel, grid, kPortableThreads, Shape::kSharedBytes, p);
}

}  // namespace
}  // namespace moec::cuda
