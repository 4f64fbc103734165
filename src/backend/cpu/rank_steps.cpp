// SPDX-License-Identifier: Apache-2.0
// Steps of a rank between collectives.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "backend/cpu/gemm.h"
#include "backend/cpu/ops.h"
#include "backend/cpu/pieces.h"
#include "backend/cpu/plan_routes.h"
#include "backend/cpu/row_math.h"
#include "backend/rank_steps.h"
#include "core/dtype.h"
#include "core/portable.h"

namespace moec::cpu {
namespace {

constexpr int64_t kSumColumns = 1024;

// Sums start at +0, so that none is ever -0: a rank without a row leaves no trace.
void sum_token(const SumRows& args, int64_t t) {
  args.ended(t);
  alignas(kCacheLine) float sum[kSumColumns], row[kSumColumns];
  const auto alone = int32_t(t);
  const int32_t* const index = args.index ? args.index + t * args.width : &alone;
  for (int64_t h = 0; h < args.hidden; h += kSumColumns) {
    const int64_t n = std::min(kSumColumns, args.hidden - h);
    const auto at = [&](const Array& rows, int64_t line) {
      return static_cast<char*>(rows.data) + (line * args.hidden + h) * dtype_bytes(rows.dtype);
    };
    std::memset(sum, 0, sizeof sum);
    const auto add_row = [&](const Array& rows, int64_t line) {
      convert_to_f32(at(rows, line), rows.dtype, row, n);
      add(sum, row, n);
    };
    for (int32_t i = 0; i < args.width && index[i] >= 0; ++i) add_row(args.rows, index[i]);
    if (args.scale != 1.0f) scale(sum, args.scale, n);
    if (args.add) add_row(args.y, t);
    if (args.broken && *args.broken) std::fill_n(sum, n, std::nanf(""));
    convert_from_f32(sum, args.y.dtype, at(args.y, t), n);
  }
}

template <class Step>
void run_at(const Step& step, int64_t i) {
  step(i);
}
void run_at(const SumRows& step, int64_t t) {
  sum_token(step, t);
}

// What one index moves, about.
template <class Step>
int64_t bytes_of(const Step&) {
  return 4 * kCacheLine;
}
int64_t bytes_of(const PickRows& step) {
  return step.row_bytes;
}
int64_t bytes_of(const SumRows& step) {
  return step.hidden * dtype_bytes(step.rows.dtype) * (step.width + 1);
}

}  // namespace

void between_ranks(const Device& device, const RankStep& step) {
  const auto run = [&](const auto& one) {
    for_ranges(device, one.count(), bytes_of(one), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) run_at(one, i);
    });
  };
  std::visit(
      [&](const auto& one) {
        if constexpr (std::is_same_v<decltype(one), const PlanRoutes&>)
          plan_routes(one);
        else
          run(one);
        if constexpr (requires { one.rows.index; }) run(one.rows);
      },
      static_cast<const RankSteps&>(step));
}

}  // namespace moec::cpu
