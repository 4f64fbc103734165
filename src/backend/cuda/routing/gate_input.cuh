// SPDX-License-Identifier: Apache-2.0
// R0: from x to what the gate's product reads: x itself, its jittered copy (dtype of x), or the
// scaled one (fp32).
#pragma once

#include "backend/cuda/device/op.cuh"
#include "math/philox.h"
#include "math/slots.h"

namespace moec::cuda {

struct GateInput {
  int64_t num_tokens, hidden;
  uint64_t seed, rng_offset;
  float jitter, rms_eps;
  bool scaled;
  Array x, input_scale;
  float root;                     // 1 / sqrt(H)
  const uint8_t* idle = nullptr;  // [T] or null: 1 = x of the token is not read, but counts as 0

  template <class Args>
  explicit GateInput(const Args& args)
      : num_tokens(args.num_tokens),
        hidden(args.hidden),
        seed(args.desc->seed),
        rng_offset(args.rng_offset),
        jitter(args.desc->jitter),
        rms_eps(args.desc->rms_eps),
        scaled(args.desc->input == MOEC_INPUT_RMS_SCALED),
        x(args.x),
        input_scale(args.input_scale),
        root(1.0f / sqrtf(float(args.hidden))) {}

  bool is_changed() const { return scaled || jitter != 0.0f; }
  moec_dtype rows_dtype() const { return scaled ? moec_dtype(MOEC_F32) : x.dtype; }

  __device__ float jitter_at(int64_t index) const {
    return math::jitter_factor(jitter, seed, rng_offset + uint64_t(index));
  }
  // Element (t, h) after the jitter.
  __device__ float value(int64_t t, int64_t h) const {
    if (idle && idle[t]) return 0.0f;
    const int64_t index = t * hidden + h;
    const float v = load_real(x.data, x.dtype, index);
    return jitter == 0.0f ? v : math::RoundTo(x.dtype)(v * jitter_at(index));
  }
  __device__ float gain(int64_t h) const {
    return load_real(input_scale.data, input_scale.dtype, h) * root;
  }
};

// Writes what is not null: the jittered x (dtype of x), the rows that the product reads, and
// 1 / rms of each row.
void prepare_rows(const Op& op, const GateInput& in, void* jittered, void* rows, float* inverse);

}  // namespace moec::cuda
