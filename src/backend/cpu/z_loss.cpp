// SPDX-License-Identifier: Apache-2.0
// The z-loss. Long rows go one by one. Of short ones the tokens of a tile lie side by side, one a
// lane; the sum of a row is that of row_sum (score_row.h), without the lanes that hold only
// padding.
#include <bit>

#include "backend/cpu/loss.h"
#include "backend/cpu/score_row.h"
#include "backend/cpu/vectorised.h"
#include "core/chunks.h"
#include "math/loss.h"

namespace moec::cpu {
namespace {

constexpr int64_t kTogether = 16;  // tokens of a tile

struct ZTile {
  int64_t columns, width;                // width: partial sums of a row, a power of 2
  float* rows;                           // [kTogether, columns] logits
  float* z;                              // [columns, kTogether], then e^(z - largest) of a row
  float sum[kTogether], lse[kTogether];  // of the latter; log(sum(e^logit))
};

void log_sum_exp(ZTile& tile) {  // of its rows
  float largest[kTogether];
  for (float& best : largest) best = -INFINITY;
  for (int64_t e = 0; e < tile.columns; ++e) {
    float* const z = tile.z + e * kTogether;
    for (int64_t t = 0; t < kTogether; ++t) z[t] = tile.rows[t * tile.columns + e];
    for (int64_t t = 0; t < kTogether; ++t) largest[t] = z[t] > largest[t] ? z[t] : largest[t];
  }
  float partial[kRowLanes][kTogether] = {};
  for (int64_t e = 0; e < tile.columns; ++e) {
    float* const z = tile.z + e * kTogether;
    float* const sum = partial[e];
    for (int64_t t = 0; t < kTogether; ++t) {
      z[t] = math::exp(z[t] - largest[t]);
      sum[t] += z[t];
    }
  }
  for (int64_t width = tile.width / 2; width > 0; width /= 2)
    for (int64_t l = 0; l < width; ++l)
      for (int64_t t = 0; t < kTogether; ++t) partial[l][t] += partial[l + width][t];
  for (int64_t t = 0; t < kTogether; ++t) {
    tile.sum[t] = partial[0][t];
    tile.lse[t] = largest[t] + math::log(tile.sum[t]);
  }
}

// Tokens [begin, end). squares: their sum is added, else the gradient is.
void z_short_rows(const LossArgs* args, const ZTile* memory, float factor, double* squares,
                  int64_t begin, int64_t end) {
  ZTile tile = *memory;
  const LossLayer& layer = args->layers[0];
  const int64_t columns = tile.columns, bytes = columns * dtype_bytes(layer.logits.dtype);
  for (int64_t first = begin; first < end; first += kTogether) {
    const int64_t count = std::min(kTogether, end - first);
    convert_to_f32(static_cast<const char*>(layer.logits.data) + first * bytes, layer.logits.dtype,
                   tile.rows, count * columns);
    log_sum_exp(tile);
    if (squares) {
      for (int64_t t = 0; t < count; ++t)
        if (is_counted(*args, first + t)) *squares += double(tile.lse[t]) * double(tile.lse[t]);
      continue;
    }
    for (int64_t e = 0; e < columns; ++e)
      for (int64_t t = 0; t < kTogether; ++t) {
        float* const z = tile.z + e * kTogether;
        z[t] = math::z_loss_slope(tile.lse[t], factor) * (z[t] / tile.sum[t]);
      }
    for (int64_t t = 0; t < count; ++t) {
      float* const d = layer.d_logits + (first + t) * columns;
      if (!is_counted(*args, first + t)) continue;
      for (int64_t e = 0; e < columns; ++e) d[e] += tile.z[e * kTogether + t];
    }
  }
}

void z_long_rows(const LossArgs* args, float* z, float factor, double* squares, int64_t begin,
                 int64_t end) {
  const int64_t columns = args->num_experts, lanes = padded_columns(columns);
  const LossLayer& layer = args->layers[0];
  for (int64_t t = begin; t < end; ++t) {
    if (!is_counted(*args, t)) continue;
    load_row(layer.logits, t, columns, z);
    const float largest = row_max(z, lanes);
    for (int64_t e = 0; e < lanes; ++e) z[e] = math::exp(z[e] - largest);
    const float sum = row_sum(z, lanes), lse = largest + math::log(sum);
    if (squares) {
      *squares += double(lse) * double(lse);
      continue;
    }
    const float slope = math::z_loss_slope(lse, factor);
    float* const d = layer.d_logits + t * columns;
    for (int64_t e = 0; e < columns; ++e) d[e] += slope * (z[e] / sum);
  }
}

// All tokens. squares: one sum for each chunk, or null: the gradient is added.
void z_chunks(const Device& device, const LossArgs& args, float factor, double* squares) {
  const int64_t columns = args.num_experts;
  const bool is_short = columns <= kRowLanes;
  const int64_t floats = is_short ? 2 * columns * kTogether : padded_columns(columns);
  const Scratch scratch(device, uint64_t(floats * device.pool.size()) * sizeof(float));
  const Chunks chunks(args.num_tokens, kLossTokens);
  device.pool.parallel_for(chunks.count, [&](int32_t slot, int64_t chunk) {
    float* const memory = static_cast<float*>(scratch.data()) + slot * floats;
    double* const sum = squares ? squares + chunk : nullptr;
    const int64_t begin = chunks.begin(chunk), end = chunks.end(chunk);
    if (!is_short) return vectorised<z_long_rows>(&args, memory, factor, sum, begin, end);
    ZTile tile;
    tile.columns = columns;
    tile.width = int64_t(std::bit_ceil(uint64_t(columns)));
    tile.rows = memory;
    tile.z = memory + columns * kTogether;
    std::fill_n(tile.rows, columns * kTogether, 0.0f);  // tokens past the last one
    const ZTile* const from = &tile;
    vectorised<z_short_rows>(&args, from, factor, sum, begin, end);
  });
}

double factor_of(const LossArgs& args) {
  int64_t tokens = counted_tokens(args, 0, args.num_tokens);
  if (args.ranks) args.ranks->add(&tokens, 1);
  return double(args.coefficient) / double(std::max<int64_t>(tokens, 1));
}

}  // namespace

double z_loss(const Device& device, const LossArgs& args) {
  double squares[Chunks::kMax] = {}, sum = 0.0;
  z_chunks(device, args, 0.0f, squares);
  for (const double square : squares) sum += square;
  if (args.ranks) args.ranks->add(&sum, 1);
  return sum * factor_of(args);
}

void z_loss_backward(const Device& device, const LossArgs& args, double d_loss) {
  z_chunks(device, args, float(factor_of(args) * d_loss), nullptr);
}

}  // namespace moec::cpu
