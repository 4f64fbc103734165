// SPDX-License-Identifier: Apache-2.0
// The values of one expert's matrix.
#include <algorithm>
#include <utility>

#include "backend/cpu/isa.h"
#include "backend/cpu/ops.h"
#include "backend/cpu/tile.h"
#include "core/workspace.h"

namespace moec::cpu {
namespace {

constexpr int kSide = 32;  // of the squares that are decoded at a time

class ValueWriter {
 public:
  explicit ValueWriter(const ValuesArgs& args)
      : args_(args), matrix_(*args.matrix), plain_(matrix_.expert(args.expert)) {
    if (!matrix_.is_coded()) return;
    coded_ = matrix_.coded(args.expert);
    decode_ = tile_kernels().decode[quant::Formats::index(matrix_.scheme)][int(Load::kF32)];
    along_n_ = matrix_.row_stride == 1;
  }
  void write(int64_t n0, int64_t k0) const {
    const int rows = int(std::min<int64_t>(kSide, args_.n - n0));
    const int columns = int(std::min<int64_t>(kSide, args_.k - k0));
    float values[kSide * kSide];
    int64_t n_stride = kSide, k_stride = 1;
    if (matrix_.is_coded()) {
      if (along_n_) std::swap(n_stride, k_stride);
      decode_({&coded_, n0, k0, along_n_, along_n_ ? columns : rows, along_n_ ? rows : columns,
               values, kSide});
    }
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j)
        store_real(
            args_.to.data, args_.to.dtype,
            (n0 + i) * args_.to.row_stride + (k0 + j) * args_.to.col_stride,
            matrix_.is_coded() ? values[i * n_stride + j * k_stride] : plain(n0 + i, k0 + j));
  }

 private:
  float plain(int64_t n, int64_t k) const {
    return load_real(plain_.data, plain_.dtype, n * plain_.row_stride + k * plain_.col_stride);
  }

  const ValuesArgs& args_;
  const ExpertMatrix& matrix_;
  const MatrixView plain_;
  quant::CodedView coded_;
  DecodeLinesFn decode_ = nullptr;
  bool along_n_ = false;
};

}  // namespace

void weight_values(const Device& device, const ValuesArgs& args) {
  const ValueWriter writer(args);
  device.pool.parallel_for(div_up(args.n, kSide), [&](int32_t, int64_t i) {
    for (int64_t k = 0; k < args.k; k += kSide) writer.write(i * kSide, k);
  });
}

}  // namespace moec::cpu
