// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/expert_weights.h"

#include <algorithm>
#include <cstring>

#include "backend/cpu/packed_form.h"
#include "backend/cpu/packing.h"
#include "backend/packed_codes.h"
#include "core/dtype.h"

namespace moec::cpu {
namespace {

class HostBytes final : public ByteMover {
 public:
  void copy(void* to, const void* from, uint64_t bytes) const override {
    std::memcpy(to, from, size_t(bytes));
  }
  void zero(void* to, uint64_t bytes) const override { std::memset(to, 0, size_t(bytes)); }
  void put(void* to, const void* from, uint64_t bytes) const override { copy(to, from, bytes); }
};

PackLayout layout_of(const WeightsView& w) {
  return {w, packed_matrix_bytes};
}

const char* packed_part(const WeightsView& w, int64_t offset) {
  return static_cast<const char*>(w.packed) + offset;
}

void load_source_bias(const ExpertMatrix& matrix, int64_t e, int64_t first, int64_t count,
                      float* to) {
  if (!matrix.has_bias()) {
    std::fill_n(to, count, 0.0f);
    return;
  }
  const MatrixView bias = matrix.bias_of(e);
  if (bias.row_stride == 1) {
    const char* const from = static_cast<const char*>(bias.data) + first * dtype_bytes(bias.dtype);
    convert_to_f32(from, bias.dtype, to, count);
    return;
  }
  for (int64_t i = 0; i < count; ++i)
    to[i] = load_real(bias.data, bias.dtype, (first + i) * bias.row_stride);
}

void pack_bias(const WeightsView& w, Part part, int64_t e, float* to) {
  const int64_t n = shape_of(w, part).n;
  const int64_t padded = packed_bias_bytes(n) / int64_t(sizeof(float));
  load_source_bias(matrix_of(w, part), e, 0, n, to);
  std::fill_n(to + n, padded - n, 0.0f);
}

}  // namespace

GemmWeight gemm_weight(const WeightsView& w, Part part, bool transposed) {
  GemmWeight weight;
  weight.matrix = &matrix_of(w, part);
  weight.transposed = transposed;
  if (!w.packed || weight.matrix->is_coded()) return weight;
  const PackLayout layout = layout_of(w);
  weight.packed = packed_part(w, layout.experts + layout.matrix[int(part)]);
  weight.packed_stride = layout.stride;
  return weight;
}

void load_bias(const WeightsView& w, Part part, int64_t e, int64_t first, int64_t count,
               float* to) {
  if (!w.packed || !keeps_bias(w, part))
    return load_source_bias(matrix_of(w, part), e, first, count, to);
  const PackLayout layout = layout_of(w);
  const char* const from = packed_part(w, layout.bias_of(part, e));
  std::memcpy(to, from + first * int64_t(sizeof(float)), size_t(count) * sizeof(float));
}

uint64_t CpuPacking::bytes(const WeightsView& w) const {
  // How codes lie is known once they are bound.
  if (!w.source_present && !w.packed && is_any_coded(w)) return 0;
  return uint64_t(layout_of(w).expert(w.num_experts));
}

std::string CpuPacking::format(const WeightsView& w) const {
  if (is_all_coded(w)) return coded_format(w);
  const ExpertMatrix& up = w.up;
  std::string name = std::string("cpu-") + dtype_name(up.is_coded() ? up.dtype : up.values.dtype);
  if (is_any_coded(w)) name.append("-").append(scheme_names(w));
  return name + "-panel32-v2";
}

void CpuPacking::pack(const WeightsView& w, void* to, int32_t first, int32_t count,
                      moec_stream) const {
  const PackLayout layout = layout_of(w);
  char* const begin = static_cast<char*>(to) + layout.expert(first);
  if (is_any_coded(w)) CodedCopy(w).write(HostBytes(), static_cast<char*>(to), first, count);
  for (const Part part : kParts) {
    const auto [n, k] = shape_of(w, part);
    if (has_part(w, part) && !matrix_of(w, part).is_coded())
      pack_experts(pool_, matrix_of(w, part), first, count, n, k, begin + layout.matrix[int(part)],
                   layout.stride);
    for (int64_t i = 0; keeps_bias(w, part) && i < count; ++i)
      pack_bias(w, part, first + i,
                reinterpret_cast<float*>(begin + i * layout.stride + layout.bias[int(part)]));
  }
}

WeightsView CpuPacking::view(const WeightsView& w, const void* head, const void* packed,
                             uint64_t bytes) const {
  return coded_view(w, head, packed, bytes);
}

void CpuPacking::unpack(const WeightsView& w, const WeightsView& to, moec_stream) const {
  const PackLayout layout = layout_of(w);
  if (is_any_coded(w)) {
    const CodedCopy codes(w);
    codes.check_like(to);
    codes.read(HostBytes(), to);
  }
  pool_.parallel_for(w.num_experts, [&](int32_t, int64_t e) {
    const char* const expert = packed_part(w, layout.expert(e));
    for (const Part part : kParts) {
      if (!has_part(w, part)) continue;
      const auto [n, k] = shape_of(w, part);
      const ExpertMatrix &from = matrix_of(w, part), &out = matrix_of(to, part);
      if (!from.is_coded())
        packed_form(from).unpack(expert + layout.matrix[int(part)], n, k, out.expert(e));
      if (!out.has_bias()) continue;
      const auto* const bias = reinterpret_cast<const float*>(expert + layout.bias[int(part)]);
      const MatrixView place = out.bias_of(e);
      for (int64_t i = 0; i < n; ++i)
        store_real(place.data, place.dtype, i * place.row_stride, bias[i]);
    }
  });
}

}  // namespace moec::cpu
