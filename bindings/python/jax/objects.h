// SPDX-License-Identifier: Apache-2.0
// Library objects behind the handlers: made on first use for a description and a device, kept until
// the process ends (a compiled computation may run at any time).
#pragma once

#include <moec/moec.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace moec::xla {

struct Failure {  // what the library said
  moec_status status;
  std::string text;
};

void check(moec_status status);  // throws Failure

template <class Struct>
Struct sized() {
  Struct made;
  moec_struct_init(&made, sizeof made);
  return made;
}

// A struct whose bytes Python wrote in hexadecimal, since an attribute's text has to be UTF-8.
void from_hex(std::string_view hex, void* to, size_t bytes);
template <class Struct>
Struct from_hex(std::string_view hex) {
  Struct made;
  from_hex(hex, &made, sizeof made);
  return made;
}

struct Device {
  int32_t type;  // moec_device_type
  int32_t id;
  moec_stream stream;
};

// The GPU on which `pointer` lies, asked of the driver that the framework has loaded.
int32_t device_of(const void* pointer);

struct Objects {
  const moec_context* context;
  moec_experts_desc desc;
  const moec_layer* layer;      // with a router
  const moec_experts* experts;  // without
  moec_experts_sizes sizes;
};
const Objects& objects_for(const Device& device, std::string_view router, std::string_view experts);

// Weights over the arrays of one call.
class Weights {
 public:
  Weights(const moec_context* context, std::string_view desc, const moec_weight_set& set);
  ~Weights() { moec_weights_free(weights_); }
  Weights(const Weights&) = delete;
  Weights& operator=(const Weights&) = delete;
  const moec_weights* get() const { return weights_; }

 private:
  moec_weights* weights_ = nullptr;
};

}  // namespace moec::xla
