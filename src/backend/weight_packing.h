// SPDX-License-Identifier: Apache-2.0
// A copy of frozen weights in a device's own layout, or of codes as they are, which calls read
// instead of what was bound.
#pragma once

#include <string>

#include "backend/weights.h"

namespace moec {

class WeightPacking {
 public:
  virtual ~WeightPacking() = default;
  virtual bool takes(const WeightsView& weights) const = 0;  // false: these have no packed form
  virtual uint64_t bytes(
      const WeightsView& weights) const = 0;  // 0: not known before they are bound
  // Names layout, types and formats.
  virtual std::string format(const WeightsView& weights) const = 0;
  // Experts [first, first + count) into a copy of all of them.
  virtual void pack(const WeightsView& weights, void* to, int32_t first, int32_t count,
                    moec_stream stream) const = 0;
  // How weights are read once `packed` holds their copy of at most `bytes`. head: the same bytes as
  // the host reads them; null: those that pack() makes of `weights`.
  virtual WeightsView view(const WeightsView& weights, const void* head, const void* packed,
                           uint64_t bytes) const = 0;
  // The tensors of packed weights to those of `to`, bound like them.
  virtual void unpack(const WeightsView& packed, const WeightsView& to,
                      moec_stream stream) const = 0;
};

}  // namespace moec
