// SPDX-License-Identifier: Apache-2.0
// logits = transform(x) * weight^T + bias, and its gradients. The three products are those of
// gemm.h with one "expert" that owns every token.
#include <algorithm>
#include <atomic>
#include <cmath>

#include "backend/cpu/gemm.h"
#include "backend/cpu/ops.h"
#include "backend/cpu/route_row.h"
#include "backend/cpu/score_row.h"
#include "backend/cpu/vectorised.h"
#include "core/error.h"
#include "core/workspace.h"
#include "math/philox.h"
#include "math/router.h"

namespace moec::cpu {
namespace {

constexpr int64_t kGateTokens = 8;  // least number of tokens per parallel piece

int64_t num_columns(const moec_router_desc& desc) {
  return int64_t(desc.num_experts) + desc.num_zero_experts;
}
void* at(const Array& array, int64_t index) {
  return static_cast<char*>(array.data) + index * dtype_bytes(array.dtype);
}

// ---- R0: from x to what the product reads
struct GateInput {
  const moec_router_desc& desc;
  int64_t num_tokens, hidden;
  uint64_t rng_offset;
  Array x, input_scale;

  bool is_jittered() const { return desc.jitter != 0.0f; }
  bool is_scaled() const { return desc.input == MOEC_INPUT_RMS_SCALED; }
};

void add_squares(const float* values, float* partial, int64_t count) {
  int64_t i = 0;
  for (; i + kRowLanes <= count; i += kRowLanes)
    for (int64_t l = 0; l < kRowLanes; ++l) partial[l] += values[i + l] * values[i + l];
  for (int64_t l = 0; i + l < count; ++l) partial[l] += values[i + l] * values[i + l];
}
void multiply(float* values, float factor, const float* factors, int64_t count) {
  for (int64_t i = 0; i < count; ++i) values[i] = values[i] * factor * factors[i];
}
void jitter_values(float* values, float jitter, uint64_t seed, uint64_t counter, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    values[i] *= math::jitter_factor(jitter, seed, counter + uint64_t(i));
}

// Row t after the jitter, as fp32.
void load_input_row(const GateInput& in, int64_t t, float* row) {
  convert_to_f32(at(in.x, t * in.hidden), in.x.dtype, row, in.hidden);
  if (!in.is_jittered()) return;
  vectorised<jitter_values>(row, in.desc.jitter, in.desc.seed,
                            in.rng_offset + uint64_t(t * in.hidden), in.hidden);
  RoundTo(in.x.dtype).row(row, in.hidden);
}

float inverse_rms_of(const GateInput& in, const float* row) {
  float partial[kRowLanes] = {};
  vectorised<add_squares>(row, static_cast<float*>(partial), in.hidden);
  return math::inverse_rms(sum_lanes(partial), in.hidden, in.desc.rms_eps);
}

// input_scale / sqrt(H) as fp32
void load_gain(const GateInput& in, float* gain) {
  convert_to_f32(in.input_scale.data, in.input_scale.dtype, gain, in.hidden);
  const float root = 1.0f / std::sqrt(float(in.hidden));
  for (int64_t h = 0; h < in.hidden; ++h) gain[h] *= root;
}

// What the product reads: x itself, its jittered copy (dtype of x), or the scaled one (fp32).
class RouterX {
 public:
  // needed: false leaves view() without rows; gain() is there all the same.
  RouterX(const Device& device, const GateInput& in, Array jittered_out, bool needed = true)
      : in_(in),
        gain_(device, in.is_scaled() ? uint64_t(in.hidden) * sizeof(float) : 0),
        rows_(device, needed ? rows_bytes(in, jittered_out) : 0) {
    const bool jittered = in.is_jittered(), scaled = in.is_scaled();
    if (!jittered && !scaled) {
      view_ = in.x;
      return;
    }
    view_ = {rows_.data(), scaled ? moec_dtype(MOEC_F32) : in.x.dtype};
    if (!view_.data) view_.data = jittered_out.data;
    if (scaled) load_gain(in, gain());
    if (!needed) return;
    const Chunks chunks(in.num_tokens, kGateTokens);
    const Scratch memory(device, uint64_t(device.pool.size() * in.hidden) * sizeof(float));
    device.pool.parallel_for(chunks.count, [&](int32_t slot, int64_t chunk) {
      float* const row = static_cast<float*>(memory.data()) + slot * in.hidden;
      for (int64_t t = chunks.begin(chunk); t < chunks.end(chunk); ++t) {
        load_input_row(in, t, row);
        if (jittered_out)
          convert_from_f32(row, in.x.dtype, at(jittered_out, t * in.hidden), in.hidden);
        if (scaled) vectorised<multiply>(row, inverse_rms_of(in, row), gain(), in.hidden);
        if (view_.data != jittered_out.data)
          convert_from_f32(row, view_.dtype, at(view_, t * in.hidden), in.hidden);
      }
    });
  }

