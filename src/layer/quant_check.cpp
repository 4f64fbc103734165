// SPDX-License-Identifier: Apache-2.0
#include "layer/quant_check.h"

namespace moec {
namespace {

using ll = long long;
using quant::BlockSize;
using quant::Codebook4;

// As given, or as the format says; 0: all of the extent.
BlockSize block_of(int64_t given, int64_t usual, int64_t extent) {
  const int64_t size = given ? given : usual;
  return size == 0 || size >= extent ? BlockSize::all_of(extent) : BlockSize(size);
}

}  // namespace

std::string scheme_names() {
  const quant::FormatInfo& last = quant::Formats::kInfos[quant::Formats::kCount - 1];
  return "0 (none) to " + std::to_string(last.scheme) + " (" + last.name + ")";
}

bool has_arrays(const moec_quant& q) {
  return q.per_expert_scales || q.per_expert_scales2 || q.per_expert_zeros ||
         q.per_expert_scale_offset || q.per_expert_group_index;
}

void check_extents(const CodedShape& m) {
  const quant::FormatInfo& format = m.format;
  const bool fits = format.orientations == quant::Orientations::kBoth ||
                    m.out_in == (format.orientations == quant::Orientations::kOutIn);
  MOEC_REQUIRE(fits, MOEC_E_UNSUPPORTED, "the orientation of %s is %s; %s has %s", m.name,
               m.out_in ? "OUT_IN (0)" : "IN_OUT (1)", format.name,
               m.out_in ? "IN_OUT (1)" : "OUT_IN (0)");
  if (!format.whole_units) return;
  const bool along_k = m.out_in || format.storage == quant::Storage::kAlongK;
  const int64_t extent = along_k ? m.K : m.N;
  MOEC_REQUIRE(extent % format.unit_values == 0, MOEC_E_SHAPE,
               "%s has %lld %s; %s has a multiple of %lld", m.name, ll(extent),
               along_k ? "inputs" : "outputs", format.name, ll(format.unit_values));
}

void check_fields(const CodedShape& m, const moec_quant& q) {
  const quant::FormatInfo& format = m.format;
  const uint32_t extras = format.extras;
  const bool divides = extras & quant::kScales2;
  check_flags((std::string(m.name) + ".quant.flags").c_str(), q.flags,
              divides ? MOEC_QUANT_SCALES2_DIVIDES : 0);
  const bool nested = extras & quant::kNested &&
                      (q.per_expert_scales ? q.per_expert_scales[0] : q.scales).dtype == MOEC_U8;
  const bool has_scales = format.scale_dtypes.size() > 0;
  const struct {
    const char* field;
    bool stacked, arrays, used, needed;
  } rows[] = {
      {"scales", !is_absent(q.scales), bool(q.per_expert_scales), has_scales, has_scales},
      {"zeros", !is_absent(q.zeros), bool(q.per_expert_zeros), format.zeros_dtypes.size() > 0,
       format.zeros_needed},
      {"scales2", !is_absent(q.scales2), bool(q.per_expert_scales2),
       nested || extras & quant::kScales2, nested || extras & quant::kScales2},
      {"codebook", !is_absent(q.codebook), false, bool(extras & quant::kCodebook),
       bool(extras & quant::kCodebook)},
      {"scale_book", !is_absent(q.scale_book), false, nested, nested},
      {"scale_offset", !is_absent(q.scale_offset), bool(q.per_expert_scale_offset), nested, nested},
      {"group_index", !is_absent(q.group_index), bool(q.per_expert_group_index),
       bool(extras & quant::kGroupIndex), false}};
  const char* const kind =
      extras & quant::kNested ? nested ? " of nested scales" : " of plain scales" : "";
  for (const auto& row : rows) {
    MOEC_REQUIRE(row.used || (!row.stacked && !row.arrays), MOEC_E_INVALID_ARG,
                 "%s.quant.%s is given; %s%s has none", m.name, row.field, format.name, kind);
    MOEC_REQUIRE(!(row.stacked && row.arrays), MOEC_E_INVALID_ARG,
                 "%s.quant.%s is given twice, stacked and per expert; give one of them", m.name,
                 row.field);
    MOEC_REQUIRE(!row.needed || row.stacked || row.arrays, MOEC_E_INVALID_ARG,
                 "%s.quant.%s is absent; %s%s needs it", m.name, row.field, format.name, kind);
  }
}

Blocks checked_blocks(const CodedShape& m, const moec_quant& q) {
  const quant::FormatInfo& format = m.format;
  const bool stream = format.storage == quant::Storage::kStream, nested = q.scale_book.data;
  // Where blocks lie along the packed axis, the format has them there in either orientation.
  const bool turned = format.along_packed && !m.out_in;
  const int64_t usual[] = {turned ? format.block_k : format.block_n,
                           turned ? format.block_n : format.block_k};
  const struct {
    const char* field;
    int64_t given, usual, extent;
    bool any;
  } rows[] = {{"block_n", q.block_n, usual[0], m.N, format.any_block && (!stream || turned)},
              {"block_k", q.block_k, usual[1], m.K, format.any_block && (!stream || !turned)},
              {"scale_block", q.scale_block, 0, 0, stream && nested}};
  for (const auto& row : rows) {
    const int64_t expected = row.usual ? row.usual : row.extent;
    MOEC_REQUIRE(row.given == 0 || row.any || row.given == expected, MOEC_E_UNSUPPORTED,
                 "%s.quant.%s is %lld; %s has 0 or %lld", m.name, row.field, ll(row.given),
                 format.name, ll(expected));
    MOEC_REQUIRE(row.given >= 0, MOEC_E_INVALID_ARG, "%s.quant.%s is %lld; expected 0 or more",
                 m.name, row.field, ll(row.given));
  }
  if (!stream) return {block_of(q.block_n, usual[0], m.N), block_of(q.block_k, usual[1], m.K)};
  const int64_t given = turned ? q.block_n : q.block_k, size = given ? given : format.block_k;
  MOEC_REQUIRE(
      size >= Codebook4::kLeastBlock && size <= Codebook4::kMostBlock && (size & (size - 1)) == 0,
      MOEC_E_UNSUPPORTED, "%s.quant.%s is %lld; %s has powers of two from %lld to %lld", m.name,
      turned ? "block_n" : "block_k", ll(size), format.name, ll(Codebook4::kLeastBlock),
      ll(Codebook4::kMostBlock));
  return {BlockSize(1), BlockSize(size)};
}

}  // namespace moec
