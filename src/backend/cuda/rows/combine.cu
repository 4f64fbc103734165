// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/rows/combine.h"

#include <algorithm>
#include <iterator>

#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/device/ptx.cuh"
#include "backend/cuda/device/with_element.cuh"

namespace moec::cuda {
namespace {

// Memory is busy only when much is on its way to each multiprocessor: with 128 KB a sum takes 8 per
// cent less than with 64, with 192 KB another 5. So rows are copied to shared memory, where there
// is more room than in registers, and whenever a stage has been summed the next one is asked for in
// its place. Each thread reads what it asked for itself: nobody waits for another.
constexpr int kMaxThreads = 256, kThreadsOfSm = 768, kSharedOfSm = 228 << 10, kSharedOfCta = 1024;
constexpr int kCopies = 18;  // of 16 bytes a thread
constexpr int kNone = -1, kIdentity = -2;

template <typename Element>
__device__ void accumulate(float (&sum)[8], uint4 v, float weight) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack<Element>(words[i]);
    sum[2 * i] = fmaf(weight, pair.x, sum[2 * i]);
    sum[2 * i + 1] = fmaf(weight, pair.y, sum[2 * i + 1]);
  }
}

// Slot k of a token, held by lane k % 32 of each warp.
struct Slot {
  int row;  // or kNone, kIdentity
  float weight;
};
// What is read of it: nothing waits for it here.
struct RawSlot {
  int row, id;
  float weight;
};
__device__ RawSlot look_up(const CombineParams& p, int64_t t, int k) {
  RawSlot raw = {kNone, -1, 0.0f};
  if (t < p.num_tokens && k < p.top_k) {
    const int64_t at = t * p.top_k + k;
    raw.row = __ldg(p.assignment_row + at);
    if (p.num_zero > 0) raw.id = __ldg(p.expert_ids + at);
    raw.weight = p.routing_weights ? __ldg(p.routing_weights + at) : 1.0f;
  }
  return raw;
}
__device__ Slot slot_of(const CombineParams& p, RawSlot raw) {
  const int zero = raw.id - p.num_experts;
  const int row = zero >= 0 && zero < p.num_zero ? kIdentity : max(raw.row, kNone);
  if (row == kNone || raw.weight == 0.0f) return {kNone, 0.0f};
  return {row, p.counts_once ? 1.0f : raw.weight};
}

// A stage: the same 8 columns of so many slots of a token, each 16 bytes of a row. In shared memory
// those of a thread lie 16 bytes behind those of the one before it; the weights of each warp's
// stages come behind all columns.
template <int kTopK>
constexpr int kSlots = kTopK ? kTopK : 8;
template <int kTopK>
constexpr int kStages = kCopies / kSlots<kTopK>;
template <int kTopK>
constexpr int kThreadBytes = kStages<kTopK> * kSlots<kTopK> * 16;
template <int kTopK>
constexpr int kWarpBytes = kStages<kTopK> * kSlots<kTopK> * 4;

// Where a thread is among its stages: all slots of a chunk of 8 columns, all chunks of a token that
// fall to it, all tokens of its CTA.
template <int kTopK>
struct Place {
  int64_t token = blockIdx.x;
  int chunk = int(threadIdx.x), slot = 0;

  __device__ void advance(const CombineParams& p, int chunks) {
    slot += kSlots<kTopK>;
    if (!kTopK && slot < p.top_k) return;
    slot = 0;
    chunk += int(blockDim.x);
    if (chunk - int(threadIdx.x) < chunks) return;
    chunk = int(threadIdx.x);
    token += gridDim.x;
  }
  // The first stage of a token, the last one of a chunk.
  __device__ bool begins() const { return chunk == int(threadIdx.x) && slot == 0; }
  __device__ bool ends(const CombineParams& p) const {
    return kTopK || slot + kSlots<kTopK> >= p.top_k;
  }
};

// Asks for one stage after the other. Slots are looked up a token ahead.
template <int kTopK>
class Asker {
 public:
  __device__ Asker(const CombineParams& p, int chunks)
      : p_(p),
        chunks_(chunks),
        held_(slot_of(p, look_up(p, at_.token, lane()))),
        next_(look_up(p, at_.token + gridDim.x, lane())) {}

