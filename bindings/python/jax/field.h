// SPDX-License-Identifier: Apache-2.0
// Arrays by name: rows of the tables in tables.h, and how a table is used.
#pragma once

#include <moec/moec.h>

#include <string_view>

namespace moec::xla {

template <class Args>
struct Field {
  const char* name;
  moec_tensor Args::* member;
};

struct MatrixField {
  const char* name;
  const char* routed;  // the name of the routed experts' one, beside the router's arrays
  moec_matrix moec_weight_set::* matrix;
  moec_tensor moec_matrix::* part;
};
inline constexpr std::string_view kSharedPrefix = "shared_expert_";

// Put the tensor called `name` where the table says; false when the table has no such name.
template <class Args, size_t N>
bool put(const Field<Args> (&table)[N], std::string_view name, const moec_tensor& tensor,
         Args& args) {
  for (const auto& field : table) {
    if (name == field.name) {
      args.*field.member = tensor;
      return true;
    }
  }
  return false;
}

// Likewise for a matrix or bias of the routed experts or, with the prefix, of the shared one.
template <size_t N>
bool put(const MatrixField (&table)[N], std::string_view name, const moec_tensor& tensor,
         moec_weight_set& routed, moec_weight_set& shared) {
  const bool is_shared = name.substr(0, kSharedPrefix.size()) == kSharedPrefix;
  // Named, since gcc 12 assigns to a copy in `(is_shared ? shared : routed).*matrix = ...`.
  moec_weight_set& set = is_shared ? shared : routed;
  if (is_shared) name.remove_prefix(kSharedPrefix.size());
  for (const auto& field : table) {
    if (name == (is_shared ? field.name : field.routed)) {
      (set.*field.matrix).*field.part = tensor;
      return true;
    }
  }
  return false;
}

}  // namespace moec::xla
