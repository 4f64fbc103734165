// SPDX-License-Identifier: Apache-2.0
#include "gpu/agree.h"

#include <algorithm>

#include "core/dtype.h"

namespace moec::test {

void fail_call(moec_status status, const char* call) {
  auto info = sized<moec_error_info>();
  moec_last_error(&info);
  std::printf("FAIL %s: %s %s\n", call, moec_status_name(status), info.message);
  std::exit(1);
}

double Values::get(int64_t index) const {
  const char* const at = bytes.data() + index * size_of(dtype);
  if (dtype == MOEC_I64) return double(*reinterpret_cast<const int64_t*>(at));
  if (dtype == MOEC_I32) return double(*reinterpret_cast<const int32_t*>(at));
  if (!is_real(dtype)) return double(*reinterpret_cast<const uint8_t*>(at));
  return double(load_real(bytes.data(), dtype, index));
}

void Values::set(int64_t index, double value) {
  char* const at = bytes.data() + index * size_of(dtype);
  if (dtype == MOEC_I64)
    *reinterpret_cast<int64_t*>(at) = int64_t(value);
  else if (dtype == MOEC_I32)
    *reinterpret_cast<int32_t*>(at) = int32_t(value);
  else if (!is_real(dtype))
    *reinterpret_cast<uint8_t*>(at) = uint8_t(value);
  else
    store_real(bytes.data(), dtype, index, float(value));
}

namespace {
Values make(moec_dtype dtype, std::vector<int64_t> shape) {
  Values values{dtype, std::move(shape), {}};
  values.bytes.resize(size_t(numel(values.shape) * size_of(dtype)));
  return values;
}
}  // namespace

Values Draw::normals(moec_dtype dtype, std::vector<int64_t> shape, double scale, double step) {
  Values values = make(dtype, std::move(shape));
  for (int64_t i = 0; i < numel(values.shape); ++i) {
    const double value = scale * normal();
    values.set(i, step > 0 ? std::round(value / step) * step : value);
  }
  return values;
}

Values Draw::integers(moec_dtype dtype, std::vector<int64_t> shape, int64_t low, int64_t high) {
  Values values = make(dtype, std::move(shape));
  for (int64_t i = 0; i < numel(values.shape); ++i) values.set(i, double(low + below(high - low)));
  return values;
}

Side::Side(int32_t device, uint32_t flags) : device_(device) {
  auto desc = sized<moec_context_desc>();
  desc.device_type = device;
  desc.flags = flags;
  MOEC_CHECK_CALL(moec_context_create(&desc, &context_));
}

Side::~Side() {
  results();
  moec_context_free(context_);
}

void* Side::allocate(int64_t bytes, const void* from) {
  void* data = nullptr;
  if (is_cuda()) {
    if (cudaMalloc(&data, size_t(bytes) + 64) != cudaSuccess) std::exit(1);
    from ? cudaMemcpy(data, from, size_t(bytes), cudaMemcpyDefault)
         : cudaMemset(data, 0xff, size_t(bytes));
    cudaDeviceSynchronize();
  } else {
    data = std::aligned_alloc(64, size_t(bytes + 127) / 64 * 64);
    from ? std::memcpy(data, from, size_t(bytes)) : std::memset(data, 0xff, size_t(bytes));
  }
  memory_.push_back(data);
  return data;
}

moec_tensor Side::in(const Values& values) {
  moec_tensor tensor;
  void* const data = allocate(int64_t(values.bytes.size()), values.bytes.data());
  MOEC_CHECK_CALL(moec_tensor_make(&tensor, data, values.dtype, device_, 0,
                                   int32_t(values.shape.size()), values.shape.data()));
  return tensor;
}

moec_tensor Side::out(const std::string& name, moec_dtype dtype, std::vector<int64_t> shape,
                      double bound, const Values* initial) {
  moec_tensor tensor;
  void* const data =
      allocate(numel(shape) * size_of(dtype), initial ? initial->bytes.data() : nullptr);
  MOEC_CHECK_CALL(
      moec_tensor_make(&tensor, data, dtype, device_, 0, int32_t(shape.size()), shape.data()));
  outputs_.push_back({name, tensor, bound});
  return tensor;
}

void Side::record(const std::string& name, const moec_tensor& tensor) {
  outputs_.push_back({name, tensor, 0});
}

std::vector<Result> Side::results() {
  if (!outputs_.empty()) MOEC_CHECK_CALL(moec_context_sync(context_, nullptr));
  std::vector<Result> results;
  for (const Output& output : outputs_) {
    const moec_tensor& t = output.tensor;
    Values values = make(t.dtype, std::vector<int64_t>(t.shape, t.shape + t.ndim));
    if (is_cuda())
      cudaMemcpy(values.bytes.data(), t.data, values.bytes.size(), cudaMemcpyDefault);
    else if (!values.bytes.empty())
      std::memcpy(values.bytes.data(), t.data, values.bytes.size());
    results.push_back({output.name, std::move(values), output.bound});
  }
  for (void* const data : memory_) is_cuda() ? static_cast<void>(cudaFree(data)) : std::free(data);
  memory_.clear();
  outputs_.clear();
  return results;
}

namespace {

// First element that differs, or -1.
int64_t first_difference(const Values& a, const Values& b) {
  const int64_t size = size_of(a.dtype);
  for (int64_t i = 0; i < numel(a.shape); ++i) {
    const bool both_nan = is_real(a.dtype) && std::isnan(a.get(i)) && std::isnan(b.get(i));
    if (!both_nan &&
        std::memcmp(&a.bytes[size_t(i * size)], &b.bytes[size_t(i * size)], size_t(size)) != 0)
      return i;
  }
  return -1;
}

// Relative L2 error of the worst row; a row's norm counts as at least a hundredth of the usual one.
double worst_row(const Values& a, const Values& b) {
  const int64_t width = a.shape.empty() ? 1 : a.shape.back(), count = numel(a.shape);
  double all = 0, worst = 0;
  for (int64_t i = 0; i < count; ++i) all += a.get(i) * a.get(i);
  const double usual = count ? std::sqrt(all / double(count) * double(width)) : 0;
  for (int64_t row = 0; row < count; row += width) {
    double diff = 0, norm = 0;
    for (int64_t i = row; i < row + width; ++i) {
      diff += (a.get(i) - b.get(i)) * (a.get(i) - b.get(i));
      norm += a.get(i) * a.get(i);
    }
    const double error = std::sqrt(diff) / std::max(std::sqrt(norm), 1e-2 * usual + 1e-30);
    if (!(error <= worst)) worst = error;
  }
  return worst;
}

}  // namespace

bool agree(const std::string& what, const std::vector<Result>& cpu,
           const std::vector<Result>& gpu) {
  bool good = cpu.size() == gpu.size();
  for (size_t i = 0; good && i < cpu.size(); ++i) {
    const Values &a = cpu[i].values, &b = gpu[i].values;
    if (cpu[i].bound > 0) {
      const double worst = worst_row(a, b);
      if (worst <= cpu[i].bound) continue;
      std::printf("FAIL %s: %s worst row %.2e (<= %.0e)\n", what.c_str(), cpu[i].name.c_str(),
                  worst, cpu[i].bound);
      good = false;
    } else if (const int64_t at = first_difference(a, b); at >= 0) {
      std::printf("FAIL %s: %s[%lld] is %.9g on the CPU, %.9g on the GPU\n", what.c_str(),
                  cpu[i].name.c_str(), static_cast<long long>(at), a.get(at), b.get(at));
      good = false;
    }
  }
  return good;
}

}  // namespace moec::test
