// SPDX-License-Identifier: Apache-2.0
// Device memory with none in front of it and none behind: what strays there ends in an error, where
// between other allocations it would read what is not its own, and nobody might see it.
#pragma once

#include <map>

#include "gpu/device_memory.h"
#include "gpu/driver.h"

namespace moec::test {

class FencedMemory {
 public:
  static cudaError_t take(void** pointer, size_t bytes) {
    CHECK_CUDA(cudaFree(nullptr));  // the context is there
    const size_t size = (bytes + kPage - 1) / kPage * kPage;
    CUmemAllocationProp properties = {};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    const CUmemAccessDesc access = {properties.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    Block block = {0, {}, size};
    if (MOEC_DRIVER(cuMemAddressReserve)(&block.range, size + 2 * kFence, kPage, 0, 0) ||
        MOEC_DRIVER(cuMemCreate)(&block.handle, size, &properties, 0) ||
        MOEC_DRIVER(cuMemMap)(block.range + kFence, size, 0, block.handle, 0) ||
        MOEC_DRIVER(cuMemSetAccess)(block.range + kFence, size, &access, 1)) {
      return cudaErrorMemoryAllocation;
    }
    *pointer = reinterpret_cast<void*>(block.range + kFence);
    blocks()[*pointer] = block;
    return cudaSuccess;
  }
  static cudaError_t give(void* pointer) {
    const auto found = blocks().find(pointer);
    if (found == blocks().end()) return cudaSuccess;  // null
    cudaDeviceSynchronize();
    const Block block = found->second;
    blocks().erase(found);
    MOEC_DRIVER(cuMemUnmap)(block.range + kFence, block.size);
    MOEC_DRIVER(cuMemRelease)(block.handle);
    MOEC_DRIVER(cuMemAddressFree)(block.range, block.size + 2 * kFence);
    return cudaSuccess;
  }

 private:
  static constexpr size_t kPage = size_t(2) << 20, kFence = 8 * kPage;
  struct Block {
    CUdeviceptr range;
    CUmemGenericAllocationHandle handle;
    size_t size;
  };
  static std::map<void*, Block>& blocks() {
    static auto* const blocks = new std::map<void*, Block>;  // outlives static arrays
    return *blocks;
  }
};

}  // namespace moec::test
