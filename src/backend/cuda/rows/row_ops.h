// SPDX-License-Identifier: Apache-2.0
// What the experts do between their products, row by row. Padding rows are neither read nor
// written.
#pragma once

#include "backend/cuda/device/rows.h"
#include "backend/program.h"
#include "backend/shares.h"

namespace moec::cuda {

// Pre-activations [rows, parts, inter]: gate and up, or up alone.
struct Preact {
  Array data;
  bool gated = false;
  int64_t inter = 0;
  moec_activation activation = {};
  moec_dtype rounding = 0;  // the type each step is rounded to (PER_OP), or 0
};

// ---- row_ops.cu
// to[row] = x[token] * weight[row], rounded; a zero weight gives zeros
void scale_rows(const Op& op, const Rows& rows, int64_t width, const Array& x, const float* weight,
                void* to);
// act[row] = activation * weight[row] (null = 1)
void activate(const Op& op, const Rows& rows, const Preact& pre, const float* weight,
              const Array& act);
struct ActGradient {
  Array q;                        // [rows, inter] of d_y Wd; absent: only `weighted` is wanted
  const float* factor = nullptr;  // [rows] d(y) / d(expert output)
  Array d_pre, weighted;          // out, each optional: as Preact; factor * activation
  float* dots = nullptr;          // out [rows], optional: <q, activation>
};
void act_gradient(const Op& op, const Rows& rows, const Preact& pre, const ActGradient& step);
// dots[row] (+)= <of_row, of_token>; of_row: rows [rows, width], or the group's bias when absent
void row_dots(const Op& op, const Rows& rows, int64_t width, const Array& of_row,
              const ExpertMatrix* bias, const Array& of_token, bool accumulate, float* dots);
// The rows of one group that all tokens are in: offsets {0, T}, tokens 0 .. T - 1.
void list_tokens(const Op& op, int64_t num_tokens, int32_t* offsets, int32_t* tokens);
// Zeros for the padding rows of [rows, bytes_of_row] and for everything up to `bytes`.
void clear_padding(const Op& op, const RowGroups& groups, int64_t bytes_of_row, uint64_t bytes,
                   void* data);

// ---- token_sums.cu: out of group e [n] (+)= sum over its rows of weight[row] * from[row][n]
struct ColumnSums {
  Rows rows;
  bool of_tokens = false;  // read from[token of row]
  Array from;
  int64_t stride = 0, width = 0;
  const float* weight = nullptr;  // [rows], null = 1
  int64_t weight_stride = 1;
  ExpertArray out;  // element n of group e at n * out_stride
  int64_t out_stride = 1;
  bool accumulate = false;
};
void column_sums(const Op& op, const ColumnSums& sums);
// out[first + n] (+)= sum over tokens of weight * from[n]; weight: of [T,2], null = 1
struct TokenSums {
  Array from;
  int64_t width;
  const float* weight;
};
void token_sums(const Op& op, int64_t num_tokens, const TokenSums& sums, const Array& out,
                int64_t first, bool accumulate);

// ---- combine_general.cu
struct OutputSum {  // y = residual + c0 output_scale sum + output_bias + c1 shared
  const moec_experts_desc* desc;
  const PlanView* plan;
  Array rows, shared;  // [P,H] before a weight on the output; [T,H], optional
  const float* mix;    // [T,2], null = 1
  Array x, output_bias, residual, y;
  bool skip_absent;  // leave rows of tokens that have no row as they are
};
void combine_output(const Op& op, const OutputSum& sum);
struct InputGradSum {  // dx (+)= rows (weighted on the input) + identity experts + gate + shared
  const moec_experts_desc* desc;
  const PlanView* plan;
  Array rows, shared;
  const float *mix, *d_logits;  // [T,2]; d_logits: null = no gate
  Array shared_gate, d_y, d_x;
  bool accumulate;
};
void combine_input_grad(const Op& op, const InputGradSum& sum);

// ---- shared_mix.cu: the gate of the shared expert, factors, gradients of routing weights
void mix_forward(const Op& op, const SharedGate& gate, float* mix);
// factor[row] = weight (1 on the input) * output_scale * c0
void row_factors(const Op& op, const moec_experts_desc& desc, const PlanView& plan,
                 const Rows& rows, const float* mix, float* factor);
void mix_factors(const Op& op, int64_t num_tokens, const float* mix, float* factor);  // c1
struct RoutingGrad {  // of the routing weights
  const moec_experts_desc* desc;
  const PlanView* plan;
  const float *mix, *dots, *input_dots;  // of rows: <d_y, output>; <d row, x>, weight on the input
  Array x, d_y;
  int dot_parts = 1;  // dots [dot_parts, P], to be added up
};
struct SharedDots {  // <d_y, shared>: [parts, T], to be added up
  const float* dots;
  int parts = 1;
};
// d_logits [T,2] of the shared expert's gate
void mix_backward(const Op& op, const RoutingGrad& grad, const SharedDots& shared, float* d_logits);
void routing_weight_grad(const Op& op, const RoutingGrad& grad, float* d_routing_weights);

}  // namespace moec::cuda
