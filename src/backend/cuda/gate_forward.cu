// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/dense.h"
#include "backend/cuda/gate.h"
#include "backend/cuda/gate_input.cuh"
#include "backend/cuda/warp.cuh"
#include "core/chunks.h"
#include "core/workspace.h"

namespace moec::cuda {
namespace {

constexpr int kThreads = 256;

// A warp a token.
__global__ __launch_bounds__(kThreads) void prepare_kernel(const GateInput in, void* jittered,
                                                           void* rows, float* inverse) {
  begin_kernel();
  const int hidden = int(in.hidden);
  for (int64_t t = global_thread() / 32; t < in.num_tokens; t += global_threads() / 32) {
    const int64_t start = t * in.hidden;
    float squares = 0.0f;
    for_columns(hidden, [&](int h) {
      const float v = in.value(start + h);
      if (jittered) store_real(jittered, in.x.dtype, start + h, v);
      if (rows && !in.scaled) store_real(rows, in.x.dtype, start + h, v);
      squares += v * v;
    });
    if (!in.scaled) continue;
    const float factor = math::inverse_rms(warp_sum(squares), in.hidden, in.rms_eps);
    if (inverse && lane_id() == 0) inverse[t] = factor;
    if (!rows) continue;
    for_columns(hidden, [&](int h) {
      static_cast<float*>(rows)[start + h] = in.value(start + h) * factor * in.gain(h);
    });
  }
}

// logits (+ bias, rounded) from the parts of the product, which may be the logits themselves.
__global__ __launch_bounds__(kThreads) void finish_logits_kernel(const float* parts,
                                                                 int64_t num_parts, int64_t count,
                                                                 int columns, const Array bias,
                                                                 const math::RoundTo round,
                                                                 float* logits) {
  begin_kernel();
  for (int64_t i = global_thread(); i < count; i += global_threads()) {
    float sum = parts[i];
    for (int64_t part = 1; part < num_parts; ++part) sum += parts[part * count + i];
    if (bias.data) sum += load_real(bias.data, bias.dtype, i % columns);
    logits[i] = round(sum);
  }
}

}  // namespace

void prepare_rows(const Op& op, const GateInput& in, void* jittered, void* rows, float* inverse) {
  run(op, "input of the gate", prepare_kernel,
      grid_for(in.num_tokens, kThreads / 32, op.multiprocessors * 8), kThreads, 0, in, jittered,
      rows, inverse);
}

moec_size gate_scratch(const moec_router_desc& desc, int64_t hidden) {
  const uint64_t columns = uint64_t(desc.num_experts) + uint64_t(desc.num_zero_experts);
  const bool scaled = desc.input == MOEC_INPUT_RMS_SCALED, changed = scaled || desc.jitter != 0.0f;
  const uint64_t width = uint64_t(hidden), chunks = uint64_t(Chunks::kMax);
  // two products (each kDenseBytes or a matrix); chunks of the gradients of bias and scale
  const uint64_t floats = columns * width + chunks * (columns + (scaled ? width : 0));
  return {2 * kDenseBytes + floats * sizeof(float) + 8 * kCacheLine,
          (std::max(width, columns) + (changed ? width : 0) + 1) * sizeof(float)};
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
  const Dense product = {T, columns, H, x, args.weight, H, 1, 1, H};
  const int64_t num_parts = dense_parts(product);
  const Scratch scratch(op, num_parts > 1 ? dense_bytes(T, columns) : 0);
  float* const parts = num_parts > 1 ? scratch.as<float>() : args.logits;
  dense_product(op, product, parts);
  const math::RoundTo round(*args.desc, args.desc->logit_precision);
  if (num_parts > 1 || args.bias || round.dtype != MOEC_F32)
    run(op, "logits", finish_logits_kernel, grid_for(T * columns, kThreads, op.multiprocessors * 8),
        kThreads, 0, static_cast<const float*>(parts), num_parts, T * columns, int(columns),
        args.bias, round, args.logits);
}

}  // namespace moec::cuda
