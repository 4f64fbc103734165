// SPDX-License-Identifier: Apache-2.0
// Every inline instruction of the sm_90a kernels, one wrapper each. Shared memory is named by its
// 32-bit address, because mbarriers, tensor maps and wgmma descriptors all want that form.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace moec::cuda::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- mbarrier -------------------------------------------------------------------------------
__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// One arrival that also announces `bytes` of bulk copies into this phase.
__device__ __forceinline__ void barrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// The same offset in CTA `rank` of the cluster.
__device__ __forceinline__ uint32_t cluster_address(uint32_t address, uint32_t rank) {
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}
// Arrive on a barrier there. The scope stays the default: what the arrival releases is a stage or a
// slot, whose next write it orders, and cluster scope would cost a fence of the whole GPU.
__device__ __forceinline__ void barrier_arrive_cluster(uint32_t remote) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(remote) : "memory");
}
// A 4-byte store to the same offset in CTA `rank`, and the one arrival of a phase of a barrier
// there: the phase ends when the store has landed.
__device__ __forceinline__ void store_arrive_cluster(uint32_t to, uint32_t barrier, uint32_t rank,
                                                     uint32_t value) {
  asm volatile(
      "{\n.reg .b32 remote, remote_barrier;\n"
      "mapa.shared::cluster.u32 remote, %0, %2;\n"
      "mapa.shared::cluster.u32 remote_barrier, %1, %2;\n"
      "mbarrier.arrive.expect_tx.shared::cluster.b64 _, [remote_barrier], 4;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [remote], %3, "
      "[remote_barrier];\n}" ::"r"(to),
      "r"(barrier), "r"(rank), "r"(value)
      : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "LOOP:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra LOOP;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Orders ordinary shared-memory writes of this thread before later reads by TMA and wgmma.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// One lane of a converged warp, always the same one. Copies issued under it need no loop over the
// lanes, which the compiler writes when it sees only `threadIdx.x == 0`.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile(
      "{\n.reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(elected));
  return elected;
}

// ---- flags in global memory -----------------------------------------------------------------
// All that this thread has seen written, by whom ever, is written for who sees the sum.
__device__ __forceinline__ void add_release(unsigned* to, unsigned value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
__device__ __forceinline__ unsigned load_acquire(const unsigned* from) {
  unsigned value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ unsigned load_relaxed(const unsigned* from) {
  unsigned value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
// What ordinary loads of this thread have seen, bulk copies that it asks for see, too.
__device__ __forceinline__ void fence_proxy_async_all() {
  asm volatile("fence.proxy.async;" ::: "memory");
}

// ---- cluster, grid --------------------------------------------------------------------------
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}
// The same in two halves, which order mbarriers made before (fence_barrier_init) and nothing else.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// To the same place in the shared memory of CTA `rank`, where it counts as 8 bytes on `barrier`.
__device__ __forceinline__ void store_remote(uint32_t address, uint32_t rank, uint64_t value,
                                             uint32_t barrier) {
  asm volatile(
      "{\n.reg .b32 to, counter;\n"
      "mapa.shared::cluster.u32 to, %0, %1;\n"
      "mapa.shared::cluster.u32 counter, %3, %1;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b64 [to], %2, [counter];\n}" ::
          "r"(address),
      "r"(rank), "l"(value), "r"(barrier)
      : "memory");
}
// Programmatic dependent launch: wait for the previous kernel; let the next one be scheduled.
// Kernels of older architectures use these too: there a launch is never programmatic and both do
// nothing.
__device__ __forceinline__ void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void grid_dependency_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- bulk tensor copies ---------------------------------------------------------------------
struct Coordinate {
  int x, y, z;  // innermost first
};
struct Coordinate4 {
  int x, y, z, w;
};
__device__ __forceinline__ void tensor_load(uint32_t dst, const CUtensorMap* map, uint32_t barrier,
                                            Coordinate at) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(dst),
      "l"(map), "r"(barrier), "r"(at.x), "r"(at.y), "r"(at.z)
      : "memory");
}
// The same, to the same place in both CTAs of a cluster of two, each of whose barriers counts it.
__device__ __forceinline__ void tensor_load_pair(uint32_t dst, const CUtensorMap* map,
                                                 uint32_t barrier, Coordinate at) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(dst),
      "l"(map), "r"(barrier), "r"(at.x), "r"(at.y), "r"(at.z), "h"(uint16_t{3})
      : "memory");
}
// Both, of tensors of four dimensions: their number is part of the instruction.
__device__ __forceinline__ void tensor_load(uint32_t dst, const CUtensorMap* map, uint32_t barrier,
                                            Coordinate4 at) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(dst),
      "l"(map), "r"(barrier), "r"(at.x), "r"(at.y), "r"(at.z), "r"(at.w)
      : "memory");
}
__device__ __forceinline__ void tensor_load_pair(uint32_t dst, const CUtensorMap* map,
                                                 uint32_t barrier, Coordinate4 at) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(dst),
      "l"(map), "r"(barrier), "r"(at.x), "r"(at.y), "r"(at.z), "r"(at.w), "h"(uint16_t{3})
      : "memory");
}

