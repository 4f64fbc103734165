// SPDX-License-Identifier: Apache-2.0
// Lines of 16 dwords from memory, by the `Ops` of tile_kernels.h.
#pragma once

// Vectors of 64 bytes are passed to functions that are inlined: how others would is no matter.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

#include "backend/cpu/tile.h"

namespace moec::cpu {
namespace {

inline int smaller(int64_t a, int b) {
  return a < b ? int(a) : b;
}

// `count` > 0 values.
template <class Ops, Load kLoad>
typename Ops::Line load_values(const void* line, int64_t offset, int count) {
  const auto* const half = static_cast<const uint16_t*>(line) + offset;
  const auto* const whole = static_cast<const float*>(line) + offset;
  if constexpr (kLoad == Load::kF32) return Ops::f32(whole, count);
  if constexpr (kLoad == Load::kF32AsBf16) return Ops::as_bf16(Ops::f32(whole, count));
  if constexpr (kLoad == Load::kF32AsF16) return Ops::as_f16(Ops::f32(whole, count));
  if constexpr (kLoad == Load::kF32ToPairs) {
    alignas(kLineBytes) uint16_t rounded[2 * kSteps];
    const int low = smaller(count, kSteps);
    Ops::put_bf16(rounded, Ops::f32(whole, low), kSteps);
    Ops::put_bf16(rounded + kSteps,
                  count > kSteps ? Ops::f32(whole + kSteps, count - kSteps) : typename Ops::Line{},
                  kSteps);
    return Ops::pairs(rounded, 2 * kSteps);
  }
  if constexpr (kLoad == Load::kBf16ToF32) return Ops::bf16(half, count);
  if constexpr (kLoad == Load::kF16ToF32) return Ops::f16(half, count);
  if constexpr (kLoad == Load::kPairs) return Ops::pairs(half, count);
}

// A masked load of a page that is not there costs an assist even when it reads nothing: null and
// empty lines are not loaded at all.
template <class Ops, Load kLoad>
typename Ops::Line load_line(const void* line, int64_t offset, int count) {
  if (!line || count <= 0) return typename Ops::Line{};
  return load_values<Ops, kLoad>(line, offset, count);
}

}  // namespace
}  // namespace moec::cpu
