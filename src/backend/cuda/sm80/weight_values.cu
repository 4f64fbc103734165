// SPDX-License-Identifier: Apache-2.0
// A thread computes an element at a time; neighbours write neighbours.
#include "backend/cuda/sm80/weight_values.h"

#include "backend/cuda/device/op.cuh"
#include "quant/format.h"

namespace moec::cuda {
namespace {

struct ValuesParams {
  quant::CodedView coded;
  MatrixView plain, to;
  bool is_coded;
  int64_t n, k;
};

__global__ __launch_bounds__(kBlockThreads) void weight_values_kernel(
    const __grid_constant__ ValuesParams p) {
  begin_kernel();
  const bool along_k = p.to.col_stride == 1;
  const int64_t width = along_k ? p.k : p.n;
  for (int64_t i = global_thread(); i < p.n * p.k; i += global_threads()) {
    const int64_t line = i / width, place = i - line * width;
    const int64_t n = along_k ? line : place, k = along_k ? place : line;
    const float value = p.is_coded ? quant::value_at(p.coded, n, k)
                                   : load_real(p.plain.data, p.plain.dtype,
                                               n * p.plain.row_stride + k * p.plain.col_stride);
    store_real(p.to.data, p.to.dtype, n * p.to.row_stride + k * p.to.col_stride, value);
  }
}

}  // namespace

void weight_values(const Op& op, const ValuesArgs& args) {
  const ExpertMatrix& m = *args.matrix;
  ValuesParams p = {};
  p.is_coded = m.is_coded();
  if (p.is_coded)
    p.coded = m.coded(args.expert);
  else
    p.plain = m.expert(args.expert);
  p.to = args.to;
  p.n = args.n;
  p.k = args.k;
  run(op, "values of weights", weight_values_kernel,
      grid_for(p.n * p.k, kBlockThreads, 16 * int64_t(op.multiprocessors)), kBlockThreads, 0, p);
}

}  // namespace moec::cuda
