// SPDX-License-Identifier: Apache-2.0
#include "machine_limits.h"

// gcc 12's own intrinsics pass "undefined" registers that its own warning then finds (gcc bug
// 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <functional>
#include <new>
#include <thread>
#include <vector>

namespace moec::bench {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// body(thread) on all threads at once, `trials` times; the best seconds from first start to last
// end.
double best_seconds(int threads, int trials, const std::function<void(int)>& body) {
  double best = 1e30;
  Clock::time_point start;
  std::barrier begin(threads, [&]() noexcept { start = Clock::now(); });
  std::barrier end(threads, [&]() noexcept { best = std::min(best, seconds_since(start)); });
  std::vector<std::thread> pool;
  for (int t = 0; t < threads; ++t)
    pool.emplace_back([&, t] {
      for (int trial = 0; trial < trials; ++trial) {
        begin.arrive_and_wait();
        body(t);
        end.arrive_and_wait();
      }
    });
  for (std::thread& thread : pool) thread.join();
  return best;
}

constexpr int64_t kSteps = 4'000'000;
constexpr int kSums = 12;  // independent sums: more than latency times rate

volatile float sink;  // so that the sums are needed

__attribute__((target("avx2,fma"))) void fma_avx2() {
  __m256 sum[kSums], a = _mm256_set1_ps(1.0001f), b = _mm256_set1_ps(0.9999f);
  for (auto& s : sum) s = a;
  for (int64_t i = 0; i < kSteps; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < kSums; ++j) sum[j] = _mm256_fmadd_ps(a, sum[j], b);
  }
  for (const auto& s : sum) sink = _mm256_cvtss_f32(s);
}

__attribute__((target("avx512f"))) void fma_avx512() {
  __m512 sum[kSums], a = _mm512_set1_ps(1.0001f), b = _mm512_set1_ps(0.9999f);
  for (auto& s : sum) s = a;
  for (int64_t i = 0; i < kSteps; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < kSums; ++j) sum[j] = _mm512_fmadd_ps(a, sum[j], b);
  }
  for (const auto& s : sum) sink = _mm512_cvtss_f32(s);
}

__attribute__((target("avx512f,avx512bf16"))) void dot_avx512() {
  __m512 sum[kSums];
  for (auto& s : sum) s = _mm512_set1_ps(1.0f);
  const auto a = reinterpret_cast<__m512bh>(_mm512_set1_epi32(0x3f813f7f));
  const auto b = reinterpret_cast<__m512bh>(_mm512_set1_epi32(0x3f7f3f82));
  for (int64_t i = 0; i < kSteps; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < kSums; ++j) sum[j] = _mm512_dpbf16_ps(sum[j], a, b);
  }
  for (const auto& s : sum) sink = _mm512_cvtss_f32(s);
}

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t line_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t lines[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

constexpr int64_t kTileSteps = 500'000;

__attribute__((target("amx-tile,amx-bf16"))) void dot_amx() {
  static constexpr TileConfig kConfig;
  __asm__ volatile("ldtilecfg %0" ::"m"(kConfig));
  alignas(64) uint16_t values[4][512];
  uint32_t state = 1;
  for (auto& tile : values)
    for (uint16_t& value : tile)  // random mantissa and sign, exponent near 1
      value = uint16_t(0x3f00u | ((state = state * 1664525u + 1013904223u) >> 16 & 0x80ffu));
  __asm__ volatile("" ::"r"(values) : "memory");
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, values[0], 64);
  _tile_loadd(5, values[1], 64);
  _tile_loadd(6, values[2], 64);
  _tile_loadd(7, values[3], 64);
  for (int64_t i = 0; i < kTileSteps; ++i) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
}

bool has_amx() {
  constexpr uint32_t kBf16 = 1u << 22, kTile = 1u << 24;
  uint32_t eax = 7, ebx, ecx = 0, edx;
  __asm__("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
  return (edx & kBf16) && (edx & kTile) && syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}

__attribute__((target("avx512f"))) int64_t read_avx512(const char* from, int64_t bytes) {
  __m512i sum = _mm512_setzero_si512();
  for (int64_t i = 0; i + 2048 <= bytes; i += 2048)
    for (int64_t line = i; line < i + 1024; line += 64) {
      _mm_prefetch(from + line + 32768, _MM_HINT_T1);
      _mm_prefetch(from + line + 33792, _MM_HINT_T1);
      sum = _mm512_xor_si512(sum, _mm512_load_si512(from + line));
      sum = _mm512_xor_si512(sum, _mm512_load_si512(from + line + 1024));
    }
  return _mm512_reduce_add_epi64(sum);
}

int64_t read_portable(const char* from, int64_t bytes) {
  __m128i sum = _mm_setzero_si128();
  for (int64_t i = 0; i + 2048 <= bytes; i += 2048)
    for (int64_t line = i; line < i + 1024; line += 64) {
      _mm_prefetch(from + line + 32768, _MM_HINT_T1);
      _mm_prefetch(from + line + 33792, _MM_HINT_T1);
      for (int64_t at = line; at < line + 64; at += 16) {
        sum = _mm_xor_si128(sum, *reinterpret_cast<const __m128i*>(from + at));
        sum = _mm_xor_si128(sum, *reinterpret_cast<const __m128i*>(from + at + 1024));
      }
    }
  return _mm_cvtsi128_si64(sum);
}

double read_bandwidth(int threads) {
  const int64_t each = (int64_t(5) << 28) / threads / 4096 * 4096;  // 1.25 GiB in all
  const size_t bytes = size_t(each * threads);
  void* const memory =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  madvise(memory, bytes, MADV_HUGEPAGE);
  std::memset(memory, 1, bytes);
  std::vector<int64_t> sums(size_t(threads) * 8);
  const bool wide = __builtin_cpu_supports("avx512f");
  const double seconds = best_seconds(threads, 5, [&](int t) {
    const char* const from = static_cast<const char*>(memory) + t * each;
    sums[size_t(t) * 8] += wide ? read_avx512(from, each) : read_portable(from, each);
  });
  munmap(memory, bytes);
  return double(bytes) / seconds;
}

std::string cpu_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);)
    if (line.starts_with("model name")) return line.substr(line.find(": ") + 2);
  return "unknown";
}

}  // namespace

MachineLimits measure_limits(int threads) {
  MachineLimits limits;
  limits.threads = threads;
  limits.cpu = cpu_name();
  const bool avx512 = __builtin_cpu_supports("avx512f");
  const auto rate = [&](double flops, void (*kernel)()) {
    return flops * threads / best_seconds(threads, 5, [&](int) { kernel(); });
  };
  const double vector_steps = double(kSteps) * kSums;
  if (avx512)
    limits.fma_f32 = rate(vector_steps * 32, fma_avx512);
  else if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    limits.fma_f32 = rate(vector_steps * 16, fma_avx2);
  if (__builtin_cpu_supports("avx512bf16")) limits.dot_bf16 = rate(vector_steps * 64, dot_avx512);
  if (has_amx()) limits.amx_bf16 = rate(double(kTileSteps) * 4 * 16 * 16 * 64, dot_amx);
  limits.read_bytes = read_bandwidth(threads);
  return limits;
}

}  // namespace moec::bench