  __device__ void ask(uint32_t columns, float* weights) {
    const uint32_t row_bytes = 16 * chunks_;
    const char* const rows = static_cast<const char*>(p_.rows) + 16 * at_.chunk;
    const char* const own = static_cast<const char*>(p_.x) + 16 * at_.chunk;
    const int first = at_.slot % 32;
#pragma unroll
    for (int i = 0; i < kSlots<kTopK>; ++i) {
      const int row = __shfl_sync(~0u, held_.row, first + i);
      const bool wanted = at_.chunk < chunks_ && row != kNone;
      const char* from = rows + uint64_t(uint32_t(row)) * row_bytes;
      if (row == kIdentity) from = own + at_.token * row_bytes;
      ptx::copy_async(columns + 16 * blockDim.x * i, from, wanted ? 16 : 0);
    }
    ptx::copy_async_commit();
    if (unsigned(lane() - first) < kSlots<kTopK>) weights[lane() - first] = held_.weight;
    advance();
  }

 private:
  static __device__ int lane() { return int(threadIdx.x & 31); }
  __device__ void advance() {
    const int64_t before = at_.token;
    at_.advance(p_, chunks_);
    if (at_.token != before) {
      held_ = slot_of(p_, next_);
      next_ = look_up(p_, at_.token + gridDim.x, lane());
    } else if (!kTopK && p_.top_k > 32 && at_.slot % 32 == 0) {
      held_ = slot_of(p_, look_up(p_, at_.token, at_.slot + lane()));
    }
  }

  const CombineParams& p_;
  int chunks_;
  Place<kTopK> at_;
  Slot held_;
  RawSlot next_;
};

template <typename Element, int kTopK>
__device__ void store_sum(const CombineParams& p, const Place<kTopK>& place, int chunks,
                          float (&sum)[8]) {
  const int64_t at = place.token * chunks + place.chunk;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum[i] *= p.scale;
  const uint4* const bias = static_cast<const uint4*>(p.bias);
  const uint4* const residual = static_cast<const uint4*>(p.residual);
  if (bias) accumulate<Element>(sum, bias[place.chunk], 1.0f);
  if (residual) accumulate<Element>(sum, residual[at], 1.0f);
  static_cast<uint4*>(p.y)[at] = {pack<Element>(sum[0], sum[1]), pack<Element>(sum[2], sum[3]),
                                  pack<Element>(sum[4], sum[5]), pack<Element>(sum[6], sum[7])};
}

__device__ bool is_skipped(const CombineParams& p, int64_t token) {
  if (!p.skip_absent) return false;
  bool any = false;
  for (int k = 0; k < p.top_k; ++k) any |= __ldg(p.assignment_row + token * p.top_k + k) >= 0;
  return !any;
}

__device__ float sum_parts(const CombineParams& p, int64_t assignment) {
  const int row = p.assignment_row[assignment];
  if (row < 0) return 0.0f;
  const float* part = p.d_weight_parts + row;
  float sum = 0;
#pragma unroll 8
  for (int i = 0; i < p.parts; ++i, part += p.max_rows) sum += __ldg(part);
  return sum;
}

__device__ void store_weight_gradients(const CombineParams& p, int64_t token) {
  for (int64_t k = threadIdx.x & 31; k < p.top_k; k += 32) {
    p.d_routing_weights[token * p.top_k + k] = sum_parts(p, token * p.top_k + k);
  }
}

