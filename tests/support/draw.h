// SPDX-License-Identifier: Apache-2.0
// Choices at random, for tests whose cases nobody has listed.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <initializer_list>

#include "random.h"

namespace moec::test {

// How many cases a test draws: MOEC_MIXED_CASES, or as many as it says.
inline int mixed_cases(int otherwise) {
  const char* const text = std::getenv("MOEC_MIXED_CASES");
  return text ? std::atoi(text) : otherwise;
}

class Draw : public Random {
 public:
  using Random::Random;
  template <typename T>
  T one_of(std::initializer_list<T> from) {
    return from.begin()[below(static_cast<int64_t>(from.size()))];
  }
  template <typename T, size_t kCount>
  const T& one_of(const T (&from)[kCount]) {
    return from[below(kCount)];
  }
  bool chance(double p) { return uniform() < p; }
};

}  // namespace moec::test
