// SPDX-License-Identifier: Apache-2.0
// What a CTA of the kernel of one token (one_token_codes.cu) has to do: slots of the token, sets of
// lines, and what becomes of their sums.
#pragma once

#include "backend/cuda/device/op.cuh"
#include "backend/cuda/few_tokens/activate.cuh"
#include "backend/cuda/sm80/few_rows_decode.cuh"
#include "backend/cuda/sm80/one_token_params.h"

namespace moec::cuda {

// The sums of a set: its bias, and those of warps that have steps of it, of which there are at most
// as many; neighbouring warps have places of their own.
__device__ __forceinline__ int one_token_sums(int sets) {
  return 1 + min(kOneTokenWarps, kOneTokenWarps / max(sets, 1) + 2);
}

// Quotients are small.
__device__ __forceinline__ int one_token_divide(int& rest, int by) {
  int whole = 0;
#pragma unroll 1
  while (rest >= by) rest -= by, ++whole;
  return whole;
}

class OneTokenShare {
 public:
  __device__ __forceinline__ OneTokenShare(const OneTokenParams& params, unsigned char* memory)
      : p_(params),
        layout_(params),
        shared_(*reinterpret_cast<OneTokenShared*>(memory)),
        memory_(memory),
        at_(ptx::shared_address(memory)) {}

  // Lane k sees slot k.
  __device__ __forceinline__ void find_slots() {
    const CombineParams& plan = p_.combine;
    const int lane = few_lane();
    const bool is_slot = lane < plan.top_k;
    const int id = is_slot ? __ldcg(plan.expert_ids + lane) : -1;
    const int row = is_slot ? __ldcg(plan.assignment_row + lane) : -1;
    const float weight =
        is_slot && plan.routing_weights ? __ldcg(plan.routing_weights + lane) : 1.0f;
    const int zero = plan.num_zero > 0 ? id - plan.num_experts : -1;
    const bool identity = is_slot && row < 0 && zero >= 0 && zero < plan.num_zero && weight != 0.0f;
    const unsigned with_rows = __ballot_sync(~0u, row >= 0), others = __ballot_sync(~0u, identity);
    const unsigned below = (1u << lane) - 1;
    slots_ = __popc(with_rows);
    all_slots_ = slots_ + __popc(others);
    if (few_warp() == 0 && (row >= 0 || identity)) {
      const int at = row >= 0 ? __popc(with_rows & below) : slots_ + __popc(others & below);
      shared_.slots[at] = {id - p_.expert_begin, row, weight};
    }
  }
  // Behind find_slots and a barrier.
  __device__ __forceinline__ void find_sets() {
    turns_ = p_.up ? slots_ : (slots_ + 1) / 2;
    const int blocks = p_.features / kOneTokenFeatures * (p_.up ? slots_ : 1);
    const int each = unsigned(blocks) / gridDim.x, rest = blocks - each * int(gridDim.x);
    blocks_ = each + (int(blockIdx.x) < rest);
    first_block_ = each * int(blockIdx.x) + min(int(blockIdx.x), rest);
    sets_ = blocks_ * (p_.up ? 1 : turns_);
    sums_ = one_token_sums(sets_);
  }
  __device__ __forceinline__ OneTokenPlace place_of(int set) const {
    int rest = p_.up ? first_block_ + set : set;
    const int whole =
        one_token_divide(rest, p_.up ? p_.features / kOneTokenFeatures : max(turns_, 1));
    return p_.up ? OneTokenPlace{whole, rest * kOneTokenFeatures}
                 : OneTokenPlace{rest, (first_block_ + whole) * kOneTokenFeatures};
  }
  // The slot of line i of a lane.
  __device__ __forceinline__ int slot_of(OneTokenPlace place, int i) const {
    return p_.up ? place.turn : min(2 * place.turn + i, slots_ - 1);
  }
  // Of the thread's set and line: the place goes to shared memory, the bias is given back.
  __device__ __forceinline__ float begin_set() {
    const int set = int(threadIdx.x) / kOneTokenLines, line = int(threadIdx.x) % kOneTokenLines;
    if (set >= sets_) return 0;
    const OneTokenPlace place = place_of(set);
    if (line == 0) places()[set] = place;
    const Operand& bias = p_.parts[line / kOneTokenFeatures].bias;
    if (!bias.base) return 0;
    const int64_t at =
        shared_.slots[slot_of(place, line / kOneTokenFeatures)].expert * bias.group_stride +
        (place.feature + line % kOneTokenFeatures) * bias.i_stride;
    return bias.dtype == MOEC_F32
               ? static_cast<const float*>(bias.base)[at]
               : __uint_as_float(uint32_t(static_cast<const uint16_t*>(bias.base)[at]) << 16);
  }

