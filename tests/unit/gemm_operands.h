// SPDX-License-Identifier: Apache-2.0
// Operands of grouped products with values that a test knows, in memory that ends at pages without
// access.
#pragma once

#include <memory>
#include <vector>

#include "backend/cpu/gemm.h"
#include "core/dtype.h"
#include "support/guard.h"
#include "support/random.h"

namespace moec::cpu {

using test::GuardedBuffer;
using test::Random;

enum class Layout { kOutIn, kInOut, kOutInInterleaved, kInOutInterleaved };

// How elements of a matrix are stored: as they are read; in fp32 that is rounded to it; as INT8
// codes with scales of this type and zero points.
struct Stored {
  bool rounded = false;
  moec_dtype scales = 0;
};

// Values of `experts` matrices [n, k] in one of the layouts, read as `dtype`. Between them is NaN.
struct Weights {
  int64_t n, k;
  ExpertMatrix matrix;
  std::unique_ptr<GuardedBuffer> memory, scales, zeros;
  std::vector<double> values;  // [experts, n, k], as rounded

  Weights(Random& random, moec_dtype dtype, Layout layout, int64_t experts, int64_t n_, int64_t k_,
          const Stored& stored = {})
      : n(n_), k(k_) {
    const bool twice = layout >= Layout::kOutInInterleaved;
    const bool out_in = layout == Layout::kOutIn || layout == Layout::kOutInInterleaved;
    matrix.row_stride = (twice ? 2 : 1) * (out_in ? k : 1);
    matrix.col_stride = out_in ? 1 : (twice ? 2 : 1) * n;
    const int64_t reach = (n - 1) * matrix.row_stride + (k - 1) * matrix.col_stride + 1;
    matrix.values.expert_stride = n * k * (twice ? 2 : 1);
    matrix.dtype = dtype;
    matrix.values.dtype = stored.scales    ? moec_dtype(MOEC_I8)
                          : stored.rounded ? moec_dtype(MOEC_F32)
                                           : dtype;
    memory = std::make_unique<GuardedBuffer>(size_t(
        ((experts - 1) * matrix.values.expert_stride + reach) * dtype_bytes(matrix.values.dtype)));
    matrix.values.base = memory->data();
    if (stored.scales) add_codes(random, stored.scales, experts, twice ? 2 : 1);
    if (stored.scales) return;
    for (int64_t e = 0; e < experts; ++e) {
      const MatrixView view = matrix.expert(e);
      for (int64_t i = 0; i < n * k; ++i) {
        const auto value = float(random.normal());
        store_real(view.data, view.dtype, i / k * view.row_stride + i % k * view.col_stride, value);
        values.push_back(round_real(dtype, value));
      }
    }
  }
  // Entry (e, n) of scales and zero points at (e * n_ + n) * step.
  void add_codes(Random& random, moec_dtype scale_dtype, int64_t experts, int64_t step) {
    const int64_t entries = (experts * n - 1) * step + 1;
    scales = std::make_unique<GuardedBuffer>(size_t(entries * dtype_bytes(scale_dtype)));
    zeros = std::make_unique<GuardedBuffer>(size_t(entries));
    matrix.scheme = MOEC_SCHEME_INT8;
    const quant::BlockSize one, all = quant::BlockSize::all_of(k);
    matrix.scales = {{scales->data(), nullptr, n * step, 0, scale_dtype}, step, 0, one, all};
    matrix.zeros = {{zeros->data(), nullptr, n * step, 0, MOEC_I8}, step, 0, one, all};
    auto* const codes = static_cast<int8_t*>(matrix.values.base);
    for (int64_t row = 0; row < experts * n; ++row) {
      const auto zero = int8_t(random.below(21) - 10);
      const float scale = round_real(scale_dtype, float(0.01 + 0.0001 * double(random.below(100))));
      store_real(scales->data(), scale_dtype, row * step, scale);
      zeros->data<int8_t>()[row * step] = zero;
      for (int64_t i = 0; i < k; ++i) {
        const auto code = int8_t(random.below(256) - 128);
        codes[row / n * matrix.values.expert_stride + row % n * matrix.row_stride +
              i * matrix.col_stride] = code;
        values.push_back(round_real(matrix.dtype, (float(code) - float(zero)) * scale));
      }
    }
  }
  std::vector<char> pack(int64_t experts) const {
    const int64_t stride = packed_matrix_bytes(matrix, n, k);
    std::vector<char> packed(size_t(experts * stride + 64), char(0xff));
    pack_experts(ThreadPool(2), matrix, 0, experts, n, k, aligned(packed), stride);
    return packed;
  }
  ExpertMatrix type() const {  // all that a packed copy leaves to read
    ExpertMatrix only;
    only.values = matrix.values;
    only.values.base = &only;  // not to be read
    only.dtype = matrix.dtype;
    return only;
  }
  static char* aligned(std::vector<char>& memory) {
    return reinterpret_cast<char*>((uintptr_t(memory.data()) + 63) / 64 * 64);
  }
};

struct Rows {
  GuardedBuffer memory;
  GemmRows rows;
  std::vector<double> values;  // [count, k]
  Rows(Random& random, moec_dtype dtype, int64_t count, int64_t k, int64_t stride)
      : memory(size_t(count ? ((count - 1) * stride + k) * dtype_bytes(dtype) : 0)) {
    rows = {memory.data(), dtype, stride, nullptr};
    for (int64_t i = 0; i < count * k; ++i) {
      const auto value = float(random.normal());
      store_real(memory.data(), dtype, i / k * stride + i % k, value);
      values.push_back(round_real(dtype, value));
    }
  }
};

}  // namespace moec::cpu
