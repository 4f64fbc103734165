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
  __device__ FewScales(const ExpertQuant& of, int64_t group, int64_t row_stride, uint32_t k_end)
      : of_(of), group_(int(group)), k_end_(k_end) {
    shift_ = shift_of(of.scales.block_k);
    step_ = uint32_t(of.scales.col_stride);
    bytes_ = dtype_bytes(of.scales.array.dtype);
    line_ = uint32_t(of.scales.row_stride);
    base_ = static_cast<const char*>(of.scales.array.expert(group));
    if (of.scheme == MOEC_SCHEME_CODEBOOK4) {  // a stream, in which blocks end with rows
      base_ += first_of_stream() * bytes_;
      step_ = 1;
      line_ = uint32_t(row_stride >> shift_);
    }
  }
  // Of features n, n + 8, ...
  __device__ __forceinline__ void begin(int n) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
      lines_[i] = (row_of(n + 8 * i) >> shift_of(of_.scales.block_n)) * line_;
  }
  // Those of the pieces at k, or nothing behind the end.
  __device__ __forceinline__ void fetch(uint32_t k) {
    if (k >= k_end_) return;
    if (bytes_ == 1)
      load<uint8_t>(k);
    else if (bytes_ == 2)
      load<uint16_t>(k);
    else
      load<uint32_t>(k);
  }
  // Of what was fetched last: at n and k. Behind the end of k all values are zeros.
  __device__ __forceinline__ void take(int n, uint32_t k, FewBlock (&to)[kPieces]) const {
    const moec_dtype dtype = of_.scales.array.dtype;
    const auto each = [&](const auto& scale) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) to[i] = {scale(i), 0.0f};
    };
    if (k >= k_end_)
      each([&](int) { return 0.0f; });
    else if (dtype == MOEC_F32)
      each([&](int i) { return __uint_as_float(bits_[i]); });
    else if (dtype == MOEC_BF16)
      each([&](int i) { return __uint_as_float(bits_[i] << 16); });
    else if (dtype == MOEC_F16)
      each([&](int i) { return __half2float(__ushort_as_half(uint16_t(bits_[i]))); });
    else if (of_.scale_book)
      take_nested(k, to);
    else
      each([&](int i) { return quant::e8m0(bits_[i]); });
    if (of_.zeros.array.present() && k < k_end_) take_zeros(n, k, to);
  }

 private:
  static __device__ int shift_of(const quant::BlockSize& size) {
    return size.is_all() ? 31 : 31 - __clz(int(size.size()));
  }
  __device__ int64_t first_of_stream() const { return group_ * of_.expert_codes >> shift_; }
  __device__ uint32_t row_of(int n) const {
    return uint32_t(of_.rows.first) + uint32_t(n) * uint32_t(of_.rows.step);
  }
  __device__ __forceinline__ uint32_t entry(int i, uint32_t k) const {
    return lines_[i] + (k >> shift_) * step_;
  }
  template <class Bits>
  __device__ __forceinline__ void load(uint32_t k) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) bits_[i] = reinterpret_cast<const Bits*>(base_)[entry(i, k)];
  }
  __device__ __forceinline__ void take_nested(uint32_t k, FewBlock (&to)[kPieces]) const {
    const int64_t first = first_of_stream();
    const int shift = shift_of(of_.scale_block);
    const auto* const second = static_cast<const float*>(of_.scales2.expert(group_));
    const float offset = *static_cast<const float*>(of_.scale_offset.expert(group_));
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const float by = second[(first + entry(i, k)) >> shift];
      to[i] = {quant::product(of_.scale_book[bits_[i]], by) + offset, 0.0f};
    }
  }
  // Read where they are wanted: bytes, or nibbles, of eight rows in a word, less the 8 of the book.
  __device__ __forceinline__ void take_zeros(int n, uint32_t k, FewBlock (&to)[kPieces]) const {
    const bool nibbles = of_.scheme == MOEC_SCHEME_INT4;
    const int shift = shift_of(of_.scales.block_n);
    const uint32_t line = uint32_t(of_.zeros.row_stride);
    const uint32_t at = (k >> shift_) * uint32_t(of_.zeros.col_stride);
    const auto* const first = static_cast<const char*>(of_.zeros.array.expert(group_));
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const uint32_t row = row_of(n + 8 * i) >> shift;
      if (nibbles) {
        const uint32_t word =
            reinterpret_cast<const uint32_t*>(first)[(row >> 3) * line + at] >> (row & 7) * 4;
        to[i].zero = float(int(word & 15u)) - 8.0f;
      } else {
        to[i].zero = float(int8_t(first[row * line + at]));
      }
    }
  }

  const ExpertQuant& of_;
  const int group_;
  const char* base_;
  const uint32_t k_end_;
  uint32_t step_, line_, lines_[kPieces], bits_[kPieces];
  int shift_, bytes_;
};

}  // namespace moec::cuda
