// SPDX-License-Identifier: Apache-2.0
// A CPU device for tests of single operations: a pool of its own, scratch that is fresh and
// poisoned on every acquire (reading what was never written shows as NaN), and conversions of test
// data.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "backend/cpu/experts_path.h"
#include "backend/cpu/ops.h"
#include "core/dtype.h"
#include "core/workspace.h"
#include "unit/isas.h"

namespace moec::test {

class CpuDevice {
 public:
  explicit CpuDevice(int32_t threads = 2) : pool_(threads), device_{pool_, &services_} {}
  operator const cpu::Device&() const { return device_; }
  // Most bytes of scratch held at once, each piece rounded up to a cache line.
  uint64_t peak() const { return peak_; }

 private:
  static void* acquire(void* self, uint64_t bytes, moec_stream) {
    auto& device = *static_cast<CpuDevice*>(self);
    void* const memory = std::aligned_alloc(kCacheLine, round_up(bytes, kCacheLine));
    std::memset(memory, 0xff, bytes);
    device.held_[memory] = round_up(bytes, kCacheLine);
    device.now_ += device.held_[memory];
    device.peak_ = std::max(device.peak_, device.now_);
    return memory;
  }
  static void release(void* self, void* memory) {
    auto& device = *static_cast<CpuDevice*>(self);
    device.now_ -= device.held_[memory];
    device.held_.erase(memory);
    std::free(memory);
  }
  static void count_launch(void*, uint64_t, uint64_t) {}

  ThreadPool pool_;
  HostServices services_ = {this, acquire, release, count_launch};
  cpu::Device device_;
  std::map<void*, uint64_t> held_;
  uint64_t now_ = 0, peak_ = 0;
};

// Values stored in a real dtype, readable as that and as double.
class Stored {
 public:
  Stored() = default;
  Stored(moec_dtype dtype, const std::vector<double>& values)
      : dtype_(dtype), count_(values.size()), bytes_(values.size() * size_t(dtype_bytes(dtype))) {
    for (size_t i = 0; i < count_; ++i)
      store_real(bytes_.data(), dtype_, int64_t(i), float(values[i]));
  }
  Stored(moec_dtype dtype, size_t count)
      : dtype_(dtype), count_(count), bytes_(count * size_t(dtype_bytes(dtype)), 0xff) {}

  Array array() { return {bytes_.empty() ? nullptr : bytes_.data(), dtype_}; }
  const std::vector<uint8_t>& bytes() const { return bytes_; }
  uint8_t* data() { return bytes_.data(); }
  std::vector<double> values() const {
    std::vector<double> all(count_);
    for (size_t i = 0; i < count_; ++i)
      all[i] = double(load_real(bytes_.data(), dtype_, int64_t(i)));
    return all;
  }

 private:
  moec_dtype dtype_ = 0;
  size_t count_ = 0;
  std::vector<uint8_t> bytes_;
};

inline std::vector<float> to_floats(const std::vector<double>& values) {
  return std::vector<float>(values.begin(), values.end());
}
inline std::vector<double> rounded(std::vector<double> values) {  // as fp32 keeps them
  for (double& v : values) v = double(float(v));
  return values;
}

}  // namespace moec::test
