// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/routing/cublaslt.h"

#include <cublasLt.h>
#include <dlfcn.h>
#include <link.h>

#include <cstdio>
#include <map>
#include <mutex>
#include <string>
#include <tuple>

#include "core/dtype.h"
#include "core/files.h"

namespace moec::cuda {
namespace {

struct Library {
  decltype(&cublasLtCreate) create = nullptr;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic = nullptr;
  decltype(&cublasLtMatmul) matmul = nullptr;
  decltype(&cublasLtMatmulDescInit_internal) init_desc = nullptr;
  decltype(&cublasLtMatmulDescSetAttribute) set_desc = nullptr;
  decltype(&cublasLtMatrixLayoutInit_internal) init_layout = nullptr;
  decltype(&cublasLtMatmulPreferenceInit_internal) init_preference = nullptr;
  decltype(&cublasLtMatmulPreferenceSetAttribute) set_preference = nullptr;
  decltype(&cublasLtGetVersion) version = nullptr;
  bool complete = false;
  std::string file, failure;  // where it is; why it is not

  Library() {
    void* const handle = dlopen("libcublasLt.so.13", RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
      const char* const text = dlerror();
      failure = text ? text : "no reason given";
      return;
    }
    link_map* map = nullptr;
    if (dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0) file = map->l_name;
    complete = true;
    const auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
      if (!function) failure = end_of(file) + " has no " + name;
      complete = complete && function;
    };
    find(create, "cublasLtCreate");
    find(heuristic, "cublasLtMatmulAlgoGetHeuristic");
    find(matmul, "cublasLtMatmul");
    find(init_desc, "cublasLtMatmulDescInit_internal");
    find(set_desc, "cublasLtMatmulDescSetAttribute");
    find(init_layout, "cublasLtMatrixLayoutInit_internal");
    find(init_preference, "cublasLtMatmulPreferenceInit_internal");
    find(set_preference, "cublasLtMatmulPreferenceSetAttribute");
    find(version, "cublasLtGetVersion");
  }
};

// The product as cuBLASLt sees it: column-major, so c^T = b^T a^T, with b first.
struct Shape {
  int64_t m, n, k, b_stride, a_stride;
  bool b_transposed, a_transposed;
  moec_dtype dtype, out;
  bool tf32;
  auto key() const {
    return std::tuple(m, n, k, b_stride, a_stride, b_transposed, a_transposed, dtype, out, tf32);
  }
  bool operator<(const Shape& other) const { return key() < other.key(); }
};

// Of all pointers and rows, in bytes. More is never promised: the choice of a kernel, and so the
// bits, would depend on addresses.
constexpr uint32_t kAlignment = 16;

bool aligned(std::initializer_list<const void*> pointers) {
  for (const void* const pointer : pointers)
    if (reinterpret_cast<uintptr_t>(pointer) % kAlignment) return false;
  return true;
}

void require(cublasStatus_t status, const char* what) {
  if (status != CUBLAS_STATUS_SUCCESS)
    fail_native(MOEC_E_CUDA, int(status), "cuBLASLt %s: status %d", what, int(status));
}

cudaDataType_t type_of(moec_dtype dtype) {
  return dtype == MOEC_BF16 ? CUDA_R_16BF : dtype == MOEC_F16 ? CUDA_R_16F : CUDA_R_32F;
}

// Descriptions of one product, on the stack.
struct Problem {
  cublasLtMatmulDescOpaque_t desc;
  cublasLtMatrixLayoutOpaque_t b, a, c;

  Problem(const Library& lt, const Shape& s) {
    const cudaDataType_t type = type_of(s.dtype);
    require(lt.init_desc(&desc, sizeof desc,
                         s.tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F, CUDA_R_32F),
            "product");
    const cublasOperation_t first = s.b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t second = s.a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    require(lt.set_desc(&desc, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first), "product");
    require(lt.set_desc(&desc, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second), "product");
    layout(lt, b, type, s.n, s.k, s.b_transposed, s.b_stride);
    layout(lt, a, type, s.k, s.m, s.a_transposed, s.a_stride);
    layout(lt, c, type_of(s.out), s.n, s.m, false, s.n);
  }

