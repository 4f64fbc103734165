// SPDX-License-Identifier: Apache-2.0
// A thread an index. Rows: a thread for a few neighbouring columns of one, in blocks of their own.
#include "backend/cuda/ranks/rank_steps.h"

#include "backend/cuda/device/op.cuh"
#include "backend/cuda/device/span.cuh"
#include "backend/cuda/ranks/plan_routes.h"

namespace moec::cuda {
namespace {

template <class Step>
__global__ __launch_bounds__(kBlockThreads) void each_kernel(const Step step, int64_t count) {
  begin_kernel();
  for (int64_t i = global_thread(); i < count; i += global_threads()) step(i);
}

// The words of rows that one of `threads` picks.
template <class Word>
__device__ void pick_rows(const PickRows& p, int64_t thread, int64_t threads) {
  const int64_t words = p.row_bytes / int64_t(sizeof(Word)), items = p.rows * words;
  for (int64_t i = thread; i < items; i += threads) {
    const int64_t row = i / words, column = i - row * words, source = p.source(row);
    if (source >= 0)
      reinterpret_cast<Word*>(p.to.at(row, p.row_bytes))[column] =
          reinterpret_cast<const Word*>(p.from.at(source, p.row_bytes))[column];
  }
}
template <class Word>
__global__ __launch_bounds__(kBlockThreads) void pick_rows_kernel(const PickRows p) {
  begin_kernel();
  pick_rows<Word>(p, global_thread(), global_threads());
}

// The first `blocks` are for the indices of the step, the others for its rows.
template <class Step, class Word>
__global__ __launch_bounds__(kBlockThreads) void with_rows_kernel(const Step step, int64_t count,
                                                                  int blocks) {
  begin_kernel();
  const int64_t threads = int64_t(blocks) * kBlockThreads;
  if (int(blockIdx.x) < blocks)
    for (int64_t i = global_thread(); i < count; i += threads) step(i);
  else
    pick_rows<Word>(step.rows, global_thread() - threads, global_threads() - threads);
}

// Sums start at +0, as on the CPU.
template <int V>
__global__ __launch_bounds__(kBlockThreads) void sum_rows_kernel(const SumRows s) {
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

dim3 grid_of(const Op& op, int64_t items) {
  return grid_for(items, kBlockThreads, 8 * op.multiprocessors);
}

// body<Word>(CTAs) with the widest word that all rows are made of.
template <class Body>
void with_words(const Op& op, const PickRows& p, const Body& body) {
  const auto run_as = [&]<class Word>() {
    body.template operator()<Word>(grid_of(op, p.rows * (p.row_bytes / int64_t(sizeof(Word)))));
  };
  const int64_t all = p.row_bytes | p.from.apart | p.to.apart |
                      int64_t(uintptr_t(p.from.data) | uintptr_t(p.to.data));
  if (all % int64_t(sizeof(uint4)) == 0)
    run_as.template operator()<uint4>();
  else if (all % int64_t(sizeof(uint32_t)) == 0)
    run_as.template operator()<uint32_t>();
  else
    run_as.template operator()<uint16_t>();
}

template <class Step>
void queue(const Op& op, const Step& step) {
  const int64_t count = step.count();
  if (!count) return;
  constexpr const char* kWhat = "a step between ranks";
  const dim3 blocks = grid_of(op, count);
  if constexpr (requires { step.rows.index; })
    if (step.rows.count())
      return with_words(op, step.rows, [&]<class Word>(dim3 of_rows) {
        run(op, kWhat, with_rows_kernel<Step, Word>, dim3(blocks.x + of_rows.x), kBlockThreads, 0,
            step, count, int(blocks.x));
      });
  run(op, kWhat, each_kernel<Step>, blocks, kBlockThreads, 0, step, count);
}
void queue(const Op& op, const PickRows& p) {
  if (p.rows)
    with_words(op, p, [&]<class Word>(dim3 blocks) {
      run(op, "rows of the outbox", pick_rows_kernel<Word>, blocks, kBlockThreads, 0, p);
    });
}
void queue(const Op& op, const PlanRoutes& routes) {
  plan_routes(op, routes);
}
void queue(const Op& op, const SumRows& sum) {
  const bool wide = spans_fit(sum.hidden, sum.rows, sum.y);
  const int64_t items = sum.num_tokens * sum.hidden / (wide ? 4 : 1);
  if (items)
    run(op, "sums of partial rows", wide ? sum_rows_kernel<4> : sum_rows_kernel<1>,
        grid_of(op, items), kBlockThreads, 0, sum);
}

}  // namespace

void between_ranks(const Op& op, const RankStep& step) {
  std::visit([&](const auto& one) { queue(op, one); }, static_cast<const RankSteps&>(step));
}

}  // namespace moec::cuda
