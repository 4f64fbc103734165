// SPDX-License-Identifier: Apache-2.0
// Tensors of adapters, of any strides, as the lists of factors that backends read.
#pragma once

#include "backend/adapters.h"
#include "layer/check.h"

namespace moec {

inline constexpr int32_t kMostAdapters = 256;
inline constexpr int64_t kMostRank = 512;
// Of one adapter: entries in the list beside gate and up, and beside down; tensors.
inline constexpr int64_t kGateUpFactors = 3, kDownFactors = 1, kFactorTensors = 8;

// Throws for what the header forbids.
moec_adapters_desc checked_adapters_desc(const moec_adapters_desc& desc);

// Where a binding lies: kGateUpFactors, kDownFactors and kFactorTensors of each adapter.
struct FactorMemory {
  Factors *gate_up, *down;
  MemorySet set;
};
AdaptersView bind_adapters(const Context& context, const moec_adapters_desc& desc,
                           const moec_adapter* list, int32_t count, FactorMemory& memory);
// Gradients of factors bound as `values`: each may be absent, of its type or f32.
AdaptersView bind_adapter_gradients(const Context& context, const moec_adapters_desc& desc,
                                    const moec_adapter* list, int32_t count,
                                    const AdaptersView& values, FactorMemory& memory);

}  // namespace moec
