// SPDX-License-Identifier: Apache-2.0
// What the library gives a backend: scratch, and a place to say what was launched.
#pragma once

#include <moec/moec.h>

#include <cstdint>

namespace moec {

struct HostServices {  // outlives the backend
  void* self;
  // Scratch of the context: grow-only, cached, safe from many threads; freed in stream order.
  void* (*acquire)(void* self, uint64_t bytes, moec_stream stream);
  void (*release)(void* self, void* pointer);
  void (*count_launch)(void* self, uint64_t kernels, uint64_t flops);
};

}  // namespace moec
