// SPDX-License-Identifier: Apache-2.0
// Rows between token order and expert order. Sums over a token's rows run in fp32, in slot order
// (expert choice: by expert), and are rounded once. Columns go in blocks that stay in cache.
#include <cmath>
#include <cstring>

#include "backend/cpu/gemm.h"
#include "backend/cpu/ops.h"
#include "backend/cpu/pieces.h"
#include "backend/cpu/vectorised.h"
#include "core/dtype.h"
#include "core/portable.h"

namespace moec::cpu {
namespace {

constexpr int64_t kRowColumns = 1024;
constexpr int64_t kDotLanes = 32;

// The rows of one token: entry i is row rows[i] (negative: none).
struct TokenRows {
  const int32_t* rows;
  int64_t count;
  TokenRows(const PlanView& plan, int64_t t) {
    if (plan.kind == MOEC_PLAN_EXPERT_CHOICE) {
      rows = plan.token_rows + plan.token_offsets[t];
      count = plan.token_offsets[t + 1] - plan.token_offsets[t];
    } else {
      rows = plan.assignment_row + t * plan.top_k;
      count = plan.top_k;
    }
  }
};

// Merging weights are by slot; expert choice has none.
const float* merging_weights(const PlanView& plan, const float* weights) {
  return plan.kind == MOEC_PLAN_EXPERT_CHOICE ? nullptr : weights;
}

const char* row_at(const void* base, int64_t row, int64_t width, moec_dtype dtype) {
  return static_cast<const char*>(base) + row * width * dtype_bytes(dtype);
}
char* row_at(void* base, int64_t row, int64_t width, moec_dtype dtype) {
  return static_cast<char*>(base) + row * width * dtype_bytes(dtype);
}

void add_scaled(const float* from, float weight, float* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] += weight * from[i];
}
void scale_into(const float* from, float weight, float* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = weight * from[i];
}
void add_products(const float* a, const float* b, float* partial, int64_t count) {
  int64_t i = 0;
  for (; i + kDotLanes <= count; i += kDotLanes)
    for (int64_t l = 0; l < kDotLanes; ++l) partial[l] += a[i + l] * b[i + l];
  for (int64_t l = 0; i + l < count; ++l) partial[l] += a[i + l] * b[i + l];
}

// <a, b> over whole rows, in 32 partial sums whatever the blocks.
float dot(const char* a, const char* b, moec_dtype dtype, int64_t count) {
  alignas(kCacheLine) float left[kRowColumns], right[kRowColumns], partial[kDotLanes] = {};
  const int64_t size = dtype_bytes(dtype);
  for (int64_t i = 0; i < count; i += kRowColumns) {
    const int64_t n = std::min(kRowColumns, count - i);
    convert_to_f32(a + i * size, dtype, left, n);
    convert_to_f32(b + i * size, dtype, right, n);
    vectorised<add_products>(left, right, partial, n);
  }
  for (int64_t width = kDotLanes / 2; width > 0; width /= 2)
    for (int64_t l = 0; l < width; ++l) partial[l] += partial[l + width];
  return partial[0];
}

// y[t] = sum of weight * row (+ residual). A weight of exactly 0 leaves its row out: no 0 * inf.
void sum_rows(const UnpermuteArgs& args, int64_t t) {
  alignas(kCacheLine) float sum[kRowColumns], row[kRowColumns];
  const TokenRows entries(*args.plan, t);
  const float* const weights = merging_weights(*args.plan, args.routing_weights);
  const int64_t size = dtype_bytes(args.dtype);
  for (int64_t h = 0; h < args.hidden; h += kRowColumns) {
    const int64_t n = std::min(kRowColumns, args.hidden - h);
    std::memset(sum, 0, sizeof sum);
    const auto add = [&](const void* base, int64_t line, float weight) {
      convert_to_f32(row_at(base, line, args.hidden, args.dtype) + h * size, args.dtype, row, n);
      vectorised<add_scaled>(row, weight, sum, n);
    };
    for (int64_t i = 0; i < entries.count; ++i) {
      const float weight = weights ? weights[t * entries.count + i] : 1.0f;
      if (entries.rows[i] >= 0 && weight != 0.0f) add(args.rows, entries.rows[i], weight);
    }
    if (args.residual) add(args.residual, t, 1.0f);
    convert_from_f32(sum, args.dtype, row_at(args.y, t, args.hidden, args.dtype) + h * size, n);
  }
}

// to = weight * from, rounded once
void scale_row(const char* from, float weight, char* to, moec_dtype dtype, int64_t count) {
  alignas(kCacheLine) float block[kRowColumns];
  const int64_t size = dtype_bytes(dtype);
  for (int64_t h = 0; h < count; h += kRowColumns) {
    const int64_t n = std::min(kRowColumns, count - h);
    convert_to_f32(from + h * size, dtype, block, n);
    vectorised<scale_into>(block, weight, block, n);
    convert_from_f32(block, dtype, to + h * size, n);
  }
}

// Row `row` of `to` from row `token` of `from`, zeros without a token.
void copy_row(const void* from, void* to, int64_t bytes, int64_t token, int64_t row) {
  char* const target = static_cast<char*>(to) + row * bytes;
  if (token < 0)
    std::memset(target, 0, size_t(bytes));
  else
    std::memcpy(target, static_cast<const char*>(from) + token * bytes, size_t(bytes));
}

}  // namespace

