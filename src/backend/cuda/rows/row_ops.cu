// SPDX-License-Identifier: Apache-2.0
// One warp a row; long rows of the kernels without sums are cut into pieces.
#include <algorithm>

#include "backend/cuda/device/op.cuh"
#include "backend/cuda/device/rotate.cuh"
#include "backend/cuda/device/span.cuh"
#include "backend/cuda/rows/row_ops.h"
#include "math/activation.h"

namespace moec::cuda {
namespace {

constexpr int kPiece = 1024, kLeastPiece = 128;  // columns of a warp

__device__ int64_t token_of(const Rows& rows, int64_t row) {
  return rows.row_token ? rows.row_token[row] : row;
}

// body(row) for the rows of this warp that are no padding.
template <class Body>
__device__ void for_each_row(const Rows& rows, const Body& body) {
  for (int64_t row = global_warp(); row < rows.groups.max_rows; row += global_warps())
    if (!rows.row_token || rows.row_token[row] >= 0) body(row);
}
// body(column) for the columns of this lane and this piece, V at a time.
template <int V, class Body>
__device__ void for_each_span(int64_t width, const Body& body) {
  const int64_t of_each = (width + gridDim.y - 1) / gridDim.y;
  const int64_t piece = (of_each + kLeastPiece - 1) / kLeastPiece * kLeastPiece;
  for (int64_t begin = blockIdx.y * piece; begin < width; begin += gridDim.y * piece) {
    const int64_t end = min(width, begin + piece);
    for (int64_t i = begin + lane_id() * V; i < end; i += 32 * V) body(i);
  }
}
dim3 row_grid(const Op& op, const Rows& rows, int64_t width, bool pieces) {
  dim3 grid = grid_for(rows.groups.max_rows, kBlockThreads / 32, int64_t(op.multiprocessors) * 64);
  constexpr int64_t kMostPieces = 65535;
  if (!pieces) return grid;
  const auto pieces_of = [&](int64_t columns) { return (width + columns - 1) / columns; };
  const int64_t wanted = int64_t(op.multiprocessors) * 32 / rows.groups.max_rows;  // few rows
  grid.y = unsigned(
      std::min(std::clamp(wanted, pieces_of(kPiece), pieces_of(kLeastPiece)), kMostPieces));
  return grid;
}

template <int V>
__global__ __launch_bounds__(kBlockThreads) void scale_rows_kernel(const Rows rows, int64_t width,
                                                                   const Array x,
                                                                   const float* weight, void* to) {
  begin_kernel();
  for_each_row(rows, [&](int64_t row) {
    const int64_t from = token_of(rows, row) * width;
    const float factor = weight[row];
    for_each_span<V>(width, [&](int64_t i) {
      Span<V> values = load_span<V>(x, from + i);
#pragma unroll
      for (int j = 0; j < V; ++j) values[j] = factor == 0.0f ? 0.0f : values[j] * factor;
      store_span(to, x.dtype, row * width + i, values);
    });
  });
}

struct RoundTo {
  moec_dtype dtype;  // 0: none
  __device__ float operator()(float value) const {
    Span<1> span = {value};
    if (dtype) round_span(dtype, span);
    return span[0];
  }
};

// body<Kind>() of the activation's kind. Rows are read and written outside of it, once for all.
template <class Body>
__device__ __forceinline__ void with_activation(uint32_t kind, const Body& body) {
  math::Activations::with(kind, body);
}

template <int V>
struct Pair {
  Span<V> gate, up;
};
template <int V>
__device__ Pair<V> load_pre(const Preact& pre, int64_t row, int64_t i) {
  Pair<V> p = {};
  const int64_t at = row * (pre.gated ? 2 : 1) * pre.inter + i;
  if (pre.gated) p.gate = load_span<V>(pre.data, at);
  p.up = load_span<V>(pre.data, pre.gated ? at + pre.inter : at);
  if (pre.rounding) {
    round_span(pre.rounding, p.gate);
    round_span(pre.rounding, p.up);
  }
  return p;
}

template <int V>
__global__ __launch_bounds__(kBlockThreads) void activate_kernel(const Rows rows, const Preact pre,
                                                                 const float* weight,
                                                                 const Array act) {
  begin_kernel();
  const RoundTo round = {pre.rounding};
  for_each_row(rows, [&](int64_t row) {
    const float factor = weight ? weight[row] : 1.0f;
    for_each_span<V>(pre.inter, [&](int64_t i) {
      Pair<V> p = load_pre<V>(pre, row, i);
      Span<V> value = {};
      with_activation(pre.activation.kind, [&]<class Kind>() {
        if (!pre.rounding) {
#pragma unroll
          for (int j = 0; j < V; ++j)
            value[j] = Kind::value(pre.activation, p.gate[j], p.up[j], math::NoRounding());
          return;
        }
#pragma unroll 1
        for (int j = 0; j < V; ++j) {
          value[0] = Kind::value(pre.activation, p.gate[0], p.up[0], round);
          rotate(value.v);
          rotate(p.gate.v);
          rotate(p.up.v);
        }
      });
#pragma unroll
      for (int j = 0; j < V; ++j) value[j] = factor == 0.0f ? 0.0f : value[j] * factor;
      store_span(act, row * pre.inter + i, value);
    });
  });
}

template <int V>
__device__ void act_gradient_row(const Preact& pre, const ActGradient& step, int64_t row) {
  const float factor = step.factor[row];
  const int64_t d_row = row * (pre.gated ? 2 : 1) * pre.inter;
  float dot = 0;
  for_each_span<V>(pre.inter, [&](int64_t i) {
    const Pair<V> p = load_pre<V>(pre, row, i);
    Span<V> q = {}, d_gate = {}, d_up = {}, weighted = {};
    if (step.q) q = load_span<V>(step.q, row * pre.inter + i);
    with_activation(pre.activation.kind, [&]<class Kind>() {
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const math::Slopes slopes = Kind::slopes(pre.activation, p.gate[j], p.up[j]);
        d_gate[j] = slopes.gate;
        d_up[j] = slopes.up;
        weighted[j] = Kind::value(pre.activation, p.gate[j], p.up[j], math::NoRounding());
      }
    });
#pragma unroll
    for (int j = 0; j < V; ++j) {
      dot += q[j] * weighted[j];
      d_gate[j] = factor == 0.0f ? 0.0f : d_gate[j] * (factor * q[j]);
      d_up[j] = factor == 0.0f ? 0.0f : d_up[j] * (factor * q[j]);
      weighted[j] = factor == 0.0f ? 0.0f : weighted[j] * factor;
    }
    if (step.d_pre) {
      if (pre.gated) store_span(step.d_pre, d_row + i, d_gate);
      store_span(step.d_pre, d_row + (pre.gated ? pre.inter : 0) + i, d_up);
    }
    if (step.weighted) store_span(step.weighted, row * pre.inter + i, weighted);
  });
  if (!step.dots) return;
  dot = warp_sum(dot);
  if (lane_id() == 0) step.dots[row] = dot;
}

template <int V>
__global__ __launch_bounds__(kBlockThreads) void act_gradient_kernel(const Rows rows,
                                                                     const Preact pre,
                                                                     const ActGradient step) {
  begin_kernel();
  for_each_row(rows, [&](int64_t row) { act_gradient_row<V>(pre, step, row); });
}

template <int V>
__global__ __launch_bounds__(kBlockThreads) void row_dots_kernel(const Rows rows, int64_t width,
                                                                 const Array of_row,
                                                                 const ExpertMatrix bias,
                                                                 const Array of_token,
                                                                 bool accumulate, float* dots) {
  begin_kernel();
  for_each_row(rows, [&](int64_t row) {
    const int64_t token = token_of(rows, row) * width;
    float dot = 0;
    if (of_row) {
      for_each_span<V>(width, [&](int64_t i) {
        const Span<V> a = load_span<V>(of_row, row * width + i);
        const Span<V> b = load_span<V>(of_token, token + i);
#pragma unroll
        for (int j = 0; j < V; ++j) dot += a[j] * b[j];
      });
    } else {
      const MatrixView b = bias.bias_of(group_of(rows.groups, row));
      for_each_span<V>(width, [&](int64_t i) {
        const Span<V> from = load_span<V>(b.data, b.dtype, i * b.row_stride);
        const Span<V> to = load_span<V>(of_token, token + i);
#pragma unroll
        for (int j = 0; j < V; ++j) dot += from[j] * to[j];
      });
    }
    dot = warp_sum(dot);
    if (lane_id() == 0) dots[row] = (accumulate ? dots[row] : 0.0f) + dot;
  });
}

__global__ __launch_bounds__(kBlockThreads) void list_tokens_kernel(int64_t num_tokens,
                                                                    int32_t* offsets,
                                                                    int32_t* tokens) {
  begin_kernel();
  if (blockIdx.x == 0 && threadIdx.x < 2) offsets[threadIdx.x] = threadIdx.x * int32_t(num_tokens);
  for (int64_t t = global_thread(); t < num_tokens; t += global_threads()) tokens[t] = int32_t(t);
}

// Padding of group e: CTA e. Behind the last group: the CTAs from groups.count on.
__global__ __launch_bounds__(kBlockThreads) void clear_padding_kernel(const RowGroups groups,
                                                                      int64_t bytes_of_row,
                                                                      uint64_t bytes, char* data) {
  begin_kernel();
  uint64_t begin = uint64_t(groups.max_rows) * uint64_t(bytes_of_row), end = bytes,
           step = kBlockThreads;
  uint64_t first = threadIdx.x;
  if (int(blockIdx.x) < groups.count) {
    if (!groups.offsets) return;
    const int e = int(blockIdx.x);
    begin = uint64_t(groups.offsets[e] + groups.counts[e]) * uint64_t(bytes_of_row);
    end = uint64_t(groups.offsets[e + 1]) * uint64_t(bytes_of_row);
  } else {
    if (groups.offsets) begin = uint64_t(groups.offsets[groups.count]) * uint64_t(bytes_of_row);
    first += uint64_t(blockIdx.x - groups.count) * kBlockThreads;
    step *= gridDim.x - groups.count;
  }
  for (uint64_t at = begin + first; at < end; at += step) data[at] = 0;
}

// Whether four elements of every group's bias may be read at once.
bool bias_has_spans(const ExpertMatrix& m) {
  return !m.bias.pointers && m.bias_stride == 1 &&
         spans_fit(m.bias.expert_stride, Array{m.bias.base, m.bias.dtype});
}

}  // namespace

