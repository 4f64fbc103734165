// SPDX-License-Identifier: Apache-2.0
// One device: its backend, the scratch that calls share, the hooks of the caller, and counters.
// Everything public is const and safe from many threads.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>

#include "backend/backend.h"
#include "core/device_name.h"
#include "core/portable.h"
#include "layer/buffers.h"
#include "layer/object.h"
#include "layer/scratch.h"

namespace moec {

enum class Phase { kRoute, kPlan, kExperts, kCombine };  // of the ns_* counters

class Context final : public Object {
 public:
  static constexpr Kind kKind = Kind::kContext;
  explicit Context(const moec_context_desc& desc);
  ~Context() override;

  const Backend& backend() const { return *backend_; }
  int32_t device_type() const { return backend_->device_type(); }
  int32_t device_id() const { return device_id_; }
  DeviceName name() const { return device_name(device_type(), device_id_); }
  bool on_host() const { return device_type() == MOEC_CPU; }
  bool checks_inputs() const { return flags_ & MOEC_CONTEXT_CHECK_INPUTS; }

  // Memory of objects (plans, packed weights) and of callers (Buffers).
  void* allocate(uint64_t bytes, moec_stream stream) const {
    return device_.allocate_block(bytes, stream);
  }
  void deallocate(void* data, uint64_t bytes, moec_stream stream) const noexcept {
    device_.release_block(data, bytes, stream);
  }
  // Memory of the host that kernels reach.
  void* allocate_shared(uint64_t bytes) const;
  void deallocate_shared(void* data) const noexcept { backend_->release(data, nullptr); }
  Buffers& buffers() const { return buffers_; }
  // Throws E_WOULD_ALLOC inside stream capture; `what` cannot be done there.
  void forbid_capture(const char* what, moec_stream stream) const;

  // Scratch of calls: on the device, and on the host (small tables of pointers).
  void* acquire(uint64_t bytes, moec_stream stream) const;
  void release_scratch(void* data) const noexcept;
  ScratchCache& host_scratch() const { return host_scratch_; }
  void reserve(uint64_t bytes, moec_stream stream) const;
  void trim() const;

  void synchronize(moec_stream stream) const;
  moec_status poll() const { return backend_->poll(); }

  void count_call() const { counters_.calls.fetch_add(1, std::memory_order_relaxed); }
  void count_path(const Taken& taken) const;
  std::atomic<uint64_t>& calls_of(uint32_t ep_scheme) const {
    return counters_.schemes[ep_scheme - MOEC_EP_GATHER];
  }
  void count_sync() const { counters_.host_syncs.fetch_add(1, std::memory_order_relaxed); }
  void stats(moec_stats& out) const;
  void reset_stats() const;

  // Adds the time of a scope to one of the ns_* counters, with MOEC_CONTEXT_PROFILE.
  class Timer {
   public:
    Timer(const Context& context, Phase phase) : context_(context), phase_(phase) {
      if (context_.flags_ & MOEC_CONTEXT_PROFILE) start_ = Clock::now();
    }
    ~Timer();
    Timer(const Timer&) = delete;
    Timer& operator=(const Timer&) = delete;

   private:
    using Clock = std::chrono::steady_clock;
    const Context& context_;
    Phase phase_;
    Clock::time_point start_ = {};
  };

 private:
  struct Counters {
    std::atomic<uint64_t> calls{0}, kernel_launches{0}, host_syncs{0}, flops{0};
    std::atomic<uint64_t> phase_ns[4] = {}, paths[kPathCounters] = {}, fallbacks{0},
                          schemes[4] = {};
    mutable std::atomic<uint64_t> allocs{0};
  };
  struct DeviceMemory final : MemorySource {  // the caller's allocator, or the backend
    void* allocate_block(uint64_t bytes, moec_stream stream) const override;
    void release_block(void* block, uint64_t bytes, moec_stream stream) const noexcept override;
    const Context* context = nullptr;
  };
  struct HostMemory final : MemorySource {
    void* allocate_block(uint64_t bytes, moec_stream stream) const override;
    void release_block(void* block, uint64_t bytes, moec_stream stream) const noexcept override;
  };
  HostServices services();

