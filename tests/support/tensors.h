// SPDX-License-Identifier: Apache-2.0
// Tensors of the device under test, made from doubles and read back as doubles.
#pragma once

#include <moec/moec.h>

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "device.h"

namespace moec::test {

size_t element_bytes(moec_dtype dtype);
// Values as bytes of a type (rounded to nearest even) and back.
std::vector<uint8_t> encode(const std::vector<double>& values, moec_dtype dtype);
std::vector<double> decode(const std::vector<uint8_t>& bytes, moec_dtype dtype);

// Owns the memory of the tensors it hands out.
class Tensors {
 public:
  // An absent tensor when there are no values.
  moec_tensor input(const std::vector<double>& values, moec_dtype dtype,
                    const std::vector<int64_t>& shape);
  template <typename Integer>
  moec_tensor input_ids(const std::vector<Integer>& ids, moec_dtype dtype,
                        const std::vector<int64_t>& shape) {
    return input(std::vector<double>(ids.begin(), ids.end()), dtype, shape);
  }
  // Bytes as they are.
  moec_tensor input_bytes(const std::vector<uint8_t>& bytes, moec_dtype dtype,
                          const std::vector<int64_t>& shape);
  // Poisoned memory that a call is to fill.
  moec_tensor output(moec_dtype dtype, const std::vector<int64_t>& shape);
  moec_buffer buffer(uint64_t bytes, uint8_t fill = 0xFF);

  // Values of a tensor of this object; empty for an absent one.
  std::vector<double> read(const moec_tensor& tensor) const;
  std::vector<uint8_t> read_bytes(const moec_tensor& tensor) const;
  std::vector<uint8_t> read_bytes(const moec_buffer& buffer) const;
  bool neighbours_untouched() const;

 private:
  std::vector<uint8_t> read_from(const void* pointer) const;
  std::deque<DeviceBuffer> buffers_;
};

// Entry `index` of the first dimension of a tensor.
moec_tensor slice(const moec_tensor& tensor, int64_t index);

}  // namespace moec::test
