// SPDX-License-Identifier: Apache-2.0
// Random test data that is the same on every machine. MOEC_TEST_SEED overrides the seed; tests
// put seed_note() into their failure messages (SCOPED_TRACE).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

namespace moec::test {

// A sanitizer is at work, which needs a hundred times as long: fewer cases.
inline bool is_small_run() {
  return std::getenv("MOEC_CHECK_SMALL") != nullptr;
}

inline uint64_t test_seed() {
  const char* text = std::getenv("MOEC_TEST_SEED");
  return text == nullptr ? 1234 : std::strtoull(text, nullptr, 0);
}
inline std::string seed_note() {
  return "MOEC_TEST_SEED=" + std::to_string(test_seed());
}

class Random {
 public:
  // `stream` separates the generators of one test run.
  explicit Random(uint64_t stream = 0) : state_(test_seed() * 0x9E3779B97F4A7C15u + stream) {}

  uint64_t bits() {  // splitmix64 (Steele, Lea, Flood 2014)
    uint64_t z = state_ += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }  // [0,1)
  int64_t below(int64_t n) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(n)); }
  double normal() {  // Box and Muller 1958
    const double radius = std::sqrt(-2 * std::log(1 - uniform()));
    return radius * std::cos(2 * std::acos(-1.0) * uniform());
  }
  std::vector<double> normals(size_t count, double scale = 1) {
    std::vector<double> values(count);
    for (double& v : values) v = scale * normal();
    return values;
  }

 private:
  uint64_t state_;
};

}  // namespace moec::test
