// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/sm90/row_gemm.h"

#include <algorithm>

#include "backend/cuda/sm90/row_gemm_kernels.h"
#include "backend/cuda/sm90/tensor_map.h"

namespace moec::cuda {
namespace {

constexpr int kTileFeatures = 256, kTileK = 64, kRowUnit = 16;

bool alternating_weights(const RowGemmProblem& p) {
  return p.alternating && form_of(p.op).gated;
}

bool is_gathered(const RowGemmProblem& p) {
  return form_of(p.op).gathered && !p.in_order;
}

moec_dtype stored_dtype(const RowGemmProblem& p) {
  return is_coded(p) ? moec_dtype(MOEC_U8) : p.dtype;
}

TensorMapShape weight_shape(const RowGemmProblem& p, int part) {
  TensorMapShape shape = {};
  shape.base = p.weights[part];
  const int64_t columns = alternating_weights(p) ? 2 * p.features : p.features;
  const int each = codes_in_byte(p.scheme);
  shape.extent[0] = (p.weights_mn_major ? columns : p.k_size) / each;
  shape.extent[1] = p.weights_mn_major ? p.k_size : p.features;
  shape.extent[2] = p.num_experts;
  shape.stride[0] = p.weight_stride / each;
  shape.stride[1] = p.expert_stride / each;
  shape.box[0] = kTileK / each;
  shape.box[1] = p.weights_mn_major || is_coded(p) ? kTileK : kTileFeatures / 2;
  shape.swizzled = p.wide && p.weights_mn_major;
  return shape;
}

// A factor lies as plain weights do.
TensorMapShape factor_shape(const RowGemmProblem& p, int part) {
  TensorMapShape shape = {};
  const bool one = p.factor_expert_stride == 0;
  const int64_t columns = alternating_weights(p) ? 2 * p.features : p.features;
  shape.base = p.factors[part];
  shape.extent[0] = p.weights_mn_major ? columns : p.rank;
  shape.extent[1] = p.weights_mn_major ? p.rank : p.features;
  shape.extent[2] = one ? 1 : p.num_experts;
  shape.stride[0] = p.factor_stride;
  shape.stride[1] = one ? p.factor_stride * shape.extent[1] : p.factor_expert_stride;
  shape.box[0] = kTileK;
  shape.box[1] = p.weights_mn_major ? kTileK : kTileFeatures / 2;
  return shape;
}
int factor_maps(const RowGemmProblem& p) {
  return p.rank == 0 ? 0 : form_of(p.op).gated && !alternating_weights(p) ? 2 : 1;
}

TensorMapShape row_shape(const void* base, int64_t width, int parts, int64_t stride, int64_t rows) {
  TensorMapShape shape = {};
  shape.base = base;
  shape.extent[0] = width;
  shape.extent[1] = parts;
  shape.extent[2] = rows;
  shape.stride[0] = width;
  shape.stride[1] = stride;
  shape.box[0] = kTileK;
  shape.box[1] = 1;
  shape.box[2] = kRowUnit;
  return shape;
}

// What of the operands and results moves by bulk copies, besides the weights.
struct RowTensor {
  RowMaps RowGemmParams::* maps;
  TensorMapShape (*shape)(const RowGemmProblem& p);
  bool (*used)(const RowGemmProblem& p);
};
constexpr RowTensor kRowTensors[] = {
    {&RowGemmParams::rows,
     [](const RowGemmProblem& p) {
       const auto shape = row_shape(p.rows, p.k_size, p.parts, p.k_size * p.parts, p.max_rows);
       return in_windows(shape, 2, kWindowRows, p.dtype);
     },
     [](const RowGemmProblem& p) { return !is_gathered(p); }},
    {&RowGemmParams::narrow_rows,
     [](const RowGemmProblem& p) {
       const auto shape = row_shape(p.narrow, p.rank, 1, p.rank, p.max_rows);
       return in_windows(shape, 2, kWindowRows, p.dtype);
     },
     [](const RowGemmProblem& p) { return p.rank > 0 && !is_gathered(p); }},
    {&RowGemmParams::out_maps,
     [](const RowGemmProblem& p) {
       return row_shape(p.out, p.features, 1, p.out_stride, p.max_rows);
     },
     [](const RowGemmProblem&) { return true; }},
    {&RowGemmParams::pre_maps,
     [](const RowGemmProblem& p) {
       return row_shape(p.pre, p.features, 2, p.features * 2, p.max_rows);
     },
     [](const RowGemmProblem& p) { return p.pre != nullptr; }},
};

int weight_maps(const RowGemmProblem& p) {
  return (form_of(p.op).gated && !alternating_weights(p)) || p.parts == 2 ? 2 : 1;
}

bool aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

cudaError_t make_maps(const RowGemmProblem& problem, RowGemmParams& params) {
  for (int i = 0; i < weight_maps(problem); ++i) {
    const TensorMapShape shape = weight_shape(problem, i);
    if (cudaError_t e = make_tensor_maps(&params.weight_maps[i], 1, stored_dtype(problem), shape))
      return e;
  }
  for (int i = 0; i < factor_maps(problem); ++i) {
    const TensorMapShape shape = factor_shape(problem, i);
    if (cudaError_t e = make_tensor_maps(&params.factor_maps[i], 1, problem.dtype, shape)) return e;
  }
  for (const RowTensor& tensor : kRowTensors) {
    if (!tensor.used(problem)) continue;
    CUtensorMap* const maps = (params.*tensor.maps).of_units;
    const TensorMapShape shape = tensor.shape(problem);
    if (cudaError_t e = make_tensor_maps(maps, kRowBoxes, problem.dtype, shape)) return e;
  }
  return cudaSuccess;
}

// All but the maps.
void set_rest(const RowGemmProblem& from, const RowGemmChoice& choice, RowGemmParams& to) {
  static_cast<RowGemmTiles&>(to) = choice.tiles;
  to.x = from.x;
  to.narrow = from.narrow;
  to.rank = int(from.rank);
  to.one_factor = from.factor_expert_stride == 0;
  to.row_token = from.row_token;
  to.x_stride = from.x_stride;
  to.group_offsets = from.group_offsets;
  to.num_experts = from.num_experts;
  to.features = int(from.features);
  to.k_size = int(from.k_size);
  to.out = from.out;
  to.out_stride = from.out_stride;
  to.pre = from.pre;
  to.d_pre = from.d_pre;
  to.row_weight = from.row_weight;
  to.d_weight_parts = from.d_weight_parts;
  to.keeps_act = from.keeps_act;
  to.max_rows = from.max_rows;
  to.alternating = from.alternating;
  to.bias[0] = from.bias[0];
  to.bias[1] = from.bias[1];
  to.form = gate_form(from.activation);
  to.early = from.early;
  to.work_counter = from.work_counter;
  to.steps = choice.in_pace ? from.steps : nullptr;
  to.done = from.done;
}

// The launch functions of each operation, then of alternating columns; of few rows those of kUp
// and kDown.
constexpr int kAlternatingKind = 4, kKinds = 5;
constexpr RowGemmLaunch<RowGemmParams>* kLaunches[kKinds] = {
    launch_up, launch_down, launch_down, launch_grad_down, launch_up_alternating};
constexpr RowGemmLaunch<CodedRowGemmParams>* kCodedLaunches[kKinds] = {
    launch_coded_up, launch_coded_down, launch_coded_down, launch_coded_grad_down,
    launch_coded_up_alternating};
// Of codes that those who multiply decode: of the operations, of PowersWeights or others.
using InRegisters = RowGemmLaunch<CodedRowGemmParams>* [4][2];
constexpr InRegisters kFewLaunches = {{launch_few_up, launch_few_up_powers},
                                      {launch_few_down, launch_few_down_powers}};
constexpr InRegisters kWideLaunches = {{launch_wide_up, launch_wide_up_powers},
                                       {launch_wide_down, launch_wide_down_powers},
                                       {launch_wide_grad, launch_wide_grad},
                                       {launch_wide_grad, launch_wide_grad}};

// kGradDown of codes is two kernels, the second of which has tiles as plain weights have.
cudaError_t launch_rows_behind(const RowGemmProblem& problem, RowGemmParams& params,
                               cudaStream_t stream) {
  if (!has_gradient_rows(problem)) return cudaSuccess;
  RowGemmProblem rest = problem;
  rest.wide = false;
  static_cast<RowGemmTiles&>(params) = choose(rest, {}).tiles;
  return launch_gradient_rows(problem, params, stream);
}

cudaError_t launch_coded(const RowGemmProblem& problem, const CodedRowGemmParams& params,
                         const RowGemmChoice& choice, int kind, cudaStream_t stream) {
  if (!problem.wide && !choice.few_rows)
    return kCodedLaunches[kind](problem, params, choice.ctas, stream);
  const InRegisters& launches = problem.wide ? kWideLaunches : kFewLaunches;
  const bool powers = problem.lines.decode == LineDecode::kPowers;
  return launches[kind][powers](problem, params, choice.ctas, stream);
}

}  // namespace

const char* row_gemm_refuses(const RowGemmProblem& p) {
  if (p.dtype != MOEC_BF16 && p.dtype != MOEC_F16) return "elements are not bf16 or f16";
  if (form_of(p.op).activated && !has_gate_form(p.activation)) {
    return "the activation is not g sigmoid(p(g)) u with a rising p";
  }
  if (alternating_weights(p) && !p.weights_mn_major) return "gate and up rows that alternate";
  if (p.features % 8 || p.k_size % 8) return "a matrix extent is not a multiple of 8";
  for (int i = 0; i < weight_maps(p); ++i) {
    if (!tensor_map_fits(weight_shape(p, i), stored_dtype(p)))
      return "weights are not aligned to 16 bytes";
  }
  for (int i = 0; i < factor_maps(p); ++i) {
    if (!tensor_map_fits(factor_shape(p, i), p.dtype)) return "factors are not aligned to 16 bytes";
  }
  if (is_gathered(p)) {
    if (!aligned(p.x) || p.x_stride % 8) return "rows of x are not aligned to 16 bytes";
    if (!aligned(p.narrow) || p.rank % 8) return "narrow rows are not aligned to 16 bytes";
  }
  for (const RowTensor& tensor : kRowTensors) {
    if (tensor.used(p) && p.max_rows > 0 && !tensor_map_fits(tensor.shape(p), p.dtype)) {
      return "rows are not aligned to 16 bytes";
    }
  }
  return nullptr;
}

cudaError_t launch_row_gemm(const RowGemmProblem& problem, const RowGemmChoice& choice,
                            cudaStream_t stream) {
  if (problem.max_rows == 0) return cudaSuccess;
  CodedRowGemmParams params = {};
  if (cudaError_t e = make_maps(problem, params)) return e;
  set_rest(problem, choice, params);
  const int kind = alternating_weights(problem) ? kAlternatingKind : int(problem.op);
  if (!is_coded(problem)) return kLaunches[kind](problem, params, choice.ctas, stream);
  params.channels[0] = problem.channels[0];
  params.channels[1] = problem.channels[1];
  params.channels_along_k = is_gradient(problem.op);
  params.lines = problem.lines;
  params.factors = {{problem.factors[0], problem.factors[1]},
                    problem.factor_stride,
                    problem.factor_expert_stride};
  if (cudaError_t e = launch_coded(problem, params, choice, kind, stream)) return e;
  return launch_rows_behind(problem, params, stream);
}

}  // namespace moec::cuda
