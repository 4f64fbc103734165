// SPDX-License-Identifier: Apache-2.0
// Tiles of 16-bit operands in shared memory and their products by mma.sync m16n8k16.
//
//   along k   [128][32 k]   64 bytes a row, 16-byte chunk c of row i at c ^ (i / 2 & 3)
//   along i   [32 k][128]   256 bytes a row, chunk c of row k at c ^ (k & 7)
//
// so that the eight rows that ldmatrix reads at once lie in different banks.
#pragma once

#include "backend/cuda/element.cuh"
#include "backend/cuda/portable_tile.cuh"
#include "backend/cuda/ptx.cuh"

namespace moec::cuda {

constexpr int kMmaThreads = 128, kMmaDepth = 32, kMmaStages = 4;
constexpr int kMmaChunks = kPortableTile * kMmaDepth / 8 / kMmaThreads;  // a thread
constexpr int kMmaTileBytes = kPortableTile * kMmaDepth * 2;
constexpr int kMmaSharedBytes = kMmaStages * 2 * kMmaTileBytes;

__device__ __forceinline__ uint32_t copied_bytes(int64_t elements) {  // of a chunk of eight
  return elements >= 8 ? 16u : elements > 0 ? uint32_t(elements) * 2 : 0u;
}

// Copies the tiles of one operand, k block after k block; each thread its own chunks.
template <bool kAlongK>
struct TileLoader;

template <>
struct TileLoader<true> {
  static constexpr int kRowStep = kMmaThreads / 4;
  const char* rows[kMmaChunks];
  uint32_t to;
  int64_t k;
  unsigned inside = 0;  // bit j: row j

  // i0: first index of the tile; row indices are offset by first_row and go through the gather.
  __device__ TileLoader(const Operand& from, const PortableTile& t, int64_t i0, int64_t i_end,
                        int64_t first_row) {
    const int chunk = threadIdx.x % 4;
    k = chunk * 8;
    const int first = threadIdx.x / 4;
    to = first * 64 + ((chunk ^ (first / 2 & 3)) * 16);
#pragma unroll
    for (int j = 0; j < kMmaChunks; ++j) {
      const int64_t i = i0 + first + kRowStep * j;
      int64_t index = i < i_end ? first_row + i : -1;
      if (from.gather && index >= 0) index = from.gather[index];
      inside |= unsigned(index >= 0) << j;
      rows[j] = from.of_group(t.group) + ((index >= 0 ? index : 0) * from.i_stride + k) * 2;
    }
  }
  // k0: multiple of kMmaDepth; part: bytes from the first part
  __device__ void load(uint32_t tile, int64_t k0, int64_t k_end, int64_t part) {
    const uint32_t bytes = copied_bytes(k_end - k0 - k);
#pragma unroll
    for (int j = 0; j < kMmaChunks; ++j) {
      const uint32_t own = inside >> j & 1 ? bytes : 0;
      const char* const source = own ? rows[j] + part + k0 * 2 : rows[j];
      ptx::copy_async(tile + to + kRowStep * 64 * j, source, own);
    }
  }
};
static_assert(TileLoader<true>::kRowStep % 8 == 0);  // the same swizzle in all rows of a thread

template <>
struct TileLoader<false> {
  const char* base;
  const int32_t* gather;
  int64_t k_stride, first_row;
  static constexpr int kStep = kMmaThreads / 16;
  uint32_t to, bytes;
  int first;
  int64_t next[kMmaChunks];  // the rows that the next load will read

  __device__ TileLoader(const Operand& from, const PortableTile& t, int64_t i0, int64_t i_end,
                        int64_t first_of_group)
      : gather(from.gather), k_stride(from.k_stride), first_row(first_of_group) {
    const int chunk = threadIdx.x % 16;
    first = threadIdx.x / 16;
    bytes = copied_bytes(i_end - i0 - chunk * 8);
    base = from.of_group(t.group) + (bytes ? (i0 + chunk * 8) * 2 : 0);
    to = first * 256 + ((chunk ^ (first & 7)) * 16);
#pragma unroll
    for (int j = 0; j < kMmaChunks; ++j) next[j] = row(first + kStep * j, t.k_end);
  }
  __device__ int64_t row(int64_t k, int64_t k_end) const {
    if (k >= k_end) return -1;
    return gather ? gather[first_row + k] : first_row + k;
  }
  __device__ void load(uint32_t tile, int64_t k0, int64_t k_end, int64_t part) {
    const int64_t after = k0 + kMmaDepth < k_end ? k0 + kMmaDepth : 0;  // parts begin at 0 again
#pragma unroll
    for (int j = 0; j < kMmaChunks; ++j) {
      const bool inside = next[j] >= 0;
      const char* const source = base + (inside ? part + next[j] * k_stride * 2 : 0);
      ptx::copy_async(tile + to + kStep * 256 * j, source, inside ? bytes : 0);
      next[j] = row(after + first + kStep * j, k_end);
    }
  }
};
static_assert(TileLoader<false>::kStep % 8 == 0);

__device__ __forceinline__ void load_matrices(uint32_t address, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// Fragments of 16 values of i and 16 of k. Of a: one operand of mma; of b: two.
template <bool kAlongK, bool kOfB>
__device__ __forceinline__ void load_fragment(uint32_t tile, int i0, int k0, uint32_t (&r)[4]) {
  const int lane = threadIdx.x & 31, within = lane & 7;
  const int first = lane >> 3 & 1, second = lane >> 4;
  const int i_block = kOfB ? second : first, k_block = kOfB ? first : second;
  if constexpr (kAlongK) {
    const int i = i0 + i_block * 8 + within, chunk = k0 / 8 + k_block;
    load_matrices(tile + i * 64 + ((chunk ^ (i / 2 & 3)) * 16), r);
  } else {
    const int k = k0 + k_block * 8 + within, chunk = i0 / 8 + i_block;
    ptx::load_matrix_transposed(tile + k * 256 + ((chunk ^ (k & 7)) * 16), r);
  }
}

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

}  // namespace moec::cuda
