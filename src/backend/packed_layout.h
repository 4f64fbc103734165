// SPDX-License-Identifier: Apache-2.0
// Where the parts of a packed copy lie, on every device.
//
//   packed copy   [coded matrices (packed_codes.h)]
//                 [experts][gate | up | down | gate bias | up bias | down bias]
//                 plain matrices in a form of the device, biases in fp32 (zeros where there are
//                 none; of coded matrices only those that there are), each part padded to a cache
//                 line; without gate parts for a plain MLP
#pragma once

#include <string>

#include "backend/weights.h"

namespace moec {

enum class Part { kGate, kUp, kDown };
inline constexpr Part kParts[] = {Part::kGate, Part::kUp, Part::kDown};

const ExpertMatrix& matrix_of(const WeightsView& weights, Part part);
ExpertMatrix& matrix_of(WeightsView& weights, Part part);
inline bool has_part(const WeightsView& weights, Part part) {
  return part != Part::kGate || weights.gated;
}
inline bool has_bias(const WeightsView& weights, Part part) {
  return matrix_of(weights, part).has_bias();
}
// Whether a copy has a place for this bias.
bool keeps_bias(const WeightsView& weights, Part part);
bool is_any_coded(const WeightsView& weights);
bool is_all_coded(const WeightsView& weights);

struct PartShape {
  int64_t n, k;
};
PartShape shape_of(const WeightsView& weights, Part part);

struct PackLayout {  // byte offsets: of the experts, and inside one
  using PlainBytes = int64_t (*)(const ExpertMatrix& matrix, int64_t n, int64_t k);

  int64_t experts = 0, matrix[3] = {}, bias[3] = {}, stride = 0;
  // plain: of an expert's plain matrix; null where all are coded.
  PackLayout(const WeightsView& weights, PlainBytes plain);
  int64_t expert(int64_t e) const { return experts + e * stride; }
  int64_t bias_of(Part part, int64_t e) const { return expert(e) + bias[int(part)]; }
};
int64_t packed_bias_bytes(int64_t n);  // padded

// Schemes for the name of a form, such as "nf4-plain".
std::string scheme_names(const WeightsView& weights);

}  // namespace moec
