// SPDX-License-Identifier: Apache-2.0
#include "gpu/agree.h"

#include <cmath>
#include <cstring>

namespace moec::test {
namespace {

size_t numel(const std::vector<int64_t>& shape) {
  size_t count = 1;
  for (const int64_t extent : shape) count *= size_t(extent);
  return count;
}

}  // namespace

Values TensorDraw::normals(moec_dtype dtype, std::vector<int64_t> shape, double scale,
                           double step) {
  Values values{dtype, std::move(shape), {}};
  values.of = Random::normals(numel(values.shape), scale);
  for (double& value : values.of)
    if (step > 0) value = std::round(value / step) * step;
  return values;
}

Values TensorDraw::integers(moec_dtype dtype, std::vector<int64_t> shape, int64_t low,
                            int64_t high) {
  Values values{dtype, std::move(shape), {}};
  values.of.resize(numel(values.shape));
  for (double& value : values.of) value = double(low + below(high - low));
  return values;
}

Side::Side(int32_t device, uint32_t flags) : device_(device) {
  auto desc = sized<moec_context_desc>();
  desc.device_type = device;
  desc.flags = flags;
  context_ = make<Context>(moec_context_create, &desc);
}

void* Side::allocate(size_t bytes) {
  Memory& memory = memory_.emplace_back();
  if (device_ == MOEC_CUDA) {
    memory.device = DeviceBytes(bytes);
    return memory.device.data();
  }
  memory.host = std::make_unique<GuardedBuffer>(bytes);
  return memory.host->data();
}

void Side::copy(void* to, const void* from, size_t bytes) const {
  if (bytes == 0) return;
  if (device_ == MOEC_CUDA)
    CHECK_CUDA(cudaMemcpy(to, from, bytes, cudaMemcpyDefault));
  else
    std::memcpy(to, from, bytes);
}

moec_tensor Side::tensor(const std::vector<int64_t>& shape, moec_dtype dtype,
                         const Values* values) {
  const size_t bytes = numel(shape) * element_bytes(dtype);
  void* const data = allocate(bytes);
  if (values) copy(data, encode(values->of, dtype).data(), bytes);
  moec_tensor made;
  check(moec_tensor_make(&made, data, dtype, device_, 0, int32_t(shape.size()), shape.data()));
  return made;
}

moec_tensor Side::in(const Values& values) {
  return tensor(values.shape, values.dtype, &values);
}

moec_tensor Side::out(const std::string& name, moec_dtype dtype, const std::vector<int64_t>& shape,
                      Bound bound, const Values* initial) {
  const moec_tensor made = tensor(shape, dtype, initial);
  outputs_.push_back({name, made, bound});
  return made;
}

moec_buffer Side::buffer(uint64_t bytes) {
  return {allocate(bytes), bytes};
}

void Side::record(const std::string& name, const moec_tensor& tensor) {
  outputs_.push_back({name, tensor, {}});
}

std::vector<Result> Side::results() {
  check(moec_context_sync(context(), nullptr));
  std::vector<Result> results;
  for (const auto& [name, t, bound] : outputs_) {
    Result result{name, t.dtype, std::vector<int64_t>(t.shape, t.shape + t.ndim), {}, bound};
    result.bytes.resize(numel(result.shape) * element_bytes(t.dtype));
    copy(result.bytes.data(), t.data, result.bytes.size());
    results.push_back(std::move(result));
  }
  for (const auto& [host, device] : memory_)
    EXPECT_TRUE(host ? host->slack_is_untouched() : device.guards_intact()) << "beside a buffer";
  forget();
  return results;
}

void Side::forget() {
  memory_.clear();
  outputs_.clear();
}

namespace {

bool is_real(moec_dtype dtype) {
  return dtype == MOEC_F32 || dtype == MOEC_F16 || dtype == MOEC_BF16;
}

void expect_same_bits(const Result& cpu, const Result& gpu) {
  if (cpu.bytes == gpu.bytes) return;
  const size_t size = element_bytes(cpu.dtype);
  const std::vector<double> a = cpu.values(), b = gpu.values();
  for (size_t i = 0; i < a.size(); ++i) {
    const bool both_nan = is_real(cpu.dtype) && std::isnan(a[i]) && std::isnan(b[i]);
    if (both_nan || std::memcmp(&cpu.bytes[i * size], &gpu.bytes[i * size], size) == 0) continue;
    ADD_FAILURE() << cpu.name << "[" << i << "] is " << a[i] << " on the CPU, " << b[i]
                  << " on the GPU";
    return;
  }
}

}  // namespace

void expect_agreement(const std::vector<Result>& cpu, const std::vector<Result>& gpu) {
  ASSERT_EQ(cpu.size(), gpu.size());
  for (size_t i = 0; i < cpu.size(); ++i) {
    ASSERT_EQ(cpu[i].bytes.size(), gpu[i].bytes.size()) << cpu[i].name;
    const Bound bound = cpu[i].bound;
    if (std::isinf(bound.rows)) continue;
    if (bound.rows == 0) {
      expect_same_bits(cpu[i], gpu[i]);
      continue;
    }
    const size_t columns = cpu[i].shape.empty() ? 1 : size_t(cpu[i].shape.back());
    expect_within(cpu[i].name, row_error(gpu[i].values(), cpu[i].values(), columns, bound.floor),
                  bound.rows);
  }
}

}  // namespace moec::test
