// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/sm90/row_gemm.h"

#include <algorithm>

#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/sm90/row_gemm_kernels.h"
#include "backend/cuda/sm90/tensor_map.h"
#include "core/workspace.h"

namespace moec::cuda {
namespace {

constexpr int kTileFeatures = 256, kTileK = 64, kRowUnit = 16, kPairRows = 256;

struct Operation {
  bool gathered, gated;  // gated: a tile is half gate, half up features
  bool activated;
  RowGemmLaunch* launch;
};
constexpr Operation kOperations[] = {
    {true, true, true, launch_up},         // kUp
    {false, false, false, launch_down},    // kDown
    {false, false, false, launch_down},    // kGradUp: the same kernel, with k in two parts
    {true, false, true, launch_grad_down}  // kGradDown
};
const Operation& operation(const RowGemmArgs& args) {
  return kOperations[int(args.op)];
}

bool gate_up_pairs(const RowGemmArgs& args) {
  return args.params.pairs && operation(args).gated;
}

TensorMapShape weight_shape(const RowGemmArgs& args, int part) {
  TensorMapShape shape = {};
  shape.base = args.weights[part];
  const int64_t columns = gate_up_pairs(args) ? 2 * args.features : args.features;
  shape.extent[0] = args.weights_mn_major ? columns : args.k_size;
  shape.extent[1] = args.weights_mn_major ? args.k_size : args.features;
  shape.extent[2] = args.params.num_experts;
  shape.stride[0] = args.weight_stride;
  shape.stride[1] = args.expert_stride;
  shape.box[0] = kTileK;
  shape.box[1] = args.weights_mn_major ? kTileK : kTileFeatures / 2;
  return shape;
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
  TensorMapShape (*shape)(const RowGemmArgs& args);
  bool (*used)(const RowGemmArgs& args);
};
constexpr RowTensor kRowTensors[] = {
    {&RowGemmParams::rows,
     [](const RowGemmArgs& a) {
       const int64_t stride = a.k_size * a.parts;
       const auto shape = row_shape(a.rows, a.k_size, a.parts, stride, a.params.max_rows);
       return in_windows(shape, 2, kWindowRows, a.dtype);
     },
     [](const RowGemmArgs& a) { return !operation(a).gathered; }},
    {&RowGemmParams::out_maps,
     [](const RowGemmArgs& a) {
       return row_shape(a.params.out, a.features, 1, a.params.out_stride, a.params.max_rows);
     },
     [](const RowGemmArgs&) { return true; }},
    {&RowGemmParams::pre_maps,
     [](const RowGemmArgs& a) {
       return row_shape(a.params.pre, a.features, 2, a.features * 2, a.params.max_rows);
     },
     [](const RowGemmArgs& a) { return a.params.pre != nullptr; }},
};

int weight_maps(const RowGemmArgs& args) {
  return (operation(args).gated && !gate_up_pairs(args)) || args.parts == 2 ? 2 : 1;
}

// A tile of one block of features takes more than half as long as one of four. So 45 blocks are
// nine tiles of four and three of three.
void choose_tiles(const RowGemmArgs& args, RowGemmParams& p) {
  constexpr int kGatedTile = kTileFeatures / 2;
  constexpr int64_t kBandBytes = 16 << 20;  // of rows, for all feature tiles to find them in L2
  const int blocks = int(div_up(args.features, kBlockFeatures));
  p.features = int(args.features);
  p.feature_tiles = int(div_up(args.features, operation(args).gated ? kGatedTile : kTileFeatures));
  p.tile_blocks = blocks / p.feature_tiles;
  p.wider_tiles = blocks % p.feature_tiles;
  p.k_size = int(args.k_size);
  p.k_blocks_of_part = int(div_up(args.k_size, kTileK));
  p.k_blocks = p.k_blocks_of_part * args.parts;
  p.band_pairs = int(std::max<int64_t>(kBandBytes / (kPairRows * args.k_size * args.parts * 2), 8));
  p.done_tiles = int(div_up(args.k_size, kGatedTile));  // the features of up are the k of down
}

bool aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

}  // namespace

const char* row_gemm_refuses(const RowGemmArgs& args) {
  const RowGemmParams& p = args.params;
  if (args.dtype != MOEC_BF16 && args.dtype != MOEC_F16) return "elements are not bf16 or f16";
  if (operation(args).activated && !has_gate_form(p.activation)) {
    return "the activation is not g sigmoid(p(g)) u with a rising p";
  }
  if (gate_up_pairs(args) && !args.weights_mn_major) return "pairs of gate and up rows";
  if (args.features % 8 || args.k_size % 8) return "a matrix extent is not a multiple of 8";
  for (int i = 0; i < weight_maps(args); ++i) {
    if (!tensor_map_fits(weight_shape(args, i), args.dtype))
      return "weights are not aligned to 16 bytes";
  }
  if (operation(args).gathered) {
    if (!aligned(p.x) || p.x_stride % 8) return "rows of x are not aligned to 16 bytes";
  }
  for (const RowTensor& tensor : kRowTensors) {
    if (tensor.used(args) && p.max_rows > 0 && !tensor_map_fits(tensor.shape(args), args.dtype)) {
      return "rows are not aligned to 16 bytes";
    }
  }
  return nullptr;
}

cudaError_t launch_row_gemm(const RowGemmArgs& args, int multiprocessors, cudaStream_t stream) {
  const Operation& op = operation(args);
  RowGemmParams p = args.params;
  if (p.max_rows == 0) return cudaSuccess;
  for (int i = 0; i < weight_maps(args); ++i) {
    const TensorMapShape shape = weight_shape(args, i);
    if (cudaError_t e = make_tensor_maps(&p.weight_maps[i], 1, args.dtype, shape)) return e;
  }
  for (const RowTensor& tensor : kRowTensors) {
    if (!tensor.used(args)) continue;
    CUtensorMap* const maps = (p.*tensor.maps).of_units;
    const TensorMapShape shape = tensor.shape(args);
    if (cudaError_t e = make_tensor_maps(maps, kRowBoxes, args.dtype, shape)) return e;
  }
  choose_tiles(args, p);
  p.form = gate_form(p.activation);
  RowGemmLaunch* const launch = gate_up_pairs(args) ? launch_up_pairs : op.launch;
  return launch(p, args.dtype == MOEC_BF16, args.weights_mn_major, ctas_in_pairs(multiprocessors),
                stream);
}

}  // namespace moec::cuda
