// SPDX-License-Identifier: Apache-2.0
// Device memory of the GPU tests and benches: it starts as NaN, guard bytes lie on both sides of
// it.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace moec::test {

inline void check_cuda(cudaError_t status, const char* call, const char* file, int line) {
  if (status == cudaSuccess) return;
  throw std::runtime_error(std::string(file) + ":" + std::to_string(line) + " " + call + ": " +
                           cudaGetErrorString(status));
}
#define CHECK_CUDA(call) ::moec::test::check_cuda((call), #call, __FILE__, __LINE__)

// Where arrays lie. A program may put its own functions here before it makes the first array.
struct DeviceMemory {
  cudaError_t (*take)(void** pointer, size_t bytes);
  cudaError_t (*give)(void* pointer);
};
inline DeviceMemory device_memory = {
    [](void** pointer, size_t bytes) { return cudaMalloc(pointer, bytes); }, cudaFree};

// Waits for the device.
template <typename T>
std::vector<T> download(const void* from, int64_t count) {
  std::vector<T> values(static_cast<size_t>(count));
  CHECK_CUDA(cudaMemcpy(values.data(), from, values.size() * sizeof(T), cudaMemcpyDefault));
  return values;
}
template <typename T>
std::vector<T> download(const T* from, int64_t count) {
  return download<T>(static_cast<const void*>(from), count);
}

// kGuard bytes of 0xff, which are NaN in every float type, lie before and after the values.
template <typename T>
class DeviceArray {
 public:
  static constexpr size_t kGuard = 4096;
  DeviceArray() = default;
  explicit DeviceArray(size_t count) : count_(count) {
    void* base = nullptr;
    CHECK_CUDA(device_memory.take(&base, bytes() + 2 * kGuard));
    base_ = static_cast<unsigned char*>(base);
    poison();
  }
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(values.size()) {
    assign(values);
  }
  DeviceArray(DeviceArray&& other) noexcept { *this = std::move(other); }
  DeviceArray& operator=(DeviceArray&& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(count_, other.count_);
    return *this;
  }
  ~DeviceArray() {
    if (base_) device_memory.give(base_);
  }

  T* data() const { return reinterpret_cast<T*>(base_ + kGuard); }
  size_t size() const { return count_; }
  size_t bytes() const { return count_ * sizeof(T); }
  void poison() const {
    CHECK_CUDA(cudaMemset(base_, 0xff, bytes() + 2 * kGuard));
    wait();
  }
  bool guards_intact() const {
    const auto guard = [this](size_t at) { return download(base_ + at, kGuard); };
    for (const auto& bytes : {guard(0), guard(kGuard + bytes())}) {
      if (std::any_of(bytes.begin(), bytes.end(), [](unsigned char b) { return b != 0xff; }))
        return false;
    }
    return true;
  }
  // All of it, as values of another type on request.
  template <typename U = T>
  std::vector<U> host() const {
    return download<U>(static_cast<const void*>(data()), int64_t(bytes() / sizeof(U)));
  }
  template <typename U>
  void assign(const std::vector<U>& values) const {
    if (values.size() * sizeof(U) > bytes()) throw std::length_error("more than the array holds");
    CHECK_CUDA(cudaMemcpy(data(), values.data(), values.size() * sizeof(U), cudaMemcpyDefault));
    wait();
  }

 private:
  // Both calls may return before the device is done, and streams of tests do not wait for them.
  static void wait() { CHECK_CUDA(cudaStreamSynchronize(nullptr)); }

  unsigned char* base_ = nullptr;
  size_t count_ = 0;
};
using DeviceBytes = DeviceArray<uint8_t>;

}  // namespace moec::test
