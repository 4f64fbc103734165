// SPDX-License-Identifier: Apache-2.0
// Rows move in packs of 16 bytes where they are aligned to that, else by the element. Sums over a
// token's rows run in fp32, in slot order (expert choice: by expert), and are rounded once.
#include "backend/cuda/rows/permute.h"

#include <algorithm>

#include "backend/cuda/device/op.cuh"
#include "backend/cuda/device/warp.cuh"
#include "core/dtype.h"

namespace moec::cuda {
namespace {

constexpr int kAtOnce = 8;  // entries whose loads are in flight together

template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Pack {
  T at[kCount];
};
template <class T>
inline constexpr int kWide = 16 / int(sizeof(T));

// The rows of one token: entry i is row rows[i] (negative: none).
struct TokenRows {
  const int32_t* rows;
  int count;
  __device__ TokenRows(const PlanView& plan, int64_t t) {
    const bool choice = plan.kind == MOEC_PLAN_EXPERT_CHOICE;
    rows = choice ? plan.token_rows + plan.token_offsets[t] : plan.assignment_row + t * plan.top_k;
    count = choice ? plan.token_offsets[t + 1] - plan.token_offsets[t] : plan.top_k;
  }
};

// Merging weights are by slot; expert choice has none.
const float* merging_weights(const PlanView& plan, const float* weights) {
  return plan.kind == MOEC_PLAN_EXPERT_CHOICE ? nullptr : weights;
}

// ---- copies: rows of `units` packs, a warp a row
struct CopyParams {
  PlanView plan;
  int64_t units, out_rows;
  const void* from;
  void* to;
  bool drop_weightless;  // zero weight makes the row zero
};

template <class Unit>
__global__ __launch_bounds__(kBlockThreads) void copy_rows_kernel(
    const __grid_constant__ CopyParams p) {
  begin_kernel();
  for (int64_t row = global_thread() / 32; row < p.out_rows; row += global_threads() / 32) {
    int64_t token = row < p.plan.max_rows ? p.plan.row_token[row] : -1;
    if (p.drop_weightless && token >= 0 && p.plan.row_weight[row] == 0.0f) token = -1;
    const Unit* const from = static_cast<const Unit*>(p.from) + token * p.units;
    Unit* const to = static_cast<Unit*>(p.to) + row * p.units;
#pragma unroll 4
    for (int64_t i = lane_id(); i < p.units; i += 32) to[i] = token < 0 ? Unit{} : from[i];
  }
}

__global__ __launch_bounds__(kBlockThreads) void row_weight_kernel(const PlanView plan,
                                                                   int64_t out_rows, float* to) {
  begin_kernel();
  for (int64_t row = global_thread(); row < out_rows; row += global_threads())
    to[row] = row < plan.max_rows ? plan.row_weight[row] : 0.0f;
}

dim3 warp_grid(const Op& op, int64_t rows) {
  return grid_for(rows, kBlockThreads / 32, int64_t(op.multiprocessors) * 16);
}

bool aligned(int64_t row_bytes, std::initializer_list<const void*> pointers, int bytes) {
  bool all = row_bytes % bytes == 0;
  for (const void* const pointer : pointers)
    all = all && reinterpret_cast<uintptr_t>(pointer) % uintptr_t(bytes) == 0;
  return all;
}

void copy_rows(const Op& op, const PermuteArgs& args, const void* from, void* to, int64_t bytes) {
  const CopyParams p = {*args.plan, bytes, args.out_rows, from, to, args.row_weight != nullptr};
  const auto start = [&](auto kernel, int64_t size) {
    CopyParams sized = p;
    sized.units = bytes / size;
    run(op, "permute", kernel, warp_grid(op, args.out_rows), kBlockThreads, 0, sized);
  };
  if (aligned(bytes, {from, to}, 16)) return start(copy_rows_kernel<uint4>, 16);
  if (aligned(bytes, {from, to}, 2)) return start(copy_rows_kernel<uint16_t>, 2);
  start(copy_rows_kernel<uint8_t>, 1);
}

// ---- sums: a CTA a token, a thread a pack of columns
template <class T, int kCount>
__global__ __launch_bounds__(kBlockThreads) void sum_rows_kernel(
    const __grid_constant__ UnpermuteArgs args, const __grid_constant__ PlanView plan,
    const float* weights) {
  using P = Pack<T, kCount>;
  begin_kernel();
  const int64_t packs = args.hidden / kCount;
  const P* const rows = static_cast<const P*>(args.rows);
  for (int64_t t = blockIdx.x; t < plan.num_tokens; t += gridDim.x) {
    const TokenRows entries(plan, t);
    for (int64_t at = threadIdx.x; at < packs; at += kBlockThreads) {
      float sum[kCount] = {};
      for (int first = 0; first < entries.count; first += kAtOnce) {
        P value[kAtOnce];
        float weight[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const bool inside = first + i < entries.count;
          const int row = inside ? entries.rows[first + i] : -1;
          weight[i] = row < 0 ? 0.0f : weights ? weights[t * entries.count + first + i] : 1.0f;
          if (weight[i] != 0.0f) value[i] = rows[row * packs + at];
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (weight[i] == 0.0f) continue;  // leaves its row out: no 0 * inf
#pragma unroll
          for (int j = 0; j < kCount; ++j) sum[j] += weight[i] * to_float(value[i].at[j]);
        }
      }
      if (args.residual) {
        const P value = static_cast<const P*>(args.residual)[t * packs + at];
#pragma unroll
        for (int j = 0; j < kCount; ++j) sum[j] += to_float(value.at[j]);
      }
      P out;
#pragma unroll
      for (int j = 0; j < kCount; ++j) out.at[j] = from_float<T>(sum[j]);
      static_cast<P*>(args.y)[t * packs + at] = out;
    }
  }
}

// ---- gradients
// d_rows[row] = weight * d_y[token]: a warp a row.
template <class T, int kCount>
__global__ __launch_bounds__(kBlockThreads) void scale_rows_kernel(
    const __grid_constant__ UnpermuteGradArgs args, const __grid_constant__ PlanView plan,
    const float* weights) {
  using P = Pack<T, kCount>;
  begin_kernel();
  const int64_t packs = args.hidden / kCount;
  for (int64_t row = global_thread() / 32; row < args.out_rows; row += global_threads() / 32) {
    const int64_t token = row < plan.max_rows ? plan.row_token[row] : -1;
    const int64_t a = token < 0 ? 0 : token * plan.top_k + plan.row_slot[row];
    const float weight = token < 0 ? 0.0f : weights ? weights[a] : 1.0f;
    const P* const from = static_cast<const P*>(args.d_y) + token * packs;
    P* const to = static_cast<P*>(args.d_rows) + row * packs;
    for (int64_t i = lane_id(); i < packs; i += 32) {
      P value = weight == 0.0f ? P{} : from[i];
#pragma unroll
      for (int j = 0; j < kCount; ++j)
        value.at[j] = weight == 0.0f ? T{} : from_float<T>(weight * to_float(value.at[j]));
      to[i] = value;
    }
  }
}

// d_routing_weights[a] = <d_y of the token, row>: a warp an assignment, lane = column mod 32.
__global__ __launch_bounds__(kBlockThreads) void dot_kernel(
    const __grid_constant__ UnpermuteGradArgs args, const __grid_constant__ PlanView plan) {
  begin_kernel();
  const int64_t count = plan.num_tokens * plan.top_k;
  for (int64_t a = global_thread() / 32; a < count; a += global_threads() / 32) {
    const int64_t row = plan.assignment_row[a], t = a / plan.top_k;
    float partial = 0.0f;
    if (row >= 0)
      for (int64_t h = lane_id(); h < args.hidden; h += 32)
        partial += load_real(args.d_y, args.dtype, t * args.hidden + h) *
                   load_real(args.rows, args.dtype, row * args.hidden + h);
    const float dot = warp_sum(partial);
    if (lane_id() == 0) args.d_routing_weights[a] = dot;
  }
}

__global__ __launch_bounds__(kBlockThreads) void gather_weights_kernel(const PlanView plan,
                                                                       const float* by_row,
                                                                       float* to) {
  begin_kernel();
  const int64_t count = plan.num_tokens * plan.top_k;
  for (int64_t a = global_thread(); a < count; a += global_threads()) {
    const int64_t row = plan.assignment_row[a];
    to[a] = row >= 0 && by_row ? by_row[row] : 0.0f;
  }
}

}  // namespace

void permute(const Op& op, const PermuteArgs& args) {
  if (args.out_rows == 0) return;
  if (args.row_bytes > 0) copy_rows(op, args, args.x, args.rows, args.row_bytes);
  if (args.row_scale && args.scale_bytes > 0)
    copy_rows(op, args, args.x_scale, args.row_scale, args.scale_bytes);
  if (args.row_weight)
    run(op, "permute", row_weight_kernel, warp_grid(op, args.out_rows / 32 + 1), kBlockThreads, 0,
        *args.plan, args.out_rows, args.row_weight);
}

void unpermute(const Op& op, const UnpermuteArgs& args) {
  const PlanView& plan = *args.plan;
  if (plan.num_tokens == 0 || args.hidden == 0) return;
  const int64_t row_bytes = args.hidden * dtype_bytes(args.dtype);
  const bool wide = aligned(row_bytes, {args.rows, args.residual, args.y}, 16);
  with_real(args.dtype, [&]<class T>() {
    run(op, "unpermute", wide ? sum_rows_kernel<T, kWide<T>> : sum_rows_kernel<T, 1>,
        grid_for(plan.num_tokens, 1, int64_t(op.multiprocessors) * 32), kBlockThreads, 0, args,
        plan, merging_weights(plan, args.routing_weights));
  });
}

void permute_backward(const Op& op, const PermuteGradArgs& args) {
  const PlanView& plan = *args.plan;
  unpermute(op, {&plan, args.hidden, args.dtype, args.d_rows, nullptr, nullptr, args.d_x});
  const int64_t count = plan.num_tokens * plan.top_k;
  if (args.d_routing_weights && count > 0)
    run(op, "gradient of permute", gather_weights_kernel, warp_grid(op, count / 32 + 1),
        kBlockThreads, 0, plan, args.d_row_weight, args.d_routing_weights);
}

void unpermute_backward(const Op& op, const UnpermuteGradArgs& args) {
  const PlanView& plan = *args.plan;
  const int64_t row_bytes = args.hidden * dtype_bytes(args.dtype);
  const int64_t count = plan.num_tokens * plan.top_k;
  const bool wide = aligned(row_bytes, {args.d_y, args.d_rows}, 16);
  if (args.out_rows > 0 && args.hidden > 0)
    with_real(args.dtype, [&]<class T>() {
      run(op, "gradient of unpermute",
          wide ? scale_rows_kernel<T, kWide<T>> : scale_rows_kernel<T, 1>,
          warp_grid(op, args.out_rows), kBlockThreads, 0, args, plan,
          merging_weights(plan, args.routing_weights));
    });
  if (args.d_routing_weights && count > 0)
    run(op, "gradient of weights", dot_kernel, warp_grid(op, count), kBlockThreads, 0, args, plan);
}

}  // namespace moec::cuda
