// SPDX-License-Identifier: Apache-2.0
// Reads a safetensors file: 8-byte little-endian header length, JSON header, raw data.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace moec::test {

struct StoredTensor {
  std::string dtype;  // as in the file: F32, BF16, I64, I8
  std::vector<int64_t> shape;
  std::vector<uint8_t> bytes;

  int64_t numel() const;
  // Values of F64, F32, F16, BF16, I64, I32, I8 or U8; throws std::runtime_error for others.
  std::vector<double> as_double() const;
};

struct SafeTensors {
  std::map<std::string, StoredTensor> tensors;
  std::map<std::string, std::string> metadata;

  bool has(const std::string& name) const { return tensors.count(name) != 0; }
  // Throws std::runtime_error naming the tensor when it is absent.
  const StoredTensor& at(const std::string& name) const;
};

// Throws std::runtime_error with the path when the file is missing or damaged.
SafeTensors load_safetensors(const std::string& path);

}  // namespace moec::test
