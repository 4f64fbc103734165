// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/device/warp.cuh"
#include "backend/cuda/routing/dense.h"
#include "backend/cuda/routing/gate.h"
#include "backend/cuda/routing/gate_input.cuh"
#include "core/chunks.h"
#include "core/workspace.h"

namespace moec::cuda {
namespace {

// A warp a token.
__global__ __launch_bounds__(kBlockThreads) void prepare_kernel(
    const __grid_constant__ GateInput in, void* jittered, void* rows, float* inverse) {
  begin_kernel();
  const int hidden = int(in.hidden);
  for (int64_t t = global_thread() / 32; t < in.num_tokens; t += global_threads() / 32) {
    const int64_t start = t * in.hidden;
    float squares = 0.0f;
    for_columns(hidden, [&](int h) {
      const float v = in.value(t, h);
      if (jittered) store_real(jittered, in.x.dtype, start + h, v);
      if (rows && !in.scaled) store_real(rows, in.x.dtype, start + h, v);
      squares += v * v;
    });
    if (!in.scaled) continue;
    const float factor = math::inverse_rms(warp_sum(squares), in.hidden, in.rms_eps);
    if (inverse && lane_id() == 0) inverse[t] = factor;
    if (!rows) continue;
    for_columns(hidden, [&](int h) {
      static_cast<float*>(rows)[start + h] = in.value(t, h) * factor * in.gain(h);
    });
  }
}

struct LogitParams {
  const float* parts;  // [num_parts, T, pieces, columns]; may be the logits themselves
  int64_t num_parts, pieces, count, columns;  // count = T * columns
  Array bias;
  math::RoundTo round;
  float* logits;
};

// logits (+ bias, rounded) from the parts of the product and the pieces of the weight.
__global__ __launch_bounds__(kBlockThreads) void finish_logits_kernel(
    const __grid_constant__ LogitParams p) {
  begin_kernel();
  for (int64_t i = global_thread(); i < p.count; i += global_threads()) {
    const int64_t t = i / p.columns, column = i - t * p.columns;
    const float* const from = p.parts + t * p.pieces * p.columns + column;
    float sum = 0.0f;
    for (int64_t part = 0; part < p.num_parts; ++part)
      for (int64_t piece = 0; piece < p.pieces; ++piece)
        sum += from[part * p.count * p.pieces + piece * p.columns];
    if (p.bias.data) sum += load_real(p.bias.data, p.bias.dtype, column);
    p.logits[i] = p.round(sum);
  }
}

}  // namespace

void prepare_rows(const Op& op, const GateInput& in, void* jittered, void* rows, float* inverse) {
  run(op, "input of the gate", prepare_kernel,
      grid_for(in.num_tokens, kBlockThreads / 32, op.multiprocessors * 8), kBlockThreads, 0, in,
      jittered, rows, inverse);
}

// The larger of both directions is not worth its code: the sum.
moec_size gate_scratch(const moec_router_desc& desc, int64_t hidden) {
  const uint64_t columns = uint64_t(desc.num_experts) + uint64_t(desc.num_zero_experts);
  const bool scaled = desc.input == MOEC_INPUT_RMS_SCALED, changed = scaled || desc.jitter != 0.0f;
  const uint64_t width = uint64_t(hidden), chunks = uint64_t(Chunks::kMax);
  const uint64_t weight = columns * width * kPieces;
  // products: d_weight in pieces, and one of [T, pieces of columns] or [T, hidden]
  const uint64_t products =
      DenseProduct::most_scratch(columns * kPieces, width) + DenseProduct::most_scratch(1, 1);
  const uint64_t sums = chunks * (columns + (scaled ? width : 0)) * sizeof(float);
  const uint64_t row = std::max(width, columns * kPieces) + (changed ? width : 0) + 2;
  return {products + weight * sizeof(bf16) + sums + 13 * kCacheLine,
          row * sizeof(float) + columns * kPieces * sizeof(bf16)};
}

void gate_forward(const Op& op, const GateArgs& args) {
  const GateInput in(args);
  const int64_t columns = int64_t(args.desc->num_experts) + args.desc->num_zero_experts;
  const int64_t T = args.num_tokens, H = args.hidden;
  if (T == 0) return;
  const bool copies = in.scaled || (in.is_changed() && !args.x_jittered);
  const Scratch copy(op, copies ? uint64_t(T * H * dtype_bytes(in.rows_dtype())) : 0);
  Array x = in.x;
  if (in.is_changed()) {
    prepare_rows(op, in, args.x_jittered.data, copy.as<void>(), nullptr);
    x = copies ? Array{copy.as<void>(), in.rows_dtype()} : args.x_jittered;
  }
  const int64_t pieces = splits(args.weight.dtype, x.dtype) ? kPieces : 1;
  const Scratch split(op, pieces > 1 ? uint64_t(kPieces * columns * H) * sizeof(bf16) : 0);
  const Array weight = pieces > 1 ? Array{split.as<void>(), MOEC_BF16} : args.weight;
  if (pieces > 1)
    split_to_bf16(op, static_cast<const float*>(args.weight.data), 1, columns * H, weight.data);
  const Dense dense = {T, columns * pieces, H, x, weight, H, 1, 1, H};
  const DenseProduct product(op, dense, pieces == 1 ? Array{args.logits, MOEC_F32} : Array{});
  const Scratch scratch(op, product.scratch_bytes());
  const float* const parts = product.run(op, scratch.as<char>());
  const math::RoundTo round(*args.desc, args.desc->logit_precision);
  if (parts || args.bias || round.dtype != MOEC_F32)
    run(op, "logits", finish_logits_kernel,
        grid_for(T * columns, kBlockThreads, int64_t(op.multiprocessors) * 8), kBlockThreads, 0,
        LogitParams{parts ? parts : args.logits, product.parts(), pieces, T * columns, columns,
                    args.bias, round, args.logits});
}

}  // namespace moec::cuda
