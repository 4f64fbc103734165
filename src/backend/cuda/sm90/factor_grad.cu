// SPDX-License-Identifier: Apache-2.0
// Gradients of factors: a CTA makes 128 lines i of one expert, each of its warps 32 of them, and
// walks the expert's rows 32 at a time.
#include "backend/cuda/sm90/narrow.cuh"
#include "core/dtype.h"

namespace moec::cuda {
namespace {

constexpr int kGradWidth = 128, kGradRows = 32;
constexpr int kWideBytes = kGradRows * kGradWidth * 2, kPanelBytes = kGradRows * 128;
template <int kRank>
constexpr int kGradStage = kWideBytes + kGradRows * kRank * 2;
// fp32 results on their way out: [ranks][128], over the stages.
constexpr int kOutLine = kGradWidth + 4;
template <int kRank>
constexpr int kGradBytes = kNarrowStages * kGradStage<kRank>;
static_assert(64 * kOutLine * 4 <= kGradBytes<64> && 16 * kOutLine * 4 <= kGradBytes<16>);

struct GradSlice {
  int expert, begin, rows, first_i, first_rank;
};

// A stage: [32 rows][128 i] as two panels of 64 i, and behind it [32 rows][ranks]. Rows of tokens
// are looked up one stage ahead.
template <int kRank>
class GradLoader {
 public:
  __device__ GradLoader(const FactorGradArgs& p, const GradSlice& slice)
      : p_(p),
        slice_(slice),
        wide_(static_cast<const char*>(p.wide) + (slice.first_i + chunk_ * 8) * 2),
        inside_(slice.first_i + chunk_ * 8 < p.width) {
    find(0);
  }
  // Stages in turn.
  __device__ __forceinline__ void load(uint32_t stage, int block) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const uint32_t to = stage + chunk_ / 8 * kPanelBytes + swizzled(row0_ + 8 * i, chunk_ % 8);
      ptx::copy_async(to, wide_ + int64_t(max(from_[i], 0)) * p_.wide_stride * 2,
                      inside_ && from_[i] >= 0 ? 16 : 0);
    }
    const int row = block * kGradRows;
    const auto* const narrow = static_cast<const char*>(p_.narrow) +
                               ((slice_.begin + row) * p_.narrow_stride + slice_.first_rank) * 2;
    copy_ranks<kRank, kGradRows>(stage + kWideBytes, narrow, p_.narrow_stride * 2,
                                 int(p_.narrow_stride) - slice_.first_rank, slice_.rows - row);
    find(block + 1);
  }

 private:
  static constexpr int kCopies = kGradRows / 8;
  __device__ __forceinline__ void find(int block) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int row = block * kGradRows + row0_ + 8 * i;
      from_[i] = -1;
      if (row >= slice_.rows) continue;
      from_[i] = slice_.begin + row;
      if (p_.wide_token) from_[i] = __ldg(p_.wide_token + from_[i]);
    }
  }

  const FactorGradArgs& p_;
  const GradSlice& slice_;
  const int row0_ = int(threadIdx.x) / 16, chunk_ = int(threadIdx.x) % 16;
  const char* const wide_;
  const bool inside_;
  int from_[kCopies];
};

template <typename Element, int kRank>
__device__ __forceinline__ void multiply_rows(uint32_t stage, int warp,
                                              float (&acc)[2][kRank / 8][4]) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int step = 0; step < kGradRows / 16; ++step) {
    uint32_t a[2][4];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const int row = 16 * step + (lane & 7) + (lane >> 4) * 8;
      const int chunk = 4 * warp + 2 * m + (lane >> 3 & 1);
      ptx::load_matrix_transposed(stage + chunk / 8 * kPanelBytes + swizzled(row, chunk % 8), a[m]);
    }