void scale_rows(const Op& op, const Rows& rows, int64_t width, const Array& x, const float* weight,
                void* to) {
  const bool wide = spans_fit(width, x, Array{to, x.dtype});
  const auto kernel = wide ? scale_rows_kernel<4> : scale_rows_kernel<1>;
  if (rows.groups.max_rows == 0) return;
  run(op, "scaled rows", kernel, row_grid(op, rows, width, true), kBlockThreads, 0, rows, width, x,
      weight, to);
}

void activate(const Op& op, const Rows& rows, const Preact& pre, const float* weight,
              const Array& act) {
  if (rows.groups.max_rows == 0) return;
  const auto kernel = spans_fit(pre.inter, pre.data, act) ? activate_kernel<4> : activate_kernel<1>;
  run(op, "activation", kernel, row_grid(op, rows, pre.inter, true), kBlockThreads, 0, rows, pre,
      weight, act);
}

void act_gradient(const Op& op, const Rows& rows, const Preact& pre, const ActGradient& step) {
  if (rows.groups.max_rows == 0) return;
  const bool wide = spans_fit(pre.inter, pre.data, step.q, step.d_pre, step.weighted);
  const auto kernel = wide ? act_gradient_kernel<4> : act_gradient_kernel<1>;
  run(op, "gradient of the activation", kernel, row_grid(op, rows, pre.inter, false), kBlockThreads,
      0, rows, pre, step);
}

