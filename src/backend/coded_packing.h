// SPDX-License-Identifier: Apache-2.0
// The packed copy of a device that has no layout of its own: the tensors of codes byte for byte, in
// the form that the CPU has for codes, too, so that their files are the same. Kernels read it as
// stacks that are bound.
#pragma once

#include "backend/backend.h"
#include "backend/weight_packing.h"

namespace moec {

class CodedPacking final : public WeightPacking {
 public:
  explicit CodedPacking(const Backend& backend) : backend_(&backend) {}  // which lives as long

  bool takes(const WeightsView& weights) const override;
  uint64_t bytes(const WeightsView& weights) const override;
  std::string format(const WeightsView& weights) const override;
  void pack(const WeightsView& weights, void* to, int32_t first, int32_t count,
            moec_stream stream) const override;
  WeightsView view(const WeightsView& weights, const void* head, const void* packed,
                   uint64_t bytes) const override;
  void unpack(const WeightsView& packed, const WeightsView& to, moec_stream stream) const override;

 private:
  const Backend* backend_;
};

// How a device packs: by its own layout, or codes alone.
class DevicePacking {
 public:
  explicit DevicePacking(const Backend& backend) : own_(backend.packing()), codes_(backend) {}
  const WeightPacking& get() const { return own_ ? *own_ : codes_; }

 private:
  const WeightPacking* own_;
  CodedPacking codes_;
};

}  // namespace moec
