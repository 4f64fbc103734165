// SPDX-License-Identifier: Apache-2.0
// Cache of scratch blocks: a request takes the smallest idle block that is large enough; where
// there is none, the largest idle block is replaced by one of the size asked for. So the number of
// blocks is the number ever in use at once, and a repeated sequence of calls soon allocates
// nothing. More idle blocks go where the limit asks for it, where memory is short, and, the longest
// idle first, where there are more than streams that are in use are likely to need.
#pragma once

#include <moec/moec.h>

#include <cstdint>
#include <mutex>
#include <vector>

namespace moec {

class MemorySource {  // where blocks come from
 public:
  virtual void* allocate_block(uint64_t bytes, moec_stream stream) const = 0;  // throws Error
  virtual void release_block(void* block, uint64_t bytes, moec_stream stream) const noexcept = 0;

 protected:
  ~MemorySource() = default;
};

class ScratchCache {
 public:
  // A block serves one stream only, because work queued on it may still read the block after its
  // release. Streams are told apart by their ids, by their handles where the id is 0.
  struct Stream {
    moec_stream handle = nullptr;
    uint64_t id = 1;
    bool operator==(const Stream& other) const {
      return id && other.id ? id == other.id : handle == other.handle;
    }
  };
  // limit: bytes that may be held at once, 0 = any.
  ScratchCache(const MemorySource& source, uint64_t limit, bool may_grow)
      : source_(source), limit_(limit), may_grow_(may_grow) {}
  ~ScratchCache();

  // captured: into a graph, whose replays use the block: it must be there, and stays to the end.
  void* acquire(uint64_t bytes, Stream stream, bool captured);
  void release(void* block) noexcept;
  // Hold an idle block of at least `bytes`, even where calls may not grow the cache.
  void reserve(uint64_t bytes, Stream stream);
  void trim() noexcept;  // give back idle blocks that no graph uses
  void sizes(uint64_t* held, uint64_t* peak) const;

 private:
  struct Block {
    void* data;
    uint64_t bytes;
    Stream stream;
    bool busy, captured;
    bool stays() const { return busy || captured; }
  };
  // Blocks of a stream that was destroyed, whose handle `stream` has now, have it no more.
  void forget_others(Stream stream);
  Block* find_idle(uint64_t bytes, Stream stream);  // smallest that fits
  Block& grow(uint64_t bytes, Stream stream);
  void drop(size_t index) noexcept;
  template <class Wanted>
  void drop_largest(Wanted wanted) noexcept;  // that does not stay and for which wanted(block)
  void drop_idle(size_t most) noexcept;       // until there are no more than that

  const MemorySource& source_;
  const uint64_t limit_;
  const bool may_grow_;
  mutable std::mutex mutex_;
  std::vector<Block> blocks_;  // in the order of their last use
  uint64_t held_ = 0, peak_ = 0;
};

}  // namespace moec
