// SPDX-License-Identifier: Apache-2.0
// What routing forward and backward share: the scratch of one token, and step R2.
#pragma once

#include <utility>

#include "backend/cpu/ops.h"
#include "backend/cpu/score_row.h"

namespace moec::cpu {

inline constexpr int64_t kRouteTokens = 16;  // least number of tokens per parallel piece

// Scratch of one token. columns C = E+Z, lanes = C rounded up to 32.
struct RouteRow {
  int64_t columns, lanes;
  float *z, *s, *d;     // [lanes] capped logits, scores, gradient at one of them
  int64_t* keys;        // [lanes]
  int64_t* group_keys;  // [num_groups]
  int64_t* best;        // [key_blocks(lanes)]
  int32_t* ids;         // [K]
  float *w, *d_w;       // [K]
};

struct RowMemory {
  alignas(kCacheLine) char bytes[24 << 10];  // rows of usual size stay on the stack
};

// Scratch rows of all threads; only rows too large for RowMemory come from the context.
class RouteRows {
 public:
  RouteRows(const Device& device, const moec_router_desc& desc)
      : desc_(desc),
        bytes_(layout(desc, nullptr).second),
        scratch_(device, scratch_bytes(device, desc)) {}

  // What the constructor acquires.
  static uint64_t scratch_bytes(const Device& device, const moec_router_desc& desc) {
    const uint64_t bytes = layout(desc, nullptr).second;
    return bytes <= sizeof(RowMemory) ? 0 : bytes * uint64_t(device.pool.size());
  }
  int64_t columns() const { return columns(desc_); }
  RouteRow row(int32_t slot, RowMemory& memory) const {
    char* const shared = static_cast<char*>(scratch_.data());
    return layout(desc_, shared ? shared + uint64_t(slot) * bytes_ : memory.bytes).first;
  }

 private:
  static int64_t columns(const moec_router_desc& desc) {
    return int64_t(desc.num_experts) + desc.num_zero_experts;
  }
  static std::pair<RouteRow, uint64_t> layout(const moec_router_desc& desc, char* memory) {
    RouteRow row = {};
    row.columns = columns(desc);
    row.lanes = padded_columns(row.columns);
    uint64_t used = 0;
    const auto place = [&]<class T>(T*& pointer, int64_t count) {
      pointer = memory ? reinterpret_cast<T*>(memory + used) : nullptr;
      used += round_up(uint64_t(count) * sizeof(T), kCacheLine);
    };
    place(row.z, row.lanes);
    place(row.s, row.lanes);
    place(row.d, row.lanes);
    place(row.keys, row.lanes);
    place(row.group_keys, desc.num_groups);
    place(row.best, key_blocks(row.lanes));
    place(row.ids, desc.top_k);
    place(row.w, desc.top_k);
    place(row.d_w, desc.top_k);
    return {row, used};
  }

  const moec_router_desc& desc_;
  uint64_t bytes_;
  Scratch scratch_;
};

// R2
inline void load_capped_row(const moec_router_desc& desc, const Array& logits, int64_t t,
                            const RouteRow& row) {
  load_row(logits, t, row.columns, row.z);
  if (desc.logit_softcap == 0.0f) return;
  for (int64_t i = 0; i < row.columns; ++i) row.z[i] = math::softcap(row.z[i], desc.logit_softcap);
}

}  // namespace moec::cpu
