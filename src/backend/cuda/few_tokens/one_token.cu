// SPDX-License-Identifier: Apache-2.0
// Products of a few matrices with one vector each. Every warp computes whole outputs: it streams
// the rows of weights that these need, in pieces, through a ring of its own in shared memory, and
// meets the other warps only at the start.
//
//   up     an output is a feature of one slot's expert: its gate row, then its up row
//   down   an output is a column of y: its row of each slot's expert, in slot order
//   chain  up waits for the plan before it lets down in, so down may read the plan and fill its
//          ring with weights, which depend on nothing, while up still runs. Their shared memory is
//          chosen so that one CTA of each fits a multiprocessor, and never two of up
#include "backend/cuda/few_tokens/one_token.h"

#include <algorithm>

#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/device/warp.cuh"
#include "backend/cuda/few_tokens/small_epilogue.cuh"

namespace moec::cuda {
namespace {

constexpr int kMostWarps = 16;
constexpr int kMaxSlots = 32;     // a lane each
constexpr int kMostPiece = 2048;  // bytes of a row that are copied and multiplied at a time
constexpr int kVectors = kMostPiece / (32 * 16);
constexpr int kMaxDepth = 7, kMinPiece = 512;
constexpr int kUpBytes = 115 << 10, kDownBytes = 111 << 10;  // 1 KiB more each: 228 KiB together

struct OneTokenArgs {
  SmallArgs up, down;
};

struct Slot {
  int expert;
  float weight;
};

struct Shared {
  uint64_t full[kMostWarps][kMaxDepth], operand_ready;
  Slot slots[kMaxSlots];                   // those with a row
  __align__(128) unsigned char operand[];  // then the rings
};

__host__ __device__ inline int operand_bytes(int64_t k_size, int rows) {
  return (int(k_size) * 2 * rows + 127) / 128 * 128;
}

// The rings: what the operand leaves. 16 warps with two large stages each or more, else 8.
struct Ring {
  int warps, stage_bytes, depth;
  __host__ __device__ Ring(bool up, int64_t k_size, int slots) {
    const int left =
        (up ? kUpBytes : kDownBytes) - int(sizeof(Shared)) - operand_bytes(k_size, up ? 1 : slots);
    warps = left >= kMostWarps * 2 * kMostPiece ? kMostWarps : kMostWarps / 2;
    const int most = left / warps / 2 / 128 * 128;
    stage_bytes = most < kMostPiece ? most : kMostPiece;
    depth = stage_bytes < kMinPiece ? 0 : left / warps / stage_bytes;
    if (depth > kMaxDepth) depth = kMaxDepth;
  }
};

// A row of weights in equal pieces, the last one shorter.
struct Pieces {
  int row_bytes, count, bytes;
  __device__ Pieces(int64_t k_size, const Ring& ring)
      : row_bytes(int(k_size) * 2),
        count((row_bytes + ring.stage_bytes - 1) / ring.stage_bytes),
        bytes(((row_bytes + count - 1) / count + 15) / 16 * 16) {}
  __device__ int size(int piece) const { return min(bytes, row_bytes - piece * bytes); }
};

// Of `outputs`, those of this warp: begin, begin + warps, ... before end.
struct Share {
  int begin, end;
  __device__ explicit Share(int64_t outputs)
      : begin(int(outputs * blockIdx.x / gridDim.x) + int(threadIdx.x / 32)),
        end(int(outputs * (blockIdx.x + 1) / gridDim.x)) {}
};

// The pieces of a warp's outputs in order, on their way into its ring.
template <bool kUp>
class Stream {
 public:
  __device__ Stream(const SmallArgs& p, const Slot* slots, const Pieces& pieces, int rows,
                    Share share)
      : p_(p),
        slots_(slots),
        pieces_(pieces),
        rows_(rows),
        output_(share.begin),
        end_(rows > 0 ? share.end : 0) {
    find_row();
  }
  __device__ bool more() const { return output_ < end_; }
  __device__ int bytes() const { return pieces_.size(piece_); }
  __device__ const char* at() const { return row_at_ + piece_ * pieces_.bytes; }
  __device__ void advance() {
    if (++piece_ < pieces_.count) return;
    piece_ = 0;
    if (++row_ == rows_) row_ = 0, output_ += int(blockDim.x / 32);
    find_row();
  }

 private:
  __device__ void find_row() {
    if (!more()) return;
    const int features = int(p_.features), slot = kUp ? output_ / features : row_;
    const int64_t feature = kUp ? output_ - slot * features : output_;
    row_at_ = static_cast<const char*>(p_.weights[kUp ? row_ : 0]) +
              (slots_[slot].expert * p_.expert_stride + feature * p_.weight_stride) * 2;
  }

