// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/adapters.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <new>

#include "backend/cpu/isa.h"
#include "backend/quantise_args.h"
#include "backend/rank_steps.h"
#include "core/workspace.h"

namespace moec {

std::unique_ptr<Backend> make_cpu_backend(const BackendOptions& options) {
  cpu::check_isa();
  return std::make_unique<cpu::CpuBackend>(options);
}

namespace cpu {
namespace {

// "model name" of /proc/cpuinfo, or a plain word where it cannot be read.
void read_cpu_name(char* to, size_t bytes) {
  std::snprintf(to, bytes, "CPU");
  std::FILE* const file = std::fopen("/proc/cpuinfo", "r");
  if (!file) return;
  char line[256];
  while (std::fgets(line, sizeof line, file)) {
    const char* const colon = std::strstr(line, ": ");
    if (std::strncmp(line, "model name", 10) != 0 || !colon) continue;
    std::snprintf(to, bytes, "%.*s", int(std::strcspn(colon + 2, "\n")), colon + 2);
    break;
  }
  std::fclose(file);
}

}  // namespace

const char* isa_name() {
  return tile_kernels().isa;
}

void CpuBackend::device_info(moec_device_info& info) const {
  const uint64_t page = uint64_t(sysconf(_SC_PAGESIZE));
  info.device_type = MOEC_CPU;
  info.multiprocessors = ThreadPool::usable_cores();
  info.numa_node = -1;
  info.total_bytes = uint64_t(sysconf(_SC_PHYS_PAGES)) * page;
  info.free_bytes = uint64_t(sysconf(_SC_AVPHYS_PAGES)) * page;
  read_cpu_name(info.name, sizeof info.name);
  std::snprintf(info.backend, sizeof info.backend, "%s", name());
  std::snprintf(info.arch, sizeof info.arch, "%s", isa_name());
}

void* CpuBackend::allocate(uint64_t bytes, Place, moec_stream) const {
  // A packed copy is read from end to end: with huge pages, by far fewer walks of page tables.
  constexpr uint64_t kHugePage = 2 << 20;
  const bool huge = bytes >= 2 * kHugePage;
  const uint64_t alignment = huge ? kHugePage : kCacheLine;  // and the size is a multiple of it
  void* const pointer = bytes > SIZE_MAX - alignment
                            ? nullptr
                            : std::aligned_alloc(alignment, round_up(bytes, alignment));
  if (pointer && huge) madvise(pointer, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);
  MOEC_REQUIRE(pointer, MOEC_E_OUT_OF_MEMORY, "cannot allocate %llu bytes of host memory",
               static_cast<unsigned long long>(bytes));
  return pointer;
}
void CpuBackend::release(void* pointer, moec_stream) const {
  std::free(pointer);
}

void CpuBackend::copy(void* to, const void* from, uint64_t bytes, moec_stream) const {
  if (bytes) std::memcpy(to, from, bytes);
}
void CpuBackend::store(void* to, const void* from, uint64_t bytes, moec_stream s) const {
  copy(to, from, bytes, s);
}
void CpuBackend::zero(void* to, uint64_t bytes, moec_stream) const {
  if (bytes) std::memset(to, 0, bytes);
}

namespace {

struct Run {
  const Device device;
  void operator()(const GateArgs& args) const { gate_forward(device, args); }
  void operator()(const GateGradArgs& args) const { gate_backward(device, args); }
  void operator()(const RouteArgs& args) const { route_forward(device, args); }
  void operator()(const RouteGradArgs& args) const { route_backward(device, args); }
  void operator()(const BiasUpdateArgs& args) const { bias_update(device, args); }
  void operator()(const LossArgs& args) const {
    args.backward ? loss_backward(device, args) : loss_forward(device, args);
  }
  void operator()(const PlanArgs& args) const { build_plan(device, *args.source, *args.plan); }
  void operator()(const MapArgs& args) const {
    export_map(device, *args.plan, args.field, args.to);
  }
  void operator()(const PermuteArgs& args) const { permute(device, args); }
  void operator()(const UnpermuteArgs& args) const { unpermute(device, args); }
  void operator()(const PermuteGradArgs& args) const { permute_backward(device, args); }
  void operator()(const UnpermuteGradArgs& args) const { unpermute_backward(device, args); }
  void operator()(const ValuesArgs& args) const { weight_values(device, args); }
  void operator()(const MergeArgs& args) const { merge_factors(device.pool, args); }
  void operator()(const QuantiseArgs& args) const { quantise(device, args); }
};

}  // namespace

void CpuBackend::run(const Operation& operation, moec_stream) const {
  operation.visit(Run{device()});
}
moec_size CpuBackend::router_scratch(const moec_router_desc& desc, int64_t hidden) const {
  return cpu::router_scratch(device(), desc, hidden);
}
moec_size CpuBackend::plan_scratch(const moec_plan_desc& desc) const {
  return cpu::plan_scratch(device(), desc);
}
void CpuBackend::between_ranks(const RankStep& step, moec_stream) const {
  cpu::between_ranks(device(), step);
}

}  // namespace cpu
}  // namespace moec
