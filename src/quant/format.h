// SPDX-License-Identifier: Apache-2.0
// The formats of quantised weights. Each is a struct:
//
//   kInfo               what binding and memory need to know of it
//   code(m, n, k)       the stored code of element (n, k) as a number
//   block(m, n, k)      what the codes of its block have in common: a struct of floats
//   entry(m, n, k)      the number of its block; along an axis equal numbers are neighbours, unless
//                       a group index says otherwise
//   decode(code, block) the value, of fp32 or of vectors of it
//
// A value of another type is this one, rounded once. Kernels that decode many elements at a time
// have forms of their own, which give the same values.
#pragma once

#include "quant/bytes.h"
#include "quant/codebook4.h"
#include "quant/fp4.h"
#include "quant/gguf.h"
#include "quant/int4.h"

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
  // Position of a scheme in the list, or -1.
  MOEC_HD static constexpr int index(uint32_t scheme) {
    int position = 0, found = -1;
    ((Members::kInfo.scheme == scheme ? void(found = position) : void(), ++position), ...);
    return found;
  }
};
using Formats = FormatList<Int8, Fp8, Codebook4, Mxfp4, Nvfp4, Int4, Awq, Gptq<1>, Gptq<2>, GgufQ8,
                           GgufQ4, GgufQ4K, GgufQ6K, GgufMxfp4>;
// Those of signed bytes that kernels of their own multiply where each row has one scale.
using ChannelFormats = FormatList<Int8>;

inline constexpr const FormatInfo* find_format(uint32_t scheme) {
  const int index = Formats::index(scheme);
  return index < 0 ? nullptr : &Formats::kInfos[index];
}
// Codes lie as the elements of a plain matrix do.
inline constexpr bool is_bytes(const FormatInfo& format) {
  return format.storage == Storage::kRows && format.unit_values == 1;
}
// Each row n has one scale.
inline constexpr bool is_channels(BlockSize block_n, BlockSize block_k) {
  return block_n.size() == 1 && block_k.is_all();
}

template <class Format>
MOEC_HD float value(const CodedView& m, int64_t n, int64_t k) {
  return Format::template decode<float>(Format::code(m, n, k), Format::block(m, n, k));
}
MOEC_HD float value_at(const CodedView& m, int64_t n, int64_t k) {
  float result = 0;
  Formats::with(m.scheme, [&]<class Format>() { result = value<Format>(m, n, k); });
  return result;
}

}  // namespace moec::quant
