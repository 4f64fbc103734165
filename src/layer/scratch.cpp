// SPDX-License-Identifier: Apache-2.0
#include "layer/scratch.h"

#include <algorithm>

#include "core/error.h"
#include "core/workspace.h"

namespace moec {

namespace {
constexpr uint64_t kGranule = 4096;  // bytes; block sizes are multiples of it
constexpr size_t kMostIdle = 64;
}  // namespace

void ScratchCache::forget_others(Stream stream) {
  for (Block& block : blocks_)
    if (block.stream.handle == stream.handle && !(block.stream == stream))
      block.stream.handle = nullptr;
}

ScratchCache::Block* ScratchCache::find_idle(uint64_t bytes, Stream stream) {
  Block* best = nullptr;
  for (Block& block : blocks_) {
    const bool usable = !block.busy && block.bytes >= bytes && block.stream == stream;
    if (usable && (!best || block.bytes < best->bytes)) best = &block;
  }
  return best;
}

void ScratchCache::drop(size_t index) noexcept {
  const Block block = blocks_[index];
  blocks_.erase(blocks_.begin() + std::ptrdiff_t(index));
  held_ -= block.bytes;
  source_.release_block(block.data, block.bytes, block.stream.handle);
}

template <class Wanted>
void ScratchCache::drop_largest(Wanted wanted) noexcept {
  size_t largest = blocks_.size();
  for (size_t i = 0; i < blocks_.size(); ++i) {
    if (blocks_[i].stays() || !wanted(blocks_[i])) continue;
    if (largest == blocks_.size() || blocks_[i].bytes > blocks_[largest].bytes) largest = i;
  }
  if (largest < blocks_.size()) drop(largest);
}

void ScratchCache::drop_idle(size_t most) noexcept {
  size_t idle = 0;
  for (const Block& block : blocks_) idle += !block.stays();
  for (size_t i = 0; idle > most; ++i) {
    if (blocks_[i].stays()) continue;
    drop(i--);
    --idle;
  }
}

ScratchCache::Block& ScratchCache::grow(uint64_t bytes, Stream stream) {
  MOEC_REQUIRE(bytes <= UINT64_MAX - kGranule, MOEC_E_OVERFLOW,
               "%llu bytes of scratch exceed the address space",
               static_cast<unsigned long long>(bytes));
  bytes = std::max<uint64_t>(bytes, 1);
  blocks_.reserve(blocks_.size() + 1);  // so that nothing below can throw once memory is held
  uint64_t busy = 0;
  for (const Block& block : blocks_) busy += block.stays() ? block.bytes : 0;
  MOEC_REQUIRE(
      !limit_ || (bytes <= limit_ && busy <= limit_ - bytes), MOEC_E_OUT_OF_MEMORY,
      "%llu bytes of scratch in use and %llu more exceed the workspace_limit of %llu; raise "
      "it or give the call a workspace",
      static_cast<unsigned long long>(busy), static_cast<unsigned long long>(bytes),
      static_cast<unsigned long long>(limit_));
  bytes = round_up(bytes, kGranule);
  if (limit_) bytes = std::min(bytes, limit_ - busy);
  drop_largest([&](const Block& block) { return block.stream == stream; });
  while (limit_ && held_ > limit_ - bytes) drop_largest([](const Block&) { return true; });
  drop_idle(kMostIdle);
  void* data = nullptr;
  try {
    data = source_.allocate_block(bytes, stream.handle);
  } catch (const Error& error) {
    const size_t before = blocks_.size();
    if (error.code == MOEC_E_OUT_OF_MEMORY) drop_idle(0);
    if (blocks_.size() == before) throw;
    data = source_.allocate_block(bytes, stream.handle);
  }
  held_ += bytes;
  peak_ = std::max(peak_, held_);
  blocks_.push_back({data, bytes, stream, false, false});
  return blocks_.back();
}

void* ScratchCache::acquire(uint64_t bytes, Stream stream, bool captured) {
  const std::lock_guard lock(mutex_);
  forget_others(stream);
  Block* block = find_idle(bytes, stream);
  if (!block) {
    MOEC_REQUIRE(!captured && may_grow_, MOEC_E_WOULD_ALLOC,
                 "%llu bytes of scratch are not at hand and must not be allocated here; call "
                 "moec_context_reserve before, or give the call a workspace",
                 static_cast<unsigned long long>(bytes));
    block = &grow(bytes, stream);
  }
  block->busy = true;
  block->stream.handle = stream.handle;
  block->captured |= captured;
  return block->data;
}

void ScratchCache::release(void* data) noexcept {
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < blocks_.size(); ++i) {
    if (blocks_[i].data != data) continue;
    blocks_[i].busy = false;
    std::rotate(blocks_.begin() + std::ptrdiff_t(i), blocks_.begin() + std::ptrdiff_t(i) + 1,
                blocks_.end());
    return;
  }
}

void ScratchCache::reserve(uint64_t bytes, Stream stream) {
  const std::lock_guard lock(mutex_);
  forget_others(stream);
  if (!find_idle(bytes, stream)) grow(bytes, stream);
}

void ScratchCache::trim() noexcept {
  const std::lock_guard lock(mutex_);
  drop_idle(0);
}
ScratchCache::~ScratchCache() {
  while (!blocks_.empty()) drop(blocks_.size() - 1);
}

void ScratchCache::sizes(uint64_t* held, uint64_t* peak) const {
  const std::lock_guard lock(mutex_);
  *held = held_;
  *peak = peak_;
}

}  // namespace moec