#pragma unroll
    for (int n = 0; n < kRank / 16; ++n) {
      uint32_t b[4];
      load_ranks<kRank>(stage + kWideBytes, step, n, b);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        mma<Element>(acc[m][2 * n], a[m], b[0], b[1]);
        mma<Element>(acc[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// Neighbouring threads write neighbours.
__device__ __forceinline__ void store_lines(const FactorGradArgs& p, const GradSlice& slice,
                                            const float* lines, int ranks) {
  const int width = min(kGradWidth, int(p.width) - slice.first_i);
  const bool along_j = p.out[0].j_stride == 1;
  for (int at = threadIdx.x; at < width * ranks; at += kNarrowThreads) {
    const int i = along_j ? at / ranks : at % width, j = along_j ? at % ranks : at / width;
    const int line = slice.first_i + i;
    const FactorOut& out = p.out[p.alternating ? line & 1 : 0];
    const int64_t place = slice.expert * out.expert_stride +
                          (p.alternating ? line / 2 : line) * out.i_stride +
                          (slice.first_rank + j) * out.j_stride;
    float value = lines[j * kOutLine + i];
    if (p.accumulate) value += load_real(out.base, p.out_dtype, place);
    store_real(out.base, p.out_dtype, place, value);
  }
}

template <typename Element, int kRank>
__global__ __launch_bounds__(kNarrowThreads) void factor_grad_kernel(
    const __grid_constant__ FactorGradArgs p) {
  extern __shared__ __align__(128) unsigned char shared[];
  if (p.early == Early::kNothing) ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  const int tiles = int(p.width + kGradWidth - 1) / kGradWidth, warp = int(threadIdx.x) / 32;
  GradSlice slice;
  slice.expert = int(blockIdx.x) / tiles;
  slice.first_i = int(blockIdx.x) % tiles * kGradWidth;
  slice.first_rank = int(blockIdx.y) * kRank;
  slice.begin = __ldg(p.groups.offsets + slice.expert);
  slice.rows = __ldg(p.groups.offsets + slice.expert + 1) - slice.begin;
  if (slice.rows == 0 && p.accumulate) return ptx::grid_dependency_wait();
  const uint32_t memory = ptx::shared_address(shared);
  const auto stage = [&](int block) { return memory + block % kNarrowStages * kGradStage<kRank>; };
  const int blocks = (slice.rows + kGradRows - 1) / kGradRows;
  GradLoader<kRank> loader(p, slice);
#pragma unroll
  for (int block = 0; block < kNarrowStages - 1; ++block) {
    if (block < blocks) loader.load(stage(block), block);
    ptx::copy_async_commit();
  }
  float acc[2][kRank / 8][4] = {};
  for (int block = 0; block < blocks; ++block) {
    ptx::copy_async_wait<kNarrowStages - 2>();
    __syncthreads();
    const int next = block + kNarrowStages - 1;
    if (next < blocks) loader.load(stage(next), next);
    ptx::copy_async_commit();
    multiply_rows<Element, kRank>(stage(block), warp, acc);
  }
  ptx::copy_async_wait<0>();
  __syncthreads();
  auto* const lines = reinterpret_cast<float*>(shared);
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int n = 0; n < kRank / 8; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c)
        lines[(8 * n + 2 * (lane & 3) + c % 2) * kOutLine + 32 * warp + 16 * m + lane / 4 +
              c / 2 * 8] = acc[m][n][c];
  __syncthreads();
  store_lines(p, slice, lines, min(kRank, int(p.rank) - slice.first_rank));
  ptx::grid_dependency_wait();
}

}  // namespace

const char* narrow_refuses(const FactorGradArgs& args) {
  if (args.narrow_stride > kMostNarrow) return "adapters of a rank above 128";
  if (args.width % 8) return "a matrix extent that is not a multiple of 8";
  if (!in_chunks(args.wide, args.wide_stride)) return "rows that are not aligned to 16 bytes";
  if (!in_chunks(args.narrow, args.narrow_stride))
    return "narrow rows that are not aligned to 16 bytes";
  return nullptr;
}

cudaError_t launch_factor_grad(const FactorGradArgs& args, cudaStream_t stream) {
  const int64_t tiles = (args.width + kGradWidth - 1) / kGradWidth;
  return with_narrow(args.dtype, args.rank, [&]<class Element, int kRank>() {
    static std::atomic<uint64_t> allowed;
    return launch_narrow(factor_grad_kernel<Element, kRank>, tiles * args.groups.num_experts,
                         args.rank, kGradBytes<kRank>, allowed, stream, args);
  });
}

}  // namespace moec::cuda
