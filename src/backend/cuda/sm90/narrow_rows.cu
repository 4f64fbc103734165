// SPDX-License-Identifier: Apache-2.0
// Narrow rows: a CTA makes up to 64 rows of one expert, each of its warps 16 of them.
#include "backend/cuda/sm90/narrow.cuh"

namespace moec::cuda {
namespace {

constexpr int kSliceRows = 64;

struct RowSlice {
  int expert, begin, rows;
};
// The rows of a CTA. Expert e has the slices from offsets[e] / kSliceRows + e on, which are at
// least as many as its rows need: so each thread finds out by itself whether an expert is it.
__device__ __forceinline__ bool find_slice(const NarrowGroups& groups, RowSlice& slice) {
  __shared__ int found[3];
  if (threadIdx.x == 0) found[2] = 0;
  __syncthreads();
  for (int e = threadIdx.x; e < groups.num_experts; e += kNarrowThreads) {
    const int begin = __ldg(groups.offsets + e), end = __ldg(groups.offsets + e + 1);
    const int index = int(blockIdx.x) - begin / kSliceRows - e;
    const int rows = end - begin - index * kSliceRows;
    if (index < 0 || rows <= 0) continue;
    found[0] = e;
    found[1] = begin + index * kSliceRows;
    found[2] = min(rows, kSliceRows);
  }
  __syncthreads();
  slice = {found[0], found[1], found[2]};
  return slice.rows > 0;
}

constexpr int kRowsBytes = kSliceRows * 128;
template <int kRank>
constexpr int kRowsStage = kRowsBytes + kRank * 128;

// A stage: [64 rows][64 k] and behind it the factor's [ranks][64 k] or [64 k][ranks].
template <int kRank, bool kAlongK>
class NarrowLoader {
 public:
  __device__ NarrowLoader(const NarrowRowsArgs& p, const RowSlice& slice, int first_rank)
      : p_(p), first_rank_(first_rank), factor_(slice.expert * p.factor_expert_stride * 2) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int row = row0_ + 16 * i;
      int from = -1;
      if (row < slice.rows) {
        from = slice.begin + row;
        if (p.row_token) from = __ldg(p.row_token + from);
      }
      present_ |= unsigned(from >= 0) << i;
      offset_[i] = int64_t(max(from, 0)) * p.row_stride * 2 + chunk_ * 16;
    }
  }
  __device__ __forceinline__ void load(uint32_t stage, int kb, int k_blocks) const {
    const NarrowTerm& term = p_.terms[kb >= k_blocks];
    const int k0 = (kb >= k_blocks ? kb - k_blocks : kb) * kTileK, left = int(p_.k) - k0;
    const char* const rows = static_cast<const char*>(term.rows) + k0 * 2;
    const bool inside = chunk_ * 8 < left;
#pragma unroll
    for (int i = 0; i < kCopies; ++i)
      ptx::copy_async(stage + swizzled(row0_ + 16 * i, chunk_), rows + offset_[i],
                      inside && present_ >> i & 1 ? 16 : 0);
    const char* const factor = static_cast<const char*>(term.factor) + factor_;
    const int64_t stride = p_.factor_stride * 2;
    const int ranks = int(p_.rank) - first_rank_;
    stage += kRowsBytes;
    if constexpr (kAlongK) {
#pragma unroll
      for (int j = row0_; j < kRank; j += 16)
        ptx::copy_async(stage + swizzled(j, chunk_),
                        factor + (first_rank_ + j) * stride + k0 * 2 + chunk_ * 16,
                        inside && j < ranks ? 16 : 0);
    } else {
      copy_ranks<kRank, kTileK>(stage, factor + k0 * stride + first_rank_ * 2, stride, ranks, left);
    }
  }

 private:
  static constexpr int kCopies = kSliceRows / 16;
  const NarrowRowsArgs& p_;
  const int first_rank_, row0_ = int(threadIdx.x) / 8, chunk_ = int(threadIdx.x) % 8;
  const int64_t factor_;  // bytes to the expert's
  int64_t offset_[kCopies];
  unsigned present_ = 0;
};

