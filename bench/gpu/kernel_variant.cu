// SPDX-License-Identifier: Apache-2.0
// The kernels of one source tree as a shared library, so that several of them run in one process.
#include "kernel_variant.h"

#include "kernel_layer.cuh"

namespace moec::test {
namespace {

struct Block {
  char* next;
  size_t left;
} block;

cudaError_t take_of_block(void** pointer, size_t bytes) {
  const size_t rounded = (bytes + 0xffff) & ~size_t(0xffff);
  if (rounded > block.left) return cudaErrorMemoryAllocation;
  *pointer = std::exchange(block.next, block.next + rounded);
  block.left -= rounded;
  return cudaSuccess;
}

const Cublas& cublas() {
  static const Cublas cublas;
  return cublas;
}

struct Made {
  Made(const Shape& shape, int64_t tokens) : layer(shape, tokens), kernels(layer.timed(cublas())) {}
  Layer layer;
  std::vector<Timed> kernels;
};

void* make(const char* name, int64_t tokens, void* base, size_t size, size_t* used) {
  for (const Shape& shape : kShapes) {
    if (std::strcmp(shape.name, name)) continue;
    block = {static_cast<char*>(base), size};
    device_memory = {take_of_block, [](void*) { return cudaSuccess; }};
    Made* const made = new Made(shape, tokens);
    *used = size - block.left;
    return made;
  }
  return nullptr;
}

bool run(void* layer, const char* name) {
  for (const Timed& kernel : static_cast<Made*>(layer)->kernels) {
    if (std::strcmp(kernel.name, name)) continue;
    kernel.run();
    return true;
  }
  return false;
}

}  // namespace
}  // namespace moec::test

extern "C" {
extern const moec::test::KernelVariant moec_kernel_variant;
const moec::test::KernelVariant moec_kernel_variant = {
    moec::test::make, moec::test::run,
    [](void* layer) { static_cast<moec::test::Made*>(layer)->layer.poison_counters(); },
    [](void* layer) { delete static_cast<moec::test::Made*>(layer); }};
}
