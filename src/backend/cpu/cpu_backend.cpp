// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/adapters.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <new>

#include "backend/cpu/isa.h"
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

void CpuBackend::gate_forward(const GateArgs& args, moec_stream) const {
  cpu::gate_forward(device(), args);
}
void CpuBackend::gate_backward(const GateGradArgs& args, moec_stream) const {
  cpu::gate_backward(device(), args);
}
void CpuBackend::route_forward(const RouteArgs& args, moec_stream) const {
  cpu::route_forward(device(), args);
}
void CpuBackend::route_backward(const RouteGradArgs& args, moec_stream) const {
  cpu::route_backward(device(), args);
}
void CpuBackend::bias_update(const BiasUpdateArgs& args, moec_stream) const {
  cpu::bias_update(device(), args);
}
void CpuBackend::loss_forward(const LossArgs& args, moec_stream) const {
  cpu::loss_forward(device(), args);
}
void CpuBackend::loss_backward(const LossArgs& args, moec_stream) const {
  cpu::loss_backward(device(), args);
}
moec_size CpuBackend::plan_scratch(const moec_plan_desc& desc) const {
  return cpu::plan_scratch(device(), desc);
}
void CpuBackend::build_plan(const PlanSource& source, const PlanView& plan, moec_stream) const {
  cpu::build_plan(device(), source, plan);
}
void CpuBackend::export_map(const PlanView& plan, int32_t field, int32_t* to, moec_stream) const {
  cpu::export_map(device(), plan, field, to);
}

void CpuBackend::permute(const PermuteArgs& args, moec_stream) const {
  cpu::permute(device(), args);
}
void CpuBackend::unpermute(const UnpermuteArgs& args, moec_stream) const {
  cpu::unpermute(device(), args);
}
void CpuBackend::permute_backward(const PermuteGradArgs& args, moec_stream) const {
  cpu::permute_backward(device(), args);
}
void CpuBackend::unpermute_backward(const UnpermuteGradArgs& args, moec_stream) const {
  cpu::unpermute_backward(device(), args);
}
void CpuBackend::between_ranks(const RankStep& step, moec_stream) const {
  cpu::between_ranks(device(), step);
}

ExpertsPaths CpuBackend::experts_paths() const {
  return {&experts_path_, 1};
}

Backend::PackedForm CpuBackend::packed_form(const WeightsView& weights) const {
  return {cpu::packed_bytes(weights), cpu::packed_format(weights), false};
}
void CpuBackend::pack_weights(const WeightsView& weights, void* to, int32_t first, int32_t count,
                              moec_stream) const {
  cpu::pack_weights(device(), weights, to, first, count);
}
void CpuBackend::merge_factors(const MergeArgs& args, moec_stream) const {
  cpu::merge_factors(pool_, args);
}
WeightsView CpuBackend::packed_view(const WeightsView& weights, const void* packed,
                                    uint64_t bytes) const {
  return cpu::packed_view(weights, packed, bytes);
}
void CpuBackend::unpack_weights(const WeightsView& packed, const WeightsView& to,
                                moec_stream) const {
  cpu::unpack_weights(device(), packed, to);
}
void CpuBackend::weight_values(const ValuesArgs& args, moec_stream) const {
  cpu::weight_values(device(), args);
}
void CpuBackend::quantise(const QuantiseArgs& args, moec_stream) const {
  cpu::quantise(device(), args);
}

}  // namespace cpu
}  // namespace moec
