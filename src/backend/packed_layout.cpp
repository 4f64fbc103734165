// SPDX-License-Identifier: Apache-2.0
#include "backend/packed_layout.h"

#include <algorithm>
#include <utility>

#include "backend/packed_codes.h"
#include "core/workspace.h"
#include "quant/format.h"

namespace moec {
namespace {

const char* scheme_name(const ExpertMatrix& matrix) {
  return matrix.is_coded() ? quant::find_format(matrix.scheme)->name : "plain";
}

}  // namespace

const ExpertMatrix& matrix_of(const WeightsView& w, Part part) {
  return part == Part::kGate ? w.gate : part == Part::kUp ? w.up : w.down;
}
ExpertMatrix& matrix_of(WeightsView& w, Part part) {
  return const_cast<ExpertMatrix&>(matrix_of(std::as_const(w), part));
}

bool keeps_bias(const WeightsView& w, Part part) {
  return has_part(w, part) && (has_bias(w, part) || !matrix_of(w, part).is_coded());
}
bool is_any_coded(const WeightsView& w) {
  return std::any_of(std::begin(kParts), std::end(kParts),
                     [&](Part part) { return has_part(w, part) && matrix_of(w, part).is_coded(); });
}
bool is_all_coded(const WeightsView& w) {
  return std::all_of(std::begin(kParts), std::end(kParts), [&](Part part) {
    return !has_part(w, part) || matrix_of(w, part).is_coded();
  });
}

PartShape shape_of(const WeightsView& w, Part part) {
  return part == Part::kDown ? PartShape{w.hidden, w.inter} : PartShape{w.inter, w.hidden};
}

PackLayout::PackLayout(const WeightsView& w, PlainBytes plain) {
  if (is_any_coded(w)) experts = CodedCopy(w).bytes();
  for (const Part part : kParts) {
    matrix[int(part)] = stride;
    const auto [n, k] = shape_of(w, part);
    if (has_part(w, part) && !matrix_of(w, part).is_coded())
      stride += plain(matrix_of(w, part), n, k);
  }
  for (const Part part : kParts) {
    bias[int(part)] = stride;
    if (keeps_bias(w, part)) stride += packed_bias_bytes(shape_of(w, part).n);
  }
}
int64_t packed_bias_bytes(int64_t n) {
  return int64_t(round_up(uint64_t(n) * sizeof(float), kCacheLine));
}

std::string scheme_names(const WeightsView& w) {
  return std::string(scheme_name(w.up)) + "-" + scheme_name(w.down);
}

}  // namespace moec