  uint32_t flags_;
  int32_t device_id_;
  moec_allocator allocator_ = {};  // alloc null: the backend's own
  std::unique_ptr<Backend> backend_;
  mutable Counters counters_;
  DeviceMemory device_;
  HostMemory host_;
  mutable std::unique_ptr<ScratchCache> scratch_;
  mutable ScratchCache host_scratch_;
  mutable Buffers buffers_{*this};  // last: what is left in it goes back to the members above
};

// Memory of an object: given back at its end, or released to another owner.
class Block {
 public:
  Block(const Context& context, uint64_t bytes, moec_stream stream)
      : context_(context), bytes_(bytes), data_(context.allocate(bytes, stream)) {}
  ~Block() {
    if (data_) context_.deallocate(data_, bytes_, nullptr);
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  void* data() const { return data_; }
  void* release() { return std::exchange(data_, nullptr); }

 private:
  const Context& context_;
  uint64_t bytes_;
  void* data_;
};

class SharedBlock {
 public:
  SharedBlock(const Context& context, uint64_t bytes)
      : context_(context), data_(context.allocate_shared(bytes)) {}
  ~SharedBlock() { context_.deallocate_shared(data_); }
  SharedBlock(const SharedBlock&) = delete;
  SharedBlock& operator=(const SharedBlock&) = delete;
  void* data() const { return data_; }

 private:
  const Context& context_;
  void* data_;
};

// Scratch of the host for one call: an array that is given back on scope exit.
template <class T>
class HostArray {
 public:
  HostArray(const Context& context, int64_t count) : cache_(context.host_scratch()) {
    if (count) data_ = static_cast<T*>(cache_.acquire(uint64_t(count) * sizeof(T), {}, false));
  }
  ~HostArray() {
    if (data_) cache_.release(data_);
  }
  HostArray(const HostArray&) = delete;
  HostArray& operator=(const HostArray&) = delete;
  T* data() const { return data_; }

 private:
  ScratchCache& cache_;
  T* data_ = nullptr;
};

// Scratch of one call: the caller's buffer, or the context's. data() is 64-byte aligned; `need`
// (from the size query) includes the bytes that aligning may cost. extra() are `more` bytes of the
// context's, aligned likewise, that no query names: one block with the others, so that what is
// reserved once is enough.
class Workspace {
 public:
  Workspace(const Context& context, const moec_buffer& given, uint64_t need, moec_stream stream,
            uint64_t more = 0);
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  char* data() const { return data_; }
  char* extra() const { return extra_; }

 private:
  const Context& context_;
  void* owned_ = nullptr;
  char *data_ = nullptr, *extra_ = nullptr;
};

// While one lives, scratch that the backend acquires on this thread comes from `memory` as long as
// it lasts. So a call needs no scratch besides its own workspace.
class ScratchScope {
 public:
  ScratchScope(const Context& context, void* memory, uint64_t bytes) noexcept;
  ~ScratchScope();
  ScratchScope(const ScratchScope&) = delete;
  ScratchScope& operator=(const ScratchScope&) = delete;

  // `bytes` of the innermost scope of this thread, 64-byte aligned; null when there are not as
  // many.
  static void* take(const Context& context, uint64_t bytes) noexcept;
  static bool owns(const void* data) noexcept;

 private:
  const Context* context_;
  ScratchScope* outer_;
  char *begin_, *next_, *end_;
};

// Bytes that a caller's buffer needs beyond its regions so that they can start on a cache line.
inline constexpr uint64_t kAlignSlack = kCacheLine;

// A plan or weights may come from any context of the same device: E_DEVICE.
void check_same_device(const char* name, const Context& from, const Context& context);

// A caller's buffer must be there and hold `need` bytes: E_INVALID_ARG, E_WORKSPACE.
void check_buffer(const char* name, const moec_buffer& buffer, uint64_t need);
// And lie where the device reaches it: E_DEVICE.
void check_buffer(const Context& context, const char* name, const moec_buffer& buffer,
                  uint64_t need);

}  // namespace moec
