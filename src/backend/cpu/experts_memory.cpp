// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/experts_memory.h"

#include "backend/cpu/gemm.h"
#include "backend/cpu/ops.h"
#include "core/dtype.h"
#include "math/activation.h"

namespace moec::cpu {
namespace {

// Number of rows of a region: base + T * per_token.
struct Extent {
  uint64_t base, per_token;
};

Extent routed_rows(const moec_experts_desc& desc) {
  const auto padding = uint64_t(desc.expert_end - desc.expert_begin) * uint64_t(desc.align - 1);
  return {uint64_t(desc.max_rows_base) + padding, uint64_t(desc.top_k)};
}
constexpr Extent kTokens = {0, 1};

void* take(Arena& arena, Extent rows, int64_t width, int64_t element_bytes) {
  const auto bytes = uint64_t(width * element_bytes);
  return arena.take(rows.base * bytes, rows.per_token * bytes);
}
float* take_floats(Arena& arena, Extent rows, int64_t width) {
  return static_cast<float*>(take(arena, rows, width, sizeof(float)));
}

Hidden take_hidden(Arena& arena, Extent rows, int64_t width, int64_t size, bool gated) {
  Hidden hidden;
  if (gated) hidden.gate = take(arena, rows, width, size);
  hidden.up = take(arena, rows, width, size);
  hidden.act = take(arena, rows, width, size);
  return hidden;
}
Preact take_preact(Arena& arena, Extent rows, int64_t width, bool gated) {
  Preact preact;
  if (gated) preact.gate = take(arena, rows, width, sizeof(float));
  preact.up = take(arena, rows, width, sizeof(float));
  return preact;
}

bool is_gated(const moec_experts_desc& desc) {
  return desc.gate_layout != MOEC_GATE_NONE;
}
bool has_shared(const moec_experts_desc& desc) {
  return desc.shared != MOEC_SHARED_NONE;
}

void* take_products(Arena& arena, int32_t num_threads) {
  return arena.take(uint64_t(gemm_scratch_bytes(num_threads)), 0);
}

}  // namespace

bool is_mixed(const moec_experts_desc& desc) {
  return desc.shared >= MOEC_SHARED_SIGMOID_GATE;
}
bool is_shared_gated(const moec_experts_desc& desc) {
  return math::activation_info(desc.shared_activation.kind).gated;
}

SavedMemory lay_out_saved(const moec_experts_desc& desc, Arena& arena) {
  SavedMemory saved;
  if (desc.save < MOEC_SAVE_PREACT) return saved;
  saved.routed = take_preact(arena, routed_rows(desc), desc.inter, is_gated(desc));
  if (has_shared(desc))
    saved.shared = take_preact(arena, kTokens, desc.shared_inter, is_shared_gated(desc));
  return saved;
}

ForwardMemory lay_out_forward(const moec_experts_desc& desc, int32_t num_threads, Arena& arena) {
  const Extent rows = routed_rows(desc);
  const int64_t size = dtype_bytes(desc.dtype);
  ForwardMemory m;
  m.products = take_products(arena, num_threads);
  if (desc.weight_position == MOEC_WEIGHT_ON_INPUT)
    m.scaled_x = take(arena, rows, desc.hidden, size);
  m.out = take_floats(arena, rows, desc.hidden);
  m.act = take(arena, rows, desc.inter, size);
  if (has_shared(desc)) m.shared_act = take(arena, kTokens, desc.shared_inter, size);
  if (is_mixed(desc)) m.mix = take_floats(arena, kTokens, 2);
  return m;
}

BackwardMemory lay_out_backward(const moec_experts_desc& desc, int32_t num_threads, Arena& arena) {
  const Extent rows = routed_rows(desc);
  const int64_t size = dtype_bytes(desc.dtype);
  BackwardMemory m;
  m.products = take_products(arena, num_threads);
  m.routed = take_hidden(arena, rows, desc.inter, size, is_gated(desc));
  if (desc.save == MOEC_SAVE_INPUT) m.preact = take_preact(arena, rows, desc.inter, is_gated(desc));
  m.d_rows = take_floats(arena, rows, desc.hidden);
  m.factor = take_floats(arena, rows, 1);
  m.dots = take_floats(arena, rows, dot_columns(desc.inter));
  if (desc.weight_position == MOEC_WEIGHT_ON_INPUT) {
    m.scaled_x = take(arena, rows, desc.hidden, size);
    m.input_dots = take_floats(arena, rows, dot_columns(desc.hidden));
  }
  if (has_shared(desc)) {
    m.shared = take_hidden(arena, kTokens, desc.shared_inter, size, is_shared_gated(desc));
    if (desc.save == MOEC_SAVE_INPUT)
      m.shared_preact = take_preact(arena, kTokens, desc.shared_inter, is_shared_gated(desc));
    m.shared_factor = take_floats(arena, kTokens, 1);
    m.shared_dots = take_floats(arena, kTokens, dot_columns(desc.shared_inter));
  }
  if (is_mixed(desc)) {
    m.mix = take_floats(arena, kTokens, 2);
    m.d_logits = take_floats(arena, kTokens, 2);
  }
  return m;
}

Backend::Sizes experts_sizes(const Device& device, const moec_experts_desc& desc) {
  Arena forward, backward, saved;
  lay_out_forward(desc, device.pool.size(), forward);
  lay_out_backward(desc, device.pool.size(), backward);
  lay_out_saved(desc, saved);
  return {forward.size(), backward.size(), saved.size()};
}

}  // namespace moec::cpu
