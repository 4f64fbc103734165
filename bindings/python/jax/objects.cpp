// SPDX-License-Identifier: Apache-2.0
#include "objects.h"

#include <dlfcn.h>

#include <map>
#include <memory>
#include <mutex>
#include <utility>

namespace moec::xla {
namespace {

const moec_context* context_for(const Device& device) {
  static std::map<std::pair<int32_t, int32_t>, moec_context*> contexts;
  moec_context*& found = contexts[{device.type, device.id}];
  if (!found) {
    auto desc = sized<moec_context_desc>();
    desc.device_type = device.type;
    desc.device_id = device.id;
    check(moec_context_create(&desc, &found));
  }
  return found;
}

std::unique_ptr<Objects> make(const Device& device, std::string_view router,
                              std::string_view experts) {
  auto made = std::make_unique<Objects>();
  made->context = context_for(device);
  made->desc = from_hex<moec_experts_desc>(experts);
  made->sizes = sized<moec_experts_sizes>();
  if (router.empty()) {
    moec_experts* handle = nullptr;
    check(moec_experts_create(made->context, &made->desc, &handle));
    made->experts = handle;
    check(moec_experts_query(handle, &made->sizes));
  } else {
    const auto router_desc = from_hex<moec_router_desc>(router);
    auto desc = sized<moec_layer_desc>();
    desc.router = &router_desc;
    desc.experts = &made->desc;
    moec_layer* handle = nullptr;
    check(moec_layer_create(made->context, &desc, &handle));
    made->layer = handle;
    check(moec_layer_query(handle, &made->sizes));
  }
  return made;
}

}  // namespace

void check(moec_status status) {
  if (status >= 0) return;
  auto info = sized<moec_error_info>();
  (void)moec_last_error(&info);
  throw Failure{status, info.message};
}

void from_hex(std::string_view hex, void* to, size_t bytes) {
  if (hex.size() != 2 * bytes) throw Failure{MOEC_E_ABI, "a descriptor of another moec"};
  const auto digit = [](char c) { return c <= '9' ? c - '0' : c - 'a' + 10; };
  auto* out = static_cast<unsigned char*>(to);
  for (size_t i = 0; i < bytes; ++i)
    out[i] = static_cast<unsigned char>(16 * digit(hex[2 * i]) + digit(hex[2 * i + 1]));
}

int32_t device_of(const void* pointer) {
  using Query = int (*)(void*, int, uint64_t);  // cuPointerGetAttribute of the driver's C API
  constexpr int kDeviceOrdinal = 9;             // CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
  static const Query query = [] {
    void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    return driver ? reinterpret_cast<Query>(dlsym(driver, "cuPointerGetAttribute")) : nullptr;
  }();
  int32_t device = 0;
  if (pointer && query) query(&device, kDeviceOrdinal, reinterpret_cast<uintptr_t>(pointer));
  return device;
}

const Objects& objects_for(const Device& device, std::string_view router,
                           std::string_view experts) {
  static std::mutex mutex;
  static std::map<std::string, std::unique_ptr<Objects>> all;
  std::string key = std::to_string(device.type) + ":" + std::to_string(device.id) + ":";
  key.append(router).append(experts);
  const std::lock_guard lock(mutex);
  std::unique_ptr<Objects>& found = all[key];
  if (!found) found = make(device, router, experts);
  return *found;
}

Weights::Weights(const moec_context* context, std::string_view desc, const moec_weight_set& set) {
  const auto form = from_hex<moec_weights_desc>(desc);
  check(moec_weights_create(context, &form, &weights_));
  const moec_status status = moec_weights_bind(weights_, &set);
  if (status < 0) {
    auto info = sized<moec_error_info>();
    (void)moec_last_error(&info);
    moec_weights_free(weights_);
    throw Failure{status, info.message};
  }
}

}  // namespace moec::xla
