// SPDX-License-Identifier: Apache-2.0
// Tiles of 64 x 64 in registers, 4 x 4 a thread, operands through shared memory as fp32.
#include "backend/cuda/routing/dense.h"

#include <algorithm>

#include "backend/cuda/device/op.cuh"
#include "backend/cuda/routing/cublaslt.h"
#include "core/dtype.h"
#include "core/workspace.h"

namespace moec::cuda {
namespace {

constexpr int kTile = 64, kDepth = 16, kThreads = 256;
constexpr int64_t kLeastPart = 256;  // of k
constexpr int64_t kManyTiles = 256;  // from here on k is not cut

int64_t tiles(int64_t extent) {
  return (extent + kTile - 1) / kTile;
}
int64_t part_length(const Dense& dense) {
  const int64_t most = std::max<int64_t>(1, kManyTiles / (tiles(dense.m) * tiles(dense.n)));
  const int64_t even = (dense.k + most - 1) / most;
  return std::max(kLeastPart, (even + kDepth - 1) / kDepth * kDepth);
}

// to [kDepth][kTile] = operand(first + i, k0 + j) as fp32, zeros outside. Threads run along the
// axis that is contiguous in memory.
__device__ void load_tile(const Array& operand, int64_t stride, int64_t k_stride, int64_t first,
                          int64_t extent, int64_t k0, int64_t k_end, float (*to)[kTile + 4]) {
  const bool along_k = k_stride == 1;
#pragma unroll
  for (int at = threadIdx.x; at < kTile * kDepth; at += kThreads) {
    const int i = along_k ? at / kDepth : at % kTile, j = along_k ? at % kDepth : at / kTile;
    const bool inside = first + i < extent && k0 + j < k_end;
    to[j][i] =
        inside ? load_real(operand.data, operand.dtype, (first + i) * stride + (k0 + j) * k_stride)
               : 0.0f;
  }
}

__global__ __launch_bounds__(kThreads) void dense_kernel(const Dense g, int64_t length,
                                                         float* parts) {
  __shared__ float a[kDepth][kTile + 4], b[kDepth][kTile + 4];
  begin_kernel();
  const int64_t row0 = int64_t(blockIdx.x) * kTile, col0 = int64_t(blockIdx.y) * kTile;
  const int64_t k_begin = blockIdx.z * length, k_end = min(k_begin + length, g.k);
  const int row = threadIdx.x / 16 * 4, col = threadIdx.x % 16 * 4;
  float sum[4][4] = {};
  for (int64_t k0 = k_begin; k0 < k_end; k0 += kDepth) {
    load_tile(g.a, g.a_row, g.a_col, row0, g.m, k0, k_end, a);
    load_tile(g.b, g.b_col, g.b_row, col0, g.n, k0, k_end, b);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kDepth; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[i][j] = fmaf(a[k][row + i], b[k][col + j], sum[i][j]);
    __syncthreads();
  }
  float* const c = parts + blockIdx.z * g.m * g.n;
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 4; ++j)
      if (row0 + row + i < g.m && col0 + col + j < g.n)
        c[(row0 + row + i) * g.n + col0 + col + j] = sum[i][j];
}

__global__ __launch_bounds__(kThreads) void split_kernel(const float* from, int64_t rows,
                                                         int64_t columns, bf16* to) {
  begin_kernel();
  for (int64_t i = global_thread(); i < rows * columns; i += global_threads()) {
    const int64_t row = i / columns;
    bf16* const out = to + i + row * columns * (kPieces - 1);
    float rest = from[i];
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const bf16 value = from_float<bf16>(rest);
      out[piece * columns] = value;
      const bool finite = (value.bits & 0x7f80u) != 0x7f80u;  // no inf - inf
      rest = finite ? rest - to_float(value) : 0.0f;
    }
  }
}

__global__ __launch_bounds__(kThreads) void repeat_kernel(const bf16* from, int64_t count,
                                                          bf16* to) {
  begin_kernel();
  for (int64_t i = global_thread(); i < count; i += global_threads())
    for (int piece = 0; piece < kPieces; ++piece) to[piece * count + i] = from[i];
}

// cuBLASLt's workspace, which it wants at a multiple of this.
constexpr uint64_t kVendorAlign = 256, kVendorBytes = kCublasLtBytes + kVendorAlign;

uint64_t parts_bytes(int64_t m, int64_t n, int64_t parts) {
  return round_up(uint64_t(parts * m * n) * sizeof(float), kCacheLine);
}

}  // namespace

DenseProduct::DenseProduct(const Op& op, const Dense& dense, const Array& c)
    : dense_(dense),
      c_(c.data ? c : Array{nullptr, MOEC_F32}),
      vendor_(cublaslt_fits(dense, c_, op.tf32)),
      parts_(1) {
  if (vendor_) return;
  const int64_t length = part_length(dense);
  parts_ = (dense.k + length - 1) / length;
}

bool DenseProduct::is_direct() const {
  return c_ && parts_ == 1 && (vendor_ || c_.dtype == MOEC_F32);
}

uint64_t DenseProduct::scratch_bytes() const {
  return (vendor_ ? kVendorBytes : 0) + (is_direct() ? 0 : parts_bytes(dense_.m, dense_.n, parts_));
}

uint64_t DenseProduct::most_scratch(uint64_t m, uint64_t n) {
  constexpr uint64_t kMostParts = kManyTiles * kTile * kTile * sizeof(float);
  return kVendorBytes + std::max(kMostParts, m * n * sizeof(float)) + 2 * kCacheLine;
}

const float* DenseProduct::run(const Op& op, char* scratch) const {
  float* const parts =
      is_direct() ? nullptr : reinterpret_cast<float*>(scratch + (vendor_ ? kVendorBytes : 0));
  const Array to = parts ? Array{parts, MOEC_F32} : c_;
  if (vendor_) {
    const uint64_t workspace = round_up(reinterpret_cast<uintptr_t>(scratch), kVendorAlign);
    cublaslt_product(op, dense_, to, reinterpret_cast<void*>(workspace));
  } else {
    const dim3 grid(unsigned(tiles(dense_.m)), unsigned(tiles(dense_.n)), unsigned(parts_));
    cuda::run(op, "dense product", dense_kernel, grid, kThreads, 0, dense_, part_length(dense_),
              static_cast<float*>(to.data));
  }
  return parts;
}

void split_to_bf16(const Op& op, const float* from, int64_t rows, int64_t columns, void* to) {
  run(op, "split of a matrix", split_kernel,
      grid_for(rows * columns, kThreads, int64_t(op.multiprocessors) * 8), kThreads, 0, from, rows,
      columns, static_cast<bf16*>(to));
}

void repeat_bf16(const Op& op, const void* from, int64_t count, void* to) {
  run(op, "copies of a matrix", repeat_kernel,
      grid_for(count, kThreads, int64_t(op.multiprocessors) * 8), kThreads, 0,
      static_cast<const bf16*>(from), count, static_cast<bf16*>(to));
}

}  // namespace moec::cuda
