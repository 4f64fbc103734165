// SPDX-License-Identifier: Apache-2.0
#include "layer/adapters_bind.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "core/dtype.h"
#include "core/workspace.h"
#include "layer/context.h"
#include "layer/weights_view.h"

namespace moec {
namespace {

using ll = long long;

struct Name {  // "list[2].gate_up.a"
  char text[48];
  Name(const char* of, int32_t index, const char* matrix, const char* factor) {
    std::snprintf(text, sizeof text, "%s[%d].%s%s", of, index, matrix, factor);
  }
};

bool are_absent(const moec_factors& f) {
  return is_absent(f.a) && is_absent(f.b) && f.scale == 0 && !f.reserved;
}

// Elements from the first to the last; E_LAYOUT for negative strides, and for an output where two
// elements may share a place.
int64_t checked_span(const char* name, const moec_tensor& t, bool is_written) {
  struct Dim {
    int64_t stride, extent;
  } dims[3];
  int64_t span = 1;
  for (int i = 0; i < 3; ++i) {
    dims[i] = {t.strides[i], t.shape[i]};
    MOEC_REQUIRE(dims[i].stride >= 0, MOEC_E_LAYOUT, "%s.strides[%d] is %lld; expected 0 or more",
                 name, i, ll(dims[i].stride));
    span += checked_product(name, dims[i].stride, dims[i].extent - 1);
    MOEC_REQUIRE(span > 0, MOEC_E_OVERFLOW, "%s spans more than 2^63 elements", name);
  }
  checked_product(name, span, dtype_bytes(t.dtype));
  if (!is_written) return span;
  std::sort(dims, dims + 3, [](const Dim& a, const Dim& b) { return a.stride < b.stride; });
  int64_t within = 1;  // elements that the dimensions before lie within
  for (const Dim& dim : dims) {
    if (dim.extent == 1) continue;
    MOEC_REQUIRE(dim.stride >= within, MOEC_E_LAYOUT,
                 "%s has strides [%lld,%lld,%lld] for shape [%lld,%lld,%lld]; expected a place for "
                 "each element",
                 name, ll(t.strides[0]), ll(t.strides[1]), ll(t.strides[2]), ll(t.shape[0]),
                 ll(t.shape[1]), ll(t.shape[2]));
    within += dim.stride * (dim.extent - 1);
  }
  return span;
}

class FactorsBinder {
 public:
  // values: null, or what the gradients are of.
  FactorsBinder(const Context& context, const moec_adapters_desc& desc, const AdaptersView* values,
                FactorMemory& memory)
      : context_(context), desc_(desc), values_(values), memory_(memory) {}

  AdaptersView bind(const moec_adapter* list, int32_t count) {
    const int64_t I = desc_.inter, H = desc_.hidden;
    const uint32_t layout = desc_.gate_layout;
    const bool fused = part_rows(layout, I, false).step != 0, plain = layout == MOEC_GATE_NONE;
    view_.num_experts = desc_.num_experts;
    view_.hidden = H;
    view_.inter = I;
    view_.gate_up.first = memory_.gate_up;
    view_.down.first = memory_.down;
    for (int32_t i = 0; i < count; ++i) {
      index_ = i;
      const moec_adapter& from = list[i];
      const PartOfRows whole = {0, 1}, none = {0, 0};
      const auto parts = [&](bool up) { return part_rows(layout, I, up); };
      add("gate_up", from.gate_up, fused, 2 * I, H, {parts(false), parts(true)}, false);
      add("gate", from.gate, !plain, I, H, {whole, none}, false);
      add("up", from.up, true, I, H, {none, whole}, false);
      add("down", from.down, true, H, I, {whole, none}, true);
    }
    memory_.set.sort();
    return view_;
  }

 private:
  struct Parts {
    PartOfRows of[2];
  };

  void add(const char* matrix, const moec_factors& from, bool exists, int64_t N, int64_t K,
           const Parts& parts, bool down) {
    const char* const of = values_ ? "d_adapters" : "list";
    const Name name(of, index_, matrix, "");
    MOEC_REQUIRE(exists || are_absent(from), MOEC_E_INVALID_ARG,
                 "%s is given; gate_layout %u has no such matrix", name.text, desc_.gate_layout);
    FactorList& list = down ? view_.down : view_.gate_up;
    const Factors* bound = nullptr;
    if (values_) {
      const FactorList& all = down ? values_->down : values_->gate_up;
      const Factors* const next = all.first + list.count;
      const bool same = list.count < all.count && next->adapter == index_ &&
                        next->b[0].present() == (parts.of[0].step != 0) &&
                        next->b[1].present() == (parts.of[1].step != 0);
      MOEC_REQUIRE(same || are_absent(from), MOEC_E_INVALID_ARG,
                   "%s is given; the bound adapter has no such factors", name.text);
      if (!same) return;
      bound = next;
    } else if (are_absent(from)) {
      return;
    }
    Factors& to = (down ? memory_.down : memory_.gate_up)[list.count++];
    to = {};
    to.adapter = index_;
    check_scale(name.text, from);
    to.rank = bound ? bound->rank : rank_of(Name(of, index_, matrix, ".a").text, from.a);
    to.scale = from.scale;
    to.one_for_all = bound ? bound->one_for_all : is_one_for_all(from.a);
    const bool one = to.one_for_all;
    to.a = factor(Name(of, index_, matrix, ".a").text, from.a, one, to.rank, K,
                  bound ? bound->a.dtype : 0);
    const ExpertMatrix b = factor(Name(of, index_, matrix, ".b").text, from.b, false, N, to.rank,
                                  bound ? bound->b[bound->b[0].present() ? 0 : 1].dtype : 0);
    for (int i = 0; i < 2; ++i) {
      if (!parts.of[i].step || !b.present()) continue;
      to.b[i] = b;
      to.b[i].values = b.values.from(parts.of[i].first * b.row_stride);
      to.b[i].row_stride *= parts.of[i].step;
    }
    list.rank = int64_t(round_up(uint64_t(exact_[down] += to.rank), kRankMultiple));
    if (one) list.largest_shared_rank = std::max(list.largest_shared_rank, to.rank);
  }