void permute(const Device& device, const PermuteArgs& args) {
  const PlanView& plan = *args.plan;
  for_ranges(device, args.out_rows, args.row_bytes, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const bool exists = row < plan.max_rows;
      const float weight = exists ? plan.row_weight[row] : 0.0f;
      const bool is_zero = !exists || (args.row_weight && weight == 0.0f);
      const int64_t token = is_zero ? -1 : plan.row_token[row];
      copy_row(args.x, args.rows, args.row_bytes, token, row);
      if (args.row_scale) copy_row(args.x_scale, args.row_scale, args.scale_bytes, token, row);
      if (args.row_weight) args.row_weight[row] = weight;
    }
  });
}

void unpermute(const Device& device, const UnpermuteArgs& args) {
  const int64_t row_bytes = args.hidden * dtype_bytes(args.dtype);
  for_ranges(device, args.plan->num_tokens, row_bytes * (args.plan->top_k + 1),
             [&](int64_t begin, int64_t end) {
               for (int64_t t = begin; t < end; ++t) sum_rows(args, t);
             });
}

void permute_backward(const Device& device, const PermuteGradArgs& args) {
  const PlanView& plan = *args.plan;
  unpermute(device, {&plan, args.hidden, args.dtype, args.d_rows, nullptr, nullptr, args.d_x});
  if (!args.d_routing_weights) return;
  for_ranges(
      device, plan.num_tokens * plan.top_k, 3 * sizeof(float), [&](int64_t begin, int64_t end) {
        for (int64_t a = begin; a < end; ++a) {
          const int64_t row = plan.assignment_row[a];
          args.d_routing_weights[a] = row >= 0 && args.d_row_weight ? args.d_row_weight[row] : 0.0f;
        }
      });
}

void unpermute_backward(const Device& device, const UnpermuteGradArgs& args) {
  const PlanView& plan = *args.plan;
  const moec_dtype dtype = args.dtype;
  const float* const weights = merging_weights(plan, args.routing_weights);
  const int64_t width = args.hidden, row_bytes = width * dtype_bytes(dtype);
  for_ranges(device, args.out_rows, row_bytes, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t token = row < plan.max_rows ? plan.row_token[row] : -1;
      const int64_t a = token * plan.top_k + (token < 0 ? 0 : plan.row_slot[row]);
      const float weight = token < 0 ? 0.0f : weights ? weights[a] : 1.0f;
      char* const to = row_at(args.d_rows, row, width, dtype);
      if (weight == 0.0f)
        std::memset(to, 0, size_t(row_bytes));
      else
        scale_row(row_at(args.d_y, token, width, dtype), weight, to, dtype, width);
    }
  });
  if (!args.d_routing_weights) return;
  for_ranges(device, plan.num_tokens * plan.top_k, 2 * row_bytes, [&](int64_t begin, int64_t end) {
    for (int64_t a = begin; a < end; ++a) {
      const int64_t row = plan.assignment_row[a];
      args.d_routing_weights[a] = row < 0 ? 0.0f
                                          : dot(row_at(args.d_y, a / plan.top_k, width, dtype),
                                                row_at(args.rows, row, width, dtype), dtype, width);
    }
  });
}

}  // namespace moec::cpu
