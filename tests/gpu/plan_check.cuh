// SPDX-License-Identifier: Apache-2.0
// Plans and combine against plain host loops.
#pragma once

#include "backend/cuda/rows/combine.h"
#include "gpu/plain.cuh"

namespace {

// Everything a plan holds, by the definition: rows of an expert in token order.
bool plan_matches(const DevicePlan& device, const std::vector<int32_t>& ids) {
  const PlanView& p = device.plan;
  const int64_t count = int64_t(ids.size());
  std::vector<int32_t> counts(p.num_local), offsets(p.num_local + 1), rows(count, -1);
  std::vector<int32_t> token(p.max_rows, -1), slot(p.max_rows, -1);
  std::vector<float> weight(p.max_rows, 0.0f);
  const auto given = download(device.source.routing_weights, count);
  int dropped = 0;
  for (const int32_t id : ids) {
    if (id < 0 || id >= p.num_local) continue;
    if (p.capacity > 0 && counts[id] >= p.capacity)
      ++dropped;
    else
      ++counts[id];
  }
  int routed = 0, largest = 0;
  for (int e = 0; e < p.num_local; ++e) {
    offsets[e + 1] = offsets[e] + (counts[e] + p.align - 1) / p.align * p.align;
    routed += counts[e];
    largest = std::max(largest, counts[e]);
  }
  std::vector<int32_t> next(offsets.begin(), offsets.end() - 1);
  for (int64_t i = 0; i < count; ++i) {
    const int e = ids[i];
    if (e < 0 || e >= p.num_local || next[e] - offsets[e] >= counts[e]) continue;
    const int row = rows[i] = next[e]++;
    token[row] = int32_t(i / p.top_k);
    slot[row] = int32_t(i % p.top_k);
    weight[row] = given[i];
  }
  const std::vector<int32_t> totals = {routed, offsets.back(), dropped, largest};
  return counts == download(p.counts, p.num_local) &&
         offsets == download(p.group_offsets, p.num_local + 1) &&
         token == download(p.row_token, p.max_rows) && slot == download(p.row_slot, p.max_rows) &&
         weight == download(p.row_weight, p.max_rows) &&
         rows == download(p.assignment_row, count) && totals == download(p.totals, 4) &&
         given == download(p.routing_weights, count);
}

int check_plans(uint64_t seed) {
  int bad = 0;
  std::mt19937_64 random(seed);
  for (const int64_t tokens : {0, 1, 7, 100, 1024, 1025, 4096, 16384, 50000}) {
    for (const int experts : {1, 8, 128, 300}) {
      for (const int variant : {0, 1, 2}) {  // dropless; aligned; capacity
        const Shape shape = {"plan", 8, 8, experts, std::min(8, experts)};
        std::vector<int32_t> ids(tokens * shape.top_k);
        for (int32_t& id : ids)
          id = int32_t(random() % (experts + 1)) - (random() % 50 == 0 ? 1 : 0);
        const DevicePlan plan(ids, shape, variant == 1 ? 16 : 1, variant == 2 ? 1 + tokens / 4 : 0);
        plan.build();
        CHECK_CUDA(cudaDeviceSynchronize());
        if (!plan_matches(plan, ids)) {
          std::printf("FAIL plan T=%lld E=%d variant %d\n", (long long)tokens, experts, variant);
          ++bad;
        }
      }
    }
  }
  std::printf("%s plans\n", bad ? "FAIL" : "ok  ");
  return bad;
}

// Wider than a CTA takes at once, too; several tokens a CTA; some assignments have no row.
int check_combine(uint64_t seed) {
  int bad = 0;
  for (const int top_k : {1, 2, 3, 4, 6, 8, 11, 40}) {
    const Shape shape = {"combine", top_k % 2 ? 264 : 4104, 8, 48, top_k};
    const int64_t tokens = 300, rows = tokens * top_k;
    const int multiprocessors = 5;
    const std::vector<int32_t> ids = random_routing(shape, tokens, seed);
    const DevicePlan plan(ids, shape);
    plan.build();
    auto map = download(plan.plan.assignment_row, rows);
    for (int64_t i = 5; i < rows; i += 13) map[i] = -1;
    DeviceArray<int32_t> assignment_row(rows);
    assignment_row.assign(map);
    const auto y_rows = normal_array<Half>(rows * shape.hidden, 1.0f, seed + 8);
    const auto parts = normal_array<float>(rows * 6, 1.0f, seed + 9);
    DeviceArray<Half> y(tokens * shape.hidden);
    DeviceArray<float> d_weights(rows);
    cuda::CombineParams p = plan.combine(shape.hidden, y_rows.data(), y.data());
    p.assignment_row = assignment_row.data();
    p.d_weight_parts = parts.data();
    p.parts = 6;
    p.max_rows = rows;
    p.d_routing_weights = d_weights.data();
    CHECK_CUDA(cuda::launch_combine(p, MOEC_BF16, multiprocessors, nullptr));
    CHECK_CUDA(cudaDeviceSynchronize());
    const auto got = y.host(), row = y_rows.host();
    const auto weights = download(plan.plan.routing_weights, rows), part = parts.host(),
               d = d_weights.host();
    double worst = 0, worst_d = 0;
    for (int64_t t = 0; t < tokens; ++t) {
      for (int h = 0; h < shape.hidden; ++h) {
        float sum = 0;
        for (int64_t k = t * top_k; k < (t + 1) * top_k; ++k) {
          if (map[k] < 0) continue;
          sum =
              std::fma(weights[k], __bfloat162float(row[map[k] * int64_t(shape.hidden) + h]), sum);
        }
        const float diff = std::fabs(bf16(sum) - __bfloat162float(got[t * shape.hidden + h]));
        worst = diff <= worst ? worst : diff;  // the same bits are expected
      }
    }
    for (int64_t i = 0; i < rows; ++i) {
      float sum = 0;
      for (int s = 0; s < 6 && map[i] >= 0; ++s) sum += part[s * rows + map[i]];
      worst_d = std::fabs(sum - d[i]) <= worst_d ? worst_d : std::fabs(sum - d[i]);
    }
    const bool good = worst == 0 && worst_d == 0 && y.guards_intact() && d_weights.guards_intact();
    std::printf("%s combine K=%d: %.1e, %.1e\n", good ? "ok  " : "FAIL", top_k, worst, worst_d);
    bad += !good;
  }
  return bad;
}

}  // namespace
