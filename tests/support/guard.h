// SPDX-License-Identifier: Apache-2.0
// Memory that catches what a kernel must not do: touching bytes beside the buffer stops the
// program at a page without access, and bytes that were never written are NaN in every float type.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <new>

namespace moec::test {

// All ones: NaN in f32, f16, bf16 and f64, -1 in every integer type.
constexpr uint8_t kPoison = 0xFF;

// Pages that no buffer uses any more serve the next buffer of that size: new ones cost the wide
// tests more time than the arithmetic. Nothing can be read or written there until then.
class Pages {
 public:
  static uint8_t* take(size_t bytes) {
    const std::lock_guard lock(mutex_);
    const auto found = free_.find(bytes);
    void* base = MAP_FAILED;
    if (found == free_.end()) {
      base = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (base == MAP_FAILED) throw std::bad_alloc();
    } else {
      base = found->second;
      free_.erase(found);
    }
    return static_cast<uint8_t*>(base);
  }
  static void give_back(uint8_t* base, size_t bytes) {
    const std::lock_guard lock(mutex_);
    mprotect(base, bytes, PROT_NONE);
    free_.emplace(bytes, base);
  }

 private:
  static inline std::mutex mutex_;
  static inline std::multimap<size_t, uint8_t*> free_;
};

class GuardedBuffer {
 public:
  enum class Side { kEnd, kStart };  // where the buffer meets the page without access

  explicit GuardedBuffer(size_t bytes, Side side = Side::kEnd, uint8_t fill = kPoison)
      : bytes_(bytes) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    mapped_ = (bytes + page - 1) / page * page + 2 * page;
    base_ = Pages::take(mapped_);
    mprotect(base_ + page, mapped_ - 2 * page, PROT_READ | PROT_WRITE);
    std::memset(base_ + page, kPoison, mapped_ - 2 * page);
    data_ = side == Side::kEnd ? base_ + mapped_ - page - bytes : base_ + page;
    if (fill != kPoison) std::memset(data_, fill, bytes);
    slack_begin_ = side == Side::kEnd ? base_ + page : data_ + bytes;
    slack_end_ = side == Side::kEnd ? data_ : base_ + mapped_ - page;
  }
  ~GuardedBuffer() { Pages::give_back(base_, mapped_); }
  GuardedBuffer(const GuardedBuffer&) = delete;
  GuardedBuffer& operator=(const GuardedBuffer&) = delete;

  template <typename T = void>
  T* data() const {
    return reinterpret_cast<T*>(data_);
  }
  size_t size() const { return bytes_; }
  // Whether the rest of the buffer's pages, on the side without a guard, is as it was.
  bool slack_is_untouched() const {
    for (const uint8_t* p = slack_begin_; p != slack_end_; ++p)
      if (*p != kPoison) return false;
    return true;
  }
  // Bytes at the end of the buffer that still hold the poison.
  size_t untouched_tail() const {
    size_t count = 0;
    while (count < bytes_ && data_[bytes_ - 1 - count] == kPoison) ++count;
    return count;
  }

 private:
  size_t bytes_, mapped_;
  uint8_t *base_, *data_;
  const uint8_t *slack_begin_, *slack_end_;
};
template <>
inline void* GuardedBuffer::data<void>() const {
  return data_;
}

}  // namespace moec::test
