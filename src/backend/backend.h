// SPDX-License-Identifier: Apache-2.0
// What a device must be able to do. One object per context. Arguments are validated by src/layer; a
// backend refuses what it lacks by throwing Error{MOEC_E_UNSUPPORTED} from a check_* function, with
// a text that says what it has. Functions are const and may be called from many threads at once.
// Work is queued on `stream`; only synchronize() waits, and copy_to_host(), which calls it.
#pragma once

#include <memory>
#include <string>

#include "backend/args.h"
#include "backend/program.h"
#include "core/error.h"

namespace moec {

class PeerDevice;     // peer_device.h
struct QuantiseArgs;  // quantise_args.h
struct RankStep;      // rank_steps.h

struct HostServices {  // what the library gives a backend; outlives it
  void* self;
  // Scratch of the context: grow-only, cached, safe from many threads; freed in stream order.
  void* (*acquire)(void* self, uint64_t bytes, moec_stream stream);
  void (*release)(void* self, void* pointer);
  void (*count_launch)(void* self, uint64_t kernels, uint64_t flops);
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
  // Throw E_UNSUPPORTED for a legal description that has no kernel here.
  virtual void check_router(const moec_router_desc& desc) const = 0;

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

  // ---- routing
  // Most scratch that one gate or route call (either direction) acquires for T tokens; a caller
  // that has as much at hand for it keeps the call from allocating.
  virtual moec_size router_scratch(const moec_router_desc&, int64_t) const { return {0, 0}; }
  virtual void gate_forward(const GateArgs& args, moec_stream stream) const = 0;
  virtual void gate_backward(const GateGradArgs& args, moec_stream stream) const = 0;
  virtual void route_forward(const RouteArgs& args, moec_stream stream) const = 0;
  virtual void route_backward(const RouteGradArgs& args, moec_stream stream) const = 0;
  virtual void bias_update(const BiasUpdateArgs& args, moec_stream stream) const = 0;
  virtual void loss_forward(const LossArgs& args, moec_stream stream) const = 0;
  virtual void loss_backward(const LossArgs& args, moec_stream stream) const = 0;
  // Bytes of PlanView::scratch for T tokens, whatever desc.max_tokens.
  virtual moec_size plan_scratch(const moec_plan_desc& desc) const = 0;
  virtual void build_plan(const PlanSource& source, const PlanView& plan, moec_stream s) const = 0;
  // Fields 11 and 12 of moec_plan_field (i32); every entry of `to` is written.
  virtual void export_map(const PlanView& plan, int32_t field, int32_t* to,
                          moec_stream s) const = 0;

  // ---- rows
  virtual void permute(const PermuteArgs& args, moec_stream stream) const = 0;
  virtual void unpermute(const UnpermuteArgs& args, moec_stream stream) const = 0;
  virtual void permute_backward(const PermuteGradArgs& args, moec_stream stream) const = 0;
  virtual void unpermute_backward(const UnpermuteGradArgs& args, moec_stream stream) const = 0;

  // What a rank does between the collectives of an ep.
  virtual void between_ranks(const RankStep& step, moec_stream stream) const = 0;
  virtual const PeerDevice& peers() const = 0;

  // ---- experts
  // The ways to run the experts, best first: the first that takes a call runs it.
  virtual ExpertsPaths experts_paths() const = 0;

  // ---- packed weights
  struct PackedForm {
    uint64_t bytes = 0;        // 0 = there is none
    std::string format;        // names layout, type and instruction set
    bool needs_source = true;  // forward and backward read the source all the same
  };
  virtual PackedForm packed_form(const WeightsView& weights) const = 0;
  virtual void pack_weights(const WeightsView& weights, void* to, int32_t first, int32_t count,
                            moec_stream stream) const = 0;
  // How weights are read once `packed` holds their copy.
  virtual WeightsView packed_view(const WeightsView& weights, const void* packed,
                                  uint64_t /*bytes*/) const {
    WeightsView view = weights;
    view.packed = packed;
    return view;
  }
  // The tensors of such weights to those of `to`, bound like them.
  virtual void unpack_weights(const WeightsView&, const WeightsView& /*to*/, moec_stream) const {
    MOEC_FAIL(MOEC_E_UNSUPPORTED, "weights have no packed form on %s", name());
  }
  // Of bound weights.
  virtual void weight_values(const ValuesArgs& args, moec_stream stream) const = 0;
  virtual void merge_factors(const MergeArgs& args, moec_stream stream) const = 0;

  // ---- codes and scales from values
  virtual void quantise(const QuantiseArgs& args, moec_stream stream) const = 0;
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
