// SPDX-License-Identifier: Apache-2.0
// The formats of quantised weights. Each is a struct in a header of its own:
//
//   kInfo               what binding and memory need to know of it
//   value(m, n, k)      element (n, k) in fp32: the definition of the format
//
// A value of another type is this one, rounded once. Kernels that decode many elements at a time
// have forms of their own, which give the same values.
#pragma once

#include "quant/int8.h"

namespace moec::quant {

template <class... Members>
struct FormatList {
  static constexpr int kCount = sizeof...(Members);
  static constexpr FormatInfo kInfos[] = {Members::kInfo...};
  template <class Body>
  static constexpr void for_each(Body body) {  // body<Format>() for each, in order
    (body.template operator()<Members>(), ...);
  }
  // body<Format>() of the one with this scheme, which is in the list.
  template <class Body>
  MOEC_HD static void with(uint32_t scheme, Body&& body) {
    ((scheme == Members::kInfo.scheme ? body.template operator()<Members>() : void()), ...);
  }
};
using Formats = FormatList<Int8>;

// Position in the list, or -1.
MOEC_HD constexpr int format_index(uint32_t scheme) {
  for (int i = 0; i < Formats::kCount; ++i)
    if (Formats::kInfos[i].scheme == scheme) return i;
  return -1;
}
inline constexpr const FormatInfo* find_format(uint32_t scheme) {
  const int index = format_index(scheme);
  return index < 0 ? nullptr : &Formats::kInfos[index];
}

MOEC_HD float value_at(const CodedView& m, int64_t n, int64_t k) {
  float value = 0;
  Formats::with(m.scheme, [&]<class Format>() { value = Format::value(m, n, k); });
  return value;
}

}  // namespace moec::quant
