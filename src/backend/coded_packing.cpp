// SPDX-License-Identifier: Apache-2.0
#include "backend/coded_packing.h"

#include <algorithm>

#include "backend/packed_codes.h"
#include "backend/packed_layout.h"

namespace moec {
namespace {

class QueuedBytes final : public ByteMover {
 public:
  QueuedBytes(const Backend& backend, moec_stream stream) : backend_(backend), stream_(stream) {}

  void copy(void* to, const void* from, uint64_t bytes) const override {
    backend_.copy(to, from, bytes, stream_);
  }
  void zero(void* to, uint64_t bytes) const override { backend_.zero(to, bytes, stream_); }
  void put(void* to, const void* from, uint64_t bytes) const override {
    for (uint64_t at = 0; at < bytes; at += Backend::kMostStored)
      backend_.store(static_cast<char*>(to) + at, static_cast<const char*>(from) + at,
                     std::min(bytes - at, Backend::kMostStored), stream_);
  }

 private:
  const Backend& backend_;
  moec_stream stream_;
};

PackLayout layout_of(const WeightsView& w) {
  return {w, nullptr};
}

// The bias as a matrix of one row.
ExpertMatrix bias_row(const ExpertMatrix& m) {
  ExpertMatrix row;
  row.values = m.bias;
  row.col_stride = m.bias_stride;
  row.dtype = MOEC_F32;
  return row;
}

}  // namespace

bool CodedPacking::takes(const WeightsView& w) const {
  return is_all_coded(w);
}

uint64_t CodedPacking::bytes(const WeightsView& w) const {
  // How codes lie is known once they are bound.
  if (!takes(w) || (!w.source_present && !w.packed)) return 0;
  return uint64_t(layout_of(w).expert(w.num_experts));
}

std::string CodedPacking::format(const WeightsView& w) const {
  return coded_format(w);
}

void CodedPacking::pack(const WeightsView& w, void* to, int32_t first, int32_t count,
                        moec_stream stream) const {
  const PackLayout layout = layout_of(w);
  const QueuedBytes mover(*backend_, stream);
  char* const begin = static_cast<char*>(to);
  CodedCopy(w).write(mover, begin, first, count);
  for (const Part part : kParts) {
    if (!keeps_bias(w, part)) continue;
    const int64_t n = shape_of(w, part).n;
    const ExpertMatrix row = bias_row(matrix_of(w, part));
    const uint64_t used = uint64_t(n) * sizeof(float);
    for (int32_t e = first; e < first + count; ++e) {
      char* const place = begin + layout.bias_of(part, e);
      backend_->run(ValuesArgs{&row, e, 1, n, {place, n, 1, MOEC_F32}}, stream);
      if (const uint64_t padding = uint64_t(packed_bias_bytes(n)) - used)
        mover.zero(place + used, padding);
    }
  }
}

WeightsView CodedPacking::view(const WeightsView& weights, const void* head, const void* packed,
                               uint64_t bytes) const {
  WeightsView w = coded_view(weights, head, packed, bytes);
  const PackLayout layout = layout_of(w);
  MOEC_REQUIRE(uint64_t(layout.expert(w.num_experts)) <= bytes, MOEC_E_CORRUPT,
               "the packed weights have %llu bytes; their biases end at %llu",
               static_cast<unsigned long long>(bytes),
               static_cast<unsigned long long>(layout.expert(w.num_experts)));
  for (const Part part : kParts) {
    if (!keeps_bias(w, part)) continue;
    ExpertMatrix& m = matrix_of(w, part);
    m.bias = {};
    m.bias.base = static_cast<char*>(const_cast<void*>(packed)) + layout.bias_of(part, 0);
    m.bias.expert_stride = layout.stride / int64_t(sizeof(float));
    m.bias.dtype = MOEC_F32;
    m.bias_stride = 1;
  }
  return w;
}

void CodedPacking::unpack(const WeightsView& w, const WeightsView& to, moec_stream stream) const {
  const CodedCopy codes(w);
  codes.check_like(to);
  codes.read(QueuedBytes(*backend_, stream), to);
  for (const Part part : kParts) {
    if (!keeps_bias(w, part)) continue;
    const ExpertMatrix row = bias_row(matrix_of(w, part));
    for (int32_t e = 0; e < w.num_experts; ++e) {
      const MatrixView bias = matrix_of(to, part).bias_of(e);
      const MatrixView place = {bias.data, 0, bias.row_stride, bias.dtype};
      backend_->run(ValuesArgs{&row, e, 1, shape_of(w, part).n, place}, stream);
    }
  }
}

}  // namespace moec
