// SPDX-License-Identifier: Apache-2.0
#include "safetensors.h"

#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <stdexcept>

#include "json.h"

namespace moec::test {
namespace {

template <typename Word>
Word word_at(const std::vector<uint8_t>& bytes, size_t index) {
  Word word;
  std::memcpy(&word, bytes.data() + index * sizeof(Word), sizeof(Word));
  return word;
}

double half_to_double(uint16_t bits) {
  const int exponent = bits >> 10 & 31;
  const int mantissa = bits & 1023;
  double value = exponent == 31  ? (mantissa ? NAN : INFINITY)
                 : exponent == 0 ? std::ldexp(mantissa, -24)
                                 : std::ldexp(1024 + mantissa, exponent - 25);
  return bits >> 15 ? -value : value;
}

double bfloat16_to_double(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

size_t element_size(const std::string& dtype) {
  static const std::map<std::string, size_t> kSizes = {{"F32", 4}, {"F16", 2}, {"BF16", 2},
                                                       {"I64", 8}, {"I32", 4}, {"U8", 1},
                                                       {"I8", 1},  {"F64", 8}, {"F8_E4M3", 1}};
  const auto found = kSizes.find(dtype);
  if (found == kSizes.end()) throw std::runtime_error("load_safetensors: unknown dtype " + dtype);
  return found->second;
}

double element_at(const StoredTensor& tensor, size_t i) {
  if (tensor.dtype == "F32") return word_at<float>(tensor.bytes, i);
  if (tensor.dtype == "F64") return word_at<double>(tensor.bytes, i);
  if (tensor.dtype == "F16") return half_to_double(word_at<uint16_t>(tensor.bytes, i));
  if (tensor.dtype == "BF16") return bfloat16_to_double(word_at<uint16_t>(tensor.bytes, i));
  if (tensor.dtype == "I64") return static_cast<double>(word_at<int64_t>(tensor.bytes, i));
  if (tensor.dtype == "I32") return word_at<int32_t>(tensor.bytes, i);
  if (tensor.dtype == "I8") return word_at<int8_t>(tensor.bytes, i);
  return word_at<uint8_t>(tensor.bytes, i);
}

}  // namespace

int64_t StoredTensor::numel() const {
  int64_t product = 1;
  for (int64_t extent : shape) product *= extent;
  return product;
}

std::vector<double> StoredTensor::as_double() const {
  std::vector<double> values(static_cast<size_t>(numel()));
  for (size_t i = 0; i < values.size(); ++i) values[i] = element_at(*this, i);
  return values;
}

const StoredTensor& SafeTensors::at(const std::string& name) const {
  const auto found = tensors.find(name);
  if (found == tensors.end()) throw std::runtime_error("SafeTensors::at: no tensor " + name);
  return found->second;
}

SafeTensors load_safetensors(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  const std::vector<char> file(std::istreambuf_iterator<char>(stream), {});
  const auto broken = [&](const char* what) {
    return std::runtime_error("load_safetensors: " + path + ": " + what);
  };
  uint64_t header_bytes = 0;
  if (file.size() < sizeof(header_bytes)) throw broken("missing or shorter than its first field");
  std::memcpy(&header_bytes, file.data(), sizeof(header_bytes));
  if (header_bytes > file.size() - sizeof(header_bytes)) throw broken("header past the end");
  const size_t data = sizeof(header_bytes) + header_bytes;
  SafeTensors out;
  for (const auto& [name, entry] : parse_json({file.data() + 8, header_bytes}).object) {
    if (name == "__metadata__") {
      for (const auto& [key, value] : entry.object) out.metadata[key] = value.string;
      continue;
    }
    StoredTensor tensor;
    tensor.dtype = entry.at("dtype").string;
    for (const Json& extent : entry.at("shape").array)
      tensor.shape.push_back(static_cast<int64_t>(extent.number));
    const auto first = static_cast<size_t>(entry.at("data_offsets").array.at(0).number);
    const auto last = static_cast<size_t>(entry.at("data_offsets").array.at(1).number);
    if (last < first || last > file.size() - data) throw broken("tensor past the end");
    if (last - first != static_cast<size_t>(tensor.numel()) * element_size(tensor.dtype))
      throw broken("a tensor's bytes do not fit its shape");
    const auto* begin = reinterpret_cast<const uint8_t*>(file.data()) + data;
    tensor.bytes.assign(begin + first, begin + last);
    out.tensors[name] = std::move(tensor);
  }
  return out;
}

}  // namespace moec::test
