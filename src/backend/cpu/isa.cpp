// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/isa.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "core/error.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace moec::cpu {
namespace {

struct Features {
  bool avx2 = false, avx512 = false, avx512bf16 = false, amx = false;
  bool fast_bf16_dot = false;  // vdpbf16ps at the rate of fma
};

#if defined(__x86_64__)

struct Registers {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers cpuid(uint32_t leaf, uint32_t subleaf = 0) {
  Registers r;
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
  return r;
}

uint64_t enabled_state() {  // XCR0: register files that the operating system saves
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t(high) << 32 | low;
}

bool has_bits(uint64_t value, uint64_t bits) {
  return (value & bits) == bits;
}

// Linux hands out the tile registers on request, once per process.
bool request_tiles() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

Features detect() {
  Features f;
  const Registers base = cpuid(1), more = cpuid(7, 0), tail = cpuid(7, 1);
  if (!has_bits(base.ecx, 1u << 27)) return f;  // OSXSAVE
  const uint64_t state = enabled_state();
  constexpr uint32_t kFma = 1u << 12, kAvx = 1u << 28, kF16c = 1u << 29;
  f.avx2 = has_bits(state, 0x6) && has_bits(base.ecx, kFma | kAvx | kF16c) &&
           has_bits(more.ebx, 1u << 5);
  constexpr uint32_t kF = 1u << 16, kDq = 1u << 17, kBw = 1u << 30, kVl = 1u << 31;
  f.avx512 = f.avx2 && has_bits(state, 0xe6) && has_bits(more.ebx, kF | kDq | kBw | kVl);
  f.avx512bf16 = f.avx512 && has_bits(tail.eax, 1u << 5);
  constexpr uint32_t kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  f.amx = f.avx512bf16 && has_bits(state, 0x60000) && has_bits(more.edx, kAmxBf16 | kAmxTile) &&
          request_tiles();
  const Registers vendor = cpuid(0);
  f.fast_bf16_dot = vendor.ebx == signature_AMD_ebx;  // Intel's runs at 0.4 of the fma rate
  return f;
}

#else

Features detect() {
  return {};
}

#endif

struct Entry {
  const TileKernels* kernels;
  bool available, preferred;
};

struct Table {  // slowest first
  Entry entries[5];
  static const Table& get() {
    static const Table table = [] {
      const Features f = detect();
      return Table{{{&kTilePortable, true, true},
                    {&kTileAvx2, f.avx2, true},
                    {&kTileAvx512, f.avx512, true},
                    {&kTileAvx512Bf16, f.avx512bf16, f.fast_bf16_dot},
                    {&kTileAmx, f.amx, true}}};
    }();
    return table;
  }
};

std::atomic<const TileKernels*> selected{nullptr};

const TileKernels* find(const char* name) {
  const TileKernels* best = nullptr;
  for (const Entry& entry : Table::get().entries) {
    if (!entry.available) continue;
    if (name ? std::strcmp(name, entry.kernels->isa) == 0 : entry.preferred) best = entry.kernels;
  }
  MOEC_REQUIRE(best, MOEC_E_UNSUPPORTED,
               "MOEC_CPU_ISA is \"%s\"; this machine's best is \"%s\", it has: %s", name,
               find(nullptr)->isa, available_isas().c_str());
  return best;
}

const char* wanted_isa() {  // null: the best
  const char* const name = std::getenv("MOEC_CPU_ISA");
  return name && *name ? name : nullptr;
}

}  // namespace

std::string available_isas() {
  std::string names;
  for (const Entry& entry : Table::get().entries)
    if (entry.available) names.append(names.empty() ? "" : " ").append(entry.kernels->isa);
  return names;
}

void select_isa(const char* name) {
  selected.store(find(name ? name : wanted_isa()), std::memory_order_release);
}

void check_isa() {
  const TileKernels &wanted = *find(wanted_isa()), &used = tile_kernels();
  MOEC_REQUIRE(&wanted == &used, MOEC_E_INVALID_STATE,
               "MOEC_CPU_ISA asks for \"%s\"; this process already uses \"%s\": set it before the "
               "first context",
               wanted.isa, used.isa);
}

const TileKernels& tile_kernels() {
  if (!selected.load(std::memory_order_acquire)) select_isa(nullptr);
  return *selected.load(std::memory_order_acquire);
}

}  // namespace moec::cpu
