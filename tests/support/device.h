// SPDX-License-Identifier: Apache-2.0
// Memory of the device under test, which MOEC_TEST_DEVICE names: cpu (default) or cuda. On the CPU
// a buffer ends at a page without access; on both it starts out as NaN.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace moec::test {

struct TestDevice {
  int32_t type = 0;  // moec_device_type
  int32_t id = 0;
};
// Throws std::runtime_error for a name it does not know, and for cuda without a usable driver.
TestDevice test_device();
// The GPU of this thread from now on; it is the first one before.
void use_gpu(int32_t id);
int32_t num_gpus();
// Of the largest runs: MOEC_TEST_RANKS of them, which may share GPUs, or one for each GPU.
int32_t most_ranks();

class DeviceBuffer {
 public:
  explicit DeviceBuffer(size_t bytes);  // filled with kPoison
  DeviceBuffer(const void* from, size_t bytes);
  ~DeviceBuffer();
  DeviceBuffer(DeviceBuffer&&) noexcept;
  DeviceBuffer& operator=(DeviceBuffer&&) noexcept;

  void* pointer() const;
  size_t size() const { return bytes_; }
  void upload(const void* from) const;
  void download(void* to) const;  // waits for the device
  bool neighbours_untouched() const;
  // Of memory that is not a buffer; both wait.
  static void copy_in(void* to, const void* from, size_t bytes);
  static void copy_out(void* to, const void* from, size_t bytes);

 private:
  struct Memory;
  size_t bytes_;
  std::unique_ptr<Memory> memory_;
};

}  // namespace moec::test
