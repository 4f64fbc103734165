// SPDX-License-Identifier: Apache-2.0
// One matrix of codes [N,K] with what makes values of them, as a format reads it. Everything but
// the rows of codes that are bytes is that of the bound matrix, of which this one may be a part:
// its row n is row rows.of(n) there.
#pragma once

#include <initializer_list>

#include "core/dtype.h"

namespace moec::quant {

// Elements along an axis that share an entry. Most sizes are powers of two: a division takes longer
// than loading a value.
class BlockSize {
 public:
  MOEC_HD constexpr BlockSize() : BlockSize(1) {}
  MOEC_HD constexpr explicit BlockSize(int64_t size) : size_(size), shift_(shift_of(size)) {}
  // All of an axis of this extent.
  MOEC_HD static constexpr BlockSize all_of(int64_t extent) {
    BlockSize size(extent);
    size.shift_ = kAll;
    return size;
  }
  MOEC_HD constexpr int64_t size() const { return size_; }
  MOEC_HD constexpr bool is_all() const { return shift_ == kAll; }
  MOEC_HD constexpr bool is_power() const { return shift_ >= 0; }  // of two, or all
  // The entry of an element, and how many entries an extent has.
  MOEC_HD constexpr int64_t of(int64_t index) const {
    return shift_ >= 0 ? index >> shift_ : index / size_;
  }
  MOEC_HD constexpr int64_t count(int64_t extent) const { return of(extent - 1) + 1; }

 private:
  static constexpr int kAll = 63;
  MOEC_HD static constexpr int shift_of(int64_t size) {
    if (size < 1 || (size & (size - 1))) return -1;
    int shift = 0;
    while ((size >> shift) > 1) ++shift;
    return shift;
  }
  int64_t size_;
  int32_t shift_;  // negative: no power of two
};

// Entry of element (n, k): data[block_n.of(n) * row_stride + block_k.of(k) * col_stride].
struct BlockView {
  const void* data = nullptr;
  int64_t row_stride = 0, col_stride = 0;  // elements
  BlockSize block_n, block_k;
  moec_dtype dtype = 0;

  MOEC_HD explicit operator bool() const { return data != nullptr; }
  MOEC_HD int64_t at(int64_t n, int64_t k) const {
    return block_n.of(n) * row_stride + block_k.of(k) * col_stride;
  }
};

struct RowMap {
  int64_t first = 0, step = 1;
  MOEC_HD int64_t of(int64_t n) const { return first + n * step; }
  // Rows begin, begin + by, ... of these.
  MOEC_HD RowMap part(int64_t begin, int64_t by) const { return {of(begin), step * by}; }
};

struct CodedView {
  const void* codes = nullptr;
  int64_t row_stride = 0, col_stride = 0;  // codes; of GGUF's blocks bytes
  uint32_t scheme = 0;                     // moec_scheme
  BlockView scales, zeros;                 // zeros of several codes in an element: along N
  moec_dtype code_dtype = 0;
  uint32_t flags = 0;  // moec_quant_flags
  RowMap rows;
  int64_t first = 0, blocks_along_k = 0;  // first code in a stream; groups of group_index
  const float *codebook = nullptr, *scale_book = nullptr, *scales2 = nullptr,
              *scale_offset = nullptr;
  const int32_t* group_index = nullptr;  // [K]
  BlockSize scale_block;
};

using Dtypes = std::initializer_list<moec_dtype>;
inline constexpr Dtypes kNoTypes = {}, kRealTypes = {MOEC_F32, MOEC_F16, MOEC_BF16},
                        kI8Types = {MOEC_I8}, kU8Types = {MOEC_U8}, kI32Types = {MOEC_I32},
                        kFp8Types = {MOEC_F8_E4M3, MOEC_F8_E5M2}, kE4m3Types = {MOEC_F8_E4M3},
                        kPowerTypes = {MOEC_F8_E8M0, MOEC_U8},
                        kRealOrPowerTypes = {MOEC_F32, MOEC_F16, MOEC_BF16, MOEC_F8_E8M0, MOEC_U8},
                        kRealOrBookTypes = {MOEC_F32, MOEC_F16, MOEC_BF16, MOEC_U8},
                        kAnyBytes = {MOEC_U8, MOEC_I8, MOEC_F32, MOEC_F16, MOEC_BF16};

// How codes lie in their tensor.
enum class Storage {
  kRows,    // [N,K] or [K,N], the last extent in units
  kAlongK,  // [K in units, N]
  kStream   // all of a tensor in one row
};
enum class Orientations { kBoth, kOutIn, kInOut };
// Tensors of a moec_quant that a format may have besides scales.
enum Extras : uint32_t {
  kNoExtras = 0,
  kScales2 = 1,
  kCodebook = 2,
  kNested = 4,  // scale_book, scale_offset, scales2
  kGroupIndex = 8
};

// What binding and memory need to know of a format.
struct FormatInfo {
  uint32_t scheme;
  const char* name;
  int code_bits;  // of one element
  Dtypes code_dtypes;
  Storage storage = Storage::kRows;
  Orientations orientations = Orientations::kBoth;
  // `unit_values` neighbours are `unit_elements` elements of the tensor.
  int64_t unit_values = 1, unit_elements = 1;
  bool whole_units = false;  // extents are multiples of them
  Dtypes scale_dtypes = kNoTypes;
  Dtypes zeros_dtypes = kNoTypes;  // none: the format has none
  int64_t zeros_values = 1;        // zero points in an element, along N
  bool zeros_needed = false;
  // Elements along N and along K that share a scale unless the matrix says others; 0 = all. Along
  // the packed axis and across it, where `along_packed`.
  int64_t block_n = 1, block_k = 0;
  bool along_packed = false;
  bool any_block = false;  // a matrix may say others
  uint32_t extras = kNoExtras;
  bool spare_row = false;  // beside one row of scales there may be a second
};

}  // namespace moec::quant