  const SmallArgs& p_;
  const Slot* slots_;
  const Pieces& pieces_;
  int rows_, output_, end_, row_ = 0, piece_ = 0;
  const char* row_at_ = nullptr;
};

// This lane's part of the product of a piece and the operand, both in shared memory.
template <typename Element>
__device__ __forceinline__ float dot(uint32_t weights, uint32_t operand, int bytes) {
  uint4 w[kVectors] = {}, x[kVectors] = {};
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = lane_id() * 16 + i * 512;
    if (at >= bytes) continue;
    w[i] = ptx::shared_load(weights + at);
    x[i] = ptx::shared_load(operand + at);
  }
  float2 sum = {};
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const uint32_t a[4] = {w[i].x, w[i].y, w[i].z, w[i].w}, b[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 u = unpack<Element>(a[j]), v = unpack<Element>(b[j]);
      sum.x = fmaf(u.x, v.x, sum.x);
      sum.y = fmaf(u.y, v.y, sum.y);
    }
  }
  return sum.x + sum.y;
}

template <typename Element>
__device__ void store(void* out, int64_t at, float value) {
  static_cast<uint16_t*>(out)[at] = uint16_t(pack<Element>(value, 0.0f));
}
template <typename Element>
__device__ float load(const void* from, int64_t at) {
  return float(static_cast<const Element*>(from)[at]);
}

template <typename Element, bool kUp>
__global__ __launch_bounds__(32 * kMostWarps,
                             2) void one_token_kernel(const __grid_constant__ OneTokenArgs args) {
  extern __shared__ __align__(128) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const SmallArgs& p = kUp ? args.up : args.down;
  const CombineParams& plan = args.down.combine;
  const int warp = threadIdx.x / 32, lane = lane_id();
  const Ring form(kUp, p.k_size, plan.top_k);
  const Pieces pieces(p.k_size, form);
  if (threadIdx.x <= kMostWarps * kMaxDepth) {  // operand_ready is the last one
    ptx::barrier_init(ptx::shared_address(&shared.full[0][0] + threadIdx.x), 1);
    ptx::fence_barrier_init();
  }
  if constexpr (kUp) ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();

  // ---- the slots: lane k sees slot k
  const bool is_slot = lane < plan.top_k;
  const int id = is_slot ? __ldcg(plan.expert_ids + lane) : -1;
  const bool has_row = is_slot && __ldcg(plan.assignment_row + lane) >= 0;
  const float weight = is_slot && plan.routing_weights ? __ldcg(plan.routing_weights + lane) : 1.0f;
  const int expert = id - p.expert_begin;
  const unsigned with_rows = __ballot_sync(kAllLanes, has_row);
  const int slots = __popc(with_rows);
  if (warp == 0 && has_row) {
    shared.slots[__popc(with_rows & ((1u << lane) - 1))] = {expert, weight};
  }
  __syncthreads();

  const Share share(kUp ? p.features * slots : p.features);
  const int rows = kUp ? 2 : slots;
  const uint32_t operand = ptx::shared_address(shared.operand);
  const uint32_t ring = operand + operand_bytes(p.k_size, kUp ? 1 : plan.top_k) +
                        warp * form.depth * form.stage_bytes;
  const uint32_t full = ptx::shared_address(&shared.full[warp][0]);
  const uint32_t ready = ptx::shared_address(&shared.operand_ready);
  const auto load_operand_once = [&] {
    const uint32_t bytes = uint32_t(pieces.row_bytes * (kUp ? 1 : slots));
    if (warp != 0 || slots == 0 || !ptx::elect_one()) return;
    ptx::barrier_arrive_expect(ready, bytes);
    ptx::bulk_load(operand, p.operand, bytes, ready);
  };
  if constexpr (kUp) load_operand_once();
  Stream<kUp> stream(p, shared.slots, pieces, rows, share);
  const auto fill = [&](int stage) {
    if (!stream.more()) return;
    if (ptx::elect_one()) {
      const uint32_t bytes = uint32_t(stream.bytes());
      ptx::barrier_arrive_expect(full + stage * 8, bytes);
      ptx::bulk_load(ring + stage * form.stage_bytes, stream.at(), bytes, full + stage * 8);
    }
    stream.advance();
  };
  for (int stage = 0; stage < form.depth; ++stage) fill(stage);
  if constexpr (!kUp) {
    ptx::grid_dependency_wait();
    load_operand_once();
  }
  if (slots > 0) ptx::barrier_wait(ready, 0);

  int stage = 0;
  uint32_t phase = 0;
  for (int output = share.begin; output < share.end; output += form.warps) {
    const int slot = kUp ? output / int(p.features) : 0;
    const int feature = kUp ? output - slot * int(p.features) : output;
    float bias[2] = {};
    if constexpr (kUp) {
      bias[0] = bias_of<Element>(p.bias[0], shared.slots[slot].expert, feature);
      bias[1] = bias_of<Element>(p.bias[1], shared.slots[slot].expert, feature);
    }
    float sums[2] = {};
    for (int row = 0; row < rows; ++row) {
      float sum = 0;
      for (int piece = 0; piece < pieces.count; ++piece) {
        ptx::barrier_wait(full + stage * 8, phase);
        const int at = (kUp ? 0 : row * pieces.row_bytes) + piece * pieces.bytes;
        sum += dot<Element>(ring + stage * form.stage_bytes, operand + at, pieces.size(piece));
        __syncwarp();
        fill(stage);
        if (++stage == form.depth) stage = 0, phase ^= 1;
      }
      if constexpr (kUp) {
        (row == 0 ? sums[0] : sums[1]) = sum;
      } else {
        const float by = shared.slots[row].weight;  // 0: no expert, whatever its output
        if (by != 0.0f) sums[0] = fmaf(by, sum, sums[0]);
      }
    }
    if constexpr (kUp) {
      const float gate = warp_sum(sums[0]) + bias[0], up = warp_sum(sums[1]) + bias[1];
      const float value = activate(p.activation, gate, up);
      if (lane == 0) store<Element>(p.out, output, value);
    } else {  // what a slot adds beside its product, then what comes once
      const int zero = plan.num_zero > 0 ? id - plan.num_experts : -1;
      const bool counts = weight != 0.0f;
      if (counts && has_row) {
        sums[0] = fmaf(weight, bias_of<Element>(p.bias[0], expert, feature), sums[0]);
      } else if (counts && zero >= 0 && zero < plan.num_zero) {
        sums[0] = fmaf(weight, load<Element>(plan.x, feature), sums[0]);
      }
      float y = warp_sum(sums[0]) * plan.scale;
      if (lane > 0) continue;
      if (plan.bias) y += load<Element>(plan.bias, feature);
      if (plan.residual) y += load<Element>(plan.residual, feature);
      store<Element>(plan.y, feature, y);
    }
  }
}

