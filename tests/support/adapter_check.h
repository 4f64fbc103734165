// SPDX-License-Identifier: Apache-2.0
// Gradients of adapters against others, worst row.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "compare.h"
#include "oracle/moe_oracle.h"

namespace moec::test {

inline void expect_adapters(const std::vector<oracle::Adapter>& got,
                            const std::vector<oracle::Adapter>& ref, int hidden, int inter,
                            double tolerance) {
  ASSERT_EQ(got.size(), ref.size());
  for (size_t i = 0; i < got.size(); ++i) {
    const auto compare = [&](const char* name, const oracle::Factors& g, const oracle::Factors& r,
                             int in) {
      if (!r.rank) return;
      const RowError a = row_error(g.a, r.a, size_t(in), kTypicalRow);
      EXPECT_LE(a.error, tolerance) << i << name << ".a: " << a;
      const RowError b = row_error(g.b, r.b, size_t(r.rank), kTypicalRow);
      EXPECT_LE(b.error, tolerance) << i << name << ".b: " << b;
    };
    compare(".gate", got[i].gate, ref[i].gate, hidden);
    compare(".up", got[i].up, ref[i].up, hidden);
    compare(".down", got[i].down, ref[i].down, inter);
  }
}

}  // namespace moec::test
