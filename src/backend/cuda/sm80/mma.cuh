// SPDX-License-Identifier: Apache-2.0
// Tiles of 16-bit operands in shared memory and their products by mma.sync m16n8k16.
//
//   along k   [128][32 k]   64 bytes a row, 16-byte chunk c of row i at c ^ (i / 2 & 3)
//   along i   [32 k][128]   256 bytes a row, chunk c of row k at c ^ (k & 7)
//
// so that the eight rows that ldmatrix reads at once lie in different banks.
#pragma once

#include "backend/cuda/device/ptx.cuh"
#include "backend/cuda/device/with_element.cuh"
#include "backend/cuda/sm80/instructions.cuh"
#include "backend/cuda/sm80/tile.cuh"

namespace moec::cuda {

constexpr int kMmaDepth = 32, kMmaStages = 4;
// A tile of kRows rows of a and kPortableTile of b. kMakes: stages hold what elements of b are made
// of, a byte an element at most, and two tiles of b lie behind them.
template <int kRows_, bool kMakes>
struct MmaShape {
  static constexpr int kRows = kRows_;
  static constexpr int kBytesOfA = kRows * kMmaDepth * 2, kBytesOfB = kPortableTile * kMmaDepth * 2;
  static constexpr int kStageBytes = kBytesOfA + kBytesOfB / (kMakes ? 2 : 1);
  static constexpr int kSharedBytes = kMmaStages * kStageBytes + (kMakes ? 2 * kBytesOfB : 0);

  static __device__ uint32_t stage(uint32_t memory, int block) {
    return memory + uint32_t(block) % kMmaStages * kStageBytes;
  }
  static __device__ uint32_t tile_of_b(uint32_t memory, int block) {
    return kMakes ? memory + kMmaStages * kStageBytes + uint32_t(block) % 2 * kBytesOfB
                  : stage(memory, block) + kBytesOfA;
  }
};

__device__ __forceinline__ uint32_t copied_bytes(int64_t elements) {  // of a chunk of eight
  return elements >= 8 ? 16u : elements > 0 ? uint32_t(elements) * 2 : 0u;
}

// Chunks of a tile of kRows, a thread.
template <int kRows>
constexpr int kThreadChunks = kRows * kMmaDepth / 8 / kPortableThreads;

// Copies the tiles of one operand, k block after k block; each thread its own chunks. What lies
// behind the end of k is 0; rows that are not inside reach no result. What a copy needs is kept and
// only advanced: the loop over k has more of these instructions than products.
// kWhole: k blocks that lie in front of the end of k have instructions of their own.
template <bool kAlongK, int kRows, bool kWhole>
struct TileLoader;

template <int kRows, bool kWhole>
struct TileLoader<true, kRows, kWhole> {
  static constexpr int kChunks = kThreadChunks<kRows>, kRowStep = kPortableThreads / 4;
  static_assert(kRowStep % 8 == 0);  // the same swizzle in all rows of a thread
  const char* rows[kChunks];
  uint32_t to;
  int k;                // of the chunk in a k block
  unsigned inside = 0;  // bit j: row j

  // i0: first index of the tile; row indices are offset by first_row and go through the gather.
  __device__ TileLoader(const Operand& from, const PortableTile& t, int64_t i0, int64_t i_end,
                        int64_t first_row) {
    const int chunk = threadIdx.x % 4, first = threadIdx.x / 4;
    k = chunk * 8;
    to = first * 64 + ((chunk ^ (first / 2 & 3)) * 16);
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      const int64_t i = i0 + first + kRowStep * j;
      int64_t index = i < i_end ? first_row + i : -1;
      if (from.gather && index >= 0) index = from.gather[index];
      inside |= unsigned(index >= 0) << j;
      rows[j] = from.of_group(t.group) + ((index >= 0 ? index : 0) * from.i_stride + k) * 2;
    }
  }
  __device__ void load(uint32_t tile, int k0, int k_end) const {
    const auto of = [&](int j) { return tile + to + kRowStep * 64 * j; };
    if (kWhole && k0 + kMmaDepth <= k_end) {
#pragma unroll
      for (int j = 0; j < kChunks; ++j) ptx::copy_async_if(inside >> j & 1, of(j), rows[j]);
    } else {
      const uint32_t bytes = copied_bytes(k_end - k0 - k);
#pragma unroll
      for (int j = 0; j < kChunks; ++j)
        ptx::copy_async(of(j), rows[j], inside >> j & 1 ? bytes : 0);
    }
  }
  // To the k block at k0, and from part to part.
  __device__ void advance(int k0, int, int64_t part) {
    const int64_t step = k0 > 0 ? kMmaDepth * 2 : part;
#pragma unroll
    for (int j = 0; j < kChunks; ++j) rows[j] += step;
  }
  // What advance adds to come to the next part, `bytes` from this one.
  static __device__ int64_t part_step(int64_t bytes, int k_end) {
    return bytes - (k_end - 1) / kMmaDepth * (kMmaDepth * 2);
  }
};

