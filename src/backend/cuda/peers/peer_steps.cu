// SPDX-License-Identifier: Apache-2.0
// A crew is a block. Kernels wait for other ranks, so they leave multiprocessors to others, and the
// next kernel of their stream is not let in before they have heard all.
#include "backend/cuda/device/op.cuh"
#include "backend/cuda/peers/peers.h"
#include "backend/peer_crew.h"

namespace moec::cuda {
namespace {

constexpr int kThreads = 512, kWarp = 32;

struct Crew {
  __device__ int index() const { return int(blockIdx.x); }
  __device__ int crews() const { return int(gridDim.x); }
  __device__ int thread() const { return int(threadIdx.x); }
  __device__ int threads() const { return kThreads; }
  __device__ int lane() const { return int(threadIdx.x) % kWarp; }
  __device__ static constexpr int lanes() { return kWarp; }
  // Few pieces are spread over all blocks.
  __device__ int64_t team() const { return int64_t(threadIdx.x / kWarp) * gridDim.x + blockIdx.x; }
  __device__ int64_t teams() const { return int64_t(kThreads / kWarp) * gridDim.x; }
  __device__ int64_t global_thread() const { return moec::cuda::global_thread(); }
  __device__ int64_t global_threads() const { return moec::cuda::global_threads(); }
  __device__ void sync() const { __syncthreads(); }
  __device__ bool any(bool value) const { return __syncthreads_or(value); }
  __device__ uint32_t join(uint32_t bits) const { return __reduce_or_sync(~0u, bits); }
  __device__ void say(uint64_t* word, uint64_t value) const {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
  }
  __device__ uint64_t hear(const uint64_t* word) const {
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
  }
  __device__ uint64_t now() const {
    uint64_t ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
  }
  __device__ void pause() const {}
  template <class T>
  __device__ T load(const T* from) const {
    return *from;
  }
  template <class T>
  __device__ void store(T* to, const T& value) const {
    *to = value;
  }
  __device__ void go_on() const { ptx::grid_dependency_launch(); }
};

// Few kernels: of what rows are only their loops know.
__global__ __launch_bounds__(kThreads) void dispatch_kernel(
    const __grid_constant__ PeerDispatch step, bool wide) {
  ptx::grid_dependency_wait();
  Crew crew;
  peer::run(step, crew, [&] {
    if (wide)
      peer::send_rows<PeerChunk>(step, crew);
    else if (step.x.dtype == MOEC_F32)
      peer::send_rows<uint32_t>(step, crew);
    else
      peer::send_rows<uint16_t>(step, crew);
  });
}

template <class Y>
__global__ __launch_bounds__(kThreads) void combine_kernel(const __grid_constant__ PeerCombine step,
                                                           bool wide) {
  ptx::grid_dependency_wait();
  Crew crew;
  peer::run(step, crew, [&](bool is_well) {
    const auto sum = [&]<class P>() {
      if (wide)
        peer::sum_rows<P, Y, 16 / sizeof(P)>(step, crew, is_well);
      else
        peer::sum_rows<P, Y, 1>(step, crew, is_well);
    };
    if (step.partial_dtype == MOEC_F32)
      sum.template operator()<float>();
    else
      sum.template operator()<Y>();
  });
}

// Blocks for `bytes` that a rank sends to another, or takes from it: 32 keep a link almost busy,
// and more pay where there is much. Stores gain from more than loads do.
int32_t crews(const PeerMap& map, int64_t bytes, int64_t most) {
  constexpr int64_t kEach = 8 << 10, kSome = 4 << 20, kMuch = 16 << 20;
  if (map.max_crews)
    most = map.max_crews;
  else if (bytes < kSome)
    most = 32;
  else if (bytes < kMuch)
    most = 64;
  return int32_t(grid_for(bytes, kEach, most).x);
}

bool is_aligned(const void* pointer, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % uintptr_t(bytes) == 0;
}

}  // namespace

int32_t num_blocks(const PeerDispatch& step) {
  const int64_t row_bytes = step.hidden * dtype_bytes(step.x.dtype);
  return crews(step.map, step.bound * row_bytes * (step.has_beside ? 2 : 1), kPeerLanes);
}
int32_t num_blocks(const PeerCombine& step) {
  return crews(step.map, step.bound * step.hidden * dtype_bytes(step.partial_dtype),
               kPeerLanes / 2);
}

void queue(const Op& op, const PeerDispatch& step) {
  const int64_t row_bytes = step.hidden * dtype_bytes(step.x.dtype);
  const bool wide =
      row_bytes % 16 == 0 && is_aligned(step.x.data, 16) && is_aligned(step.beside.data, 16);
  run(op, "a dispatch to peers", dispatch_kernel, dim3(unsigned(num_blocks(step))), kThreads, 0,
      step, wide);
}

void queue(const Op& op, const PeerCombine& step) {
  const dim3 grid(unsigned(num_blocks(step)));
  const int64_t together = 16 / dtype_bytes(step.partial_dtype);
  const bool wide =
      step.hidden % together == 0 && is_aligned(step.y.data, together * dtype_bytes(step.y.dtype));
  with_real(step.y.dtype, [&]<class Y>() {
    run(op, "a combine from peers", combine_kernel<Y>, grid, kThreads, 0, step, wide);
  });
}

}  // namespace moec::cuda
