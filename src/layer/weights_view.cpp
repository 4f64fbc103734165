// SPDX-License-Identifier: Apache-2.0
#include "layer/weights_view.h"

#include "core/dtype.h"

namespace moec {
namespace {

constexpr int64_t kPackedExtent = 64;  // no pack rounds extents further

// Binds the matrices of one set, each checked against its shape [El,N,K] or [El,K,N].
struct Binder {
  const Context& context;
  const moec_weights_desc& desc;
  const bool gradients;
  void** pointers;
  MemorySet memory;

  int64_t inter() const { return desc.inter; }
  int64_t hidden() const { return desc.hidden; }
  int64_t local() const { return desc.num_experts; }

  Array tensor(const char* name, const moec_tensor& from, Shape shape, moec_dtype dtype) {
    const Array array = gradients ? checked_array(name, from, shape, {dtype, MOEC_F32}, context)
                                  : checked_array(name, from, shape, {dtype}, context);
    memory.add(array.data, uint64_t(tensor_numel(from) * dtype_bytes(from.dtype)));
    return array;
  }

  // `count` tensors of one shape: their addresses go to `pointers`. All have one dtype.
  void* const* each(const char* name, const moec_tensor* from, Shape shape, moec_dtype dtype,
                    moec_dtype& found) {
    void** const begin = pointers;
    for (int64_t e = 0; e < local(); ++e) {
      const Array array = tensor(name, from[e], shape, e ? found : dtype);
      MOEC_REQUIRE(e == 0 || array.dtype == found, MOEC_E_DTYPE,
                   "%s has %s for expert %lld; expected %s as for expert 0", name,
                   dtype_name(array.dtype), static_cast<long long>(e), dtype_name(found));
      found = array.dtype;
      *pointers++ = array.data;
    }
    return begin;
  }

  ExpertMatrix matrix(const char* name, const moec_matrix& from, int64_t N, int64_t K,
                      uint32_t orientation) {
    const bool has_data = !is_absent(from.data), has_bias = !is_absent(from.bias);
    const bool arrays = from.per_expert || from.per_expert_bias;
    MOEC_REQUIRE(!(has_data && from.per_expert) && !(has_bias && from.per_expert_bias),
                 MOEC_E_INVALID_ARG, "%s is given twice, stacked and per expert; give one of them",
                 name);
    MOEC_REQUIRE(from.count == (arrays ? local() : 0), MOEC_E_INVALID_ARG,
                 "%s.count is %lld; expected %lld", name, static_cast<long long>(from.count),
                 static_cast<long long>(arrays ? local() : 0));
    MOEC_REQUIRE(gradients || has_data || from.per_expert, MOEC_E_INVALID_ARG,
                 "%s is absent; this gate_layout needs it", name);
    const bool out_in = orientation == MOEC_OUT_IN;
    const int64_t rows = out_in ? N : K, cols = out_in ? K : N;
    ExpertMatrix to;
    to.expert_stride = N * K;
    to.row_stride = out_in ? K : 1;
    to.col_stride = out_in ? 1 : N;
    to.bias_expert_stride = N;
    if (has_data) {
      const Array array = tensor(name, from.data, {local(), rows, cols}, desc.dtype);
      to.base = array.data;
      to.dtype = array.dtype;
    } else if (from.per_expert) {
      to.pointers = each(name, from.per_expert, {rows, cols}, desc.dtype, to.dtype);
    }
    if (has_bias) {
      const Array array = tensor("bias", from.bias, {local(), N}, desc.bias_dtype);
      to.bias_base = array.data;
      to.bias_dtype = array.dtype;
    } else if (from.per_expert_bias) {
      to.bias_pointers =
          each("per_expert_bias", from.per_expert_bias, {N}, desc.bias_dtype, to.bias_dtype);
    }
    return to;
  }