void row_dots(const Op& op, const Rows& rows, int64_t width, const Array& of_row,
              const ExpertMatrix* bias, const Array& of_token, bool accumulate, float* dots) {
  if (rows.groups.max_rows == 0) return;
  const bool wide = spans_fit(width, of_row, of_token) && (!bias || bias_has_spans(*bias));
  const auto kernel = wide ? row_dots_kernel<4> : row_dots_kernel<1>;
  run(op, "products of rows", kernel, row_grid(op, rows, width, false), kBlockThreads, 0, rows,
      width, of_row, bias ? *bias : ExpertMatrix{}, of_token, accumulate, dots);
}

void list_tokens(const Op& op, int64_t num_tokens, int32_t* offsets, int32_t* tokens) {
  run(op, "tokens", list_tokens_kernel, grid_for(num_tokens, kBlockThreads, op.multiprocessors),
      kBlockThreads, 0, num_tokens, offsets, tokens);
}

void clear_padding(const Op& op, const RowGroups& groups, int64_t bytes_of_row, uint64_t bytes,
                   void* data) {
  if (bytes == 0) return;
  const dim3 grid(unsigned(groups.count + op.multiprocessors));
  run(op, "padding", clear_padding_kernel, grid, kBlockThreads, 0, groups, bytes_of_row, bytes,
      static_cast<char*>(data));
}

}  // namespace moec::cuda
