// SPDX-License-Identifier: Apache-2.0
// A range of items cut into pieces that depend on its length only, so that sums made piece by piece
// have the same bits for every number of threads, and on every device.
#pragma once

#include <cstdint>

namespace moec {

// Items of a long sum that are added by themselves first: rounding errors grow with its length.
inline constexpr int64_t kSummedTogether = 64;

struct Chunks {
  static constexpr int64_t kMax = 64;
  int64_t items, length, count;

  Chunks(int64_t num_items, int64_t least) : items(num_items) {
    const int64_t even = (num_items + kMax - 1) / kMax;
    length = least > even ? least : even;
    count = (items + length - 1) / length;
  }
  int64_t begin(int64_t chunk) const { return chunk * length; }
  int64_t end(int64_t chunk) const {
    const int64_t after = (chunk + 1) * length;
    return after < items ? after : items;
  }
};

}  // namespace moec
