// SPDX-License-Identifier: Apache-2.0
// What the portable kernels are given. A product is c(m, n) = sum over k of a(m, k) b(n, k). Row
// products run over m = rows, weight gradients over k = rows of a group.
#pragma once

#include <cuda_runtime.h>

#include "backend/cuda/sm80/row_product.h"
#include "core/dtype.h"

namespace moec::cuda {

constexpr int kPortableTile = 128, kPortableThreads = 256;  // tiles of 128 x 128

struct Operand {  // element (i, k) of group e; i is m or n
  const void* base;
  void* const* pointers;  // [groups], instead of base
  int64_t group_stride, pointer_offset, i_stride, k_stride;
  const int32_t* gather;  // of the index that runs over rows
  moec_dtype dtype;

  MOEC_HD const char* of_group(int64_t e) const {
    const int64_t size = dtype_bytes(dtype);
    return pointers ? static_cast<const char*>(pointers[e]) + pointer_offset * size
                    : static_cast<const char*>(base) + e * group_stride * size;
  }
};

// What products read in the place of an operand b: elements of its codes, or its own rounded once.
struct OperandCodes {
  ExpertQuant quant;
  moec_dtype dtype;  // that they read; 0: as the operand is
  bool transposed;   // the matrix is [k,n]: its n is the operand's k
};

// What the columns of narrow rows are multiplied by.
struct ColumnScales {
  const float* scale;                        // [n], null: nothing
  const int32_t *adapter, *ids, *row_token;  // [n]; of tokens, null: all; of rows, null: themselves
};

struct PortableGemm {
  RowGroups groups;
  int64_t m, n, k;  // without the extent that runs over rows
  int parts;
  bool sum;
  Operand a, b[2];
  OperandCodes codes[2];  // of b
  int64_t a_part;         // elements from part 0 of a to part 1
  Operand c;              // i: m, k: n
  int64_t c_part;         // elements from part 0 to part 1
  bool spans;             // four neighbours of n may be stored at once
  bool accumulate;
  bool groups_made;
  Operand bias[2];  // i: n; no base and no pointers: none
  const float* bias_weight;
  ColumnScales column_scales;
};

// A row product as kernels are given it. aligned: whether every operand begins at 16 bytes.
PortableGemm gemm_of(const RowProduct& product, const ProductOutput& output, bool& aligned);

// In which type products read operand b of a part.
MOEC_HD moec_dtype dtype_of_b(const PortableGemm& p, int part) {
  return p.codes[part].dtype ? p.codes[part].dtype : p.b[part].dtype;
}

// The matrix [n,k] behind operand b of a part.
MOEC_HD quant::CodedView coded_view(const PortableGemm& p, int part, int64_t group) {
  const Operand& b = p.b[part];
  const OperandCodes& codes = p.codes[part];
  return codes.quant.view(
      group, {const_cast<char*>(b.of_group(group)), codes.transposed ? b.k_stride : b.i_stride,
              codes.transposed ? b.i_stride : b.k_stride, b.dtype});
}
MOEC_HD bool is_coded(const PortableGemm& p) {  // of gate and up both or none
  return p.codes[0].quant.is_coded();
}

// tile_rows: of row products.
inline dim3 portable_grid(const PortableGemm& p, bool weight_gradient,
                          int tile_rows = kPortableTile) {
  const auto tiles = [](int64_t extent, int64_t of = kPortableTile) {
    return (extent + of - 1) / of;
  };
  if (weight_gradient) return dim3(unsigned(tiles(p.m) * tiles(p.n) * p.groups.count));
  // Every group may end in a tile of its own.
  const int64_t ends = p.groups.offsets ? p.groups.count : 0;
  const int64_t rows = tiles(p.groups.max_rows, tile_rows) + ends;
  return dim3(unsigned(rows * tiles(p.n) * (p.sum ? 1 : p.parts)));
}

// The two sets of kernels.
// aligned: every operand of every group begins at 16 bytes.
bool mma_takes(const PortableGemm& gemm, bool weight_gradient, bool aligned);
// Of those: whether elements of operand b are made of codes or of fp32.
inline bool makes_b(const PortableGemm& gemm, bool weight_gradient) {
  return !weight_gradient && (is_coded(gemm) || gemm.b[0].dtype == MOEC_F32);
}
void mma_product(const Op& op, const PortableGemm& gemm, bool weight_gradient);
void mma_coded_product(const Op& op, const PortableGemm& gemm);  // of those, where b is coded
void plain_product(const Op& op, const PortableGemm& gemm, bool weight_gradient);

}  // namespace moec::cuda
