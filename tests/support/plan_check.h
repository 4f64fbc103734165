// SPDX-License-Identifier: Apache-2.0
// A plan of the library against the oracle's: every field, exactly.
#pragma once

#include <gtest/gtest.h>
#include <moec/moec.h>

#include <cmath>
#include <limits>
#include <vector>

#include "handles.h"
#include "layer_runner.h"
#include "oracle/moe_oracle.h"
#include "tensors.h"

namespace moec::test {

// Any field as values. The extents of the row arrays come from moec_plan_view.
inline oracle::Vec field(const moec_plan* plan, int32_t id, std::vector<int64_t> shape = {}) {
  moec_dtype dtype = MOEC_I32;
  if (shape.empty()) {
    moec_tensor view;
    check(moec_plan_view(plan, id, &view));
    shape.assign(view.shape, view.shape + view.ndim);
    dtype = view.dtype;
  }
  Tensors tensors;
  const moec_tensor copy = tensors.output(dtype, shape);
  check(moec_plan_export(plan, id, &copy, nullptr));
  check(moec_context_sync(test_context(), nullptr));
  EXPECT_TRUE(tensors.neighbours_untouched());
  return tensors.read(copy);
}

// A row array of the plan is as long as the plan's bound; its tail is padding.
template <typename T>
oracle::Vec padded_to(const std::vector<T>& values, size_t size, double with) {
  oracle::Vec out(values.begin(), values.end());
  EXPECT_LE(out.size(), size);
  out.resize(size, with);
  return out;
}

inline oracle::Vec as_values(const oracle::Ids& ids) {
  return oracle::Vec(ids.begin(), ids.end());
}

// NaN, which does not equal itself, as a number that nothing else is.
inline oracle::Vec comparable(oracle::Vec values) {
  for (double& value : values)
    if (std::isnan(value)) value = std::numeric_limits<double>::max();
  return values;
}

// The rows of each expert.
inline void expect_rows(const moec_plan* plan, const oracle::Plan& expected) {
  EXPECT_EQ(field(plan, MOEC_PLAN_COUNTS), as_values(expected.counts));
  EXPECT_EQ(field(plan, MOEC_PLAN_GROUP_OFFSETS), as_values(expected.group_offsets));
  const oracle::Vec tokens = field(plan, MOEC_PLAN_ROW_TOKEN);
  EXPECT_EQ(tokens, padded_to(expected.row_token, tokens.size(), -1));
  EXPECT_EQ(comparable(field(plan, MOEC_PLAN_ROW_WEIGHT)),
            comparable(padded_to(expected.row_weight, tokens.size(), 0)));
  EXPECT_EQ(field(plan, MOEC_PLAN_TOTALS), as_values(expected.totals));
  int32_t totals[4];
  check(moec_plan_totals_sync(plan, totals, nullptr));
  EXPECT_EQ(oracle::Ids(totals, totals + 4), expected.totals);
}

inline void expect_plan(const moec_plan* plan, const oracle::Plan& expected,
                        const oracle::Vec& weights) {
  expect_rows(plan, expected);
  const oracle::Vec slots = field(plan, MOEC_PLAN_ROW_SLOT);
  EXPECT_EQ(slots, padded_to(expected.row_slot, slots.size(), -1));
  EXPECT_EQ(field(plan, MOEC_PLAN_ASSIGNMENT_ROW), as_values(expected.assignment_row));
  EXPECT_EQ(field(plan, MOEC_PLAN_EXPERT_IDS), as_values(expected.expert_ids));
  EXPECT_EQ(comparable(field(plan, MOEC_PLAN_ROUTING_WEIGHTS)), comparable(weights));
}

}  // namespace moec::test
