// SPDX-License-Identifier: Apache-2.0
// What every GPU test program has: GoogleTest, whose filter runs one check, and one way to compare.
// Without a GPU a program ends with 77 (CTest: skipped).
//   MOEC_TEST_SEED     decides the random data
//   MOEC_CHECK_SMALL   a sanitizer is at work, which needs a hundred times as long: fewer cases
//   MOEC_CHECK_TOOL    which one: memcheck, racecheck or initcheck
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "support/compare.h"
#include "support/random.h"

namespace moec::test {

inline bool is_under(const char* tool) {
  const char* const given = std::getenv("MOEC_CHECK_TOOL");
  return given && std::string(given) == tool;
}
inline bool is_hopper() {
  int major = 0;
  return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) == cudaSuccess &&
         major == 9;
}
// Both sides of a comparison of backends are the CPU: what such a program says of itself.
inline bool compares_cpu_with_itself() {
  return std::getenv("MOEC_AGREE_CPU") != nullptr;
}

class GpuEnvironment : public testing::Environment {
 public:
  void SetUp() override {
    std::printf("%s\n", seed_note().c_str());
    int count = 0;
    if (compares_cpu_with_itself()) return;
    if (cudaGetDeviceCount(&count) == cudaSuccess && count > 0) return;
    std::printf("skipped: no GPU\n");
    std::exit(77);
  }
};
inline testing::Environment* const kGpuEnvironment =
    testing::AddGlobalTestEnvironment(new GpuEnvironment);

// A reference row of zeros wants exact zeros, and a small row is as exact as a large one.
constexpr double kNoFloor = 0;

// One line for each comparison, so that a run that passes shows how far from its bounds it is.
inline void expect_within(const std::string& what, const RowError& worst, double bound) {
  std::printf("  %-56s %.2e in row %lld (<= %.1e)\n", what.c_str(), worst.error,
              static_cast<long long>(worst.row), bound);
  EXPECT_LE(worst.error, bound) << what << ": row " << worst.row;
}

// Rows of a result beside what they should be, gathered one after the other.
class RowPairs {
 public:
  explicit RowPairs(int64_t columns) : columns_(static_cast<size_t>(columns)) {}
  // step: between neighbours of `got`.
  template <typename Want, typename Got>
  void add(const Want* want, const Got* got, int64_t step = 1) {
    for (size_t i = 0; i < columns_; ++i) {
      want_.push_back(static_cast<float>(want[i]));
      got_.push_back(static_cast<float>(got[static_cast<int64_t>(i) * step]));
    }
  }
  void expect(const std::string& what, double bound) const {
    expect_within(what, row_error(got_, want_, columns_, kNoFloor), bound);
  }

 private:
  size_t columns_;
  std::vector<float> want_, got_;
};

// The first place at which two lists differ, or -1. Any NaN equals any other.
template <typename T>
int64_t first_difference(const std::vector<T>& a, const std::vector<T>& b) {
  if (a.size() != b.size()) return static_cast<int64_t>(std::min(a.size(), b.size()));
  for (size_t i = 0; i < a.size(); ++i) {
    const bool both_nan = a[i] != a[i] && b[i] != b[i];
    if (a[i] != b[i] && !both_nan) return static_cast<int64_t>(i);
  }
  return -1;
}

}  // namespace moec::test
