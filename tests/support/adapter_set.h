// SPDX-License-Identifier: Apache-2.0
// The oracle's adapters as moec.h takes them, in several ways of storage, and their gradients back.
#pragma once

#include <vector>

#include "oracle/moe_oracle.h"
#include "tensors.h"

namespace moec::test {

enum class FactorStorage {
  kCompact,  // [E,N,K]
  kPeft,     // A compact; of B element (e, n, j) at (n r + j) E + e
  kTurned,   // [E,K,N]
  kGaps,     // rows of more elements than they have
};
struct AdapterLayout {
  uint32_t gate_layout = MOEC_GATE_SPLIT;
  // gate and up have one A: they are bound as gate_up, in the order of gate_layout. The gradient of
  // that A is read back as gate's, and up's is zeros.
  bool fused = false;
  bool one_for_all = false;  // every expert has the A of the first, bound once
  FactorStorage storage = FactorStorage::kCompact;
  moec_dtype dtype = MOEC_F32;
};

class AdapterSet {
 public:
  // before: gradients, which hold this value; null: the values.
  AdapterSet(const std::vector<oracle::Adapter>& values, int experts, int hidden, int inter,
             const AdapterLayout& layout, const double* before = nullptr);
  moec_adapters_desc desc() const;
  const std::vector<moec_adapter>& list() const { return list_; }
  // less: what is taken off each value.
  std::vector<oracle::Adapter> read(double less = 0) const;
  std::vector<uint8_t> bytes() const;
  // Elements between those of the tensors, and memory beside them, are as they were.
  bool neighbours_untouched() const;

 private:
  struct Stored {  // one tensor: its memory, and the place of each canonical element
    moec_tensor memory{};
    std::vector<size_t> place;
  };
  moec_tensor tensor(const oracle::Vec& values, int64_t experts, int64_t n, int64_t k, bool is_b,
                     Stored* stored);
  oracle::Vec values_of(const Stored& stored, double less) const;
  moec_factors factors(const oracle::Factors& from, int64_t n, int64_t k, Stored* stored);

  int experts_, hidden_, inter_;
  AdapterLayout layout_;
  const double* before_;
  double before_value_ = 0;
  Tensors tensors_;
  std::vector<oracle::Adapter> shapes_;
  std::vector<std::vector<Stored>> stored_;  // of each adapter: a, b of gate (or both), up, down
  std::vector<moec_adapter> list_;
};

}  // namespace moec::test
