// SPDX-License-Identifier: Apache-2.0
// The z-loss. A token has p.width lanes, so that a warp holds several tokens of few experts; its
// lanes call what is below together. Sums are those of the CPU backend, in its chunks and order.
#include <bit>

#include "backend/cuda/device/op.cuh"
#include "backend/cuda/device/warp.cuh"
#include "backend/cuda/routing/loss.h"
#include "core/chunks.h"
#include "core/dtype.h"
#include "math/exp.h"
#include "math/loss.h"

namespace moec::cuda {
namespace {

struct ZParams {
  int64_t num_tokens, chunk_tokens, chunks;
  int32_t num_experts, width;  // width: a power of 2
  double coefficient;
  Array logits;
  float* d_logits;
  const uint8_t* token_mask;
  const float* d_loss;
  float* loss;
  double* part;      // [chunks] sums of squares
  int32_t* counted;  // [chunks], with a mask
  // of all ranks: the sum of squares, and counted tokens; null: of this one
  double* sum_of_all;
  int64_t* counted_of_all;

  __device__ bool counts_token(int64_t t) const { return !token_mask || token_mask[t]; }
  __device__ double loss_gradient() const { return d_loss ? double(*d_loss) : 1.0; }
  __device__ int64_t chunk_begin(int64_t chunk) const { return chunk * chunk_tokens; }
  __device__ int64_t chunk_end(int64_t chunk) const {
    return min(chunk_begin(chunk) + chunk_tokens, num_tokens);
  }
};

struct LogSumExp {
  float largest, sum, value;  // sum: of e^(z - largest)
};

// visit(z, index) for this lane's logits of token t.
template <class Visit>
__device__ void for_logits(const ZParams& p, int64_t t, bool is_counted, Visit visit) {
  for (int e = lane_id() % p.width; is_counted && e < p.num_experts; e += p.width) {
    const int64_t index = t * p.num_experts + e;
    visit(load_real(p.logits.data, p.logits.dtype, index), index);
  }
}
// Means nothing for a token that is not counted. The order of the sum is row_sum's, whose other
// lanes hold padding.
__device__ LogSumExp log_sum_exp(const ZParams& p, int64_t t, bool is_counted) {
  float largest = -__builtin_inff(), sum = 0.0f;
  for_logits(p, t, is_counted, [&](float z, int64_t) { largest = z > largest ? z : largest; });
  for (int step = p.width / 2; step > 0; step /= 2) {
    const float other = __shfl_xor_sync(kAllLanes, largest, step);
    largest = other > largest ? other : largest;
  }
  for_logits(p, t, is_counted, [&](float z, int64_t) { sum += math::exp(z - largest); });
  for (int step = p.width / 2; step > 0; step /= 2)
    sum += __shfl_down_sync(kAllLanes, sum, step, p.width);
  sum = __shfl_sync(kAllLanes, sum, 0, p.width);
  return {largest, sum, largest + math::log(sum)};
}

constexpr int kZThreads = 1024, kZTile = 1024, kGradientThreads = 256;

// Counted tokens of one chunk.
__global__ __launch_bounds__(kZThreads) void count_chunk_kernel(const __grid_constant__ ZParams p) {
  __shared__ int32_t counted;
  begin_kernel();
  if (threadIdx.x == 0) counted = 0;
  __syncthreads();
  const int64_t slot = blockIdx.x, end = p.chunk_end(slot);
  int32_t mine = 0;
  for (int64_t t = p.chunk_begin(slot) + threadIdx.x; t < end; t += kZThreads)
    mine += p.counts_token(t);
  mine = warp_sum(mine);
  if (lane_id() == 0) atomicAdd(&counted, mine);
  __syncthreads();
  if (threadIdx.x == 0) p.counted[slot] = counted;
}

// By one warp.
__device__ int64_t own_counted(const ZParams& p) {
  if (!p.token_mask) return p.num_tokens;
  int32_t mine = 0;
  for_columns(int(p.chunks), [&](int chunk) { mine += p.counted[chunk]; });
  return warp_sum(mine);
}
__device__ double z_factor(const ZParams& p) {
  const int64_t counted = p.counted_of_all ? *p.counted_of_all : own_counted(p);
  return p.coefficient / double(max(counted, int64_t(1)));
}

// Sum of the squared logsumexp of one chunk, in the order of its tokens.
__global__ __launch_bounds__(kZThreads) void z_chunk_kernel(const __grid_constant__ ZParams p) {
  __shared__ double squares[kZTile];
  begin_kernel();
  const int64_t slot = blockIdx.x, end = p.chunk_end(slot);
  const int step = kZThreads / p.width, mine = threadIdx.x / p.width;
  double total = 0.0;
  for (int64_t first = p.chunk_begin(slot); first < end; first += kZTile) {
    const int count = int(min(int64_t(kZTile), end - first));
    for (int i = mine; i - mine < count; i += step) {
      const bool is_counted = i < count && p.counts_token(first + i);
      const double value = double(log_sum_exp(p, first + i, is_counted).value);
      if (i < count && threadIdx.x % p.width == 0) squares[i] = is_counted ? value * value : 0.0;
    }
    __syncthreads();
    if (threadIdx.x == 0)
      for (int i = 0; i < count; ++i) total += squares[i];
    __syncthreads();
  }
  if (threadIdx.x == 0) p.part[slot] = total;
}

// Of lane 0, in the order of chunks.
__device__ double own_sum(const ZParams& p) {
  __shared__ double parts[Chunks::kMax];
  for_columns(int(p.chunks), [&](int chunk) { parts[chunk] = p.part[chunk]; });
  __syncwarp();
  double sum = 0.0;
  for (int64_t chunk = 0; threadIdx.x == 0 && chunk < p.chunks; ++chunk) sum += parts[chunk];
  return sum;
}

// Each is one warp: the loss, and what this rank adds to that of all.
__global__ void z_sum_kernel(const __grid_constant__ ZParams p) {
  begin_kernel();
  const double factor = z_factor(p), sum = p.sum_of_all ? *p.sum_of_all : own_sum(p);
  if (threadIdx.x == 0) *p.loss = float(sum * factor);
}
__global__ void z_own_kernel(const __grid_constant__ ZParams p, bool with_sum) {
  begin_kernel();
  const int64_t counted = own_counted(p);
  const double sum = with_sum ? own_sum(p) : 0.0;
  if (threadIdx.x != 0) return;
  *p.counted_of_all = counted;
  *p.sum_of_all = sum;
}

__global__ __launch_bounds__(kGradientThreads) void z_gradient_kernel(
    const __grid_constant__ ZParams p) {
  begin_kernel();
  const float factor = float(z_factor(p) * p.loss_gradient());
  const int tokens = 32 / p.width;  // of a warp
  for (int64_t first = global_thread() / 32 * tokens; first < p.num_tokens;
       first += global_threads() / 32 * tokens) {
    const int64_t t = first + lane_id() / p.width;
    const bool is_counted = t < p.num_tokens && p.counts_token(t);
    const LogSumExp row = log_sum_exp(p, t, is_counted);
    const float slope = math::z_loss_slope(row.value, factor);
    for_logits(p, t, is_counted, [&](float z, int64_t index) {
      p.d_logits[index] += slope * (math::exp(z - row.largest) / row.sum);
    });
  }
}

}  // namespace

void z_loss(const Op& op, const LossArgs& args, bool backward) {
  const Chunks chunks(args.num_tokens, kLossTokens);
  const Scratch scratch(op, Chunks::kMax * (sizeof(double) + sizeof(int32_t)) + 2 * sizeof(double));
  ZParams p = {};
  p.num_tokens = args.num_tokens;
  p.chunk_tokens = chunks.length;
  p.chunks = chunks.count;
  p.num_experts = args.num_experts;
  p.width = int32_t(std::min<uint32_t>(kRowLanes, std::bit_ceil(uint32_t(args.num_experts))));
  p.coefficient = double(args.coefficient);
  p.logits = args.layers[0].logits;
  p.d_logits = args.layers[0].d_logits;
  p.token_mask = args.token_mask;
  p.d_loss = args.d_loss;
  p.loss = args.loss;
  p.part = scratch.as<double>() + 2;
  p.counted = reinterpret_cast<int32_t*>(p.part + Chunks::kMax);
  const dim3 each(unsigned(p.chunks));
  if (p.chunks && p.token_mask) run(op, "loss", count_chunk_kernel, each, kZThreads, 0, p);
  if (p.chunks && !backward) run(op, "loss", z_chunk_kernel, each, kZThreads, 0, p);
  if (args.ranks) {
    p.sum_of_all = scratch.as<double>();
    p.counted_of_all = reinterpret_cast<int64_t*>(p.sum_of_all + 1);
    run(op, "loss", z_own_kernel, dim3(1), 32, 0, p, !backward);
    if (!backward) args.ranks->add(p.sum_of_all, 1);
    args.ranks->add(p.counted_of_all, 1);
  }
  if (!backward) {
    run(op, "loss", z_sum_kernel, dim3(1), 32, 0, p);
  } else if (p.chunks) {
    run(op, "gradient of a loss", z_gradient_kernel,
        grid_for(p.num_tokens * p.width, kGradientThreads, int64_t(op.multiprocessors) * 8),
        kGradientThreads, 0, p);
  }
}

}  // namespace moec::cuda
