// SPDX-License-Identifier: Apache-2.0
// The row GEMMs of many rows an expert, of a forward of codes along k and of its backward: tiles of
// 128 features x up to 256 rows, so that a code is decoded once for 256 rows, by the warps that
// multiply it, into wgmma's A operand. Shared memory moves rows and codes, and no elements. No warp
// gathers: its instructions cost those that decode a fifth of their time. So rows of x and of d_y
// are put in order before.
#pragma once

#include "backend/cuda/sm90/epilogue_wide.cuh"
#include "backend/cuda/sm90/row_gemm_few.cuh"

namespace moec::cuda {

using WideElement = __nv_bfloat16;
template <LineDecode kDecode, bool kWholeLines>
cudaError_t up_of_wide(const CodedRowGemmParams& params, int ctas, cudaStream_t stream) {
  using Weights = RegisterWeights<kDecode, kWholeLines>;
  using Epilogue = StoreWideActivated<WideElement, SigmoidGated>;
  return launch_config<RowGemmConfig<WideElement, Weights, false, Epilogue, Blocks::kPair>>(
      params, ctas, stream);
}
template <LineDecode kDecode, bool kWholeLines>
cudaError_t down_of_wide(const CodedRowGemmParams& params, int ctas, cudaStream_t stream) {
  using Weights = RegisterWeights<kDecode, kWholeLines>;
  using Epilogue = StoreWideRows<WideElement>;
  return launch_config<RowGemmConfig<WideElement, Weights, false, Epilogue>>(params, ctas, stream);
}
// Both gradients. Their codes lie along the features.
template <LineDecode kDecode, bool kF32Scales>
cudaError_t grad_of_wide(const CodedRowGemmParams& params, int ctas, cudaStream_t stream) {
  using Weights = ColumnWeights<kDecode, kF32Scales>;
  using Epilogue = StoreWideColumns<WideElement, Weights>;
  return launch_config<RowGemmConfig<WideElement, Weights, false, Epilogue>>(params, ctas, stream);
}

// body<how codes are decoded, kWholeLines>() of all but powers, which are compiled alone. What
// bytes have no kernel for, takes_wide_tiles() leaves to others. Integers have one for all lines.
template <class Body>
cudaError_t with_wide_codes(const CodedLines& lines, const Body& body) {
  switch (lines.decode) {
    case LineDecode::kTable:
      return has_whole_lines(lines) ? body.template operator()<LineDecode::kTable, true>()
                                    : body.template operator()<LineDecode::kTable, false>();
    case LineDecode::kIntegers:
      return body.template operator()<LineDecode::kIntegers, false>();
    case LineDecode::kBytes:
      return body.template operator()<LineDecode::kBytes, true>();
    case LineDecode::kSigned:
      return body.template operator()<LineDecode::kSigned, false>();
    case LineDecode::kPowers:
      break;
  }
  return cudaErrorInvalidValue;
}

// The same of gradients, with kF32Scales, of powers, too.
template <class Body>
cudaError_t with_wide_columns(const CodedLines& lines, const Body& body) {
  switch (lines.decode) {
    case LineDecode::kTable:
      return has_f32_scales(lines) ? body.template operator()<LineDecode::kTable, true>()
                                   : body.template operator()<LineDecode::kTable, false>();
    case LineDecode::kPowers:
      return body.template operator()<LineDecode::kPowers, false>();
    case LineDecode::kIntegers:
      return body.template operator()<LineDecode::kIntegers, false>();
    case LineDecode::kBytes:
      return body.template operator()<LineDecode::kBytes, true>();
    case LineDecode::kSigned:
      return body.template operator()<LineDecode::kSigned, true>();
  }
  return cudaErrorInvalidValue;
}

}  // namespace moec::cuda