// A CTA takes a token at a time; the slots of the first are looked up while it waits. The gradients
// of a token's weights fall to its warps in turn.
template <int kTopK>
__global__ __launch_bounds__(kMaxThreads, kThreadsOfSm / kMaxThreads) void combine_kernel(
    const CombineParams p, const moec_dtype dtype) {
  extern __shared__ __align__(16) unsigned char shared[];
  constexpr int kEach = kSlots<kTopK>;
  const int chunks = p.y ? int(p.hidden / 8) : 0, warps = int(blockDim.x) / 32;
  const int warp = int(threadIdx.x) / 32;
  const uint32_t slot_bytes = 16 * blockDim.x;
  const uint32_t columns = ptx::shared_address(shared) + 16 * threadIdx.x;
  float* const weights = reinterpret_cast<float*>(shared + kThreadBytes<kTopK> * blockDim.x +
                                                  kWarpBytes<kTopK> * warp);
  int turn = warp;
  Place<kTopK> at;
  Asker<kTopK> asker(p, chunks);
  const auto ask = [&](int stage) {
    asker.ask(columns + stage * kEach * slot_bytes, weights + stage * kEach);
  };
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  for (int stage = 0; stage < kStages<kTopK>; ++stage) ask(stage);
  __syncwarp();
  float sum[8] = {};
  for (int stage = 0; at.token < p.num_tokens; at.advance(p, chunks)) {
    if (at.begins()) {
      if (turn == 0 && p.d_routing_weights) store_weight_gradients(p, at.token);
      turn = (turn == 0 ? warps : turn) - 1;
    }
    ptx::copy_async_wait<kStages<kTopK> - 1>();
    with_element(dtype, [&]<class Element>() {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const uint4 row = ptx::shared_load(columns + (stage * kEach + i) * slot_bytes);
        accumulate<Element>(sum, row, weights[stage * kEach + i]);
      }
    });
    __syncwarp();  // all have read the weights, and those asked for before this stage are there
    ask(stage);
    stage = stage + 1 < kStages<kTopK> ? stage + 1 : 0;
    if (!at.ends(p)) continue;
    if (at.chunk < chunks && !is_skipped(p, at.token))
      with_element(dtype, [&]<class Element>() { store_sum<Element>(p, at, chunks, sum); });
#pragma unroll
    for (float& column : sum) column = 0;
  }
}

template <int kTopK>
cudaError_t launch_kernel(const CombineParams& p, moec_dtype dtype, int multiprocessors,
                          cudaStream_t stream) {
  static std::atomic<uint64_t> allowed;
  const auto kernel = combine_kernel<kTopK>;
  const auto bytes = [](int threads) {
    return kThreadBytes<kTopK> * threads + kWarpBytes<kTopK> * (threads / 32);
  };
  if (cudaError_t e = allow_shared_memory(kernel, bytes(kMaxThreads), allowed)) return e;
  const int64_t chunks = std::max<int64_t>(p.hidden / 8, 1);
  const int64_t rounds = (chunks + kMaxThreads - 1) / kMaxThreads;  // of nearly equal width
  const int threads = int((chunks + rounds - 1) / rounds + 31) / 32 * 32;
  const int each = std::min(kThreadsOfSm / threads, kSharedOfSm / (bytes(threads) + kSharedOfCta));
  const int64_t resident = int64_t(multiprocessors) * each;
  const int64_t turns = (p.num_tokens + resident - 1) / resident;  // of nearly as many tokens
  const int grid = int((p.num_tokens + turns - 1) / turns);
  return launch(kernel, dim3(grid), threads, bytes(threads), stream, p, dtype);
}

// By the number of slots; the first is for any other, too.
constexpr decltype(&launch_kernel<0>) kLaunches[] = {
    launch_kernel<0>, launch_kernel<1>, launch_kernel<2>, launch_kernel<0>, launch_kernel<4>,
    launch_kernel<0>, launch_kernel<6>, launch_kernel<0>, launch_kernel<8>};

}  // namespace

const char* combine_refuses(const CombineParams& p, moec_dtype dtype) {
  if (dtype != MOEC_BF16 && dtype != MOEC_F16) return "elements other than bf16 and f16";
  if (p.hidden % 8) return "a hidden size that is not a multiple of 8";
  for (const void* pointer : {p.rows, p.x, p.residual, p.bias, static_cast<const void*>(p.y)}) {
    if (reinterpret_cast<uintptr_t>(pointer) % 16) return "rows that are not aligned to 16 bytes";
  }
  return nullptr;
}

cudaError_t launch_combine(const CombineParams& p, moec_dtype dtype, int multiprocessors,
                           cudaStream_t stream) {
  if (p.num_tokens == 0) return cudaSuccess;
  const int slots = p.top_k < int(std::size(kLaunches)) ? p.top_k : 0;
  return kLaunches[slots](p, dtype, multiprocessors, stream);
}

}  // namespace moec::cuda
