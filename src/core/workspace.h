// SPDX-License-Identifier: Apache-2.0
// Layout of a scratch or saved buffer.
//
//   caller's pointer           (element-aligned only)
//   | up to 63 bytes           skipped to reach a cache line (workspace only; saved starts at once)
//   | region 0 | region 1 ...  each rounded up to a cache line
//
// The same code measures (Arena without memory) and hands out, so that the size query is exact: a
// region of `base + tokens * per_token` bytes is described by its two numbers, whose sums are the
// query.
#pragma once

#include <moec/moec.h>

#include <cstddef>
#include <cstdint>

#include "core/portable.h"

namespace moec {

inline constexpr int64_t div_up(int64_t value, int64_t by) {
  return (value + by - 1) / by;
}
inline constexpr uint64_t round_up(uint64_t value, uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

class Arena {
 public:
  Arena() = default;  // measures
  Arena(void* memory, int64_t tokens) : memory_(static_cast<char*>(memory)), tokens_(tokens) {}

  // `base + tokens * per_token` bytes, aligned like the arena's own start; null while measuring.
  void* take(uint64_t base, uint64_t per_token) {
    size_.base += round_up(base, kCacheLine) + kCacheLine;  // one line of slack pays for rounding
    size_.per_token += per_token;
    if (!memory_) return nullptr;
    char* const region = memory_ + used_;
    used_ += round_up(base + uint64_t(tokens_) * per_token, kCacheLine);
    return region;
  }
  template <class T>
  T* take_array(uint64_t base_count, uint64_t per_token_count) {
    return static_cast<T*>(take(base_count * sizeof(T), per_token_count * sizeof(T)));
  }
  moec_size size() const { return size_; }
  uint64_t used() const { return used_; }

 private:
  char* memory_ = nullptr;
  int64_t tokens_ = 0;
  uint64_t used_ = 0;
  moec_size size_ = {0, 0};
};

inline uint64_t bytes_for(moec_size size, int64_t tokens) {
  return size.base + uint64_t(tokens) * size.per_token;
}

}  // namespace moec
