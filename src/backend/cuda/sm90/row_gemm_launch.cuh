// SPDX-License-Identifier: Apache-2.0
// Choose among the instances of one row GEMM: element type, activation and orientation of the
// weights.
#pragma once

#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/sm90/activation.cuh"
#include "backend/cuda/sm90/row_gemm.cuh"
#include "backend/cuda/sm90/row_gemm_kernels.h"

namespace moec::cuda {

template <typename Config>
cudaError_t launch_config(const typename Config::Params& params, int ctas, cudaStream_t stream) {
  constexpr int kBytes = kSharedBytesOf<Config>();
  // A multiprocessor has 228 KiB, and a CTA takes one more than it asks for.
  static_assert(Config::kCtas * (kBytes + (1 << 10)) <= 228 << 10);
  static std::atomic<uint64_t> allowed;
  const auto kernel = row_gemm_kernel<Config>;
  if (cudaError_t error = allow_shared_memory(kernel, kBytes, allowed)) return error;
  return launch(kernel, dim3(ctas), Config::kAllThreads, kBytes, stream, params);
}

template <typename Element, bool kGather, typename Epilogue,
          template <Major> typename Weights = PlainWeights, typename Params>
cudaError_t launch_major(const RowGemmProblem& problem, const Params& params, int ctas,
                         cudaStream_t stream) {
  return problem.weights_mn_major
             ? launch_config<RowGemmConfig<Element, Weights<Major::kMN>, kGather, Epilogue>>(
                   params, ctas, stream)
             : launch_config<RowGemmConfig<Element, Weights<Major::kK>, kGather, Epilogue>>(
                   params, ctas, stream);
}

// body<Element>() of the problem's type.
template <class Body>
cudaError_t with_element(const RowGemmProblem& problem, const Body& body) {
  return problem.dtype == MOEC_BF16 ? body.template operator()<__nv_bfloat16>()
                                    : body.template operator()<__half>();
}

// body<Element, Activation>() of its type and activation. SwiGLU has kernels of its own in bf16.
template <class Body>
cudaError_t with_activation(const RowGemmProblem& problem, const Body& body) {
  if (problem.dtype == MOEC_F16) return body.template operator()<__half, SigmoidGated>();
  return problem.activation.kind == MOEC_ACT_SWIGLU
             ? body.template operator()<__nv_bfloat16, Swiglu>()
             : body.template operator()<__nv_bfloat16, SigmoidGated>();
}

}  // namespace moec::cuda
