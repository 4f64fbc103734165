// SPDX-License-Identifier: Apache-2.0
// moec_bits cpu|cuda [THREADS]: prints the corpus. MOEC_CPU_ISA and MOEC_CUDA_KERNELS name the
// path. The CPU's workspace grows with THREADS, which is 1 unless given; nothing else does.
#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "corpus.h"

namespace moec::bits {
namespace {

constexpr uint64_t kOdd = 0x9E3779B97F4A7C15u;

uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// Eight bytes a step; the length counts, too.
uint64_t hash(const void* data, size_t bytes) {
  uint64_t h = mix(bytes + kOdd), word = 0;
  const auto* at = static_cast<const uint8_t*>(data);
  for (; bytes >= sizeof word; bytes -= sizeof word, at += sizeof word) {
    std::memcpy(&word, at, sizeof word);
    h = (h ^ word) * kOdd;
    h ^= h >> 32;
  }
  word = 0;
  if (bytes) std::memcpy(&word, at, bytes);
  return mix(h ^ word);
}

uint32_t float_bits(double value) {
  const auto f = static_cast<float>(value);
  uint32_t u;
  std::memcpy(&u, &f, sizeof u);
  return u;
}

// To nearest even, for finite values in range.
uint16_t bf16_bits(double value) {
  const uint32_t u = float_bits(value);
  return static_cast<uint16_t>((u + 0x7FFF + (u >> 16 & 1)) >> 16);
}
uint16_t f16_bits(double value) {
  const uint32_t u = float_bits(value), sign = u >> 16 & 0x8000, a = u & 0x7FFFFFFF;
  constexpr uint32_t kLeastNormal = 113u << 23, kBias = 112u << 10;
  const uint32_t rest = a < kLeastNormal
                            ? static_cast<uint32_t>(std::lrint(std::fabs(value) * 0x1p24))
                            : ((a + 0xFFF + (a >> 13 & 1)) >> 13) - kBias;
  return static_cast<uint16_t>(sign | rest);
}

constexpr uint8_t kPoison = 0xA5;  // of outputs; nothing that a call would write
bool is_poison(uint8_t byte) {
  return byte == kPoison;
}

size_t element_bytes(moec_dtype dtype) {
  return (dtype >> 8 & 0xFF) / 8;
}

void store(moec_dtype dtype, double value, uint8_t* to) {
  const auto put = [to](auto bits) { std::memcpy(to, &bits, sizeof bits); };
  switch (dtype) {
    case MOEC_F32:
      return put(float_bits(value));
    case MOEC_F16:
      return put(f16_bits(value));
    case MOEC_BF16:
      return put(bf16_bits(value));
    case MOEC_I64:
      return put(static_cast<int64_t>(value));
    case MOEC_I32:
      return put(static_cast<int32_t>(value));
    default:
      return put(static_cast<uint8_t>(value));
  }
}

}  // namespace

Draw::Draw(const std::string& name) : state_(hash(name.data(), name.size())) {}

uint64_t Draw::bits() {
  return mix(state_ += kOdd);
}

Case::Case(const moec_context* context, std::string name)
    : context_(context), name_(std::move(name)), draw_(name_) {}

moec_tensor Case::hold(moec_dtype dtype, const Shape& shape, const void* from) {
  const size_t bytes = static_cast<size_t>(elements(shape)) * element_bytes(dtype);
  held_.emplace_back(from, bytes);
  const test::TestDevice device = test::test_device();
  moec_tensor tensor;
  require("tensor_make",
          moec_tensor_make(&tensor, held_.back().pointer(), dtype, device.type, device.id,
                           static_cast<int32_t>(shape.size()), shape.data()));
  return tensor;
}

moec_tensor Case::input(moec_dtype dtype, const Shape& shape, const Numbers& numbers) {
  const size_t size = element_bytes(dtype);
  std::vector<uint8_t> bytes(static_cast<size_t>(elements(shape)) * size);
  for (size_t at = 0; at < bytes.size(); at += size) {
    double value = numbers.offset + numbers.scale * draw_.value();
    if (numbers.step > 0) value = numbers.step * std::rint(value / numbers.step);
    store(dtype, value, &bytes[at]);
  }
  return hold(dtype, shape, bytes.data());
}

moec_tensor Case::input_ids(moec_dtype dtype, const Shape& shape, const std::vector<int64_t>& ids) {
  const size_t size = element_bytes(dtype);
  std::vector<uint8_t> bytes(ids.size() * size);
  for (size_t i = 0; i < ids.size(); ++i)
    store(dtype, static_cast<double>(ids[i]), &bytes[i * size]);
  return hold(dtype, shape, bytes.data());
}

moec_tensor Case::input_ids(moec_dtype dtype, const Shape& shape, int64_t low, int64_t high) {
  std::vector<int64_t> ids(static_cast<size_t>(elements(shape)));
  for (int64_t& id : ids) id = low + draw_.below(high - low);
  return input_ids(dtype, shape, ids);
}

moec_tensor Case::output(const std::string& name, moec_dtype dtype, const Shape& shape) {
  const size_t bytes = static_cast<size_t>(elements(shape)) * element_bytes(dtype);
  const moec_tensor tensor = hold(dtype, shape, std::vector<uint8_t>(bytes, kPoison).data());
  outputs_.emplace_back(name, &held_.back());
  return tensor;
}

moec_tensor Case::sum(const std::string& name, moec_dtype dtype, const Shape& shape) {
  const bool integers = dtype == MOEC_I32;  // counts
  const moec_tensor tensor =
      integers ? input_ids(dtype, shape, 0, 9) : input(dtype, shape, {.scale = 0.25});
  outputs_.emplace_back(name, &held_.back());
  return tensor;
}

moec_buffer Case::workspace(uint64_t bytes) {
  if (bytes == 0) return {};
  held_.emplace_back(bytes);
  return {held_.back().pointer(), bytes};
}

moec_buffer Case::output_bytes(const std::string& name, uint64_t bytes) {
  const moec_buffer buffer = workspace(bytes);
  if (bytes == 0) return buffer;
  held_.back().upload(std::vector<uint8_t>(bytes, kPoison).data());
  outputs_.emplace_back(name, &held_.back());
  return buffer;
}

void Case::line(const std::string& name, const char* text) const {
  std::printf("%s %s %s\n", name_.c_str(), name.c_str(), text);
}

void Case::number(const std::string& name, uint64_t value) const {
  line(name, std::to_string(value).c_str());
}

void Case::number(const std::string& name, const moec_size& size) const {
  line(name, (std::to_string(size.base) + "+" + std::to_string(size.per_token)).c_str());
}

void Case::refused(const Refusal& refusal) const {
  line(std::string("refused:") + refusal.what(), moec_status_name(refusal.status));
}

void Case::finish() {
  require("context_sync", moec_context_sync(context_, nullptr));
  std::vector<uint8_t> bytes;
  for (const auto& [name, buffer] : outputs_) {
    bytes.resize(buffer->size());
    buffer->download(bytes.data());
    const bool unwritten = !bytes.empty() && std::all_of(bytes.begin(), bytes.end(), is_poison);
    char text[24];
    std::snprintf(text, sizeof text, "%016" PRIx64, hash(bytes.data(), bytes.size()));
    line(name, unwritten ? "unwritten" : text);
  }
  outputs_.clear();
}

namespace {

int print_corpus(int threads) {
  const test::TestDevice device = test::test_device();
  const bool is_cuda = device.type == MOEC_CUDA;
  auto desc = sized<moec_context_desc>();
  desc.device_type = device.type;
  desc.device_id = device.id;
  desc.num_threads = is_cuda ? 0 : threads;
  const auto context = make<Context>("context_create", moec_context_create, &desc);
  gate_cases(context.get());
  route_cases(context.get());
  plan_cases(context.get());
  loss_cases(context.get());
  experts_cases(context.get(), is_cuda);
  layer_cases(context.get());
  return 0;
}

}  // namespace
}  // namespace moec::bits

int main(int count, char** arguments) {
  if (count < 2 || count > 3) {
    std::fputs("usage: moec_bits cpu|cuda [THREADS]\n", stderr);
    return 2;
  }
  setenv("MOEC_TEST_DEVICE", arguments[1], 1);
  try {
    return moec::bits::print_corpus(count > 2 ? std::atoi(arguments[2]) : 1);
  } catch (const std::exception& failure) {
    auto info = moec::bits::sized<moec_error_info>();
    moec_last_error(&info);
    std::fprintf(stderr, "moec_bits: %s: %s\n", failure.what(), info.message);
    return 1;
  }
}
