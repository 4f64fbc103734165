// SPDX-License-Identifier: Apache-2.0
// The problems on which the tiled kernels are checked, and the ways that these kernels may go.
#pragma once

#include <vector>

#include "gpu/experts_problem.h"

namespace moec::test {

// A problem and its number among those of the same orientation.
struct KernelCase {
  ExpertsCase experts;
  unsigned number;
};
const std::vector<KernelCase>& kernel_cases();

// A kernel takes four ways: CTAs of a pair load for each other or not, work comes from a counter or
// is dealt, clusters keep pace or not. Way 0 has all three. A check launches a kernel `launches`
// times a problem; over all problems each launch takes all ways in turn, and each round begins one
// later: what comes second in all problems shall not always go one way. A check that runs alone
// takes the ways that it takes among all others.
class Way {
 public:
  Way(const KernelCase& c, unsigned launch, unsigned launches) {
    const unsigned turn = c.number * launches + launch;
    way_ = (turn + turn / 4) % 4;
  }
  bool shares() const { return way_ % 2 == 0; }
  bool counts() const { return way_ == 0 || way_ == 3; }
  bool paces() const { return way_ < 2; }
  bool has_single_tiles() const { return way_ % 2 == 1; }  // weight gradients: else all in runs

 private:
  unsigned way_;
};

}  // namespace moec::test
