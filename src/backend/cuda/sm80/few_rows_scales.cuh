// SPDX-License-Identifier: Apache-2.0
// The blocks of the pieces of a lane's features. Bits of scales are read one step ahead.
#pragma once

#include "backend/cuda/sm80/few_rows.h"
#include "backend/cuda/sm80/few_rows_decode.cuh"

namespace moec::cuda {

// kPieces: of a lane, eight features apart.
template <int kPieces>
class FewScales {
 public:
  // Of features n, n + 8, ... end: of a row, in bytes of codes, as k is here.
  __device__ FewScales(const ExpertQuant& of, int64_t group, int64_t row_stride, bool nibbles,
                       int end, int n)
      : of_(of), group_(int(group)), n_(n), last_(end - 16) {
    const int shift = shift_of(of.scales.block_k);
    shift_ = shift - nibbles;
    n_shift_ = shift_of(of.scales.block_n);
    step_ = uint32_t(of.scales.col_stride);
    uint32_t line = uint32_t(of.scales.row_stride);
    const moec_dtype dtype = of.scales.array.dtype;
    kind_ = dtype == MOEC_BF16  ? kBf16
            : dtype == MOEC_F32 ? kF32
            : dtype == MOEC_F16 ? kF16
            : of.scale_book     ? kNested
                                : kPowers;
    if (of.zeros.array.present()) kind_ |= kZeros;
    base_ = static_cast<const char*>(of.scales.array.expert(group));
    if (of.scheme == MOEC_SCHEME_CODEBOOK4) {  // a stream, in which blocks end with rows
      first_ = group * of.expert_codes >> shift;
      base_ += first_ * int(dtype_bytes(dtype));
      step_ = 1;
      line = uint32_t(row_stride >> shift);
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i) lines_[i] = (row_of(i) >> n_shift_) * line;
    kind_ = int(ptx::kept(uint32_t(kind_)));
    base_ = ptx::kept(base_);
  }
  // Those of the pieces at k; behind the end others.
  __device__ __forceinline__ void fetch(int k) {
    k = min(k, last_);
    if (kind() >= kPowers)
      load<1>(k);
    else if (kind() != kF32)
      load<2>(k);
    else
      load<4>(k);
  }
  // Of what was fetched last: at k. inside: k is in front of the end; behind it all values
  // are zeros.
  __device__ __forceinline__ void take(int k, bool inside, FewBlock (&to)[kPieces]) const {
    const auto each = [&](const auto& scale) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) to[i] = {scale(i), 0};
    };
    if (kind() == kBf16)
      each([&](int i) { return __uint_as_float(bits_[i] << 16); });
    else if (kind() == kF32)
      each([&](int i) { return __uint_as_float(bits_[i]); });
    else if (kind() == kPowers)
      each([&](int i) { return quant::e8m0(bits_[i]); });
    else if (kind() == kF16)
      each([&](int i) { return __half2float(__ushort_as_half(uint16_t(bits_[i]))); });
    else
      take_nested(min(k, last_), to);
    if (kind_ & kZeros) take_zeros(min(k, last_), to);
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
      if (!inside) to[i].scale = 0.0f;
  }

 private:
  enum Kind { kBf16, kF32, kF16, kPowers, kNested, kZeros = 8 };
  __device__ __forceinline__ int kind() const { return kind_ & 7; }
  static __device__ int shift_of(const quant::BlockSize& size) {
    return size.is_all() ? 31 : 31 - __clz(int(size.size()));
  }
  __device__ __forceinline__ uint32_t row_of(int i) const {
    return uint32_t(of_.rows.first) + uint32_t(n_ + 8 * i) * uint32_t(of_.rows.step);
  }
  __device__ __forceinline__ uint32_t entry(int i, int k) const {
    return lines_[i] + (unsigned(k) >> shift_) * step_;
  }
  template <int kBytes>
  __device__ __forceinline__ void load(int k) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
      ptx::load_bits_if<kBytes>(true, bits_[i], base_ + uint64_t(entry(i, k)) * kBytes);
  }
  __device__ __forceinline__ void take_nested(int k, FewBlock (&to)[kPieces]) const {
    const int shift = shift_of(of_.scale_block);
    const auto* const second = static_cast<const float*>(of_.scales2.expert(group_));
    const float offset = *static_cast<const float*>(of_.scale_offset.expert(group_));
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const float by = second[(first_ + entry(i, k)) >> shift];
      to[i] = {quant::product(of_.scale_book[bits_[i]], by) + offset, 0};
    }
  }
  // Read where they are wanted: bytes, or nibbles, of eight rows in a word, less the 8 of the book.
  __device__ __forceinline__ void take_zeros(int k, FewBlock (&to)[kPieces]) const {
    const bool nibbles = of_.scheme == MOEC_SCHEME_INT4;
    const uint32_t line = uint32_t(of_.zeros.row_stride);
    const uint32_t at = (unsigned(k) >> shift_) * uint32_t(of_.zeros.col_stride);
    const auto* const first = static_cast<const char*>(of_.zeros.array.expert(group_));
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const uint32_t row = row_of(i) >> n_shift_;
      if (nibbles) {
        const uint32_t word =
            reinterpret_cast<const uint32_t*>(first)[(row >> 3) * line + at] >> (row & 7) * 4;
        to[i].zero = int(word & 15u) - 8;
      } else {
        to[i].zero = int8_t(first[row * line + at]);
      }
    }
  }

  const ExpertQuant& of_;
  const int group_, n_, last_;
  const char* base_;
  int64_t first_ = 0;  // of the expert in a stream
  uint32_t step_, lines_[kPieces], bits_[kPieces] = {};
  int shift_, n_shift_, kind_;
};

}  // namespace moec::cuda
