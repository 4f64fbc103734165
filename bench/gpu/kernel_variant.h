// SPDX-License-Identifier: Apache-2.0
// What a shared library of kernels (kernel_variant.cu) offers to compare_variants.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moec::test {

struct KernelVariant {
  // A layer of this shape, its memory in the block; what it takes of that goes to `used`. Null: no
  // such shape. The same inputs lie at the same places in all variants.
  void* (*make)(const char* shape, int64_t tokens, void* block, size_t size, size_t* used);
  bool (*run)(void* layer, const char* kernel);  // false: no such kernel
  void (*poison_counters)(void* layer);          // no results, and their layout may differ
  void (*destroy)(void* layer);
};
constexpr char kVariantSymbol[] = "moec_kernel_variant";

}  // namespace moec::test
