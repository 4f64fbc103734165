// SPDX-License-Identifier: Apache-2.0
#include "layer/weights_view.h"

#include "core/dtype.h"
#include "core/workspace.h"
#include "layer/quant_bind.h"

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

  Array tensor(const char* name, const moec_tensor& from, Shape shape, Dtypes dtypes) {
    const Array array = checked_array(name, from, shape, dtypes, context);
    memory.add(array.data, uint64_t(tensor_numel(from) * dtype_bytes(from.dtype)));
    return array;
  }
  // Gradients have the type of the values or f32.
  Array tensor(const char* name, const moec_tensor& from, Shape shape, moec_dtype dtype) {
    return gradients ? tensor(name, from, shape, {dtype, MOEC_F32})
                     : tensor(name, from, shape, {dtype});
  }

  // `count` tensors of one shape: their addresses go to `pointers`. All have one dtype.
  template <class Types>
  void* const* each(const char* name, const moec_tensor* from, Shape shape, Types types,
                    moec_dtype& found) {
    void** const begin = pointers;
    for (int64_t e = 0; e < local(); ++e) {
      const Array array =
          e ? tensor(name, from[e], shape, {found}) : tensor(name, from[e], shape, types);
      found = array.dtype;
      *pointers++ = array.data;
    }
    return begin;
  }

  // Stacked [E, extent 0, extent 1], or as tensors of one expert each; without `rank 2` [E, extent
  // 0].
  template <class Types>
  ExpertArray array(const char* name, const moec_tensor& stacked, const moec_tensor* per_expert,
                    int64_t rows, int64_t cols, int rank, Types types) {
    ExpertArray to;
    to.expert_stride = rows * cols;
    if (per_expert) {
      to.pointers = rank == 2 ? each(name, per_expert, {rows, cols}, types, to.dtype)
                              : each(name, per_expert, {rows}, types, to.dtype);
      return to;
    }
    if (is_absent(stacked)) return to;
    const Array found = rank == 2 ? tensor(name, stacked, {local(), rows, cols}, types)
                                  : tensor(name, stacked, {local(), rows}, types);
    to.base = found.data;
    to.dtype = found.dtype;
    return to;
  }

  // `parts`: 2 where the rows are those of gate and of up.
  ExpertMatrix matrix(const char* name, const moec_matrix& from, int64_t N, int64_t K,
                      uint32_t orientation, uint32_t scheme, int parts = 1) {
    const bool has_data = !is_absent(from.data), has_bias = !is_absent(from.bias);
    const bool arrays = from.per_expert || from.per_expert_bias;
    MOEC_REQUIRE(!(has_data && from.per_expert) && !(has_bias && from.per_expert_bias),
                 MOEC_E_INVALID_ARG, "%s is given twice, stacked and per expert; give one of them",
                 name);
    const bool coded = scheme != MOEC_SCHEME_NONE, out_in = orientation == MOEC_OUT_IN;
    MOEC_REQUIRE(!from.quant || (coded && !gradients), MOEC_E_INVALID_ARG,
                 "%s.quant is given; expected NULL for %s", name,
                 gradients ? "a gradient" : "MOEC_SCHEME_NONE");
    const bool quant_arrays = from.quant && has_arrays(*from.quant);
    MOEC_REQUIRE(from.count == (arrays || quant_arrays ? local() : 0), MOEC_E_INVALID_ARG,
                 "%s.count is %lld; expected %lld", name, static_cast<long long>(from.count),
                 static_cast<long long>(arrays || quant_arrays ? local() : 0));
    MOEC_REQUIRE(gradients || has_data || from.per_expert, MOEC_E_INVALID_ARG,
                 "%s is absent; this gate_layout needs it", name);
    MOEC_REQUIRE(!coded || !gradients || (!has_data && !from.per_expert), MOEC_E_UNSUPPORTED,
                 "the gradient of %s is asked for, whose scheme is %s; quantised matrices are "
                 "frozen: leave it absent",
                 name, coded ? quant::find_format(scheme)->name : "none");
    const int64_t rows = out_in ? N : K, cols = out_in ? K : N;
    ExpertMatrix to;
    to.row_stride = out_in ? K : 1;
    to.col_stride = out_in ? 1 : N;
    if (coded) {
      to.dtype = desc.dtype;
      if (!gradients)
        bind_codes({context, local(), pointers, memory},
                   {name, *quant::find_format(scheme), N, K, out_in}, parts, from, to);
    } else {
      to.values = array(name, from.data, from.per_expert, rows, cols, 2, desc.dtype);
      to.dtype = to.values.dtype;
    }
    to.bias = array(from.per_expert_bias ? "per_expert_bias" : "bias", from.bias,
                    from.per_expert_bias, N, 1, 1, desc.bias_dtype);
    return to;
  }

  void refuse(const char* name, const moec_matrix& from) const {
    const bool given = !is_absent(from.data) || !is_absent(from.bias) || from.per_expert ||
                       from.per_expert_bias || from.count || from.quant;
    MOEC_REQUIRE(!given, MOEC_E_INVALID_ARG, "%s is given; gate_layout %u has no such matrix", name,
                 desc.gate_layout);
  }
};

