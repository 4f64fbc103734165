// SPDX-License-Identifier: Apache-2.0
// Plans, capacity, TransformerEngine's maps and the row primitives of the oracle.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "moe_oracle.h"

namespace moec::oracle {
namespace {

int64_t capacity_of(const Config& config, int tokens, int slots) {
  const PlanConfig& p = config.plan;
  if (p.capacity > 0 || p.drop == Drop::kNone) return p.capacity;
  return static_cast<int64_t>(std::ceil(static_cast<double>(tokens) * slots /
                                        config.router.num_experts * p.capacity_factor));
}

// Keep `capacity` assignments of one expert (given in token order), in token order.
std::vector<size_t> keep_some(std::vector<size_t> assignments, const Vec& weights, Drop drop,
                              int64_t capacity) {
  if (drop == Drop::kNone || static_cast<int64_t>(assignments.size()) <= capacity)
    return assignments;
  if (drop == Drop::kByWeight)
    std::stable_sort(assignments.begin(), assignments.end(), [&](size_t a, size_t b) {
      if (std::isnan(weights[a]) || std::isnan(weights[b]))
        return std::isnan(weights[a]) && !std::isnan(weights[b]);
      return weights[a] > weights[b];
    });
  assignments.resize(static_cast<size_t>(capacity));
  std::sort(assignments.begin(), assignments.end());
  return assignments;
}

}  // namespace

Plan build_plan(const Config& config, int tokens, int slots, const Ids& ids, const Vec& weights) {
  const int columns = config.router.columns();
  const int begin = config.plan.expert_begin;
  const int end = config.plan.expert_end == 0 ? config.router.num_experts : config.plan.expert_end;
  const int align = std::max(config.plan.align, 1);
  const int64_t capacity = capacity_of(config, tokens, slots);
  Plan plan;
  plan.assignment_row.assign(ids.size(), -1);
  plan.group_offsets.push_back(0);
  plan.totals.assign(4, 0);
  for (int id : ids) plan.expert_ids.push_back(id >= 0 && id < columns ? id : -1);
  for (int e = begin; e < end; ++e) {
    std::vector<size_t> routed;
    for (size_t a = 0; a < ids.size(); ++a)
      if (ids[a] == e) routed.push_back(a);
    const auto kept = keep_some(routed, weights, config.plan.drop, capacity);
    for (size_t a : kept) {
      plan.assignment_row[a] = static_cast<int>(plan.row_token.size());
      plan.row_token.push_back(static_cast<int>(a) / slots);
      plan.row_slot.push_back(static_cast<int>(a) % slots);
      plan.row_weight.push_back(weights[a]);
    }
    const auto count = static_cast<int>(kept.size());
    const int rows = plan.group_offsets.back() + (count + align - 1) / align * align;
    plan.counts.push_back(count);
    plan.group_offsets.push_back(rows);
    plan.row_token.resize(static_cast<size_t>(rows), -1);
    plan.row_slot.resize(static_cast<size_t>(rows), -1);
    plan.row_weight.resize(static_cast<size_t>(rows), 0.0);
    plan.totals[0] += count;
    plan.totals[2] += static_cast<int>(routed.size()) - count;
    plan.totals[3] = std::max(plan.totals[3], count);
  }
  plan.totals[1] = plan.group_offsets.back();
  return plan;
}

void from_map(const Mask& map, const Vec& probs, int tokens, int experts, int slots, Ids* ids,
              Vec* weights) {
  ids->assign(static_cast<size_t>(tokens * slots), -1);
  weights->assign(ids->size(), 0.0);
  for (int t = 0; t < tokens; ++t) {
    int slot = 0;
    for (int e = 0; e < experts && slot < slots; ++e) {
      const auto from = static_cast<size_t>(t * experts + e);
      const auto to = static_cast<size_t>(t * slots + slot);
      if (map[from] == 0) continue;
      (*ids)[to] = e;
      (*weights)[to] = probs.empty() ? 1 : probs[from];
      ++slot;
    }
  }
}

Ids te_row_id_map(const Mask& map, int tokens, int experts) {
  const int width = 2 * experts + 1;
  Ids rows(static_cast<size_t>(tokens * width), -1);
  Ids used(static_cast<size_t>(tokens), 0);
  int total = static_cast<int>(std::count_if(map.begin(), map.end(), [](uint8_t m) { return m; }));
  for (int e = experts - 1; e >= 0; --e) {  // descending destination rows
    for (int t = tokens - 1; t >= 0; --t) {
      if (map[static_cast<size_t>(t * experts + e)] == 0) continue;
      const int n = used[static_cast<size_t>(t)]++;
      rows[static_cast<size_t>(t * width + n)] = --total;
      rows[static_cast<size_t>(t * width + experts + n)] = e;
    }
  }
  for (int t = 0; t < tokens; ++t)
    rows[static_cast<size_t>(t * width + 2 * experts)] = used[static_cast<size_t>(t)];
  return rows;
}

Ids te_pad_offsets(const Mask& map, int tokens, int experts, int align) {
  Ids offsets;
  int sum = 0;
  for (int e = 0; e < experts; ++e) {
    int count = 0;
    for (int t = 0; t < tokens; ++t) count += map[static_cast<size_t>(t * experts + e)] != 0;
    offsets.push_back(sum);
    sum += (count + align - 1) / align * align - count;
  }
  return offsets;
}

Ids te_index_map(const Ids& ids, int tokens, int slots, int64_t num_out) {
  std::vector<size_t> order(ids.size());
  for (size_t p = 0; p < order.size(); ++p) order[p] = p;
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return static_cast<uint32_t>(ids[a]) < static_cast<uint32_t>(ids[b]);  // -1 sorts last
  });
  const int64_t limit = num_out == 0 ? static_cast<int64_t>(ids.size()) : num_out;
  Ids map(ids.size(), -1);
  for (size_t row = 0; row < order.size() && static_cast<int64_t>(row) < limit; ++row) {
    const size_t token = order[row] / static_cast<size_t>(slots);
    const size_t slot = order[row] % static_cast<size_t>(slots);
    map[slot * static_cast<size_t>(tokens) + token] = static_cast<int>(row);
  }
  return map;
}