template <int kRows>
struct TileLoader<false, kRows, false> {
  static_assert(kRows == kPortableTile);
  static constexpr int kChunks = kThreadChunks<kRows>, kStep = kPortableThreads / 16;
  static_assert(kStep % 8 == 0);
  const char* base;
  const int32_t* gather;
  uint32_t stride, to, bytes;  // stride: bytes from row to row
  int first, first_row;
  int next[kChunks];  // the rows that the next load will read

  __device__ TileLoader(const Operand& from, const PortableTile& t, int64_t i0, int64_t i_end,
                        int64_t first_of_group)
      : gather(from.gather), stride(uint32_t(from.k_stride * 2)), first_row(int(first_of_group)) {
    const int chunk = threadIdx.x % 16;
    first = threadIdx.x / 16;
    bytes = copied_bytes(i_end - i0 - chunk * 8);
    base = from.of_group(t.group) + (bytes ? (i0 + chunk * 8) * 2 : 0);
    to = first * 256 + ((chunk ^ (first & 7)) * 16);
    if (gather) gather += first_row;
    find_rows(0, int(t.k_end));
  }
  __device__ void find_rows(int k0, int k_end) {
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      const int k = k0 + first + kStep * j;
      next[j] = k >= k_end ? -1 : gather ? gather[k] : first_row + k;
    }
  }
  __device__ void load(uint32_t tile, int, int) const {
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      const char* const source = base + uint64_t(uint32_t(max(next[j], 0))) * stride;
      ptx::copy_async(tile + to + kStep * 256 * j, source, next[j] >= 0 ? bytes : 0);
    }
  }
  __device__ void advance(int k0, int k_end, int64_t part) {
    if (k0 == 0) base += part;
    find_rows(k0, k_end);
  }
  static __device__ int64_t part_step(int64_t bytes, int) { return bytes; }
};

__device__ __forceinline__ void load_matrices(uint32_t address, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// Fragments of 16 values of i and 16 of k, `kCount` of them side by side along i. Of a: one operand
// of mma each; of b: two. Each lane's place in a tile is computed once.
// AlongK: std::bool_constant, or bool where it is known at run time.
template <class AlongK, bool kOfB, int kCount>
struct Fragments {
  static constexpr int kSteps = kMmaDepth / 16, kPlaces = kSteps > kCount ? kSteps : kCount;
  const AlongK along_k;
  uint32_t place[kPlaces];  // along k: of each step; along i: of each fragment
  uint32_t values[kCount][4];

  __device__ Fragments(int i0, AlongK along) : along_k(along) {
    const int lane = threadIdx.x & 31, within = lane & 7;
    const int first = lane >> 3 & 1, second = lane >> 4;
    const int i_block = kOfB ? second : first, k_block = kOfB ? first : second;
#pragma unroll
    for (int n = 0; n < kPlaces; ++n) {
      if (along_k) {
        const int i = i0 + i_block * 8 + within, chunk = 2 * n + k_block;
        place[n] = i * 64 + ((chunk ^ (i / 2 & 3)) * 16);
      } else {
        const int k = k_block * 8 + within, chunk = i0 / 8 + 2 * n + i_block;
        place[n] = k * 256 + ((chunk ^ (k & 7)) * 16);
      }
    }
  }
  // Those of 16 k from 16 * step on; the first `count` of them.
  __device__ __forceinline__ void load(uint32_t tile, int step, int count = kCount) {
    if (along_k) {
#pragma unroll
      for (int n = 0; n < kCount; ++n)
        if (n < count) load_matrices(tile + place[step] + n * 16 * 64, values[n]);
    } else {
#pragma unroll
      for (int n = 0; n < kCount; ++n)
        if (n < count) ptx::load_matrix_transposed(tile + place[n] + step * 16 * 256, values[n]);
    }
  }
};

template <typename Element>
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1);
template <>
__device__ __forceinline__ void mma<__nv_bfloat16>(float (&c)[4], const uint32_t (&a)[4],
                                                   uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma<__half>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                            uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same of 8 of k.
template <typename Element>
__device__ __forceinline__ void mma_of_8(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b);
template <>
__device__ __forceinline__ void mma_of_8<__nv_bfloat16>(float (&c)[4], uint32_t a0, uint32_t a1,
                                                        uint32_t b) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(b));
}

}  // namespace moec::cuda
