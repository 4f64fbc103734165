// SPDX-License-Identifier: Apache-2.0
// Rows that go to other ranks, and the sum of those that come back.
#include <cstring>

#include "backend/cpu/gemm.h"
#include "backend/cpu/ops.h"
#include "backend/cpu/vectorised.h"
#include "core/dtype.h"
#include "core/portable.h"

namespace moec::cpu {
namespace {

constexpr int64_t kBlock = 1024;           // columns
constexpr int64_t kPieceBytes = 64 << 10;  // least work of a parallel piece

// body(i) for each of `items`, in pieces of about kPieceBytes.
template <class Body>
void for_items(const Device& device, int64_t items, int64_t item_bytes, Body&& body) {
  const Chunks chunks(items, std::max<int64_t>(1, kPieceBytes / std::max<int64_t>(item_bytes, 1)));
  device.pool.parallel_for(chunks.count, [&](int32_t, int64_t chunk) {
    for (int64_t i = chunks.begin(chunk); i < chunks.end(chunk); ++i) body(i);
  });
}

void add_to(const float* from, float* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] += from[i];
}
void scale(float by, float* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) values[i] *= by;
}

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
    const auto add = [&](const Array& rows, int64_t line) {
      convert_to_f32(at(rows, line), rows.dtype, row, n);
      vectorised<add_to>(static_cast<const float*>(row), static_cast<float*>(sum), n);
    };
    for (int32_t i = 0; i < args.width && index[i] >= 0; ++i) add(args.rows, index[i]);
    if (args.scale != 1.0f) vectorised<scale>(args.scale, static_cast<float*>(sum), n);
    if (args.add) add(args.y, t);
    convert_from_f32(sum, args.y.dtype, at(args.y, t), n);
  }
}

}  // namespace

void pick_rows(const Device& device, const PickRowsArgs& args) {
  const int64_t bytes = args.row_bytes;
  for_items(device, args.count, bytes, [&](int64_t i) {
    if (args.index[i] < 0) return;
    std::memcpy(static_cast<char*>(args.to) + i * bytes,
                static_cast<const char*>(args.from) + args.index[i] * bytes, size_t(bytes));
  });
}

void sum_rows(const Device& device, const SumRowsArgs& args) {
  const int64_t bytes = args.hidden * dtype_bytes(args.rows.dtype);
  for_items(device, args.num_tokens, bytes * (args.width + 1),
            [&](int64_t t) { sum_token(args, t); });
}

}  // namespace moec::cpu