// Shared memory to a tensor; rows outside it are not written. Later reads of the source by the copy
// engine are counted by bulk_commit / bulk_wait_read of the thread that issued it.
__device__ __forceinline__ void tensor_store(const CUtensorMap* map, uint32_t src, Coordinate at) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
      "r"(src), "r"(at.x), "r"(at.y), "r"(at.z)
      : "memory");
}
// The same under a policy of the L2 cache.
__device__ __forceinline__ void tensor_store(const CUtensorMap* map, uint32_t src, Coordinate at,
                                             uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group.L2::cache_hint "
      "[%0, {%2, %3, %4}], [%1], %5;" ::"l"(map),
      "r"(src), "r"(at.x), "r"(at.y), "r"(at.z), "l"(policy)
      : "memory");
}
// The same of a tensor of five dimensions, the middle three of which are the place.
__device__ __forceinline__ void tensor_store_wide(const CUtensorMap* map, uint32_t src,
                                                  Coordinate at, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group.L2::cache_hint "
      "[%0, {0, 0, %2, %3, %4}], [%1], %5;" ::"l"(map),
      "r"(src), "r"(at.x), "r"(at.y), "r"(at.z), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void tensor_add_wide(const CUtensorMap* map, uint32_t src,
                                                Coordinate at) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.5d.global.shared::cta.add.tile.bulk_group "
      "[%0, {0, 0, %2, %3, %4}], [%1];" ::"l"(map),
      "r"(src), "r"(at.x), "r"(at.y), "r"(at.z)
      : "memory");
}
// The same, added to what the tensor holds.
__device__ __forceinline__ void tensor_add(const CUtensorMap* map, uint32_t src, Coordinate at) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group "
      "[%0, {%2, %3, %4}], [%1];" ::"l"(map),
      "r"(src), "r"(at.x), "r"(at.y), "r"(at.z)
      : "memory");
}
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// All groups of this thread are written.
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
// At most kPending groups of this thread still read shared memory.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// ---- bulk copies of contiguous bytes (multiples of 16) ------------------------------------------
__device__ __forceinline__ void bulk_load(uint32_t dst, const void* src, uint32_t bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(dst),
      "l"(src), "r"(bytes), "r"(barrier)
      : "memory");
}

// ---- 16-byte asynchronous copies ------------------------------------------------------------
// Copies `bytes` (0 or 16) and fills the rest with zeros; nothing is read when bytes is 0.
__device__ __forceinline__ void copy_async(uint32_t dst, const void* src, uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes)
               : "memory");
}
// The same under a policy of the L2 cache.
__device__ __forceinline__ void copy_async(uint32_t dst, const void* src, uint32_t bytes,
                                           uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(dst),
               "l"(src), "r"(bytes), "l"(policy)
               : "memory");
}
// The whole 16 bytes, if `wanted`.
__device__ __forceinline__ void copy_async_if(bool wanted, uint32_t dst, const void* src,
                                              uint64_t policy) {
  asm volatile(
      "{\n.reg .pred p;\n"
      "setp.ne.b32 p, %0, 0;\n"
      "@p cp.async.cg.shared.global.L2::cache_hint [%1], [%2], 16, %3;\n}" ::"r"(int(wanted)),
      "r"(dst), "l"(src), "l"(policy)
      : "memory");
}
// For data that other tiles read again: it leaves the L2 cache last.
__device__ __forceinline__ uint64_t policy_keep() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// For data that nobody reads again: it leaves the L2 cache first.
__device__ __forceinline__ uint64_t policy_once() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// Always one store: where two paths write in other orders, the compiler splits it into words.
__device__ __forceinline__ void global_store(void* to, uint4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}
// Arrive on `barrier` once all earlier copies of this thread have landed.
__device__ __forceinline__ void copy_async_arrive(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- registers, named barriers --------------------------------------------------------------
template <int kRegisters>
__device__ __forceinline__ void registers_release() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void registers_acquire() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Arrive without waiting.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- 8x8 matrices of 16-bit elements between registers and shared memory ----------------------
__device__ __forceinline__ void store_matrix(uint32_t row, uint32_t a, uint32_t b, uint32_t c,
                                             uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}
__device__ __forceinline__ void store_matrix_transposed(uint32_t row, uint32_t a, uint32_t b,
                                                        uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}
__device__ __forceinline__ void load_matrix_transposed(uint32_t row, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}
// Keeps the place of what makes the word among what the compiler may move.
__device__ __forceinline__ void settle(uint32_t& word) {
  asm volatile("" : "+r"(word));
}
__device__ __forceinline__ uint4 shared_load(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
__device__ __forceinline__ uint2 shared_load_pair(uint32_t address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ uint32_t shared_load_word(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ void shared_store(uint32_t address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ __forceinline__ void shared_store(uint32_t address, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}
__device__ __forceinline__ void shared_store(uint32_t address, float2 v) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(v.x), "f"(v.y) : "memory");
}

}  // namespace moec::cuda::ptx