// Part `index` of a matrix.
ExpertMatrix part(ExpertMatrix whole, const PartOfRows& rows, int index) {
  const auto [first, step] = rows;
  if (!whole.is_coded() || quant::is_bytes(*quant::find_format(whole.scheme))) {
    whole.values = whole.values.from(first * whole.row_stride);
    whole.row_stride *= step;
  }
  whole.rows = whole.rows.part(first, step);
  if (whole.scales2.expert_stride == 2) whole.scales2 = whole.scales2.from(index);
  whole.bias = whole.bias.from(first);
  whole.bias_stride = step;
  return whole;
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
  const uint32_t up_scheme = desc.gate_up_scheme;
  WeightsView view = empty_view(desc);
  const auto rows_of = [&](bool up) { return part_rows(desc.gate_layout, I, up); };
  if (rows_of(false).step) {
    binder.refuse("gate", set.gate);
    binder.refuse("up", set.up);
    const ExpertMatrix both =
        binder.matrix("gate_up", set.gate_up, 2 * I, H, desc.gate_up_orientation, up_scheme, 2);
    view.gate = part(both, rows_of(false), 0);
    view.up = part(both, rows_of(true), 1);
  } else {
    binder.refuse("gate_up", set.gate_up);
    if (!view.gated)
      binder.refuse("gate", set.gate);
    else
      view.gate = binder.matrix("gate", set.gate, I, H, desc.gate_up_orientation, up_scheme);
    view.up = binder.matrix("up", set.up, I, H, desc.gate_up_orientation, up_scheme);
  }
  view.down = binder.matrix("down", set.down, H, I, desc.down_orientation, desc.down_scheme);
  binder.memory.sort();
  return {view, binder.memory};
}

void check_bias_gradient(const char* name, const ExpertMatrix& gradient,
                         const ExpertMatrix& value) {
  MOEC_REQUIRE(!gradient.has_bias() || value.has_bias(), MOEC_E_INVALID_ARG,
               "%s has a bias gradient; the bound weights have no bias there", name);
}

}  // namespace

PartOfRows part_rows(uint32_t gate_layout, int64_t inter, bool up) {
  switch (gate_layout) {
    case MOEC_GATE_THEN_UP:
      return {up ? inter : 0, 1};
    case MOEC_UP_THEN_GATE:
      return {up ? 0 : inter, 1};
    case MOEC_GATE_INTERLEAVED:
      return {up ? 1 : 0, 2};
    default:
      return {0, 0};
  }
}

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
    MOEC_REQUIRE(scheme == MOEC_SCHEME_NONE || quant::find_format(scheme), MOEC_E_UNSUPPORTED,
                 "the scheme is %u; this version has %s", scheme, scheme_names().c_str());
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

int64_t binding_entries(const moec_weight_set& set, int64_t num_experts, bool gradients) {
  int64_t entries = 0;
  for (const moec_matrix* matrix : {&set.gate_up, &set.gate, &set.up, &set.down}) {
    const int64_t each = matrix->count == num_experts ? num_experts : 1;  // another is refused
    const auto add = [&](const moec_tensor* per_expert) { entries += per_expert ? each : 1; };
    add(matrix->per_expert);
    add(matrix->per_expert_bias);
    if (matrix->quant && !gradients) entries += quant_entries(*matrix->quant, each);
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
  const auto matrix = [&](int64_t N, int64_t K, bool bias, uint32_t scheme) {
    ExpertMatrix to;
    to.values.base = &nowhere;
    to.values.expert_stride = N * K;
    const quant::FormatInfo* const format = quant::find_format(scheme);  // null: plain
    to.values.dtype = format ? *format->code_dtypes.begin() : desc.dtype;
    to.row_stride = K;
    to.col_stride = 1;
    to.dtype = desc.dtype;
    to.scheme = scheme;
    to.scales.block_k = quant::BlockSize::all_of(K);
    if (bias) to.bias = {&nowhere, nullptr, N, 0, desc.bias_dtype};
    return to;
  };
  WeightsView view = empty_view(desc);
  if (view.gated) view.gate = matrix(I, H, gate_bias, desc.gate_up_scheme);
  view.up = matrix(I, H, up_bias, desc.gate_up_scheme);
  view.down = matrix(H, I, down_bias, desc.down_scheme);
  view.source_present = false;
  return view;
}

}  // namespace moec
