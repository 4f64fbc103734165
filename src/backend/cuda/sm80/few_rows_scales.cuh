// SPDX-License-Identifier: Apache-2.0
// The blocks of a lane's eight pieces. Bits of scales are read one step ahead.
#pragma once

#include "backend/cuda/sm80/few_rows.h"
#include "backend/cuda/sm80/few_rows_decode.cuh"

namespace moec::cuda {

// Entries of a matrix along one of its extents.
struct FewEntries {
  uint32_t first = 0, step = 1, stride;
  int shift;
  __device__ __forceinline__ uint32_t block(int i) const {
    return (first + uint32_t(i) * step) >> shift;
  }
  __device__ __forceinline__ uint32_t at(int i) const { return block(i) * stride; }
};

// Kinds of scales; a kernel has a bit for each that it may meet.
enum FewKind { kFewBf16, kFewF32, kFewF16, kFewPowers, kFewNested, kFewZeros = 8 };
constexpr unsigned kFewFloats = 1 << kFewBf16 | 1 << kFewF32 | 1 << kFewF16;
constexpr unsigned kFewAny = ~0u;

// kOfLines: along k; each line of codes has scales of its own.
template <class Form, unsigned kKinds = kFewAny, bool kOfLines = false>
class FewScales {
 public:
  // end: of k, in units of the form, as k is here.
  __device__ FewScales(const PortableGemm& p, int part, int group, int n0, Form form, int end)
      : of_(p.codes[part].quant),
        form_(form),
        transposed_(p.codes[part].transposed),
        group_(group),
        last_(end - 16) {
    const int n = n0 + few_lane() / 4 * (form.across ? form.piece() : 1);
    const moec_dtype dtype = of_.scales.array.dtype;
    kind_ = dtype == MOEC_BF16  ? kFewBf16
            : dtype == MOEC_F32 ? kFewF32
            : dtype == MOEC_F16 ? kFewF16
            : of_.scale_book    ? kFewNested
                                : kFewPowers;
    if (of_.zeros.array.present()) kind_ |= kFewZeros;
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
    of_n_ = transposed_ ? columns : rows;
    of_n_.first += n * of_n_.step;
    next_ = 8 * of_n_.step * of_n_.stride << bytes_shift();
    kind_ = int(ptx::kept(uint32_t(kind_)));
    base_ = ptx::kept(base_);
  }
  // Asks for the scale of piece i at k; behind the end for another one.
  __device__ __forceinline__ void fetch(int i, int k) {
    const char* at = base_ + (uint64_t(entry(kOfLines ? 0 : i, k)) << bytes_shift());
    if constexpr (kOfLines) at += uint64_t(next_) * unsigned(i);
    if (has(kFewPowers) || has(kFewNested))
      ptx::load_bits_if<1>(true, bits_[i], at);
    else if (has(kFewF32))
      ptx::load_bits_if<4>(true, bits_[i], at);
    else
      ptx::load_bits_if<2>(true, bits_[i], at);
  }
  // Of what was asked for last: powers as they are stored.
  __device__ __forceinline__ uint32_t power(int i) const { return bits_[i]; }
  // In front of blocks: what was asked for last as numbers, at k. inside: k is in front of the end;
  // behind it all values are zeros.
  __device__ __forceinline__ void convert(int k, bool inside) {
    const auto each = [&](const auto& to) {
#pragma unroll
      for (int i = 0; i < 8; ++i) bits_[i] = __float_as_uint(to(i));
    };
    if (has(kFewBf16))
      each([&](int i) { return __uint_as_float(bits_[i] << 16); });
    else if (has(kFewPowers))
      each([&](int i) { return quant::e8m0(bits_[i]); });
    else if (has(kFewF16))
      each([&](int i) { return __half2float(__ushort_as_half(uint16_t(bits_[i]))); });
    else if (has(kFewNested))
      each([&](int i) { return nested(i, k); });
    if (!inside) each([](int) { return 0.0f; });
    take_zeros(k);
  }
  __device__ __forceinline__ FewBlock block(int i) const {
    return {__uint_as_float(bits_[i]), int8_t(zeros_ >> 8 * i)};
  }

 private:
  // Zero points of all pieces at k. Read where they are wanted.
  __device__ __forceinline__ void take_zeros(int k) {
    if constexpr (may(kFewZeros)) {
      if (!(kind_ & kFewZeros)) return;
      zeros_ = 0;
#pragma unroll 1
      for (int i = 0; i < 8; ++i) zeros_ |= uint64_t(zero_of(i, k) & 255) << 8 * i;
    }
  }
  static constexpr bool may(int kind) { return kKinds >> kind & 1; }
  // Whether scales are of this kind, which the compiler knows where there is one alone.
  __device__ __forceinline__ bool has(FewKind kind) const {
    constexpr unsigned kOf = kKinds & (1u << kFewZeros) - 1;
    return may(kind) && (kOf == 1u << kind || (kind_ & 7) == kind);
  }
  __device__ __forceinline__ int bytes_shift() const {
    return has(kFewPowers) || has(kFewNested) ? 0 : has(kFewF32) ? 2 : 1;
  }
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
  // Where the matrix has piece i: n from the lane's first piece on.
  __device__ __forceinline__ int n_of(int i) const { return form_.across ? 0 : 8 * i; }
  __device__ __forceinline__ int k_of(int i, int k) const {
    return form_.k_of(min(k, last_)) + (form_.across ? i : 0);
  }
  __device__ __forceinline__ uint32_t entry(int i, int k) const {
    return of_n_.at(n_of(i)) + of_k_.at(k_of(i, k));
  }
  __device__ __forceinline__ float nested(int i, int k) const {
    const auto* const second = static_cast<const float*>(of_.scales2.expert(group_));
    const float offset = *static_cast<const float*>(of_.scale_offset.expert(group_));
    const float by = second[(first_ + entry(i, k)) >> shift_of(of_.scale_block)];
    return quant::product(of_.scale_book[bits_[i]], by) + offset;
  }
  // Bytes, or nibbles, of eight rows in a word, less the 8 of the book.
  __device__ __forceinline__ int zero_of(int i, int k) const {
    const uint32_t line = uint32_t(of_.zeros.row_stride), next = uint32_t(of_.zeros.col_stride);
    const auto* const first = static_cast<const char*>(of_.zeros.array.expert(group_));
    const uint32_t along_n = of_n_.block(n_of(i));
    const uint32_t along_k = of_k_.block(k_of(i, k));
    const uint32_t row = transposed_ ? along_k : along_n;
    const uint32_t at = (transposed_ ? along_n : along_k) * next;
    if (of_.scheme != MOEC_SCHEME_INT4) return int8_t(first[row * line + at]);
    const uint32_t word = reinterpret_cast<const uint32_t*>(first)[(row >> 3) * line + at];
    return int(word >> (row & 7) * 4 & 15u) - 8;
  }

  const ExpertQuant& of_;
  const Form form_;
  const bool transposed_;
  const int group_, last_;
  const char* base_;
  int64_t first_ = 0;  // of the expert in a stream
  FewEntries of_k_, of_n_;
  uint32_t next_;  // bytes from the scale of a piece to that of the next one, of lines
  uint32_t bits_[8] = {};
  uint64_t zeros_ = 0;  // bytes
  int kind_;
};

}  // namespace moec::cuda
