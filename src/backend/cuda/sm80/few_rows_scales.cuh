// SPDX-License-Identifier: Apache-2.0
// The blocks of a lane's pieces. Bits of scales are read one step ahead.
#pragma once

#include "backend/cuda/sm80/few_rows.h"
#include "backend/cuda/sm80/few_rows_decode.cuh"

namespace moec::cuda {

// Of eight pieces across k, of four of them along k.
struct FewBlocks {
  float scale[8];
  uint32_t zeros[2];  // bytes
  __device__ __forceinline__ FewBlock at(int i) const {
    return {scale[i], int8_t(zeros[i / 4] >> i % 4 * 8)};
  }
};

// Entries of a matrix along one of its extents.
struct FewEntries {
  uint32_t first = 0, step = 1, stride;
  int shift;
  __device__ __forceinline__ uint32_t block(int i) const {
    return (first + uint32_t(i) * step) >> shift;
  }
  __device__ __forceinline__ uint32_t at(int i) const { return block(i) * stride; }
};

template <class Form>
class FewScales {
 public:
  // end: of k, in units of the form, as k is here.
  __device__ FewScales(const PortableGemm& p, int part, int group, int n0, Form form, int end)
      : of_(p.codes[part].quant),
        form_(form),
        transposed_(p.codes[part].transposed),
        group_(group),
        last_(end - 16) {
    n_ = n0 + few_lane() / 4 * (form.across ? form.piece() : 1);
    const moec_dtype dtype = of_.scales.array.dtype;
    kind_ = dtype == MOEC_BF16  ? kBf16
            : dtype == MOEC_F32 ? kF32
            : dtype == MOEC_F16 ? kF16
            : of_.scale_book    ? kNested
                                : kPowers;
    if (of_.zeros.array.present()) kind_ |= kZeros;
    base_ = static_cast<const char*>(of_.scales.array.expert(group_));
    FewEntries rows = entries(true), columns = entries(false);
    if (of_.scheme == MOEC_SCHEME_CODEBOOK4) {  // a stream, in which blocks end with lines
      const int shift = columns.shift;
      const Operand& b = p.b[part];
      first_ = group_ * of_.expert_codes >> shift;
      base_ += first_ * int(dtype_bytes(dtype));
      const bool along_rows = form.across != transposed_;
      FewEntries &along = along_rows ? rows : columns, &lines = along_rows ? columns : rows;
      along.stride = 1;
      along.shift = shift;
      lines.stride = uint32_t((form.across ? b.k_stride : b.i_stride) >> shift);
      lines.shift = 0;
    }
    of_k_ = transposed_ ? rows : columns;
#pragma unroll
    for (int i = 0; i < 4; ++i) lines_[i] = (transposed_ ? columns : rows).at(n_ + 8 * i);
    kind_ = int(ptx::kept(uint32_t(kind_)));
    base_ = ptx::kept(base_);
  }
  // Those of the pieces at k; behind the end others.
  __device__ __forceinline__ void fetch(int k) {
    uint32_t entries[8];
    find_entries(k, entries);
    if (kind() >= kPowers)
      load<1>(entries);
    else if (kind() != kF32)
      load<2>(entries);
    else
      load<4>(entries);
  }
  // Of what was fetched last: at k. inside: k is in front of the end; behind it all values
  // are zeros.
  __device__ __forceinline__ void take(int k, bool inside, FewBlocks& to) const {
    to.zeros[0] = to.zeros[1] = 0;
    if (kind() == kBf16)
      each([&](int i) { to.scale[i] = __uint_as_float(bits_[i] << 16); });
    else if (kind() == kF32)
      each([&](int i) { to.scale[i] = __uint_as_float(bits_[i]); });
    else if (kind() == kPowers)
      each([&](int i) { to.scale[i] = quant::e8m0(bits_[i]); });
    else if (kind() == kF16)
      each([&](int i) { to.scale[i] = __half2float(__ushort_as_half(uint16_t(bits_[i]))); });
    else
      take_nested(k, to);
    if (kind_ & kZeros) take_zeros(k, to);
    if (!inside) each([&](int i) { to.scale[i] = 0.0f; });
  }