  const Array& view() const { return view_; }
  float* gain() const { return static_cast<float*>(gain_.data()); }

 private:
  static uint64_t rows_bytes(const GateInput& in, const Array& jittered_out) {
    const uint64_t count = uint64_t(in.num_tokens * in.hidden);
    if (in.is_scaled()) return count * sizeof(float);
    return in.is_jittered() && !jittered_out ? count * uint64_t(dtype_bytes(in.x.dtype)) : 0;
  }
  const GateInput& in_;
  Scratch gain_, rows_;
  Array view_;
};

// ---- R1: products with one group that holds every token
class OneGroup {
 public:
  OneGroup(const Device& device, int64_t num_tokens)
      : pool_(device.pool),
        offsets_{0, int32_t(num_tokens)},
        scratch_(device, uint64_t(gemm_scratch_bytes(device.pool.size()))) {}

  // Rows of a [T,k] times B: weight [n,k], or [k,n] when transposed.
  void product(const Array& a, const Array& weight, bool transposed, int64_t n, int64_t k,
               GemmEpilogue epilogue, void* context) const {
    ExpertMatrix matrix;
    matrix.values.base = weight.data;
    matrix.values.dtype = matrix.dtype = weight.dtype;
    matrix.row_stride = transposed ? n : k;
    matrix.col_stride = 1;
    GroupedGemm gemm;
    gemm.num_experts = 1;
    gemm.group_offsets = offsets_;
    gemm.n = n;
    gemm.add({{a.data, a.dtype, k, nullptr}, {&matrix, nullptr, 0, transposed}, k});
    gemm.epilogue = epilogue;
    gemm.context = context;
    grouped_gemm(pool_, gemm, scratch_.data());
  }

  // d [n,k] (+)= g [T,n]^T * x [T,k]; x_rows: the row of x for each row of g, or null.
  void weight_gradient(const Array& g, int64_t n, const Array& x, const int32_t* x_rows, int64_t k,
                       const Array& d, bool accumulate) const {
    ExpertMatrix matrix;
    matrix.values.base = d.data;
    matrix.values.dtype = matrix.dtype = d.dtype;
    matrix.row_stride = k;
    matrix.col_stride = 1;
    GroupedWgrad wgrad;
    wgrad.num_experts = 1;
    wgrad.group_offsets = offsets_;
    wgrad.n = n;
    wgrad.k = k;
    wgrad.g = {g.data, g.dtype, n, nullptr};
    wgrad.x = {x.data, x.dtype, k, x_rows};
    wgrad.d = &matrix;
    wgrad.accumulate = accumulate;
    grouped_wgrad(pool_, wgrad, scratch_.data());
  }

 private:
  const ThreadPool& pool_;
  int32_t offsets_[2];
  Scratch scratch_;
};

void store_logits(void* context, const FinishedTile& tile) {
  const GateArgs& args = *static_cast<const GateArgs*>(context);
  const int64_t columns = num_columns(*args.desc);
  const RoundTo round(*args.desc, args.desc->logit_precision);
  float bias[64];
  for (int64_t first = 0; first < tile.cols; first += 64) {
    const int64_t count = std::min<int64_t>(64, tile.cols - first);
    if (args.bias) convert_to_f32(at(args.bias, tile.col0 + first), args.bias.dtype, bias, count);
    for (int64_t i = 0; i < tile.rows; ++i) {
      const float* const from = tile.c0 + i * tile.ld + first;
      float* const to = args.logits + (tile.row0 + i) * columns + tile.col0 + first;
      for (int64_t j = 0; j < count; ++j) to[j] = args.bias ? from[j] + bias[j] : from[j];
      round.row(to, count);
    }
  }
}

// ---- backward
// Tokens that take part, as rows of x: those with a gradient at any logit. Others are -1, and their
// x, which may be NaN, is not read.
class TakingPart {
 public:
  TakingPart(const Device& device, const GateGradArgs& args, int64_t columns)
      : memory_(device, uint64_t(args.num_tokens) * sizeof(int32_t)) {
    const Chunks chunks(args.num_tokens, kGateTokens);
    std::atomic<bool> all = true;
    device.pool.parallel_for(chunks.count, [&](int32_t, int64_t chunk) {
      for (int64_t t = chunks.begin(chunk); t < chunks.end(chunk); ++t) {
        const float* const d = args.d_logits + t * columns;
        const bool takes_part = std::any_of(d, d + columns, [](float g) { return g != 0.0f; });
        rows()[t] = takes_part ? int32_t(t) : -1;
        if (!takes_part) all = false;
      }
    });
    all_ = all;
  }
  bool operator()(int64_t t) const { return rows()[t] >= 0; }
  const int32_t* gather() const { return all_ ? nullptr : rows(); }  // null: all of them

