// SPDX-License-Identifier: Apache-2.0
// Rows of pairs times lines of decoded values, of every instruction set that multiplies so and that
// this machine has, beside doubles.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "core/dtype.h"
#include "support/random.h"
#include "unit/isas.h"

namespace moec::cpu {
namespace {

using test::on_each_isa;
using test::Random;

// An A panel times lines of values, in doubles.
void check_pair_lines(int rows, int blocks, bool accumulate, Random& random) {
  const TileKernels& tile = tile_kernels();
  constexpr int kBlockK = 2 * kSteps;
  const int64_t k = int64_t(blocks) * kBlockK, stride = k + kBlockK, ld = tile.pair_columns + 3;
  const auto value = [&] { return from_float<bf16>(float(2 * random.uniform() - 1)); };
  std::vector<bf16> a(size_t(rows) * size_t(k)), b(size_t(stride) * size_t(tile.pair_columns));
  for (bf16& v : a) v = value();
  for (bf16& v : b) v = value();
  std::vector<float> c(size_t(ld) * size_t(rows), 0.5f);
  const std::vector<float> before = c;
  std::vector<bf16> turned = a;
  if (tile.turn_rows) tile.turn_rows(turned.data(), rows, blocks);
  if (tile.begin) tile.begin();
  tile.pair_lines({reinterpret_cast<const uint16_t*>(b.data()), stride, turned.data(), rows,
                   c.data(), ld, blocks, accumulate});
  if (tile.end) tile.end();
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < ld; ++j) {
      const size_t at = size_t(i * ld + j);
      if (j >= tile.pair_columns) {
        ASSERT_EQ(c[at], before[at]);
        continue;
      }
      double sum = accumulate ? before[at] : 0.0, size = std::abs(sum);
      for (int64_t n = 0; n < k; ++n) {
        const auto line = size_t((n / kBlockK * rows + i) * kBlockK + n % kBlockK);
        const double term = double(to_float(a[line])) * double(to_float(b[size_t(j * stride + n)]));
        sum += term;
        size += std::abs(term);
      }
      ASSERT_NEAR(c[at], sum, 1e-6 * size) << rows << " rows, row " << i << ", column " << j;
    }
}

TEST(PairLines, AreMultiplied) {
  SCOPED_TRACE(test::seed_note());
  bool any = false;
  on_each_isa([&] {
    Random random(9);
    const TileKernels& tile = tile_kernels();
    if (!tile.pairs) return;
    any = true;
    for (const ProductKernel* kernel : {&tile.bf16_few, &tile.bf16})
      for (int rows = kernel->row_multiple; rows <= kernel->max_rows; rows += kernel->row_multiple)
        for (const int blocks : {1, 2, 5, 64}) check_pair_lines(rows, blocks, rows % 2, random);
  });
  if (!any) GTEST_SKIP() << "needs AVX512-BF16 and VBMI, or AMX";
}

}  // namespace
}  // namespace moec::cpu
