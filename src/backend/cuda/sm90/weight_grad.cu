// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/sm90/weight_grad.cuh"

#include <algorithm>

#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/sm90/tensor_map.h"
#include "core/workspace.h"

namespace moec::cuda {
namespace {

bool whole_blocks(const WeightGradArgs& args) {
  return args.m_size % 64 == 0;
}
// Two blocks of [64 rows][64 m], or one.
TensorMapShape row_shape(const WeightGradArgs& args) {
  const int64_t rows = std::max<int64_t>(args.max_rows, 1), row_size = args.m_size * args.parts;
  TensorMapShape shape = {};
  shape.base = args.rows;
  shape.box[0] = 64;
  if (whole_blocks(args)) {
    shape.extent[0] = 64;
    shape.extent[1] = rows;
    shape.extent[2] = row_size / 64;
    shape.stride[0] = row_size;
    shape.stride[1] = 64;
    shape.box[1] = kTileK;
    shape.box[2] = 2;
  } else {
    shape.extent[0] = args.m_size;
    shape.extent[1] = args.parts;
    shape.extent[2] = rows;
    shape.stride[0] = args.m_size;
    shape.stride[1] = row_size;
    shape.box[1] = 1;
    shape.box[2] = kTileK;
  }
  return in_windows(shape, whole_blocks(args) ? 1 : 2, kTileK, args.dtype);
}

// Whether a piece leaves in one copy, 256 bytes of each row of the gradient: the rows of two boxes
// side by side, eight of one and eight of the other in turn. Where such a box may lie in two parts,
// or a row ends inside of 128 bytes, each box leaves by itself.
bool whole_lines(const WeightGradArgs& args) {
  if (args.out_f32) return false;
  if (!args.out_m_contiguous) return args.n_size % 64 == 0;
  return args.m_size % (args.parts == 1 ? 64 : 128) == 0;
}
TensorMapShape out_shape(const WeightGradArgs& args, int part) {
  const int64_t width = args.out_m_contiguous ? args.m_size : args.n_size;
  const int64_t height = args.out_m_contiguous ? args.n_size : args.m_size;
  const int64_t experts = args.params.num_experts, stride = args.out_stride;
  if (whole_lines(args)) {
    return {args.out[part],
            5,
            {64, 8, width / 64, height / 8, experts},
            {stride, 64, 8 * stride, args.out_expert_stride},
            {64, 8, 2, 8, 1}};
  }
  const int box = args.out_f32 ? 32 : 64;  // 128 bytes
  return {
      args.out[part], 3, {width, height, experts}, {stride, args.out_expert_stride}, {box, 64, 1}};
}
moec_dtype out_dtype(const WeightGradArgs& args) {
  return args.out_f32 ? moec_dtype(MOEC_F32) : args.dtype;
}

template <typename C>
cudaError_t launch_config(const WeightGradParams& p, int grid, cudaStream_t stream) {
  static std::atomic<uint64_t> allowed;
  const auto kernel = weight_grad_kernel<C>;
  if (cudaError_t error = allow_shared_memory(kernel, C::kSharedBytes, allowed)) return error;
  return launch_cluster(kernel, dim3(ctas_in_pairs(grid)), kClusterSize, kGradThreads,
                        C::kSharedBytes, stream, p);
}

template <typename Element, bool kF32>
cudaError_t launch_axis(const WeightGradParams& p, const WeightGradArgs& args, int grid,
                        cudaStream_t stream) {
  return args.out_m_contiguous ? launch_config<GradConfig<Element, kF32, true>>(p, grid, stream)
                               : launch_config<GradConfig<Element, kF32, false>>(p, grid, stream);
}
template <typename Element>
cudaError_t launch_element(const WeightGradParams& p, const WeightGradArgs& args, int grid,
                           cudaStream_t stream) {
  return args.out_f32 ? launch_axis<Element, true>(p, args, grid, stream)
                      : launch_axis<Element, false>(p, args, grid, stream);
}

bool aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

}  // namespace

const char* weight_grad_refuses(const WeightGradArgs& args) {
  const WeightGradParams& p = args.params;
  if (args.dtype != MOEC_BF16 && args.dtype != MOEC_F16) return "elements are not bf16 or f16";
  if (args.m_size % 8 || args.n_size % 8) return "a matrix extent is not a multiple of 8";
  if (!tensor_map_fits(row_shape(args), args.dtype)) return "rows are not aligned to 16 bytes";
  if (!aligned(p.x) || p.x_stride % 8) return "rows of x are not aligned to 16 bytes";
  for (int part = 0; part < args.parts; ++part) {
    if (!tensor_map_fits(out_shape(args, part), out_dtype(args)))
      return "the gradient is not aligned to 16 bytes";
  }
  return nullptr;
}

cudaError_t launch_weight_grad(const WeightGradArgs& args, int multiprocessors,
                               cudaStream_t stream) {
  WeightGradParams p = args.params;
  if (cudaError_t error = make_tensor_maps(&p.row_map, 1, args.dtype, row_shape(args)))
    return error;
  for (int part = 0; part < args.parts; ++part) {
    const TensorMapShape out = out_shape(args, part);
    if (cudaError_t error = make_tensor_maps(&p.out_maps[part], 1, out_dtype(args), out))
      return error;
  }
  p.m_size = int(args.m_size);
  p.n_size = int(args.n_size);
  p.whole_blocks = whole_blocks(args);
  p.whole_lines = whole_lines(args);
  p.m_blocks_of_part = int(div_up(args.m_size, 64));
  p.m_blocks = p.m_blocks_of_part * args.parts;
  p.m_tiles = int(div_up(p.m_blocks, 4));
  p.n_tiles = int(div_up(args.n_size, kMaxTileN));
  p.run_experts = p.num_experts - args.single_tiles / (p.m_tiles * p.n_tiles);
  return args.dtype == MOEC_BF16 ? launch_element<__nv_bfloat16>(p, args, multiprocessors, stream)
                                 : launch_element<__half>(p, args, multiprocessors, stream);
}

}  // namespace moec::cuda
