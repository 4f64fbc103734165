// SPDX-License-Identifier: Apache-2.0
#include "tensors.h"

#include <malloc.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "guard.h"
#include "oracle/moe_oracle.h"
#include "safetensors.h"

namespace moec::test {
namespace {

// Freed memory stays in the process: wide tests take more time to map it anew than for arithmetic.
[[maybe_unused]] const int kKeepMemory =
    mallopt(M_MMAP_THRESHOLD, 1 << 30) & mallopt(M_TRIM_THRESHOLD, 2000000000);

template <typename Word>
void put(uint8_t* at, Word word) {
  std::memcpy(at, &word, sizeof(word));
}

uint16_t half_bits(double value) {  // of a value that fp16 can hold
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double size = std::fabs(value);
  if (std::isnan(value)) return 0x7E00;
  if (std::isinf(value)) return sign | 0x7C00;
  if (size < 0x1p-14) return static_cast<uint16_t>(sign | static_cast<int>(size * 0x1p24));
  // The first ten bits of the fraction, below an exponent whose bias is 15 in place of 1023.
  const uint64_t bits = std::bit_cast<uint64_t>(size) >> 42;
  return static_cast<uint16_t>(sign | (bits - (uint64_t{1008} << 10)));
}

uint16_t bfloat16_bits(double value) {  // of a value that bf16 can hold
  const auto single = static_cast<float>(value);
  uint32_t bits;
  std::memcpy(&bits, &single, sizeof(bits));
  return static_cast<uint16_t>(bits >> 16);
}

template <typename WordOf>
std::vector<uint8_t> encode_each(const std::vector<double>& values, WordOf word_of) {
  constexpr size_t kSize = sizeof(word_of(0.0));
  std::vector<uint8_t> bytes(values.size() * kSize);
  for (size_t i = 0; i < values.size(); ++i) put(bytes.data() + i * kSize, word_of(values[i]));
  return bytes;
}

}  // namespace

size_t element_bytes(moec_dtype dtype) {
  return (dtype >> 8 & 0xFF) / 8;
}

std::vector<uint8_t> encode(const std::vector<double>& values, moec_dtype dtype) {
  using oracle::round_to;
  using oracle::Rounding;
  switch (dtype) {
    case MOEC_F32:
      return encode_each(values, [](double v) { return static_cast<float>(v); });
    case MOEC_F16:
      return encode_each(values, [](double v) { return half_bits(round_to(Rounding::kFp16, v)); });
    case MOEC_BF16:
      return encode_each(values,
                         [](double v) { return bfloat16_bits(round_to(Rounding::kBf16, v)); });
    case MOEC_I32:
      return encode_each(values, [](double v) { return static_cast<int32_t>(v); });
    case MOEC_I64:
      return encode_each(values, [](double v) { return static_cast<int64_t>(v); });
    case MOEC_I8:
      return encode_each(values, [](double v) { return static_cast<int8_t>(v); });
    case MOEC_U8:
    case MOEC_BOOL:
      return encode_each(values, [](double v) { return static_cast<uint8_t>(v); });
    default:
      throw std::runtime_error("encode: unknown dtype");
  }
}

std::vector<double> decode(const std::vector<uint8_t>& bytes, moec_dtype dtype) {
  static const std::pair<moec_dtype, const char*> kNames[] = {
      {MOEC_F32, "F32"}, {MOEC_F16, "F16"}, {MOEC_BF16, "BF16"}, {MOEC_I32, "I32"},
      {MOEC_I64, "I64"}, {MOEC_U8, "U8"},   {MOEC_BOOL, "U8"},   {MOEC_I8, "I8"}};
  const auto count = static_cast<int64_t>(bytes.size() / element_bytes(dtype));
  for (const auto& [value, name] : kNames)
    if (value == dtype) return StoredTensor{name, {count}, bytes}.as_double();
  throw std::runtime_error("decode: unknown dtype");
}

moec_tensor Tensors::output(moec_dtype dtype, const std::vector<int64_t>& shape) {
  size_t count = 1;
  for (int64_t extent : shape) count *= static_cast<size_t>(extent);
  buffers_.emplace_back(count * element_bytes(dtype));
  const TestDevice device = test_device();
  moec_tensor tensor;
  if (moec_tensor_make(&tensor, buffers_.back().pointer(), dtype, device.type, device.id,
                       static_cast<int32_t>(shape.size()), shape.data()) != MOEC_OK)
    throw std::runtime_error("Tensors: moec_tensor_make failed");
  return tensor;
}

moec_tensor Tensors::input(const std::vector<double>& values, moec_dtype dtype,
                           const std::vector<int64_t>& shape) {
  return values.empty() ? moec_tensor{} : input_bytes(encode(values, dtype), dtype, shape);
}

moec_tensor Tensors::input_bytes(const std::vector<uint8_t>& bytes, moec_dtype dtype,
                                 const std::vector<int64_t>& shape) {
  const moec_tensor tensor = output(dtype, shape);
  if (bytes.size() != buffers_.back().size())
    throw std::runtime_error("Tensors::input: values do not fit the shape");
  buffers_.back().upload(bytes.data());
  return tensor;
}

moec_buffer Tensors::buffer(uint64_t bytes, uint8_t fill) {
  if (bytes == 0) return {};
  buffers_.emplace_back(bytes);
  if (fill != kPoison) buffers_.back().upload(std::vector<uint8_t>(bytes, fill).data());
  return {buffers_.back().pointer(), bytes};
}

std::vector<uint8_t> Tensors::read_from(const void* pointer) const {
  if (!pointer) return {};
  for (const DeviceBuffer& buffer : buffers_) {
    if (buffer.pointer() != pointer) continue;
    std::vector<uint8_t> bytes(buffer.size());
    buffer.download(bytes.data());
    return bytes;
  }
  throw std::runtime_error("Tensors::read: not memory of this object");
}

std::vector<uint8_t> Tensors::read_bytes(const moec_tensor& tensor) const {
  return read_from(tensor.data);
}
std::vector<uint8_t> Tensors::read_bytes(const moec_buffer& buffer) const {
  return read_from(buffer.ptr);
}

std::vector<double> Tensors::read(const moec_tensor& tensor) const {
  if (!tensor.data) return {};
  return decode(read_bytes(tensor), tensor.dtype);
}

bool Tensors::neighbours_untouched() const {
  for (const DeviceBuffer& buffer : buffers_)
    if (!buffer.neighbours_untouched()) return false;
  return true;
}

moec_tensor slice(const moec_tensor& tensor, int64_t index) {
  moec_tensor part = tensor;
  uint64_t elements = 1;
  part.ndim = tensor.ndim - 1;
  for (int32_t d = 0; d < MOEC_MAX_DIMS; ++d) {
    part.shape[d] = d < part.ndim ? tensor.shape[d + 1] : 0;
    part.strides[d] = 0;
    if (d < part.ndim) elements *= static_cast<uint64_t>(part.shape[d]);
  }
  part.byte_offset += static_cast<uint64_t>(index) * elements * element_bytes(tensor.dtype);
  return part;
}

}  // namespace moec::test