template <typename Element, bool kUp>
cudaError_t launch_part(const OneTokenArgs& args, int multiprocessors, cudaStream_t stream) {
  static std::atomic<uint64_t> allowed;
  const auto kernel = one_token_kernel<Element, kUp>;
  constexpr int kBytes = kUp ? kUpBytes : kDownBytes;
  if (cudaError_t e = allow_shared_memory(kernel, kBytes, allowed)) return e;
  if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                           cudaSharedmemCarveoutMaxShared)) {
    return e;
  }
  const SmallArgs& p = kUp ? args.up : args.down;
  const Ring form(kUp, p.k_size, args.down.combine.top_k);
  return launch(kernel, dim3(multiprocessors), 32 * form.warps, kBytes, stream, args);
}

template <typename Element>
cudaError_t launch_both(const OneTokenArgs& args, int multiprocessors, cudaStream_t stream) {
  if (cudaError_t e = launch_part<Element, true>(args, multiprocessors, stream)) return e;
  return launch_part<Element, false>(args, multiprocessors, stream);
}

}  // namespace

const char* one_token_refuses(const SmallArgs& up, const SmallArgs& down) {
  const CombineParams& plan = down.combine;
  if (plan.num_tokens != 1) return "more than one token";
  if (up.pre) return "pre-activations that are kept";
  if (plan.top_k > kMaxSlots) return "more than 32 experts of a token";
  if (Ring(true, up.k_size, plan.top_k).depth == 0 ||
      Ring(false, down.k_size, plan.top_k).depth == 0) {
    return "rows that leave no room for weights in shared memory";
  }
  return nullptr;
}

cudaError_t launch_one_token(const SmallArgs& up, const SmallArgs& down, int multiprocessors,
                             cudaStream_t stream) {
  const OneTokenArgs args = {up, down};
  return up.dtype == MOEC_BF16 ? launch_both<__nv_bfloat16>(args, multiprocessors, stream)
                               : launch_both<__half>(args, multiprocessors, stream);
}

}  // namespace moec::cuda