Vec permute(const Plan& plan, const Vec& x, int width) {
  const auto n = static_cast<size_t>(width);
  Vec rows(plan.row_token.size() * n, 0.0);
  for (size_t r = 0; r < plan.row_token.size(); ++r)
    for (size_t i = 0; i < n && plan.row_token[r] >= 0; ++i)
      rows[r * n + i] = x[static_cast<size_t>(plan.row_token[r]) * n + i];
  return rows;
}

Vec unpermute(const Plan& plan, int tokens, int slots, const Vec& rows, const Vec& weights,
              int width) {
  const auto n = static_cast<size_t>(width);
  Vec y(static_cast<size_t>(tokens) * n, 0.0);
  for (size_t a = 0; a < plan.assignment_row.size(); ++a) {
    if (plan.assignment_row[a] < 0) continue;
    const auto row = static_cast<size_t>(plan.assignment_row[a]);
    const size_t token = a / static_cast<size_t>(slots);
    const double weight = weights.empty() ? 1 : weights[a];
    for (size_t i = 0; i < n; ++i) y[token * n + i] += weight * rows[row * n + i];
  }
  return y;
}

Vec permute_backward(const Plan& plan, int tokens, int slots, const Vec& d_rows, int width) {
  return unpermute(plan, tokens, slots, d_rows, {}, width);
}

void unpermute_backward(const Plan& plan, int slots, const Vec& rows, const Vec& weights,
                        const Vec& d_y, int width, Vec* d_rows, Vec* d_routing_weights) {
  const auto n = static_cast<size_t>(width);
  d_rows->assign(rows.size(), 0.0);
  d_routing_weights->assign(plan.assignment_row.size(), 0.0);
  for (size_t a = 0; a < plan.assignment_row.size(); ++a) {
    if (plan.assignment_row[a] < 0) continue;
    const auto row = static_cast<size_t>(plan.assignment_row[a]);
    const size_t token = a / static_cast<size_t>(slots);
    for (size_t i = 0; i < n; ++i) {
      (*d_rows)[row * n + i] = (weights.empty() ? 1 : weights[a]) * d_y[token * n + i];
      (*d_routing_weights)[a] += rows[row * n + i] * d_y[token * n + i];
    }
  }
}

}  // namespace moec::oracle
