// SPDX-License-Identifier: Apache-2.0
// One layer of experts with its plan and random weights, for the kernels that are called without a
// layer around them. Tokens that nobody selects hold NaN, so that a wrong gather shows.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "gpu/device_problem.h"
#include "gpu/harness.h"

namespace moec::test {

struct ExpertsCase {
  Shape shape;               // its name is part of the test's
  std::vector<int32_t> ids;  // [T,K], -1: nobody
  int align = 1;
  int stride = 1;           // every stride-th row is compared
  bool transposed = false;  // matrices [E,H,2I] and [E,I,H] instead of [E,2I,H] and [E,H,I]
};

// Top-1 ids by which expert e gets counts[e] tokens, in mixed order, with a few tokens left over.
std::vector<int32_t> ids_of(const std::vector<int>& counts);

// The value of an activation and its derivatives, in double.
struct Activated {
  double value, d_gate, d_up;
};
Activated plain_activation(uint32_t kind, double gate, double up);
// The same activation for the kernels. Its limit is one that many values reach.
moec_activation activation_of(uint32_t kind);
std::string activation_name(uint32_t kind);

int multiprocessors();
// Throws what a kernel says when it does not take a problem; null: it takes it.
void must_take(const char* refusal);

class ExpertsProblem {
 public:
  explicit ExpertsProblem(const ExpertsCase& c);

 protected:
  // gate (part 0) or up (part 1). alternate: the same memory read as features of gate and up in
  // turn.
  PlainMatrix gate_up(int part, bool alternate = false) const;
  PlainMatrix down() const;
  PlainRows gathered(const DeviceArray<Half>& of_tokens, int64_t width) const;
  // [sample, features], for the sampled rows.
  std::vector<float> plain(const PlainRows& a, const PlainMatrix& w, int64_t features,
                           int64_t k_size) const;
  // Rows of experts whose number has this parity, and those behind the last expert's, become NaN.
  template <typename T>
  void poison_rows(const DeviceArray<T>& rows, int64_t width, int parity) const;
  int rows_of(int expert) const { return offsets_[expert + 1] - offsets_[expert]; }
  template <typename T>
  static void expect_guards(const DeviceArray<T>& array, const char* what) {
    EXPECT_TRUE(array.guards_intact()) << "guard bytes of " << what;
  }
  // Sampled rows of experts of the other parity. padded: rows of no token, too.
  void expect_rows(const std::string& what, const std::vector<float>& want,
                   const DeviceArray<Half>& got, int64_t width, int parity, bool padded) const;

  ExpertsCase c_;
  int64_t hidden_, inter_, experts_;
  DevicePlan plan_;
  int64_t tokens_, rows_;
  std::vector<int> offsets_, row_token_, sample_, sample_expert_;
  DeviceArray<Half> x_, gate_up_, down_;

 private:
  DeviceArray<int> sample_device_, experts_device_;
};

// A test of such a problem: Case has `const ExpertsCase* problem` and a name.
template <typename Case>
class ExpertsTest : public testing::TestWithParam<Case>, protected ExpertsProblem {
 protected:
  ExpertsTest() : ExpertsProblem(*this->GetParam().problem) {}
};
template <typename Case>
std::string name_of(const testing::TestParamInfo<Case>& info) {
  return info.param.name();
}

template <typename T>
void ExpertsProblem::poison_rows(const DeviceArray<T>& rows, int64_t width, int parity) const {
  const auto poison = [&](int64_t begin, int64_t end) {
    CHECK_CUDA(cudaMemset(rows.data() + begin * width, 0xff, (end - begin) * width * sizeof(T)));
  };
  for (int e = parity; e < experts_; e += 2) poison(offsets_[e], offsets_[e + 1]);
  poison(offsets_.back(), rows_);
}

}  // namespace moec::test
