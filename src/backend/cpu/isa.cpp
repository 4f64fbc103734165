// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/isa.h"

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>

#include "core/error.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace moec::cpu {
namespace {

struct Set {
  const TileKernels* kernels;
  bool available, preferred;
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

std::array<Set, 5> sets() {
  const Registers base = cpuid(1), more = cpuid(7, 0), tail = cpuid(7, 1), vendor = cpuid(0);
  const bool saves = has_bits(base.ecx, 1u << 27);  // OSXSAVE
  const uint64_t state = saves ? enabled_state() : 0;
  constexpr uint32_t kFma = 1u << 12, kAvx = 1u << 28, kF16c = 1u << 29;
  const bool avx2 = has_bits(state, 0x6) && has_bits(base.ecx, kFma | kAvx | kF16c) &&
                    has_bits(more.ebx, 1u << 5);
  constexpr uint32_t kF = 1u << 16, kDq = 1u << 17, kBw = 1u << 30, kVl = 1u << 31;
  const bool avx512 = avx2 && has_bits(state, 0xe6) && has_bits(more.ebx, kF | kDq | kBw | kVl);
  const bool avx512bf16 = avx512 && has_bits(tail.eax, 1u << 5) && has_bits(more.ecx, 1u << 1);
  constexpr uint32_t kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  const bool amx = avx512bf16 && has_bits(state, 0x60000) &&
                   has_bits(more.edx, kAmxBf16 | kAmxTile) && request_tiles();
  // vdpbf16ps has the rate of fma there; Intel's runs at 0.4 of it.
  const bool fast_bf16_dot = vendor.ebx == signature_AMD_ebx;
  return {{{&kTilePortable, true, true},
           {&kTileAvx2, avx2, true},
           {&kTileAvx512, avx512, true},
           {&kTileAvx512Bf16, avx512bf16, fast_bf16_dot},
           {&kTileAmx, amx, true}}};
}

#elif defined(__aarch64__)

std::array<Set, 3> sets() {
  constexpr unsigned long kBf16 = 1ul << 14;  // HWCAP2_BF16, which older headers lack
  return {{{&kTilePortable, true, true},
           {&kTileNeon, true, true},
           {&kTileNeonBf16, (getauxval(AT_HWCAP2) & kBf16) != 0, true}}};
}

#else

std::array<Set, 1> sets() {
  return {{{&kTilePortable, true, true}}};
}

#endif

const auto& table() {  // slowest first
  static const auto all = sets();
  return all;
}

std::atomic<const TileKernels*> selected{nullptr};

const TileKernels* find(const char* name) {
  const TileKernels* best = nullptr;
  for (const Set& set : table()) {
    if (!set.available) continue;
    if (name ? std::strcmp(name, set.kernels->isa) == 0 : set.preferred) best = set.kernels;
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
  for (const Set& set : table())
    if (set.available) names.append(names.empty() ? "" : " ").append(set.kernels->isa);
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
