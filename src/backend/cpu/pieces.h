// SPDX-License-Identifier: Apache-2.0
// Items of one size each, such as rows, in parallel pieces.
#pragma once

#include <algorithm>

#include "backend/cpu/ops.h"
#include "core/chunks.h"

namespace moec::cpu {

constexpr int64_t kPieceBytes = 64 << 10;  // least work of a parallel piece

// body(first, last) over [0, items), in pieces of about kPieceBytes.
template <class Body>
void for_ranges(const Device& device, int64_t items, int64_t item_bytes, Body&& body) {
  const Chunks chunks(items, std::max<int64_t>(1, kPieceBytes / std::max<int64_t>(item_bytes, 1)));
  device.pool.parallel_for(
      chunks.count, [&](int32_t, int64_t chunk) { body(chunks.begin(chunk), chunks.end(chunk)); });
}

}  // namespace moec::cpu