 private:
  enum Kind { kBf16, kF32, kF16, kPowers, kNested, kZeros = 8 };
  __device__ __forceinline__ int kind() const { return kind_ & 7; }
  static __device__ int shift_of(const quant::BlockSize& size) {
    return size.is_all() ? 31 : 31 - __clz(int(size.size()));
  }
  // Of rows or columns of the matrix.
  __device__ __forceinline__ FewEntries entries(bool rows) const {
    FewEntries of;
    if (rows) of.first = uint32_t(of_.rows.first), of.step = uint32_t(of_.rows.step);
    of.stride = uint32_t(rows ? of_.scales.row_stride : of_.scales.col_stride);
    of.shift = shift_of(rows ? of_.scales.block_n : of_.scales.block_k);
    return of;
  }
  template <class Body>
  __device__ __forceinline__ void each(const Body& body) const {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i < 4 || form_.across) body(i);
  }
  __device__ __forceinline__ int k_of(int k) const { return form_.k_of(min(k, last_)); }
  __device__ __forceinline__ void find_entries(int k, uint32_t (&to)[8]) const {
    const int first = k_of(k);
    if (form_.across) {
#pragma unroll
      for (int i = 0; i < 8; ++i) to[i] = lines_[0] + of_k_.at(first + i);
    } else {
      const uint32_t at = of_k_.at(first);
#pragma unroll
      for (int i = 0; i < 8; ++i) to[i] = lines_[i % 4] + at;
    }
  }
  template <int kBytes>
  __device__ __forceinline__ void load(const uint32_t (&entries)[8]) {
    each([&](int i) {
      ptx::load_bits_if<kBytes>(true, bits_[i], base_ + uint64_t(entries[i]) * kBytes);
    });
  }
  __device__ __forceinline__ void take_nested(int k, FewBlocks& to) const {
    const int shift = shift_of(of_.scale_block);
    const auto* const second = static_cast<const float*>(of_.scales2.expert(group_));
    const float offset = *static_cast<const float*>(of_.scale_offset.expert(group_));
    uint32_t entries[8];
    find_entries(k, entries);
    each([&](int i) {
      const float by = second[(first_ + entries[i]) >> shift];
      to.scale[i] = quant::product(of_.scale_book[bits_[i]], by) + offset;
    });
  }
  // Read where they are wanted: bytes, or nibbles, of eight rows in a word, less the 8 of the book.
  __device__ __forceinline__ void take_zeros(int k, FewBlocks& to) const {
    const bool nibbles = of_.scheme == MOEC_SCHEME_INT4;
    const uint32_t line = uint32_t(of_.zeros.row_stride), next = uint32_t(of_.zeros.col_stride);
    const auto* const first = static_cast<const char*>(of_.zeros.array.expert(group_));
    const int from = k_of(k);
    const FewEntries of_n = entries(!transposed_);
    each([&](int i) {
      const uint32_t along_n = of_n.block(form_.across ? n_ : n_ + 8 * i);
      const uint32_t along_k = of_k_.block(form_.across ? from + i : from);
      const uint32_t row = transposed_ ? along_k : along_n;
      const uint32_t at = (transposed_ ? along_n : along_k) * next;
      int zero;
      if (nibbles) {
        const uint32_t word =
            reinterpret_cast<const uint32_t*>(first)[(row >> 3) * line + at] >> (row & 7) * 4;
        zero = int(word & 15u) - 8;
      } else {
        zero = int8_t(first[row * line + at]);
      }
      to.zeros[i / 4] |= uint32_t(zero & 255) << i % 4 * 8;
    });
  }

  const ExpertQuant& of_;
  const Form form_;
  const bool transposed_;
  const int group_, last_;
  int n_;
  const char* base_;
  int64_t first_ = 0;  // of the expert in a stream
  FewEntries of_k_;
  uint32_t lines_[4], bits_[8] = {};
  int kind_;
};

}  // namespace moec::cuda
