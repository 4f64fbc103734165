// SPDX-License-Identifier: Apache-2.0
// A list of kinds: one class a kind, whose kInfo says what it is. The list is the only place that
// names all of them; loops, tables and checks of arguments follow from it.
#pragma once

#include <cstdint>
#include <type_traits>

namespace moec {

// Entry i is the kind whose kInfo.kind is i.
template <class... Kinds>
struct KindList {
  using Info = std::common_type_t<std::remove_const_t<decltype(Kinds::kInfo)>...>;
  static constexpr uint32_t kCount = sizeof...(Kinds);
  static constexpr Info kInfos[] = {Kinds::kInfo...};

  template <class Body>
  static constexpr void for_each(Body body) {  // body<Kind>() for each, in order
    (body.template operator()<Kinds>(), ...);
  }
  template <class Body>
  static constexpr void with(uint32_t kind, const Body& body) {  // body<Kind>() of one
    ((kind == Kinds::kInfo.kind && (body.template operator()<Kinds>(), true)) || ...);
  }
  static constexpr bool in_order() {
    for (uint32_t i = 0; i < kCount; ++i)
      if (kInfos[i].kind != i) return false;
    return true;
  }
};

}  // namespace moec
