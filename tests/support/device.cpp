// SPDX-License-Identifier: Apache-2.0
#include "device.h"

#include <dlfcn.h>
#include <moec/moec.h>

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "guard.h"

namespace moec::test {
namespace {

thread_local int32_t gpu = 0;

// The few driver functions that tests need, found at run time: no CUDA header, no link.
class CudaDriver {
 public:
  static const CudaDriver& get() {
    static const CudaDriver driver;
    return driver;
  }
  void* allocate(size_t bytes) const {
    uint64_t address = 0;
    make_current();
    check(allocate_(&address, bytes ? bytes : 1), "cuMemAlloc");
    return reinterpret_cast<void*>(address);
  }
  // That of this thread: its primary context, the one that the runtime API of the plug-in uses.
  void make_current() const {
    check(set_current_(contexts_.at(static_cast<size_t>(gpu))), "cuCtxSetCurrent");
  }
  size_t count() const { return contexts_.size(); }
  void release(void* p) const { free_(reinterpret_cast<uint64_t>(p)); }
  void upload(void* to, const void* from, size_t bytes) const {
    if (bytes) check(upload_(reinterpret_cast<uint64_t>(to), from, bytes), "cuMemcpyHtoD");
  }
  void download(void* to, const void* from, size_t bytes) const {
    if (bytes) check(download_(to, reinterpret_cast<uint64_t>(from), bytes), "cuMemcpyDtoH");
  }

 private:
  CudaDriver() {
    library_ = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library_) throw std::runtime_error("MOEC_TEST_DEVICE=cuda: no libcuda.so.1");
    int count = 0;
    check(find<int(unsigned)>("cuInit")(0), "cuInit");
    check(find<int(int*)>("cuDeviceGetCount")(&count), "cuDeviceGetCount");
    for (int i = 0; i < count; ++i) {
      int device = 0;
      void* context = nullptr;
      check(find<int(int*, int)>("cuDeviceGet")(&device, i), "cuDeviceGet");
      check(find<int(void**, int)>("cuDevicePrimaryCtxRetain")(&context, device), "retain");
      contexts_.push_back(context);
    }
    set_current_ = find<int(void*)>("cuCtxSetCurrent");
    make_current();
    allocate_ = find<int(uint64_t*, size_t)>("cuMemAlloc_v2");
    free_ = find<int(uint64_t)>("cuMemFree_v2");
    upload_ = find<int(uint64_t, const void*, size_t)>("cuMemcpyHtoD_v2");
    download_ = find<int(void*, uint64_t, size_t)>("cuMemcpyDtoH_v2");
  }
  template <typename Function>
  Function* find(const char* name) const {
    void* symbol = dlsym(library_, name);
    if (!symbol) throw std::runtime_error(std::string("libcuda has no ") + name);
    return reinterpret_cast<Function*>(symbol);
  }
  static void check(int result, const char* what) {
    if (result) throw std::runtime_error(std::string(what) + ": error " + std::to_string(result));
  }

  void* library_ = nullptr;
  std::vector<void*> contexts_;
  int (*set_current_)(void*);
  int (*allocate_)(uint64_t*, size_t);
  int (*free_)(uint64_t);
  int (*upload_)(uint64_t, const void*, size_t);
  int (*download_)(void*, uint64_t, size_t);
};

}  // namespace

TestDevice test_device() {
  const char* text = std::getenv("MOEC_TEST_DEVICE");
  const std::string name = text ? text : "cpu";
  if (name == "cpu") return {MOEC_CPU, 0};
  if (name != "cuda") throw std::runtime_error("MOEC_TEST_DEVICE is " + name + "; cpu or cuda");
  CudaDriver::get();
  return {MOEC_CUDA, gpu};
}
void use_gpu(int32_t id) {
  gpu = id;
  CudaDriver::get().make_current();
}
int32_t num_gpus() {
  return static_cast<int32_t>(CudaDriver::get().count());
}
int32_t most_ranks() {
  const char* const text = std::getenv("MOEC_TEST_RANKS");
  return text ? std::atoi(text) : num_gpus();
}

struct DeviceBuffer::Memory {
  std::unique_ptr<GuardedBuffer> host;  // CPU
  void* device = nullptr;               // CUDA

  explicit Memory(size_t bytes) {
    if (test_device().type == MOEC_CPU) {
      host = std::make_unique<GuardedBuffer>(bytes);
      return;
    }
    device = CudaDriver::get().allocate(bytes);
    const std::vector<uint8_t> poison(bytes, kPoison);
    CudaDriver::get().upload(device, poison.data(), bytes);
  }
  ~Memory() {
    if (device) CudaDriver::get().release(device);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
};

DeviceBuffer::DeviceBuffer(size_t bytes)
    : bytes_(bytes), memory_(std::make_unique<Memory>(bytes)) {}
DeviceBuffer::DeviceBuffer(const void* from, size_t bytes) : DeviceBuffer(bytes) {
  upload(from);
}
DeviceBuffer::~DeviceBuffer() = default;
DeviceBuffer::DeviceBuffer(DeviceBuffer&&) noexcept = default;
DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&&) noexcept = default;

void* DeviceBuffer::pointer() const {
  return memory_->host ? memory_->host->data() : memory_->device;
}

void DeviceBuffer::upload(const void* from) const {
  if (memory_->host && bytes_)
    std::memcpy(memory_->host->data(), from, bytes_);
  else if (memory_->device)
    CudaDriver::get().upload(memory_->device, from, bytes_);
}

void DeviceBuffer::download(void* to) const {
  if (memory_->host && bytes_)
    std::memcpy(to, memory_->host->data(), bytes_);
  else if (memory_->device)
    CudaDriver::get().download(to, memory_->device, bytes_);
}

void DeviceBuffer::copy_in(void* to, const void* from, size_t bytes) {
  if (test_device().type == MOEC_CPU)
    std::memcpy(to, from, bytes);
  else
    CudaDriver::get().upload(to, from, bytes);
}
void DeviceBuffer::copy_out(void* to, const void* from, size_t bytes) {
  if (test_device().type == MOEC_CPU)
    std::memcpy(to, from, bytes);
  else
    CudaDriver::get().download(to, from, bytes);
}

bool DeviceBuffer::neighbours_untouched() const {
  return !memory_->host || memory_->host->slack_is_untouched();
}

}  // namespace moec::test