template <typename Element, int kRank, bool kAlongK>
__device__ __forceinline__ void multiply_stage(uint32_t stage, int first_row,
                                               float (&acc)[kRank / 8][4]) {
  const int lane = threadIdx.x & 31;
  const uint32_t factor = stage + kRowsBytes;
#pragma unroll
  for (int step = 0; step < kTileK / 16; ++step) {
    uint32_t a[4];
    load_matrices(stage + swizzled(first_row + (lane & 15), 2 * step + (lane >> 4)), a);
#pragma unroll
    for (int n = 0; n < kRank / 16; ++n) {
      uint32_t b[4];
      if constexpr (kAlongK) {
        const int j = 16 * n + (lane & 7) + (lane >> 4) * 8;
        load_matrices(factor + swizzled(j, 2 * step + (lane >> 3 & 1)), b);
      } else {
        load_ranks<kRank>(factor, step, n, b);
      }
      mma<Element>(acc[2 * n], a, b[0], b[1]);
      mma<Element>(acc[2 * n + 1], a, b[2], b[3]);
    }
  }
}

template <typename Element, int kRank, bool kAlongK>
__global__ __launch_bounds__(kNarrowThreads) void narrow_rows_kernel(
    const __grid_constant__ NarrowRowsArgs p) {
  extern __shared__ __align__(128) unsigned char shared[];
  if (p.early == Early::kNothing) ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  RowSlice slice;
  if (!find_slice(p.groups, slice)) return ptx::grid_dependency_wait();
  const uint32_t memory = ptx::shared_address(shared);
  const auto stage = [&](int kb) { return memory + kb % kNarrowStages * kRowsStage<kRank>; };
  const int first_rank = int(blockIdx.y) * kRank, first_row = int(threadIdx.x) / 32 * 16;
  const int k_blocks = int(p.k + kTileK - 1) / kTileK, all = k_blocks * p.num_terms;
  const NarrowLoader<kRank, kAlongK> loader(p, slice, first_rank);
  if (p.early == Early::kWeights) ptx::grid_dependency_wait();
#pragma unroll
  for (int kb = 0; kb < kNarrowStages - 1; ++kb) {
    if (kb < all) loader.load(stage(kb), kb, k_blocks);
    ptx::copy_async_commit();
  }
  float acc[kRank / 8][4] = {};
  for (int kb = 0; kb < all; ++kb) {
    ptx::copy_async_wait<kNarrowStages - 2>();
    __syncthreads();
    const int next = kb + kNarrowStages - 1;
    if (next < all) loader.load(stage(next), next, k_blocks);
    ptx::copy_async_commit();
    if (first_row < slice.rows) multiply_stage<Element, kRank, kAlongK>(stage(kb), first_row, acc);
  }
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first_row + lane / 4 + 8 * half;
    if (row >= slice.rows) continue;
    auto* const to = static_cast<Element*>(p.to) + (slice.begin + row) * p.rank + first_rank;
#pragma unroll
    for (int n = 0; n < kRank / 8; ++n) {
      if (first_rank + 8 * n >= p.rank) continue;
      *reinterpret_cast<uint32_t*>(to + 8 * n + 2 * (lane & 3)) =
          pack<Element>(acc[n][2 * half] * p.scale, acc[n][2 * half + 1] * p.scale);
    }
  }
  ptx::grid_dependency_wait();
}

template <typename Element, int kRank, bool kAlongK>
cudaError_t launch_rows(const NarrowRowsArgs& args, cudaStream_t stream) {
  static std::atomic<uint64_t> allowed;
  const int64_t slices = args.groups.max_rows / kSliceRows + args.groups.num_experts;
  return launch_narrow(narrow_rows_kernel<Element, kRank, kAlongK>, slices, args.rank,
                       kNarrowStages * kRowsStage<kRank>, allowed, stream, args);
}

}  // namespace

const char* narrow_refuses(const NarrowRowsArgs& args) {
  if (args.rank > kMostNarrow) return "adapters of a rank above 128";
  if (args.rank % 8 || args.k % 8) return "a matrix extent that is not a multiple of 8";
  for (int i = 0; i < args.num_terms; ++i) {
    if (!in_chunks(args.terms[i].rows, args.row_stride))
      return "rows that are not aligned to 16 bytes";
    if (!in_chunks(args.terms[i].factor, args.factor_stride) || args.factor_expert_stride % 8)
      return "factors that are not aligned to 16 bytes";
  }
  return nullptr;
}

cudaError_t launch_narrow_rows(const NarrowRowsArgs& args, cudaStream_t stream) {
  if (args.groups.max_rows == 0) return cudaSuccess;
  return with_narrow(args.dtype, args.rank, [&]<class Element, int kRank>() {
    return args.along_k ? launch_rows<Element, kRank, true>(args, stream)
                        : launch_rows<Element, kRank, false>(args, stream);
  });
}

}  // namespace moec::cuda