  __device__ __forceinline__ OneTokenPlace* places() const {
    return reinterpret_cast<OneTokenPlace*>(memory_ + layout_.places);
  }
  // [sets, sums_, lines]
  __device__ __forceinline__ float* sums_of_set(int set) const {
    return reinterpret_cast<float*>(memory_ + layout_.sums) + set * sums_ * kOneTokenLines;
  }
  __device__ __forceinline__ float sum_of(int set, int line) const {
    const float* const from = sums_of_set(set) + line;
    float sum = from[0];
#pragma unroll 4
    for (int i = 1; i < sums_; ++i) sum += from[i * kOneTokenLines];
    return sum;
  }

  __device__ __forceinline__ void finish_up() const {
#pragma unroll 1
    for (int i = int(threadIdx.x); i < sets_ * kOneTokenFeatures; i += kOneTokenThreads) {
      const OneTokenPlace place = places()[i / kOneTokenFeatures];
      const int row = shared_.slots[place.turn].row, n = place.feature + i % kOneTokenFeatures;
      const float gate = sum_of(i / kOneTokenFeatures, i % kOneTokenFeatures),
                  up = sum_of(i / kOneTokenFeatures, kOneTokenFeatures + i % kOneTokenFeatures);
      const int64_t at = row * p_.pre_stride + n;
      if (p_.pre_dtype == MOEC_F32) {
        static_cast<float*>(p_.pre)[at] = gate;
        static_cast<float*>(p_.pre)[at + p_.pre_part] = up;
      } else {
        const uint32_t two = pack<__nv_bfloat16>(gate, up);
        static_cast<uint16_t*>(p_.pre)[at] = uint16_t(two);
        static_cast<uint16_t*>(p_.pre)[at + p_.pre_part] = uint16_t(two >> 16);
      }
      static_cast<uint16_t*>(p_.act)[row * p_.act_stride + n] =
          uint16_t(pack<__nv_bfloat16>(activate(p_.activation, gate, up), 0.0f));
    }
  }

  __device__ __forceinline__ void finish_down() const {
    const CombineParams& to = p_.combine;
    const auto element = [](const void* from, int64_t at) {
      return __uint_as_float(uint32_t(static_cast<const uint16_t*>(from)[at]) << 16);
    };
#pragma unroll 1
    for (int i = int(threadIdx.x); i < blocks_ * kOneTokenFeatures; i += kOneTokenThreads) {
      const int n = first_block_ * kOneTokenFeatures + i;
      float y = 0;
#pragma unroll 1
      for (int k = 0; k < all_slots_; ++k) {
        const float weight = shared_.slots[k].weight;
        if (weight == 0.0f) continue;  // no expert, whatever its output
        const float value = k >= slots_ ? element(to.x, n)
                                        : sum_of(i / kOneTokenFeatures * turns_ + k / 2,
                                                 k % 2 * kOneTokenFeatures + i % kOneTokenFeatures);
        y = fmaf(weight, value, y);
      }
      y *= to.scale;
      if (to.bias) y += element(to.bias, n);
      if (to.residual) y += element(to.residual, n);
      static_cast<uint16_t*>(to.y)[n] = uint16_t(pack<__nv_bfloat16>(y, 0.0f));
    }
  }

  const OneTokenParams& p_;
  const OneTokenLayout layout_;
  OneTokenShared& shared_;
  unsigned char* const memory_;
  const uint32_t at_;  // of memory_
  int slots_, all_slots_, turns_, sets_, sums_;

 private:
  int blocks_, first_block_;  // of eight features
};

}  // namespace moec::cuda
