// SPDX-License-Identifier: Apache-2.0
#include "backend/packed_codes.h"

#include <algorithm>
#include <cstring>

#include "core/dtype.h"
#include "core/error.h"
#include "core/workspace.h"
#include "quant/format.h"

namespace moec {
namespace {

constexpr const char* kPartNames[] = {"gate", "up", "down"};

struct ArrayRecord {
  int64_t offset, bytes, first;  // offset -1: absent; first: elements in front of the part
  uint32_t dtype, shared;
};
struct Record {  // of a part; of a plain one zeros
  uint32_t scheme, flags;
  uint32_t all_n, all_k;
  int64_t rows_first, rows_step, row_stride, col_stride;
  int64_t scales_row, scales_col, zeros_row, zeros_col;
  int64_t block_n, block_k, scale_block, blocks_along_k, expert_codes;
  ArrayRecord arrays[8];
};
constexpr size_t kRecordBytes = sizeof(Record) * std::size(kParts);

quant::BlockSize block_size(int64_t size, uint32_t all) {
  return all ? quant::BlockSize::all_of(size) : quant::BlockSize(size);
}
ExpertArray shared_floats(const float* data) {
  ExpertArray array;
  array.base = const_cast<float*>(data);
  array.dtype = MOEC_F32;
  return array;
}
bool are_joined(const WeightsView& w) {
  return w.gated && w.gate.rows.first != w.up.rows.first;
}

Record record_of(const ExpertMatrix& m) {
  Record r = {};
  r.scheme = m.scheme;
  r.flags = m.flags;
  r.all_n = m.scales.block_n.is_all();
  r.all_k = m.scales.block_k.is_all();
  r.rows_first = m.rows.first;
  r.rows_step = m.rows.step;
  r.row_stride = m.row_stride;
  r.col_stride = m.col_stride;
  r.scales_row = m.scales.row_stride;
  r.scales_col = m.scales.col_stride;
  r.zeros_row = m.zeros.row_stride;
  r.zeros_col = m.zeros.col_stride;
  r.block_n = m.scales.block_n.size();
  r.block_k = m.scales.block_k.size();
  r.scale_block = m.scale_block.size();
  r.blocks_along_k = m.blocks_along_k;
  r.expert_codes = m.expert_codes;
  return r;
}

}  // namespace

const char* CodedCopy::Array::expert(int64_t e) const {
  const int64_t size = dtype_bytes(from.dtype);
  if (from.pointers) return static_cast<const char*>(from.pointers[e]);
  return static_cast<const char*>(from.base) +
         ((shared ? 0 : e * from.expert_stride) - from.pointer_offset) * size;
}

template <class Body>
void CodedCopy::Array::for_runs(int64_t first, int64_t last, Body body) const {
  if (shared) return body(int64_t(0), int64_t(1));
  const bool is_stack = !from.pointers && from.expert_stride * dtype_bytes(from.dtype) == bytes;
  const int64_t step = is_stack ? last - first : 1;
  for (int64_t e = first; e < last; e += step) body(e, step);
}

// n: rows of the bound matrix.
void CodedCopy::find_arrays(const ExpertMatrix& m, int64_t n, int64_t k, int64_t experts,
                            Array (&arrays)[kArrays]) {
  const quant::FormatInfo& format = *quant::find_format(m.scheme);
  const bool stream = format.storage == quant::Storage::kStream;
  const bool one_stream = stream && m.expert_codes;
  const int64_t codes = (one_stream ? experts : 1) * n * k;
  const int64_t scales = stream ? m.scales.block_k.count(codes) : m.scales.array.expert_stride;
  const auto set = [&](int i, const ExpertArray& from, int64_t elements, bool shared) {
    if (!from.present()) return;
    arrays[i].from = from;
    arrays[i].bytes = elements * dtype_bytes(from.dtype);
    arrays[i].shared = shared;
  };
  const int64_t size = dtype_bytes(m.values.dtype);
  set(0, m.values, stream ? div_up(div_up(codes, 2), size) : m.values.expert_stride, one_stream);
  set(1, m.scales.array, scales, one_stream);
  set(2, m.zeros.array, m.zeros.array.expert_stride, false);
  const bool one_scale = !stream && m.scales2.expert_stride == 0;
  set(3, m.scales2,
      stream      ? m.scale_block.count(scales)
      : one_scale ? 1
                  : m.scales2.expert_stride,
      one_stream || one_scale);
  set(4, m.scale_offset, 1, one_stream);
  set(5, m.group_index, m.group_index.expert_stride, false);
  set(6, shared_floats(m.codebook), 16, true);
  set(7, shared_floats(m.scale_book), 256, true);
}

CodedCopy::CodedCopy(const WeightsView& w) : experts_(w.num_experts) {
  const bool joined = are_joined(w);
  int64_t at = int64_t(round_up(kRecordBytes, kCacheLine));
  bool any = false;
  for (const Part part : kParts) {
    const ExpertMatrix& m = matrix_of(w, part);
    if (!m.is_coded() || (part == Part::kGate && !w.gated)) continue;
    Matrix& to = parts_[int(part)];
    to.matrix = &m;
    any = true;
    const bool down = part == Part::kDown, both = joined && !down;
    find_arrays(m,
                down   ? w.hidden
                : both ? 2 * w.inter
                       : w.inter,
                down ? w.inter : w.hidden, experts_, to.arrays);
    to.owns = !(both && part == Part::kUp);
    for (int i = 0; i < kArrays; ++i) {
      Array& array = to.arrays[i];
      if (!array.bytes) continue;
      array.offset = to.owns ? at : parts_[int(Part::kGate)].arrays[i].offset;
      const int64_t all = array.bytes * (array.shared ? 1 : experts_);
      if (to.owns) at += int64_t(round_up(uint64_t(all), kCacheLine));
    }
  }
  if (any) bytes_ = at;
}

template <class Body>
void CodedCopy::for_each(Body body) const {
  for (const Part part : kParts) {
    const Matrix& m = parts_[int(part)];
    if (!m.matrix || !m.owns) continue;
    for (const Array& array : m.arrays)
      if (array.bytes) body(array);
  }
}

void CodedCopy::write_records(char* head) const {
  Record records[std::size(kParts)] = {};
  for (const Part part : kParts) {
    const Matrix& m = parts_[int(part)];
    if (!m.matrix) continue;
    Record& record = records[int(part)] = record_of(*m.matrix);
    for (int i = 0; i < kArrays; ++i) {
      const Array& a = m.arrays[i];
      record.arrays[i] = {a.offset, a.bytes, a.from.pointer_offset, a.from.dtype, a.shared};
    }
  }
  std::memcpy(head, records, sizeof records);
}

void CodedCopy::write(const ByteMover& mover, char* packed, int32_t first, int32_t count) const {
  if (!bytes_) return;
  const auto clear_to_line = [&](char* from, int64_t used) {
    if (const int64_t left = int64_t(round_up(uint64_t(used), kCacheLine)) - used)
      mover.zero(from + used, uint64_t(left));
  };
  char records[kRecordBytes];
  write_records(records);
  mover.put(packed, records, sizeof records);
  clear_to_line(packed, sizeof records);
  for_each([&](const Array& a) {
    char* const to = packed + a.offset;
    a.for_runs(first, first + count, [&](int64_t e, int64_t number) {
      mover.copy(to + e * a.bytes, a.expert(e), uint64_t(number * a.bytes));
    });
    clear_to_line(to, a.bytes * (a.shared ? 1 : experts_));
  });
}

void CodedCopy::check_like(const WeightsView& to) const {
  const CodedCopy other(to);
  for (const Part part : kParts) {
    const Matrix &own = parts_[int(part)], &given = other.parts_[int(part)];
    const char* const name = kPartNames[int(part)];
    if (!own.matrix) continue;
    const Record a = record_of(*own.matrix), b = record_of(*given.matrix);
    MOEC_REQUIRE(std::memcmp(&a, &b, sizeof a) == 0, MOEC_E_MISMATCH,
                 "%s is bound in blocks of %lld x %lld, or in another order of rows; the packed "
                 "codes have blocks of %lld x %lld",
                 name, static_cast<long long>(b.block_n), static_cast<long long>(b.block_k),
                 static_cast<long long>(a.block_n), static_cast<long long>(a.block_k));
    for (int i = 0; i < kArrays; ++i) {
      const Array &x = own.arrays[i], &y = given.arrays[i];
      MOEC_REQUIRE(x.bytes == y.bytes && x.shared == y.shared && x.from.dtype == y.from.dtype,
                   MOEC_E_MISMATCH,
                   "tensor %d of %s has %lld bytes of type 0x%x; the packed one has %lld of 0x%x",
                   i, name, static_cast<long long>(y.bytes), y.from.dtype,
                   static_cast<long long>(x.bytes), x.from.dtype);
    }
  }
}

void CodedCopy::read(const ByteMover& mover, const WeightsView& to) const {
  const CodedCopy other(to);
  for (const Part part : kParts) {
    const Matrix &own = parts_[int(part)], &given = other.parts_[int(part)];
    if (!own.matrix || !own.owns) continue;
    for (int i = 0; i < kArrays; ++i) {
      const Array &x = own.arrays[i], &y = given.arrays[i];
      if (!x.bytes) continue;
      y.for_runs(0, experts_, [&](int64_t e, int64_t number) {
        mover.copy(const_cast<char*>(y.expert(e)), x.expert(e), uint64_t(number * x.bytes));
      });
    }
  }
}

WeightsView coded_view(WeightsView w, const void* head, const void* packed, uint64_t bytes) {
  const auto* const data = static_cast<const char*>(packed);
  char made[kRecordBytes];
  if (!head) CodedCopy(w).write_records(made);
  const auto* const records = head ? static_cast<const char*>(head) : made;
  for (const Part part : kParts) {
    ExpertMatrix& m = matrix_of(w, part);
    if (!m.is_coded() || (part == Part::kGate && !w.gated)) continue;
    Record r;
    MOEC_REQUIRE(bytes >= kRecordBytes, MOEC_E_CORRUPT,
                 "the packed weights have %llu bytes; their records have %zu",
                 static_cast<unsigned long long>(bytes), kRecordBytes);
    std::memcpy(&r, records + sizeof r * size_t(part), sizeof r);
    MOEC_REQUIRE(r.scheme == m.scheme, MOEC_E_CORRUPT,
                 "the packed record of %s has scheme %u; expected %u", kPartNames[int(part)],
                 r.scheme, m.scheme);
    const auto array = [&](int i) {
      const ArrayRecord& a = r.arrays[i];
      if (a.offset < 0) return ExpertArray{};
      const int64_t all = a.bytes * (a.shared ? 1 : w.num_experts);
      MOEC_REQUIRE(a.bytes >= 0 && a.offset <= int64_t(bytes) && all <= int64_t(bytes) - a.offset,
                   MOEC_E_CORRUPT, "tensor %d of the packed %s ends behind the copy", i,
                   kPartNames[int(part)]);
      ExpertArray to;
      to.base = const_cast<char*>(data) + a.offset;
      to.dtype = a.dtype;
      to.expert_stride = a.shared ? 0 : a.bytes / dtype_bytes(a.dtype);
      return to.from(a.first);
    };
    m.flags = r.flags;
    m.rows = {r.rows_first, r.rows_step};
    m.row_stride = r.row_stride;
    m.col_stride = r.col_stride;
    m.values = array(0);
    const quant::BlockSize block_n = block_size(r.block_n, r.all_n);
    const quant::BlockSize block_k = block_size(r.block_k, r.all_k);
    m.scales = {array(1), r.scales_row, r.scales_col, block_n, block_k};
    m.zeros = {array(2), r.zeros_row, r.zeros_col, block_n, block_k};
    m.scales2 = array(3);
    m.scale_offset = array(4);
    m.group_index = array(5);
    m.codebook = static_cast<const float*>(array(6).base);
    m.scale_book = static_cast<const float*>(array(7).base);
    m.scale_block = quant::BlockSize(r.scale_block);
    m.blocks_along_k = r.blocks_along_k;
    m.expert_codes = r.expert_codes;
  }
  w.packed = packed;
  return w;
}

std::string coded_format(const WeightsView& w) {
  return std::string("codes-") + dtype_name(w.up.dtype) + "-" + scheme_names(w) + "-v1";
}

}  // namespace moec
