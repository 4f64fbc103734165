// SPDX-License-Identifier: Apache-2.0
// A thread an index. Rows: a thread for a few neighbouring columns of one.
#include "backend/cuda/ranks/rank_steps.h"

#include "backend/cuda/device/op.cuh"
#include "backend/cuda/device/span.cuh"
#include "backend/cuda/ranks/plan_routes.h"

namespace moec::cuda {
namespace {

constexpr int kThreads = 256;

template <class Step>
__global__ __launch_bounds__(kThreads) void each_kernel(const Step step, int64_t count) {
  begin_kernel();
  for (int64_t i = global_thread(); i < count; i += global_threads()) step(i);
}

template <class Word>
__global__ __launch_bounds__(kThreads) void pick_rows_kernel(const PickRows p) {
  begin_kernel();
  const int64_t words = p.row_bytes / int64_t(sizeof(Word)), items = p.rows * words;
  const auto* const from = static_cast<const Word*>(p.from);
  for (int64_t i = global_thread(); i < items; i += global_threads()) {
    const int64_t row = i / words, column = i - row * words;
    if (p.index[row] >= 0) static_cast<Word*>(p.to)[i] = from[p.index[row] * words + column];
  }
}

// Sums start at +0, as on the CPU.
template <int V>
__global__ __launch_bounds__(kThreads) void sum_rows_kernel(const SumRows s) {
  begin_kernel();
  s.ended(global_thread());
  const int64_t spans = s.hidden / V, items = s.num_tokens * spans;
  const bool broken = s.broken && *s.broken;
  for (int64_t i = global_thread(); i < items; i += global_threads()) {
    const int64_t t = i / spans, column = (i - t * spans) * V;
    Span<V> sum = {};
    for (int32_t j = 0; j < s.width; ++j) {
      const int64_t row = s.index ? s.index[t * s.width + j] : t;
      if (row < 0) break;
      add_scaled(sum, 1.0f, load_span<V>(s.rows, row * s.hidden + column));
    }
#pragma unroll
    for (int v = 0; v < V; ++v) sum[v] *= s.scale;
    const int64_t at = t * s.hidden + column;
    if (s.add) add_scaled(sum, 1.0f, load_span<V>(s.y, at));
#pragma unroll
    for (int v = 0; v < V; ++v) sum[v] = broken ? __int_as_float(0x7fffffff) : sum[v];
    store_span<V>(s.y, at, sum);
  }
}

template <class Step>
void queue(const Op& op, const Step& step) {
  if (step.count())
    run(op, "a step between ranks", each_kernel<Step>,
        grid_for(step.count(), kThreads, 8 * op.multiprocessors), kThreads, 0, step, step.count());
}
template <class Word>
bool pick_words(const Op& op, const PickRows& p) {
  if ((p.row_bytes | int64_t(uintptr_t(p.from) | uintptr_t(p.to))) % int64_t(sizeof(Word)))
    return false;
  run(op, "rows of the outbox", pick_rows_kernel<Word>,
      grid_for(p.rows * (p.row_bytes / int64_t(sizeof(Word))), kThreads, 8 * op.multiprocessors),
      kThreads, 0, p);
  return true;
}
void queue(const Op& op, const PickRows& p) {
  if (p.rows)
    pick_words<uint4>(op, p) || pick_words<uint32_t>(op, p) || pick_words<uint16_t>(op, p);
}
void queue(const Op& op, const PlanRoutes& routes) {
  plan_routes(op, routes);
}
void queue(const Op& op, const SumRows& sum) {
  const bool wide = spans_fit(sum.hidden, sum.rows, sum.y);
  const int64_t items = sum.num_tokens * sum.hidden / (wide ? 4 : 1);
  if (items)
    run(op, "sums of partial rows", wide ? sum_rows_kernel<4> : sum_rows_kernel<1>,
        grid_for(items, kThreads, 8 * op.multiprocessors), kThreads, 0, sum);
}

}  // namespace

void between_ranks(const Op& op, const RankStep& step) {
  std::visit([&](const auto& one) { queue(op, one); }, static_cast<const RankSteps&>(step));
}

}  // namespace moec::cuda
