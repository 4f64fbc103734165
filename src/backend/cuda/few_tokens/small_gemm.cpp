// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/few_tokens/small_gemm.h"

namespace moec::cuda {
namespace {

constexpr int kMaxExperts = 1024;  // group offsets lie in shared memory

bool aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

}  // namespace

const char* small_refuses(const SmallArgs& args) {
  if (args.dtype != MOEC_BF16 && args.dtype != MOEC_F16) return "elements are not bf16 or f16";
  if (args.features % 8 || args.k_size % 8) return "a matrix extent is not a multiple of 8";
  if (args.num_experts > kMaxExperts) return "more than 1024 local experts";
  if (!aligned(args.weights[0]) || !aligned(args.weights[1]) || args.weight_stride % 8 ||
      args.expert_stride % 8) {
    return "weights are not aligned to 16 bytes";
  }
  if (!aligned(args.operand) || args.operand_stride % 8) {
    return "rows are not aligned to 16 bytes";
  }
  return nullptr;
}

}  // namespace moec::cuda
