// SPDX-License-Identifier: Apache-2.0
// What a device must be able to do. One object per context. Arguments are validated by src/layer;
// what a backend lacks it refuses with Error{MOEC_E_UNSUPPORTED} and a text that says what it has.
// Functions are const and may be called from many threads at once. Work is queued on `stream`; only
// synchronize() waits, and copy_to_host(), which calls it.
#pragma once

#include <concepts>
#include <memory>
#include <variant>

#include "backend/args.h"
#include "backend/host_services.h"
#include "backend/program.h"
#include "core/error.h"

namespace moec {

class PeerDevice;     // peer_device.h
class WeightPacking;  // weight_packing.h
struct QuantiseArgs;  // quantise_args.h
struct RankStep;      // rank_steps.h

// What run() queues: any of these records, which the call reads and does not keep. Each backend has
// a function for each.
class Operation {
 public:
  using Record =
      std::variant<const GateArgs*, const GateGradArgs*, const RouteArgs*, const RouteGradArgs*,
                   const BiasUpdateArgs*, const LossArgs*, const PlanArgs*, const MapArgs*,
                   const PermuteArgs*, const UnpermuteArgs*, const PermuteGradArgs*,
                   const UnpermuteGradArgs*, const ValuesArgs*, const MergeArgs*,
                   const QuantiseArgs*>;
  template <class Args>
    requires std::constructible_from<Record, const Args*>
  // NOLINTNEXTLINE(google-explicit-constructor): callers give run() a record
  Operation(const Args& args) : record_(&args) {}
  template <class Function>
  void visit(const Function& function) const {
    std::visit([&](const auto* args) { function(*args); }, record_);
  }

 private:
  Record record_;
};

struct BackendOptions {
  int32_t device_id = 0;
  int32_t num_threads = 0;                 // CPU; 0 = affinity mask and quota
  uint32_t math = 0;                       // moec_math_mode
  const moec_thread_pool* pool = nullptr;  // CPU; copied
};

class Backend {
 public:
  virtual ~Backend() = default;

  // ---- identity
  virtual const char* name() const = 0;
  virtual int32_t device_type() const = 0;  // moec_device_type
  virtual void device_info(moec_device_info& info) const = 0;
  virtual void set_host(const HostServices& host) = 0;

  // ---- memory and time
  // kShared: memory of the host that kernels reach at the same address. Throws E_OUT_OF_MEMORY.
  enum class Place { kDevice, kShared };
  virtual void* allocate(uint64_t bytes, Place place, moec_stream stream) const = 0;
  virtual void release(void* pointer, moec_stream stream) const = 0;  // never throws; may wait
  virtual void copy(void* to, const void* from, uint64_t bytes, moec_stream stream) const = 0;
  // Waits for the copy, unlike copy().
  void copy_to_host(void* to, const void* from, uint64_t bytes, moec_stream stream) const {
    copy(to, from, bytes, stream);
    synchronize(stream);
  }
  // At most kMostStored bytes, a multiple of 4, which are read before the call returns, even where
  // `stream` is captured.
  static constexpr uint64_t kMostStored = 64;
  virtual void store(void* to, const void* from, uint64_t bytes, moec_stream stream) const = 0;
  virtual void zero(void* to, uint64_t bytes, moec_stream stream) const = 0;
  virtual void synchronize(moec_stream stream) const = 0;
  virtual moec_status poll() const = 0;
  // Whether kernels here may read and write what `pointer` points at.
  virtual bool reaches(const void* pointer) const = 0;
  virtual bool capturing(moec_stream stream) const = 0;
  // Another for each stream there ever was: two may have had the same handle, or, in two threads,
  // have it now (cudaStreamPerThread). 0: `stream` is captured, and its id cannot be known.
  virtual uint64_t stream_id(moec_stream stream) const = 0;

  // ---- operations
  virtual void run(const Operation& operation, moec_stream stream) const = 0;
  // Opens what a router's calls need, so that none of them does while a stream is captured.
  virtual void prepare_router(const moec_router_desc& desc) const = 0;
  // Most scratch that one gate or route call (either direction) acquires for T tokens; a caller
  // that has as much at hand for it keeps the call from allocating.
  virtual moec_size router_scratch(const moec_router_desc& desc, int64_t hidden) const = 0;
  // Bytes of PlanView::scratch for T tokens, whatever desc.max_tokens.
  virtual moec_size plan_scratch(const moec_plan_desc& desc) const = 0;

  // ---- experts
  // The ways to run the experts, best first: the first that takes a call runs it.
  virtual ExpertsPaths experts_paths() const = 0;
  virtual const WeightPacking* packing() const = 0;  // null: codes alone (coded_packing.h)

  // ---- ranks
  // What a rank does between the collectives of an ep.
  virtual void between_ranks(const RankStep& step, moec_stream stream) const = 0;
  virtual const PeerDevice& peers() const = 0;
};

std::unique_ptr<Backend> make_cpu_backend(const BackendOptions& options);

// The plug-in's one exported entry, `moec_backend_entry`: fills this table. The interface version
// and the build id must be the library's own.
inline constexpr uint32_t kBackendInterface = 1;
// Why a backend has no device. CUDA versions are 1000 major + 10 minor; 0 = not known.
struct DeviceSearch {
  char state[16];       // "ready", "no_driver", "old_driver", "no_device", "failed"
  int32_t native_code;  // what the driver said
  int32_t driver_version, needs_version;  // of CUDA: what the driver serves, what is needed
  char text[256];                         // what is missing; empty when ready
};
struct BackendEntry {
  uint32_t interface_version;
  const char* build_id;
  int32_t device_type;
  int32_t (*device_count)();  // 0 without a driver; never throws
  Backend* (*create)(const BackendOptions& options, Error* error);  // null: *error says why
  void (*device_info)(int32_t device_id, moec_device_info* info);
  DeviceSearch (*search)();                          // never throws
  void (*dense_products)(char* text, size_t bytes);  // whose code multiplies dense matrices
};
using BackendEntryFunction = const BackendEntry* (*)();

}  // namespace moec
