// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <optional>

#include "backend/cuda/device/warp.cuh"
#include "backend/cuda/routing/column_sum.h"
#include "backend/cuda/routing/dense.h"
#include "backend/cuda/routing/gate.h"
#include "backend/cuda/routing/gate_input.cuh"

namespace moec::cuda {
namespace {

constexpr int64_t kGateTokens = 8;  // least number of tokens of a chunk

struct InputGradient {
  GateInput in;
  Array d_x, d_x_jittered;
  bool accumulate;
  const float* d_rows;   // [T,H] gradient at what the product read, with its parts after it
  int64_t num_parts;     // of d_rows
  const float* inverse;  // [T] 1 / rms, scaled input

  __device__ float gradient(int64_t index) const {
    float sum = d_rows[index];
    for (int64_t part = 1; part < num_parts; ++part)
      sum += d_rows[part * in.num_tokens * in.hidden + index];
    return sum;
  }
  // d at the jittered x: back through the jitter, then into d_x.
  __device__ void store(int64_t index, float d) const {
    if (d_x_jittered.data) d += load_real(d_x_jittered.data, d_x_jittered.dtype, index);
    if (in.jitter != 0.0f) d *= in.jitter_at(index);
    if (accumulate) d += load_real(d_x.data, d_x.dtype, index);
    store_real(d_x.data, d_x.dtype, index, d);
  }
};

__global__ __launch_bounds__(kBlockThreads) void input_gradient_kernel(
    const __grid_constant__ InputGradient p) {
  begin_kernel();
  const int64_t count = p.in.num_tokens * p.in.hidden;
  for (int64_t i = global_thread(); i < count; i += global_threads()) p.store(i, p.gradient(i));
}

// Through x / rms(x) * gain: a warp a token.
__global__ __launch_bounds__(kBlockThreads) void scaled_gradient_kernel(
    const __grid_constant__ InputGradient p) {
  begin_kernel();
  const int hidden = int(p.in.hidden);
  for (int64_t t = global_thread() / 32; t < p.in.num_tokens; t += global_threads() / 32) {
    const int64_t start = t * hidden;
    const float inverse = p.inverse[t];
    float dot = 0.0f;
    for_columns(hidden, [&](int h) {
      dot += p.gradient(start + h) * p.in.gain(h) * (p.in.value(t, h) * inverse);
    });
    const float mean = warp_sum(dot) / float(hidden);
    for_columns(hidden, [&](int h) {
      const float normed = p.in.value(t, h) * inverse;
      p.store(start + h,
              math::rms_gradient(inverse, normed, p.gradient(start + h) * p.in.gain(h), mean));
    });
  }
}

// Sum of value(t) over [first, end), by blocks: rounding errors grow with the length of a sum.
template <class Value>
__device__ float sum_in_blocks(int64_t first, int64_t end, Value value) {
  float sum = 0.0f;
  for (int64_t begin = first; begin < end; begin += kSummedTogether) {
    float block = 0.0f;
    for (int64_t t = begin; t < min(begin + kSummedTogether, end); ++t) block += value(t);
    sum += block;
  }
  return sum;
}

// partial [chunk, h] = sum over the chunk's tokens of d * normed x / sqrt(H)
__global__ __launch_bounds__(kBlockThreads) void scale_gradient_kernel(
    const __grid_constant__ InputGradient p, int64_t chunk_tokens, float* partial) {
  begin_kernel();
  const int64_t h = global_thread(), first = blockIdx.y * chunk_tokens;
  if (h >= p.in.hidden) return;
  const int64_t end = min(first + chunk_tokens, p.in.num_tokens);
  const float sum = sum_in_blocks(first, end, [&](int64_t t) {
    const int64_t index = t * p.in.hidden + h;
    return p.gradient(index) * (p.in.value(t, h) * p.inverse[t]);
  });
  partial[blockIdx.y * p.in.hidden + h] = sum * p.in.root;
}

// partial [chunk, i] = sum over the chunk's tokens of values [T, width]
__global__ __launch_bounds__(kBlockThreads) void sum_columns_kernel(
    const float* values, int64_t num_tokens, int64_t width, int64_t chunk_tokens, float* partial) {
  begin_kernel();
  const int64_t i = global_thread(), first = blockIdx.y * chunk_tokens;
  if (i >= width) return;
  const int64_t end = min(first + chunk_tokens, num_tokens);
  partial[blockIdx.y * width + i] =
      sum_in_blocks(first, end, [&](int64_t t) { return values[t * width + i]; });
}

// idle[t] = 1: no logit of the token has a gradient. A warp a token.
__global__ __launch_bounds__(kBlockThreads) void find_idle_kernel(const float* d_logits,
                                                                  int64_t num_tokens, int columns,
                                                                  uint8_t* idle) {
  begin_kernel();
  for (int64_t t = global_thread() / 32; t < num_tokens; t += global_threads() / 32) {
    bool takes_part = false;
    for_columns(columns, [&](int i) { takes_part |= d_logits[t * columns + i] != 0.0f; });
    takes_part = __any_sync(kAllLanes, takes_part);
    if (lane_id() == 0) idle[t] = !takes_part;
  }
}

dim3 chunk_grid(int64_t width, const Chunks& chunks) {
  return dim3(unsigned((width + kBlockThreads - 1) / kBlockThreads), unsigned(chunks.count));
}

void bias_gradient(const Op& op, const GateGradArgs& args, int64_t columns) {
  const Chunks chunks(args.num_tokens, kGateTokens);
  const Scratch partial(op, uint64_t(chunks.count * columns) * sizeof(float));
  if (chunks.count)
    run(op, "gradient of the gate's bias", sum_columns_kernel, chunk_grid(columns, chunks),
        kBlockThreads, 0, args.d_logits, args.num_tokens, columns, chunks.length,
        partial.as<float>());
  store_sum(op, partial.as<const float>(), chunks.count, columns, args.d_bias, args.accumulate);
}

// d_logits as the products read it: [T, pieces, columns].
struct LogitGradient {
  Array values;
  int64_t pieces;
};

void weight_gradient(const Op& op, const GateGradArgs& args, int64_t columns,
                     const LogitGradient& d, const Array& x) {
  const int64_t T = args.num_tokens, H = args.hidden, rows = columns * d.pieces;
  const DenseProduct product(op, {rows, H, T, d.values, x, 1, rows, H, 1});
  const Scratch scratch(op, product.scratch_bytes());
  const float* const parts = product.run(op, scratch.as<char>());
  store_sum(op, parts, product.parts() * d.pieces, columns * H, args.d_weight, args.accumulate);
}

void input_scale_gradient(const Op& op, const GateGradArgs& args, const InputGradient& gradient) {
  const Chunks chunks(args.num_tokens, kGateTokens);
  const Scratch partial(op, uint64_t(chunks.count * args.hidden) * sizeof(float));
  run(op, "gradient of the input scale", scale_gradient_kernel, chunk_grid(args.hidden, chunks),
      kBlockThreads, 0, gradient, chunks.length, partial.as<float>());
  store_sum(op, partial.as<const float>(), chunks.count, args.hidden, args.d_input_scale,
            args.accumulate);
}

}  // namespace

void gate_backward(const Op& op, const GateGradArgs& args) {
  GateInput in(args);
  const int64_t columns = int64_t(args.desc->num_experts) + args.desc->num_zero_experts;
  const int64_t T = args.num_tokens, H = args.hidden;
  const bool scale_gradient = in.scaled && args.d_input_scale, to_x = args.d_x || scale_gradient;
  if (T == 0) {
    if (args.d_weight) store_sum(op, nullptr, 0, columns * H, args.d_weight, args.accumulate);
    if (args.d_bias) bias_gradient(op, args, columns);
    if (scale_gradient) store_sum(op, nullptr, 0, H, args.d_input_scale, args.accumulate);
    return;
  }
  const bool skips = args.skips_idle && (args.d_weight || in.scaled);
  const Scratch idle(op, skips ? uint64_t(T) : 0);
  if (skips) {
    run(op, "tokens without a gradient", find_idle_kernel,
        grid_for(T, kBlockThreads / 32, op.multiprocessors * 8), kBlockThreads, 0, args.d_logits, T,
        int(columns), idle.as<uint8_t>());
    in.idle = idle.as<uint8_t>();
  }
  const bool copies_x = args.d_weight && (in.is_changed() || in.idle);
  const moec_dtype x_dtype = copies_x ? in.rows_dtype() : in.x.dtype;
  const bool split_x = args.d_weight && splits(MOEC_F32, x_dtype);
  const bool split_weight = to_x && splits(MOEC_F32, args.weight.dtype);
  const uint64_t pieces_bytes = uint64_t(T * columns * kPieces) * sizeof(bf16);
  const Scratch pieces(op, split_x || split_weight ? pieces_bytes : 0);
  const Array d_real = {const_cast<float*>(args.d_logits), MOEC_F32};
  const LogitGradient d_split = {{pieces.as<void>(), MOEC_BF16}, kPieces}, d_whole = {d_real, 1};
  if (split_x || split_weight) split_to_bf16(op, args.d_logits, T, columns, pieces.as<void>());

  const LogitGradient& d = split_weight ? d_split : d_whole;
  const int64_t depth = columns * d.pieces;
  const Scratch copies(op, split_weight ? uint64_t(depth * H) * sizeof(bf16) : 0);
  const Array weight = split_weight ? Array{copies.as<void>(), MOEC_BF16} : args.weight;
  const moec_dtype out = args.d_x.dtype;
  const bool plain = !in.is_changed() && !args.d_x_jittered && !args.accumulate_x &&
                     (out == MOEC_F32 || out == d.values.dtype);
  std::optional<DenseProduct> product;  // d_logits * weight
  if (to_x)
    product.emplace(op, Dense{T, H, depth, d.values, weight, depth, 1, H, 1},
                    plain ? args.d_x : Array{});
  // The product's memory is that of x's copy, which is not read any more by then.
  const uint64_t copy_bytes = copies_x ? uint64_t(T * H * dtype_bytes(x_dtype)) : 0;
  const Scratch memory(op, std::max(copy_bytes, to_x ? product->scratch_bytes() : 0));
  const Scratch inverse(op, in.scaled ? uint64_t(T) * sizeof(float) : 0);
  void* const copy = copies_x ? memory.as<void>() : nullptr;
  if (copies_x || in.scaled) prepare_rows(op, in, nullptr, copy, inverse.as<float>());
  if (args.d_weight)
    weight_gradient(op, args, columns, split_x ? d_split : d_whole,
                    copies_x ? Array{copy, x_dtype} : in.x);
  if (args.d_bias) bias_gradient(op, args, columns);
  if (!to_x) return;
  if (split_weight) repeat_bf16(op, args.weight.data, columns * H, weight.data);
  const float* const d_rows = product->run(op, memory.as<char>());
  if (product->is_direct()) return;
  const InputGradient gradient = {in,     args.d_x,         args.d_x_jittered,  args.accumulate_x,
                                  d_rows, product->parts(), inverse.as<float>()};
  if (scale_gradient) input_scale_gradient(op, args, gradient);
  if (args.d_x)
    run(op, "gradient of the gate's input",
        in.scaled ? scaled_gradient_kernel : input_gradient_kernel,
        grid_for(in.scaled ? T * 32 : T * H, kBlockThreads, op.multiprocessors * 8), kBlockThreads,
        0, gradient);
}

}  // namespace moec::cuda
