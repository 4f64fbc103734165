// SPDX-License-Identifier: Apache-2.0
#include "counted_malloc.h"

#include <atomic>
#include <cerrno>
#include <cstddef>

extern "C" {  // glibc's own, under names that nothing replaces
void* __libc_malloc(size_t bytes);
void* __libc_calloc(size_t count, size_t bytes);
void* __libc_realloc(void* block, size_t bytes);
void* __libc_memalign(size_t align, size_t bytes);
void __libc_free(void* block);
}

namespace {

std::atomic<int64_t> allocations{0}, live{0}, largest{0}, until_failure{0};
std::atomic<bool> has_failed{false};

bool fails_now() {
  if (until_failure.load(std::memory_order_relaxed) == 0) return false;
  if (until_failure.fetch_sub(1) != 1) return false;
  has_failed.store(true);
  return true;
}

void note(size_t bytes) {
  int64_t before = largest.load(std::memory_order_relaxed);
  while (int64_t(bytes) > before && !largest.compare_exchange_weak(before, int64_t(bytes))) {
  }
}

template <class Allocate>
void* counted(size_t bytes, Allocate allocate) {
  if (fails_now()) {
    errno = ENOMEM;
    return nullptr;
  }
  note(bytes);
  void* const block = allocate();
  if (block) {
    allocations.fetch_add(1, std::memory_order_relaxed);
    live.fetch_add(1, std::memory_order_relaxed);
  }
  return block;
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) void* malloc(size_t bytes) {
  return counted(bytes, [&] { return __libc_malloc(bytes); });
}
__attribute__((visibility("default"))) void* calloc(size_t count, size_t bytes) {
  return counted(count * bytes, [&] { return __libc_calloc(count, bytes); });
}
__attribute__((visibility("default"))) void* realloc(void* block, size_t bytes) {
  if (!block) return malloc(bytes);
  if (fails_now()) {
    errno = ENOMEM;
    return nullptr;
  }
  note(bytes);
  allocations.fetch_add(1, std::memory_order_relaxed);
  return __libc_realloc(block, bytes);
}
__attribute__((visibility("default"))) void* memalign(size_t align, size_t bytes) {
  return counted(bytes, [&] { return __libc_memalign(align, bytes); });
}
__attribute__((visibility("default"))) void* aligned_alloc(size_t align, size_t bytes) {
  return memalign(align, bytes);
}
__attribute__((visibility("default"))) int posix_memalign(void** out, size_t align, size_t bytes) {
  void* const block = memalign(align, bytes);
  if (!block) return ENOMEM;
  *out = block;
  return 0;
}
__attribute__((visibility("default"))) void free(void* block) {
  if (block) live.fetch_sub(1, std::memory_order_relaxed);
  __libc_free(block);
}

}  // extern "C"

namespace moec::test {

MallocCounts malloc_counts() {
  return {allocations.load(), live.load(), largest.load()};
}
void watch_largest() {
  largest.store(0);
}

bool fail_allocation(int64_t n) {
  const bool failed = has_failed.exchange(false);
  until_failure.store(n);
  return failed;
}

}  // namespace moec::test