  void check_scale(const char* name, const moec_factors& from) const {
    MOEC_REQUIRE(!from.reserved, MOEC_E_INVALID_ARG, "%s.reserved is %u; expected 0", name,
                 from.reserved);
    MOEC_REQUIRE(!values_ || from.scale == 0, MOEC_E_INVALID_ARG,
                 "%s.scale is %g; expected 0, of a gradient", name, double(from.scale));
    MOEC_REQUIRE(values_ || (std::isfinite(from.scale) && from.scale != 0), MOEC_E_INVALID_ARG,
                 "%s.scale is %g; expected a finite number that is not 0, such as alpha / rank",
                 name, double(from.scale));
  }

  bool is_one_for_all(const moec_tensor& a) const {
    const bool compact = !a.strides[0] && !a.strides[1] && !a.strides[2];
    return desc_.num_experts > 1 && (a.shape[0] == 1 || (!compact && a.strides[0] == 0));
  }

  static int64_t rank_of(const char* name, const moec_tensor& a) {
    MOEC_REQUIRE(!is_absent(a), MOEC_E_INVALID_ARG, "%s is absent; it is required", name);
    MOEC_REQUIRE(a.ndim == 3, MOEC_E_SHAPE, "%s has %d dimensions; expected 3", name, a.ndim);
    MOEC_REQUIRE(a.shape[1] >= 1 && a.shape[1] <= kMostRank, MOEC_E_SHAPE,
                 "%s has rank %lld (shape[1]); expected 1 to %lld", name, ll(a.shape[1]),
                 ll(kMostRank));
    return a.shape[1];
  }

  // [E,n,k] of any strides, or [1,n,k] of all experts. value_dtype: of a gradient's factor.
  ExpertMatrix factor(const char* name, const moec_tensor& from, bool one, int64_t n, int64_t k,
                      moec_dtype value_dtype) {
    if (values_ && is_absent(from)) return {};
    moec_tensor t = from;
    const int64_t experts = one && from.shape[0] == 1 ? 1 : desc_.num_experts;
    std::fill(t.strides, t.strides + MOEC_MAX_DIMS, 0);
    const Array array =
        value_dtype ? checked_array(name, t, {experts, n, k}, {value_dtype, MOEC_F32}, context_)
                    : checked_array(name, t, {experts, n, k}, kReal, context_);
    const bool compact = !from.strides[0] && !from.strides[1] && !from.strides[2];
    const int64_t lines[3] = {n * k, k, 1};
    for (int i = 0; i < 3; ++i) t.strides[i] = compact ? lines[i] : from.strides[i];
    MOEC_REQUIRE(!one || experts == 1 || t.strides[0] == 0, MOEC_E_LAYOUT,
                 "%s.strides[0] is %lld; expected 0, as the bound factor of all experts has", name,
                 ll(t.strides[0]));
    if (one) t.shape[0] = 1;  // no place of its own for each expert
    const int64_t span = checked_span(name, t, values_ != nullptr);
    memory_.set.add(array.data, uint64_t(span * dtype_bytes(t.dtype)));
    ExpertMatrix to;
    to.values = {array.data, nullptr, one ? 0 : t.strides[0], 0, t.dtype};
    to.dtype = t.dtype;
    to.row_stride = t.strides[1];
    to.col_stride = t.strides[2];
    return to;
  }

  const Context& context_;
  const moec_adapters_desc& desc_;
  const AdaptersView* const values_;
  FactorMemory& memory_;
  AdaptersView view_;
  int32_t index_ = 0;
  int64_t exact_[2] = {};  // ranks so far, of gate and up, and of down
};

}  // namespace

moec_adapters_desc checked_adapters_desc(const moec_adapters_desc& desc) {
  check_flags("desc.flags", desc.flags, 0);
  check_at_least("desc.num_experts", desc.num_experts, 1);
  check_enum("desc.gate_layout", desc.gate_layout, MOEC_GATE_NONE);
  check_at_least("desc.hidden", desc.hidden, 1);
  check_at_least("desc.inter", desc.inter, 1);
  // Copies of all adapters of the largest rank keep their bytes in 63 bits.
  const int64_t ranks = int64_t(kMostAdapters) * kGateUpFactors * kMostRank * 8;
  for (const int64_t width : {desc.hidden, desc.inter})
    checked_product("num_experts * ranks * width",
                    checked_product("num_experts * ranks", desc.num_experts, ranks), width);
  return desc;
}

AdaptersView bind_adapters(const Context& context, const moec_adapters_desc& desc,
                           const moec_adapter* list, int32_t count, FactorMemory& memory) {
  return FactorsBinder(context, desc, nullptr, memory).bind(list, count);
}

AdaptersView bind_adapter_gradients(const Context& context, const moec_adapters_desc& desc,
                                    const moec_adapter* list, int32_t count,
                                    const AdaptersView& values, FactorMemory& memory) {
  return FactorsBinder(context, desc, &values, memory).bind(list, count);
}

}  // namespace moec
