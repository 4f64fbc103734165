// SPDX-License-Identifier: Apache-2.0
// Plans and combine against plain host loops, bit for bit.
#include <cmath>

#include "gpu/device_problem.h"
#include "gpu/harness.h"
#include "support/draw.h"

namespace moec::test {
namespace {

enum class Variant { kDropless, kAligned, kCapacity };

using PlanParam = std::tuple<int, int, Variant>;  // tokens, experts
std::string plan_name(const testing::TestParamInfo<PlanParam>& info) {
  const auto [tokens, experts, variant] = info.param;
  const char* const names[] = {"dropless", "aligned", "capacity"};
  return std::string("T") + std::to_string(tokens) + "_E" + std::to_string(experts) + "_" +
         names[int(variant)];
}
class Plan : public testing::TestWithParam<PlanParam> {};
INSTANTIATE_TEST_SUITE_P(
    Kernel, Plan,
    testing::Combine(testing::Values(0, 1, 7, 100, 1024, 1025, 4096, 16384, 50000),
                     testing::Values(1, 8, 128, 300),
                     testing::Values(Variant::kDropless, Variant::kAligned, Variant::kCapacity)),
    plan_name);

// Everything a plan holds, by the definition: rows of an expert in token order.
TEST_P(Plan, follows_the_definition) {
  const auto [tokens, experts, variant] = GetParam();
  if (is_small_run() && tokens > 1024) GTEST_SKIP() << "too large";
  const Shape shape = {"plan", 8, 8, experts, std::min(8, experts)};
  const int64_t count = int64_t(tokens) * shape.top_k;
  Draw draw(uint64_t(count) * 3 + uint64_t(variant));
  std::vector<int32_t> ids(count);
  for (int32_t& id : ids) id = int32_t(draw.below(experts + 1)) - (draw.chance(0.02) ? 1 : 0);
  const DevicePlan device(ids, shape, variant == Variant::kAligned ? 16 : 1,
                          variant == Variant::kCapacity ? 1 + tokens / 4 : 0);
  device.build();
  const PlanView& p = device.plan;
  const auto given = device.given_weights();

  std::vector<int32_t> counts(experts), offsets(experts + 1), rows(count, -1);
  std::vector<int32_t> token(p.max_rows, -1), slot(p.max_rows, -1);
  std::vector<float> weight(p.max_rows, 0.0f);
  int routed = 0, dropped = 0, largest = 0;
  for (const int32_t id : ids) {
    if (id < 0 || id >= experts) continue;
    const bool full = p.capacity > 0 && counts[id] >= p.capacity;
    ++(full ? dropped : counts[id]);
  }
  for (int e = 0; e < experts; ++e) {
    offsets[e + 1] = offsets[e] + (counts[e] + p.align - 1) / p.align * p.align;
    routed += counts[e];
    largest = std::max(largest, counts[e]);
  }
  std::vector<int32_t> next(offsets.begin(), offsets.end() - 1);
  for (int64_t i = 0; i < count; ++i) {
    const int e = ids[i];
    if (e < 0 || e >= experts || next[e] - offsets[e] >= counts[e]) continue;
    const int row = rows[i] = next[e]++;
    token[row] = int32_t(i / p.top_k);
    slot[row] = int32_t(i % p.top_k);
    weight[row] = given[i];
  }
  EXPECT_EQ(download(p.counts, experts), counts);
  EXPECT_EQ(download(p.group_offsets, experts + 1), offsets);
  EXPECT_EQ(download(p.row_token, p.max_rows), token);
  EXPECT_EQ(download(p.row_slot, p.max_rows), slot);
  EXPECT_EQ(download(p.row_weight, p.max_rows), weight);
  EXPECT_EQ(download(p.assignment_row, count), rows);
  EXPECT_EQ(download(p.totals, 4),
            (std::vector<int32_t>{routed, offsets.back(), dropped, largest}));
  EXPECT_EQ(device.routing_weights(), given);
}

// Wider than a CTA takes at once, too; several tokens a CTA; some assignments have no row.
class CombineOf : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Kernel, CombineOf, testing::Values(1, 2, 3, 4, 6, 8, 11, 40),
                         testing::PrintToStringParamName());

TEST_P(CombineOf, top_k_rows_has_the_bits_of_plain_loops) {
  const int top_k = GetParam(), parts = 6, few_multiprocessors = 5;
  const Shape shape = {"combine", top_k % 2 ? 264 : 4104, 8, 48, top_k};
  const int64_t tokens = 300, rows = tokens * top_k, hidden = shape.hidden;
  const DevicePlan plan(random_routing(shape, tokens, test_seed()), shape);
  plan.build();
  auto map = download(plan.plan.assignment_row, rows);
  for (int64_t i = 5; i < rows; i += 13) map[i] = -1;
  const DeviceArray<int32_t> assignment_row(map);
  const auto row_values = normal_array<Half>(rows * hidden, 1.0f, test_seed() + 8);
  const auto dot_parts = normal_array<float>(rows * parts, 1.0f, test_seed() + 9);
  const DeviceArray<Half> y(tokens * hidden);
  const DeviceArray<float> d_routing_weights(rows);
  cuda::CombineParams p = plan.combine(hidden, row_values.data(), y.data());
  p.assignment_row = assignment_row.data();
  p.d_weight_parts = dot_parts.data();
  p.parts = parts;
  p.max_rows = rows;
  p.d_routing_weights = d_routing_weights.data();
  CHECK_CUDA(cuda::launch_combine(p, MOEC_BF16, few_multiprocessors, nullptr));

  const auto row = floats(row_values.host());
  const auto weights = plan.routing_weights(), part = dot_parts.host();
  std::vector<float> want(tokens * hidden), want_d(rows);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t h = 0; h < hidden; ++h) {
      float sum = 0;
      for (int64_t k = t * top_k; k < (t + 1) * top_k; ++k)
        if (map[k] >= 0) sum = std::fma(weights[k], row[map[k] * hidden + h], sum);
      want[t * hidden + h] = bf16(sum);
    }
  }
  for (int64_t i = 0; i < rows; ++i)
    for (int s = 0; s < parts && map[i] >= 0; ++s) want_d[i] += part[s * rows + map[i]];
  EXPECT_EQ(first_difference(floats(y.host()), want), -1);
  EXPECT_EQ(first_difference(d_routing_weights.host(), want_d), -1);
  EXPECT_TRUE(y.guards_intact());
  EXPECT_TRUE(d_routing_weights.guards_intact());
}

}  // namespace
}  // namespace moec::test
