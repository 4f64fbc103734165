// SPDX-License-Identifier: Apache-2.0
// The shapes that the GPU benches know, and what bounds them: dense batched products of cuBLAS.
#pragma once

#include <dlfcn.h>

#include "gpu/device_problem.h"

namespace moec::test {

constexpr Shape kShapes[] = {
    {"gpt-oss-20b", 2880, 2880, 32, 4},   {"gpt-oss-120b", 2880, 2880, 128, 4},
    {"qwen3-30b-a3b", 2048, 768, 128, 8}, {"olmoe", 2048, 1024, 64, 8},
    {"mixtral-8x7b", 4096, 14336, 8, 2},  {"sonic-30b", 4096, 1024, 128, 8},
    {"dsv3", 7168, 2048, 256, 8},
};

// From the machine.
class Cublas {
 public:
  Cublas() {
    void* library = dlopen("libcublas.so.13", RTLD_NOW | RTLD_GLOBAL);
    if (!library) return;
    const auto create = reinterpret_cast<int (*)(void**)>(dlsym(library, "cublasCreate_v2"));
    const auto workspace =
        reinterpret_cast<int (*)(void*, void*, size_t)>(dlsym(library, "cublasSetWorkspace_v2"));
    set_stream_ = reinterpret_cast<int (*)(void*, void*)>(dlsym(library, "cublasSetStream_v2"));
    gemm_ = reinterpret_cast<Gemm>(dlsym(library, "cublasGemmStridedBatchedEx"));
    if (!create || !gemm_ || create(&handle_) != 0) gemm_ = nullptr;
    CHECK_CUDA(cudaMalloc(&workspace_, 64 << 20));
    if (gemm_) workspace(handle_, workspace_, 64 << 20);
  }
  bool present() const { return gemm_; }
  // y[e][n][m] = x[e][n][k] * w[e][m][k]^T. Without a stream: the default one.
  void batched(int batch, int m, int n, int k, const Half* w, const Half* x, Half* y,
               cudaStream_t stream = nullptr) const {
    const float one = 1, zero = 0;
    constexpr int kBf16 = 14, kCompute32f = 68;  // CUDA_R_16BF, CUBLAS_COMPUTE_32F
    if (stream) set_stream_(handle_, stream);
    const int status =
        gemm_(handle_, 1, 0, m, n, k, &one, w, kBf16, k, int64_t(m) * k, x, kBf16, k,
              int64_t(n) * k, &zero, y, kBf16, m, int64_t(n) * m, batch, kCompute32f, -1);
    if (status != 0) std::printf("cuBLAS status %d\n", status);
  }

 private:
  using Gemm = int (*)(void*, int, int, int, int, int, const void*, const void*, int, int,
                       long long, const void*, int, int, long long, const void*, void*, int, int,
                       long long, int, int, int);
  Gemm gemm_ = nullptr;
  int (*set_stream_)(void*, void*) = nullptr;
  void *handle_ = nullptr, *workspace_ = nullptr;
};

}  // namespace moec::test
