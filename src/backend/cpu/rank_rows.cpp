// SPDX-License-Identifier: Apache-2.0
// Rows that go to other ranks, and the sum of those that come back.
#include <cstring>

#include "backend/cpu/gemm.h"
#include "backend/cpu/ops.h"
#include "backend/cpu/pieces.h"
#include "backend/cpu/row_math.h"
#include "core/dtype.h"
#include "core/portable.h"

namespace moec::cpu {
namespace {

constexpr int64_t kBlock = 1024;  // columns

// Sums start at +0, so that none is ever -0: a rank without a row leaves no trace.
void sum_token(const SumRowsArgs& args, int64_t t) {
  alignas(kCacheLine) float sum[kBlock], row[kBlock];
  const int32_t* const index = args.index + t * args.width;
  for (int64_t h = 0; h < args.hidden; h += kBlock) {
    const int64_t n = std::min(kBlock, args.hidden - h);
    const auto at = [&](const Array& rows, int64_t line) {
      return static_cast<char*>(rows.data) + (line * args.hidden + h) * dtype_bytes(rows.dtype);
    };
    std::memset(sum, 0, sizeof sum);
    const auto add_row = [&](const Array& rows, int64_t line) {
      convert_to_f32(at(rows, line), rows.dtype, row, n);
      add(sum, row, n);
    };
    for (int32_t i = 0; i < args.width && index[i] >= 0; ++i) add_row(args.rows, index[i]);
    if (args.scale != 1.0f) scale(sum, args.scale, n);
    if (args.add) add_row(args.y, t);
    convert_from_f32(sum, args.y.dtype, at(args.y, t), n);
  }
}

}  // namespace

void pick_rows(const Device& device, const PickRowsArgs& args) {
  const int64_t bytes = args.row_bytes;
  for_ranges(device, args.count, bytes, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      if (args.index[i] >= 0)
        std::memcpy(static_cast<char*>(args.to) + i * bytes,
                    static_cast<const char*>(args.from) + args.index[i] * bytes, size_t(bytes));
  });
}

void sum_rows(const Device& device, const SumRowsArgs& args) {
  const int64_t bytes = args.hidden * dtype_bytes(args.rows.dtype);
  for_ranges(device, args.num_tokens, bytes * (args.width + 1), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) sum_token(args, t);
  });
}

}  // namespace moec::cpu