 private:
  static void layout(const Library& lt, cublasLtMatrixLayoutOpaque_t& to, cudaDataType_t type,
                     int64_t rows, int64_t columns, bool transposed, int64_t stride) {
    require(lt.init_layout(&to, sizeof to, type, uint64_t(transposed ? columns : rows),
                           uint64_t(transposed ? rows : columns), stride),
            "layout");
  }
};

class Products {
 public:
  bool open(int device) {
    const std::lock_guard lock(mutex_);
    return library_.complete && handle(device);
  }
  const Library& library() const { return library_; }
  bool has_kernel(int device, const Shape& shape) {
    Problem problem(library_, shape);
    return find(device, shape, problem).found;
  }
  void run(const Op& op, const Shape& shape, const Dense& dense, void* c, void* workspace) {
    int device = 0;
    check(cudaGetDevice(&device), "device");
    require(library_.complete ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_INITIALIZED, "library");
    Problem problem(library_, shape);
    const cublasLtMatmulAlgo_t algorithm = find(device, shape, problem).algorithm;
    const float one = 1.0f, zero = 0.0f;
    const cublasStatus_t status = library_.matmul(
        handles_[device], &problem.desc, &one, dense.b.data, &problem.b, dense.a.data, &problem.a,
        &zero, c, &problem.c, c, &problem.c, &algorithm, workspace, kCublasLtBytes, op.stream);
    if (status != CUBLAS_STATUS_SUCCESS)
      fail_native(MOEC_E_CUDA, int(status), "cuBLASLt: status %d for [%lld,%lld] x [%lld,%lld]",
                  int(status), static_cast<long long>(dense.m), static_cast<long long>(dense.k),
                  static_cast<long long>(dense.k), static_cast<long long>(dense.n));
    op.count(1, uint64_t(2 * dense.m * dense.n * dense.k));
  }

 private:
  static constexpr int kDevices = 64;
  static constexpr size_t kMostShapes = 4096;

  bool handle(int device) {
    if (device >= kDevices) return false;
    if (!handles_[device] && library_.create(&handles_[device]) != CUBLAS_STATUS_SUCCESS)
      handles_[device] = nullptr;
    return handles_[device];
  }
  struct Choice {
    bool found;
    cublasLtMatmulAlgo_t algorithm;
  };
  // By shape, never by timing: the same bits in every run.
  Choice find(int device, const Shape& shape, Problem& problem) {
    const std::lock_guard lock(mutex_);
    const auto known = choices_.find({device, shape});
    if (known != choices_.end()) return known->second;
    cublasLtMatmulPreferenceOpaque_t preference;
    require(library_.init_preference(&preference, sizeof preference), "preference");
    const auto set = [&](cublasLtMatmulPreferenceAttributes_t which, auto value) {
      require(library_.set_preference(&preference, which, &value, sizeof value), "preference");
    };
    set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kCublasLtBytes);
    set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,  // in place: its order is not said
        uint32_t(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE | CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE));
    for (const auto which :
         {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
      set(which, kAlignment);
    cublasLtMatmulHeuristicResult_t result = {};
    int count = 0;
    const cublasStatus_t status =
        library_.heuristic(handles_[device], &problem.desc, &problem.b, &problem.a, &problem.c,
                           &problem.c, &preference, 1, &result, &count);
    const Choice choice = {status == CUBLAS_STATUS_SUCCESS && count > 0, result.algo};
    if (choices_.size() >= kMostShapes) choices_.clear();
    choices_[{device, shape}] = choice;
    return choice;
  }

  const Library library_;
  std::mutex mutex_;
  cublasLtHandle_t handles_[kDevices] = {};
  std::map<std::pair<int, Shape>, Choice> choices_;
};

Products& products() {  // never destroyed: calls may come while the process ends
  static Products* const all = new Products;
  return *all;
}

Shape shape_of(const Dense& d, const Array& c, bool tf32) {
  const bool b_transposed = d.b_row == 1 && d.b_col != 1;  // k is contiguous
  const bool a_transposed = d.a_col != 1;
  return {d.m,
          d.n,
          d.k,
          b_transposed ? d.b_col : d.b_row,
          a_transposed ? d.a_col : d.a_row,
          b_transposed,
          a_transposed,
          d.a.dtype,
          c.dtype,
          tf32 && d.a.dtype == MOEC_F32};  // of 16-bit operands there is nothing to round
}

}  // namespace

void prepare_cublaslt() {
  int device = 0;
  check(cudaGetDevice(&device), "device");
  products().open(device);
}

void describe_dense_products(char* text, size_t bytes) {
  const Library& lt = products().library();
  if (!lt.complete) {
    std::snprintf(text, bytes, "kernels of moec, slower and with other bits than cuBLASLt: %s",
                  lt.failure.c_str());
    return;
  }
  std::snprintf(text, bytes, "cuBLASLt %zu of %s", lt.version(), real_path(lt.file).c_str());
}

bool cublaslt_fits(const Dense& dense, const Array& c, bool tf32) {
  int device = 0;
  check(cudaGetDevice(&device), "device");
  if (dense.a.dtype != dense.b.dtype || !products().open(device)) return false;
  const Shape shape = shape_of(dense, c, tf32);
  const int64_t bytes = dtype_bytes(shape.dtype);
  return shape.a_stride * bytes % kAlignment == 0 && shape.b_stride * bytes % kAlignment == 0 &&
         dense.n % 8 == 0 && (shape.out == MOEC_F32 || shape.out == shape.dtype) &&
         aligned({dense.a.data, dense.b.data, c.data}) && products().has_kernel(device, shape);
}

void cublaslt_product(const Op& op, const Dense& dense, const Array& c, void* workspace) {
  products().run(op, shape_of(dense, c, op.tf32), dense, c.data, workspace);
}

}  // namespace moec::cuda
