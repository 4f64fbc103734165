// SPDX-License-Identifier: Apache-2.0
#include "layer/context.h"

#include <algorithm>
#include <cstdlib>

#include "backend/registry.h"
#include "core/log.h"
#include "core/workspace.h"
#include "layer/check.h"

namespace moec {
namespace {

using ull = unsigned long long;

constexpr uint32_t kContextFlags =
    MOEC_CONTEXT_NO_ALLOC | MOEC_CONTEXT_CHECK_INPUTS | MOEC_CONTEXT_PROFILE;

constexpr int64_t kMaxThreads = 1024;  // more is a mistake, not a machine

template <size_t N>
void read(const std::atomic<uint64_t> (&from)[N], uint64_t* const (&to)[N]) {
  for (size_t i = 0; i < N; ++i) *to[i] = from[i];
}
template <size_t N>
void clear(std::atomic<uint64_t> (&counters)[N]) {
  for (auto& counter : counters) counter.store(0, std::memory_order_relaxed);
}

void check_desc(const moec_context_desc& desc) {
  check_flags("desc.flags", desc.flags, kContextFlags);
  check_enum("desc.math", desc.math, MOEC_MATH_TF32);
  check_range("desc.num_threads", desc.num_threads, 0, kMaxThreads);
  check_at_least("desc.device_id", desc.device_id, 0);
  MOEC_REQUIRE(
      desc.device_type == 0 || desc.device_type == MOEC_CPU || desc.device_type == MOEC_CUDA,
      MOEC_E_INVALID_ARG, "desc.device_type is %d; expected MOEC_CPU (1) or MOEC_CUDA (2)",
      desc.device_type);
  MOEC_REQUIRE(!desc.pool || !desc.num_threads, MOEC_E_INVALID_ARG,
               "desc.num_threads is %d and desc.pool is given; give one of them", desc.num_threads);
  if (desc.pool) {
    check_range("desc.pool.num_threads", desc.pool->num_threads, 1, kMaxThreads);
    MOEC_REQUIRE(desc.pool->parallel_for, MOEC_E_INVALID_ARG, "desc.pool.parallel_for is NULL");
  }
  if (desc.allocator) {
    check_flags("desc.allocator.flags", desc.allocator->flags, 0);
    MOEC_REQUIRE(desc.allocator->alloc && desc.allocator->release, MOEC_E_INVALID_ARG,
                 "desc.allocator has alloc or release NULL; give both");
  }
}

uint64_t alignment_of(int32_t device_type) {
  return device_type == MOEC_CPU ? 64 : 256;
}

}  // namespace

Context::Context(const moec_context_desc& desc)
    : Object(kKind), flags_(desc.flags), device_id_(desc.device_id), host_scratch_(host_, 0, true) {
  check_desc(desc);
  if (desc.allocator) allocator_ = *desc.allocator;
  const int32_t type = desc.device_type ? desc.device_type : int32_t(MOEC_CPU);
  backend_ = make_backend(type, {desc.device_id, desc.num_threads, desc.math, desc.pool});
  backend_->set_host(services());
  device_.context = this;
  scratch_ = std::make_unique<ScratchCache>(device_, desc.workspace_limit,
                                            !(flags_ & MOEC_CONTEXT_NO_ALLOC));
  log(MOEC_LOG_INFO, "context on %s", name().c_str());
}

Context::~Context() = default;

HostServices Context::services() {
  HostServices services;
  services.self = this;
  services.acquire = [](void* self, uint64_t bytes, moec_stream stream) {
    return static_cast<Context*>(self)->acquire(bytes, stream);
  };
  services.release = [](void* self, void* pointer) {
    static_cast<Context*>(self)->release_scratch(pointer);
  };
  services.count_launch = [](void* self, uint64_t kernels, uint64_t flops) {
    Counters& counters = static_cast<Context*>(self)->counters_;
    counters.kernel_launches.fetch_add(kernels, std::memory_order_relaxed);
    counters.flops.fetch_add(flops, std::memory_order_relaxed);
  };
  return services;
}

void* Context::DeviceMemory::allocate_block(uint64_t bytes, moec_stream stream) const {
  const Context& c = *context;
  c.counters_.allocs.fetch_add(1, std::memory_order_relaxed);
  if (!c.allocator_.alloc) return c.backend_->allocate(bytes, Backend::Place::kDevice, stream);
  const uint64_t align = alignment_of(c.device_type());
  void* const block = c.allocator_.alloc(c.allocator_.user, size_t(bytes), size_t(align),
                                         c.device_type(), c.device_id(), stream);
  MOEC_REQUIRE(block, MOEC_E_OUT_OF_MEMORY, "the context's allocator refused %llu bytes",
               ull(bytes));
  if (reinterpret_cast<uintptr_t>(block) % align == 0) return block;
  release_block(block, bytes, stream);
  MOEC_FAIL(MOEC_E_CALLBACK, "the context's allocator returned %p; expected a multiple of %llu",
            block, ull(align));
}

void Context::DeviceMemory::release_block(void* block, uint64_t bytes,
                                          moec_stream stream) const noexcept {
  const Context& c = *context;
  if (!c.allocator_.release) return c.backend_->release(block, stream);
  c.allocator_.release(c.allocator_.user, block, size_t(bytes), c.device_type(), c.device_id(),
                       stream);
}

void* Context::allocate_shared(uint64_t bytes) const {
  counters_.allocs.fetch_add(1, std::memory_order_relaxed);
  return backend_->allocate(bytes, Backend::Place::kShared, nullptr);
}

void* Context::HostMemory::allocate_block(uint64_t bytes, moec_stream) const {
  void* const block = std::malloc(size_t(bytes));
  MOEC_REQUIRE(block, MOEC_E_OUT_OF_MEMORY, "cannot allocate %llu bytes of host memory",
               ull(bytes));
  return block;
}
void Context::HostMemory::release_block(void* block, uint64_t, moec_stream) const noexcept {
  std::free(block);
}

void Context::forbid_capture(const char* what, moec_stream stream) const {
  MOEC_REQUIRE(!backend_->capturing(stream), MOEC_E_WOULD_ALLOC,
               "the stream is being captured; %s before the capture", what);
}

void* Context::acquire(uint64_t bytes, moec_stream stream) const {
  if (void* const taken = ScratchScope::take(*this, bytes)) return taken;
  return scratch_->acquire(bytes, {stream, backend_->stream_id(stream)},
                           backend_->capturing(stream));
}
void Context::release_scratch(void* data) const noexcept {
  if (!ScratchScope::owns(data)) scratch_->release(data);
}
void Context::reserve(uint64_t bytes, moec_stream stream) const {
  forbid_capture("reserve", stream);
  scratch_->reserve(bytes, {stream, backend_->stream_id(stream)});
}
void Context::trim() const {
  scratch_->trim();
  host_scratch_.trim();
}

void Context::synchronize(moec_stream stream) const {
  MOEC_REQUIRE(!backend_->capturing(stream), MOEC_E_WOULD_SYNC,
               "the stream is being captured; wait before or after the capture");
  if (!on_host()) count_sync();
  backend_->synchronize(stream);
}

void Context::stats(moec_stats& out) const {
  out.calls = counters_.calls;
  out.kernel_launches = counters_.kernel_launches;
  out.allocs = counters_.allocs;
  out.host_syncs = counters_.host_syncs;
  out.flops = counters_.flops;
  scratch_->sizes(&out.workspace_bytes, &out.workspace_peak);
  out.path_fallbacks = counters_.fallbacks;
  read(counters_.phase_ns, {&out.ns_route, &out.ns_plan, &out.ns_experts, &out.ns_combine});
  read(counters_.paths, {&out.path_cpu, &out.path_portable, &out.path_sm90, &out.path_few_tokens,
                         &out.path_few_rows});
  read(counters_.schemes, {&out.ep_gather, &out.ep_peer, &out.ep_rows, &out.ep_exact});
}

void Context::reset_stats() const {
  for (auto* counter : {&counters_.calls, &counters_.kernel_launches, &counters_.host_syncs,
                        &counters_.flops, &counters_.allocs, &counters_.fallbacks})
    counter->store(0, std::memory_order_relaxed);
  clear(counters_.phase_ns);
  clear(counters_.paths);
  clear(counters_.schemes);
}

void Context::count_path(const Taken& taken) const {
  counters_.paths[int(taken.path->counter)].fetch_add(1, std::memory_order_relaxed);
  if (taken.is_fallback) counters_.fallbacks.fetch_add(1, std::memory_order_relaxed);
}

Context::Timer::~Timer() {
  if (!(context_.flags_ & MOEC_CONTEXT_PROFILE)) return;
  const auto passed = std::chrono::nanoseconds(Clock::now() - start_).count();
  context_.counters_.phase_ns[int(phase_)].fetch_add(uint64_t(passed), std::memory_order_relaxed);
}

namespace {
thread_local ScratchScope* innermost = nullptr;
}

ScratchScope::ScratchScope(const Context& context, void* memory, uint64_t bytes) noexcept
    : context_(&context), outer_(innermost) {
  begin_ = next_ = static_cast<char*>(memory);
  end_ = begin_ + bytes;
  innermost = this;
}
ScratchScope::~ScratchScope() {
  innermost = outer_;
}

void* ScratchScope::take(const Context& context, uint64_t bytes) noexcept {
  ScratchScope* const scope = innermost;
  if (!scope || scope->context_ != &context) return nullptr;
  if (bytes > uint64_t(scope->end_ - scope->next_)) return nullptr;
  char* const taken = scope->next_;
  scope->next_ += std::min(round_up(bytes, kCacheLine), uint64_t(scope->end_ - scope->next_));
  return taken;
}
bool ScratchScope::owns(const void* data) noexcept {
  return innermost && data >= innermost->begin_ && data < innermost->end_;
}

void check_same_device(const char* name, const Context& from, const Context& context) {
  MOEC_REQUIRE(
      from.device_type() == context.device_type() && from.device_id() == context.device_id(),
      MOEC_E_DEVICE, "%s is of %s; expected %s", name, from.name().c_str(), context.name().c_str());
}

void check_buffer(const char* name, const moec_buffer& buffer, uint64_t need) {
  MOEC_REQUIRE(buffer.ptr || !buffer.bytes, MOEC_E_INVALID_ARG, "%s.ptr is NULL with %llu bytes",
               name, ull(buffer.bytes));
  MOEC_REQUIRE(buffer.ptr || !need, MOEC_E_INVALID_ARG, "%s is absent; %llu bytes are needed", name,
               ull(need));
  MOEC_REQUIRE(buffer.bytes >= need, MOEC_E_WORKSPACE, "%s has %llu bytes; %llu are needed", name,
               ull(buffer.bytes), ull(need));
}
void check_buffer(const Context& context, const char* name, const moec_buffer& buffer,
                  uint64_t need) {
  check_buffer(name, buffer, need);
  MOEC_REQUIRE(!need || context.backend().reaches(buffer.ptr), MOEC_E_DEVICE,
               "%s.ptr is memory that %s does not reach; expected memory of that device", name,
               context.name().c_str());
}

Workspace::Workspace(const Context& context, const moec_buffer& given, uint64_t need,
                     moec_stream stream, uint64_t more)
    : context_(context) {
  const auto aligned = [](void* start) {
    return reinterpret_cast<char*>(round_up(reinterpret_cast<uintptr_t>(start), kCacheLine));
  };
  const bool is_given = given.ptr || given.bytes;
  if (is_given) check_buffer(context, "workspace", given, need);
  const uint64_t own = is_given ? 0 : need, slack = more ? kAlignSlack : 0;
  MOEC_REQUIRE(more <= UINT64_MAX - slack - own, MOEC_E_OVERFLOW,
               "%llu and %llu bytes of scratch exceed the address space", ull(own), ull(more));
  if (own + more) owned_ = context.acquire(own + more + slack, stream);
  data_ = aligned(is_given ? given.ptr : owned_);
  if (more) extra_ = aligned(static_cast<char*>(owned_) + own);
}

Workspace::~Workspace() {
  if (owned_) context_.release_scratch(owned_);
}

}  // namespace moec