  void refuse(const char* name, const moec_matrix& from) const {
    const bool given = !is_absent(from.data) || !is_absent(from.bias) || from.per_expert ||
                       from.per_expert_bias || from.count;
    MOEC_REQUIRE(!given, MOEC_E_INVALID_ARG, "%s is given; gate_layout %u has no such matrix", name,
                 desc.gate_layout);
  }
};

// Rows first, first + step, ... of a matrix.
ExpertMatrix part(ExpertMatrix whole, int64_t first, int64_t step) {
  const int64_t offset = first * whole.row_stride;
  if (whole.base) whole.base = static_cast<char*>(whole.base) + offset * dtype_bytes(whole.dtype);
  if (whole.bias_base)
    whole.bias_base = static_cast<char*>(whole.bias_base) + first * dtype_bytes(whole.bias_dtype);
  whole.pointer_offset = offset;
  whole.bias_pointer_offset = first;
  whole.row_stride *= step;
  whole.bias_stride = step;
  return whole;
}

struct Concatenation {  // of gate and up rows in gate_up, in units of I rows or of 1
  int64_t gate_halves, up_halves, gate_row, up_row, step;
};

const Concatenation* concatenation(uint32_t gate_layout) {
  static constexpr Concatenation kThenUp = {0, 1, 0, 0, 1}, kThenGate = {1, 0, 0, 0, 1},
                                 kInterleaved = {0, 0, 0, 1, 2};
  switch (gate_layout) {
    case MOEC_GATE_THEN_UP:
      return &kThenUp;
    case MOEC_UP_THEN_GATE:
      return &kThenGate;
    case MOEC_GATE_INTERLEAVED:
      return &kInterleaved;
    default:
      return nullptr;
  }
}

WeightsView empty_view(const moec_weights_desc& desc) {
  WeightsView view;
  view.hidden = desc.hidden;
  view.inter = desc.inter;
  view.num_experts = desc.num_experts;
  view.gated = desc.gate_layout != MOEC_GATE_NONE;
  return view;
}

BoundWeights bind(Binder binder, const moec_weight_set& set) {
  const int64_t I = binder.inter(), H = binder.hidden();
  const moec_weights_desc& desc = binder.desc;
  WeightsView view = empty_view(desc);
  if (const Concatenation* const c = concatenation(desc.gate_layout)) {
    binder.refuse("gate", set.gate);
    binder.refuse("up", set.up);
    const ExpertMatrix both =
        binder.matrix("gate_up", set.gate_up, 2 * I, H, desc.gate_up_orientation);
    view.gate = part(both, c->gate_halves * I + c->gate_row, c->step);
    view.up = part(both, c->up_halves * I + c->up_row, c->step);
  } else {
    binder.refuse("gate_up", set.gate_up);
    if (!view.gated)
      binder.refuse("gate", set.gate);
    else
      view.gate = binder.matrix("gate", set.gate, I, H, desc.gate_up_orientation);
    view.up = binder.matrix("up", set.up, I, H, desc.gate_up_orientation);
  }
  view.down = binder.matrix("down", set.down, H, I, desc.down_orientation);
  binder.memory.sort();
  return {view, binder.memory};
}

void check_bias_gradient(const char* name, const ExpertMatrix& gradient,
                         const ExpertMatrix& value) {
  MOEC_REQUIRE(!gradient.has_bias() || value.has_bias(), MOEC_E_INVALID_ARG,
               "%s has a bias gradient; the bound weights have no bias there", name);
}

}  // namespace

moec_weights_desc checked_weights_desc(const moec_weights_desc& given) {
  moec_weights_desc desc = given;
  check_flags("desc.flags", desc.flags, MOEC_WEIGHTS_FROZEN);
  check_at_least("desc.num_experts", desc.num_experts, 1);
  check_enum("desc.gate_layout", desc.gate_layout, MOEC_GATE_NONE);
  check_at_least("desc.hidden", desc.hidden, 1);
  check_at_least("desc.inter", desc.inter, 1);
  check_enum("desc.gate_up_orientation", desc.gate_up_orientation, MOEC_IN_OUT);
  check_enum("desc.down_orientation", desc.down_orientation, MOEC_IN_OUT);
  MOEC_REQUIRE(is_real(desc.dtype), MOEC_E_DTYPE, "desc.dtype is 0x%x; expected f32, f16 or bf16",
               desc.dtype);
  if (desc.bias_dtype == 0) desc.bias_dtype = desc.dtype;
  MOEC_REQUIRE(desc.bias_dtype == desc.dtype || desc.bias_dtype == MOEC_F32, MOEC_E_DTYPE,
               "desc.bias_dtype is 0x%x; expected 0, %s or f32", desc.bias_dtype,
               dtype_name(desc.dtype));
  for (const uint32_t scheme : {desc.gate_up_scheme, desc.down_scheme})
    MOEC_REQUIRE(scheme == MOEC_SCHEME_NONE, MOEC_E_UNSUPPORTED,
                 "the scheme is %u; this version has MOEC_SCHEME_NONE (0): f32, f16 and bf16",
                 scheme);
  // As a backend may pack them: extents rounded up, three matrices and their biases.
  const auto padded = [](const char* name, int64_t extent) {
    return checked_product(name, extent / kPackedExtent + 1, kPackedExtent);
  };
  const int64_t matrix = checked_product(
      "4 * inter * hidden", checked_product("4 * inter", 4, padded("inter", desc.inter)),
      padded("hidden", desc.hidden));
  const int64_t elements =
      checked_product("num_experts * 4 * inter * hidden", desc.num_experts, matrix);
  checked_product("bytes of the weights", elements, 4);
  return desc;
}

int64_t binding_entries(const moec_weight_set& set, int64_t num_experts) {
  int64_t entries = 0;
  for (const moec_matrix* matrix : {&set.gate_up, &set.gate, &set.up, &set.down}) {
    const int64_t each = matrix->count == num_experts ? num_experts : 1;  // another is refused
    entries += (matrix->per_expert ? each : 1) + (matrix->per_expert_bias ? each : 1);
  }
  return entries;
}

BoundWeights bind_weights(const Context& context, const moec_weights_desc& desc,
                          const moec_weight_set& set, void** pointers, MemoryBlock* blocks) {
  check_flags("set.flags", set.flags, 0);
  return bind({context, desc, false, pointers, {"weights", blocks}}, set);
}

BoundWeights bind_gradients(const Context& context, const moec_weights_desc& desc,
                            const moec_weight_set& set, const WeightsView& values, const char* name,
                            void** pointers, MemoryBlock* blocks) {
  check_flags("gradient set.flags", set.flags, 0);
  const BoundWeights bound = bind({context, desc, true, pointers, {name, blocks}}, set);
  check_bias_gradient("gate", bound.view.gate, values.gate);
  check_bias_gradient("up", bound.view.up, values.up);
  check_bias_gradient("down", bound.view.down, values.down);
  return bound;
}

WeightsView unbound_view(const moec_weights_desc& desc, bool gate_bias, bool up_bias,
                         bool down_bias) {
  static char nowhere;  // never read: source_present is false
  const int64_t I = desc.inter, H = desc.hidden;
  const auto matrix = [&](int64_t N, int64_t K, bool bias) {
    ExpertMatrix to;
    to.base = &nowhere;
    to.dtype = desc.dtype;
    to.expert_stride = N * K;
    to.row_stride = K;
    to.col_stride = 1;
    to.bias_dtype = bias ? desc.bias_dtype : 0;
    to.bias_base = bias ? &nowhere : nullptr;
    to.bias_expert_stride = N;
    return to;
  };
  WeightsView view = empty_view(desc);
  if (view.gated) view.gate = matrix(I, H, gate_bias);
  view.up = matrix(I, H, up_bias);
  view.down = matrix(H, I, down_bias);
  view.source_present = false;
  return view;
}

}  // namespace moec
