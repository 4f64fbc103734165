// SPDX-License-Identifier: Apache-2.0
// Element types: sizes, names, and scalar conversions (round to nearest even), host and device.
#pragma once

#include <moec/moec.h>

#include <bit>
#include <cstdint>
#include <cstring>

#include "core/portable.h"

namespace moec {

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

MOEC_HD float to_float(float value) {
  return value;
}

MOEC_HD float to_float(bf16 value) {
  return std::bit_cast<float>(uint32_t(value.bits) << 16);
}

MOEC_HD float to_float(f16 value) {
  const uint32_t sign = uint32_t(value.bits & 0x8000u) << 16, rest = value.bits & 0x7fffu;
  if (rest >= 0x7c00u) return std::bit_cast<float>(sign | 0x7f800000u | ((rest & 0x3ffu) << 13));
#if defined(__CUDA_ARCH__)  // the same by one instruction, but for the bits of a NaN
  float converted;
  asm("cvt.f32.f16 %0, %1;" : "=f"(converted) : "h"(value.bits));
  return converted;
#endif
  if (rest >= 0x400u) return std::bit_cast<float>(sign | ((rest << 13) + 0x38000000u));
  const float magnitude = float(rest) * 0x1p-24f;  // subnormal: exact
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
}

template <class T>
MOEC_HD T from_float(float value);

template <>
MOEC_HD float from_float<float>(float value) {
  return value;
}

template <>
MOEC_HD bf16 from_float<bf16>(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {uint16_t((bits >> 16) | 0x40u)};  // quiet NaN
  return {uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

template <>
MOEC_HD f16 from_float<f16>(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value), sign = (bits >> 16) & 0x8000u;
  const uint32_t rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) return {uint16_t(sign | 0x7e00u)};
#if defined(__CUDA_ARCH__)  // as above
  f16 converted;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(converted.bits) : "f"(value));
  return converted;
#endif
  if (rest >= 0x477ff000u) return {uint16_t(sign | 0x7c00u)};  // >= 65520 rounds to infinity
  if (rest < 0x38800000u) {  // below 2^-14: adding 0.5 rounds to a multiple of 2^-24
    const float shifted = std::bit_cast<float>(rest) + 0.5f;
    return {uint16_t(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u))};
  }
  const uint32_t rounded = rest + 0xfffu + ((rest >> 13) & 1u);
  return {uint16_t(sign | ((rounded - 0x38000000u) >> 13))};
}

MOEC_HD bool is_real(moec_dtype dtype) {
  return dtype == MOEC_F32 || dtype == MOEC_F16 || dtype == MOEC_BF16;
}

MOEC_HD int64_t dtype_bytes(moec_dtype dtype) {
  return int64_t((dtype >> 8) & 0xffu) / 8;
}

// One of moec_dtype_value; null: another.
inline const char* known_name(moec_dtype dtype) {
  struct Row {
    moec_dtype dtype;
    const char* name;
  };
  static constexpr Row kRows[] = {
      {MOEC_F32, "f32"},   {MOEC_F16, "f16"},      {MOEC_BF16, "bf16"},    {MOEC_F64, "f64"},
      {MOEC_I8, "i8"},     {MOEC_U8, "u8"},        {MOEC_I32, "i32"},      {MOEC_I64, "i64"},
      {MOEC_BOOL, "bool"}, {MOEC_F8_E4M3, "e4m3"}, {MOEC_F8_E5M2, "e5m2"}, {MOEC_F8_E8M0, "e8m0"}};
  for (const Row& row : kRows)
    if (row.dtype == dtype) return row.name;
  return nullptr;
}
inline const char* dtype_name(moec_dtype dtype) {
  const char* const name = known_name(dtype);
  return name ? name : "unknown dtype";
}

// Call body.template operator()<T>() with the C++ type of a real dtype (checked by the caller).
template <class Body>
MOEC_HD decltype(auto) with_real(moec_dtype dtype, Body&& body) {
  if (dtype == MOEC_BF16) return body.template operator()<bf16>();
  if (dtype == MOEC_F16) return body.template operator()<f16>();
  return body.template operator()<float>();
}

// One element that may be only element-aligned, or of a type known at run time.
MOEC_HD float load_real(const void* base, moec_dtype dtype, int64_t index) {
  return with_real(dtype, [&]<class T>() { return to_float(static_cast<const T*>(base)[index]); });
}
MOEC_HD void store_real(void* base, moec_dtype dtype, int64_t index, float value) {
  with_real(dtype, [&]<class T>() { static_cast<T*>(base)[index] = from_float<T>(value); });
}
// Integer ids of either width.
MOEC_HD int64_t load_integer(const void* base, moec_dtype dtype, int64_t index) {
  return dtype == MOEC_I64 ? static_cast<const int64_t*>(base)[index]
                           : static_cast<const int32_t*>(base)[index];
}
// value as it reads after being stored as dtype.
MOEC_HD float round_real(moec_dtype dtype, float value) {
  return with_real(dtype, [&]<class T>() { return to_float(from_float<T>(value)); });
}

}  // namespace moec