 private:
  int32_t* rows() const { return static_cast<int32_t*>(memory_.data()); }
  Scratch memory_;
  bool all_;
};

struct InputGradient {  // context of the epilogue that finishes d_x
  const GateInput* in;
  Array d_x, d_x_jittered;
  bool accumulate;
};

void add_values(const Array& from, int64_t start, float* to, int64_t count) {
  constexpr int64_t kBlock = 256;
  float values[kBlock];
  for (int64_t i = 0; i < count; i += kBlock) {
    const int64_t n = std::min(kBlock, count - i);
    convert_to_f32(at(from, start + i), from.dtype, values, n);
    for (int64_t j = 0; j < n; ++j) to[i + j] += values[j];
  }
}

// `count` values of row t from column h: back through the jitter, then into d_x; destroys them.
void finish_gradient(const InputGradient& out, int64_t t, int64_t h, float* d, int64_t count) {
  const GateInput& in = *out.in;
  const int64_t start = t * in.hidden + h;
  if (out.d_x_jittered) add_values(out.d_x_jittered, start, d, count);
  if (in.is_jittered())
    vectorised<jitter_values>(d, in.desc.jitter, in.desc.seed, in.rng_offset + uint64_t(start),
                              count);
  if (out.accumulate) add_values(out.d_x, start, d, count);
  convert_from_f32(d, out.d_x.dtype, at(out.d_x, start), count);
}

void store_input_gradient(void* context, const FinishedTile& tile) {
  for (int64_t i = 0; i < tile.rows; ++i)
    finish_gradient(*static_cast<const InputGradient*>(context), tile.row0 + i, tile.col0,
                    tile.c0 + i * tile.ld, tile.cols);
}

struct RowsOut {  // context of the epilogue that keeps fp32 rows
  float* rows;
  int64_t width;
};
void store_rows(void* context, const FinishedTile& tile) {
  const RowsOut& out = *static_cast<const RowsOut*>(context);
  for (int64_t i = 0; i < tile.rows; ++i)
    std::memcpy(out.rows + (tile.row0 + i) * out.width + tile.col0, tile.c0 + i * tile.ld,
                size_t(tile.cols) * sizeof(float));
}

void sum_columns(const Device& device, const GateGradArgs& args, int64_t columns) {
  constexpr int64_t kBlockColumns = 256;
  const Chunks chunks(args.num_tokens, kGateTokens);
  const Scratch partial(device, uint64_t(chunks.count * columns) * sizeof(float));
  float* const sums = static_cast<float*>(partial.data());
  device.pool.parallel_for(chunks.count, [&](int32_t, int64_t chunk) {
    float* const sum = sums + chunk * columns;
    std::fill_n(sum, columns, 0.0f);
    const int64_t end = chunks.end(chunk);
    for (int64_t first = chunks.begin(chunk); first < end; first += kSummedTogether)
      for (int64_t col = 0; col < columns; col += kBlockColumns) {
        const int64_t n = std::min(kBlockColumns, columns - col);
        float block[kBlockColumns] = {};
        for (int64_t t = first; t < std::min(end, first + kSummedTogether); ++t)
          for (int64_t i = 0; i < n; ++i) block[i] += args.d_logits[t * columns + col + i];
        for (int64_t i = 0; i < n; ++i) sum[col + i] += block[i];
      }
  });
  store_sum(sums, chunks.count, columns, args.d_bias, args.accumulate);
}

struct ScaledRow {  // one token's way back through x / rms(x) * gain
  const float* gain;
  float inverse;
  float *x, *d, *d_gain;  // [H]: x becomes normed, d the gradient at x; d_gain is added to
};
void scaled_backward(const ScaledRow* row, int64_t hidden) {
  float partial[kRowLanes] = {};
  for (int64_t h = 0; h < hidden; ++h) {
    row->x[h] *= row->inverse;
    row->d_gain[h] += row->d[h] * row->x[h];
    row->d[h] *= row->gain[h];
  }
  int64_t h = 0;
  for (; h + kRowLanes <= hidden; h += kRowLanes)
    for (int64_t l = 0; l < kRowLanes; ++l) partial[l] += row->d[h + l] * row->x[h + l];
  for (int64_t l = 0; h + l < hidden; ++l) partial[l] += row->d[h + l] * row->x[h + l];
  const float mean = sum_lanes(partial) / float(hidden);
  for (h = 0; h < hidden; ++h)
    row->d[h] = math::rms_gradient(row->inverse, row->x[h], row->d[h], mean);
}

// d_x and d_input_scale of the scaled input. d_rows [T,H]: gradient at what the product read.
void input_backward(const Device& device, const GateGradArgs& args, const GateInput& in,
                    const TakingPart& takes_part, const float* gain, float* d_rows) {
  const int64_t hidden = in.hidden;
  const InputGradient out = {&in, args.d_x, args.d_x_jittered, args.accumulate_x};
  const Chunks chunks(in.num_tokens, kGateTokens);
  const Scratch rows(device, uint64_t(device.pool.size() * hidden) * sizeof(float));
  const Scratch partial(device, uint64_t(chunks.count * hidden) * sizeof(float));
  float* const sums = static_cast<float*>(partial.data());
  device.pool.parallel_for(chunks.count, [&](int32_t slot, int64_t chunk) {
    float* const x = static_cast<float*>(rows.data()) + slot * hidden;
    std::fill_n(sums + chunk * hidden, hidden, 0.0f);
    for (int64_t t = chunks.begin(chunk); t < chunks.end(chunk); ++t) {
      if (takes_part(t))
        load_input_row(in, t, x);
      else
        std::fill_n(x, hidden, 0.0f);
      float* const d = d_rows + t * hidden;
      const ScaledRow row = {gain, inverse_rms_of(in, x), x, d, sums + chunk * hidden};
      vectorised<scaled_backward>(&row, hidden);
      if (args.d_x) finish_gradient(out, t, 0, d, hidden);
    }
  });
  if (!args.d_input_scale) return;
  const float root = 1.0f / std::sqrt(float(hidden));
  for (int64_t i = 0; i < chunks.count * hidden; ++i) sums[i] *= root;
  store_sum(sums, chunks.count, hidden, args.d_input_scale, args.accumulate);
}

}  // namespace

// The sum of what is acquired below and in route_*.cpp, each rounded up to a cache line. Columns
// are summed twice: the gradients of per_expert_scale and of the bias, in one block by the layer.
moec_size router_scratch(const Device& device, const moec_router_desc& desc, int64_t hidden) {
  const bool scaled = desc.input == MOEC_INPUT_RMS_SCALED, changed = scaled || desc.jitter != 0.0f;
  const int64_t threads = device.pool.size(), columns = num_columns(desc);
  const int64_t rows = (scaled ? 1 + Chunks::kMax + threads : 0) + (changed ? threads : 0);
  constexpr uint64_t kMostFloats = uint64_t{1} << 60;
  MOEC_REQUIRE(uint64_t(hidden) <= kMostFloats / uint64_t(std::max<int64_t>(rows, 1)),
               MOEC_E_OVERFLOW, "hidden is %lld; %lld rows of it exceed the address space",
               static_cast<long long>(hidden), static_cast<long long>(rows));
  const uint64_t floats = uint64_t(rows * hidden + 2 * Chunks::kMax * columns);
  const uint64_t copies = scaled ? 2 : changed ? 1 : 0;  // [T,H]
  return {uint64_t(gemm_scratch_bytes(int32_t(threads))) + floats * sizeof(float) +
              RouteRows::scratch_bytes(device, desc) + 9 * kCacheLine,
          copies * uint64_t(hidden) * sizeof(float) + sizeof(int32_t)};
}

void gate_forward(const Device& device, const GateArgs& args) {
  const GateInput in = {*args.desc,      args.num_tokens, args.hidden,
                        args.rng_offset, args.x,          args.input_scale};
  const RouterX x(device, in, args.x_jittered);
  OneGroup(device, args.num_tokens)
      .product(x.view(), args.weight, false, num_columns(*args.desc), args.hidden, store_logits,
               const_cast<GateArgs*>(&args));
}

void gate_backward(const Device& device, const GateGradArgs& args) {
  const int64_t columns = num_columns(*args.desc), hidden = args.hidden;
  const GateInput in = {*args.desc,      args.num_tokens, hidden,
                        args.rng_offset, args.x,          args.input_scale};
  const Array d_logits = {const_cast<float*>(args.d_logits), MOEC_F32};
  const TakingPart takes_part(device, args, columns);
  const RouterX x(device, in, {}, bool(args.d_weight));
  const OneGroup group(device, args.num_tokens);
  if (args.d_weight)
    group.weight_gradient(d_logits, columns, x.view(), takes_part.gather(), hidden, args.d_weight,
                          args.accumulate);
  if (args.d_bias) sum_columns(device, args, columns);
  if (in.is_scaled() && (args.d_x || args.d_input_scale)) {
    const Scratch d_rows(device, uint64_t(args.num_tokens * hidden) * sizeof(float));
    RowsOut out = {static_cast<float*>(d_rows.data()), hidden};
    group.product(d_logits, args.weight, true, hidden, columns, store_rows, &out);
    input_backward(device, args, in, takes_part, x.gain(), out.rows);
  } else if (args.d_x) {
    InputGradient out = {&in, args.d_x, args.d_x_jittered, args.accumulate_x};
    group.product(d_logits, args.weight, true, hidden, columns, store_input_gradient, &out);
  }
}

}  // namespace moec::cpu
