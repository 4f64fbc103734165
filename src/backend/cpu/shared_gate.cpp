// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/shared_gate.h"

#include <algorithm>

#include "backend/cpu/gemm.h"
#include "backend/cpu/mlp.h"
#include "backend/cpu/row_math.h"
#include "core/dtype.h"
#include "math/exp.h"

namespace moec::cpu {
namespace {

const void* row_of(const void* base, moec_dtype dtype, int64_t at) {
  return static_cast<const char*>(base) + at * dtype_bytes(dtype);
}

}  // namespace

void mix_forward(const ThreadPool& pool, const MixForward& step) {
  const SharedGate& gate = step.gate;
  float* const mix = step.mix;
  const int64_t hidden = gate.desc->hidden;
  const moec_dtype dtype = gate.desc->dtype;
  constexpr int64_t kTokens = 16;
  const auto mix_of = [&](int64_t t) {
    float z[2] = {0, 0}, x[kColumns], w[kColumns];
    for (int i = 0; i < gate.logits(); ++i)
      if (gate.bias) z[i] = load_real(gate.bias.data, gate.bias.dtype, i);
    for (int64_t col = 0; col < hidden; col += kColumns) {
      const int64_t n = std::min(kColumns, hidden - col);
      convert_to_f32(row_of(gate.x.data, dtype, t * hidden + col), dtype, x, n);
      for (int i = 0; i < gate.logits(); ++i) {
        convert_to_f32(row_of(gate.weight.data, gate.weight.dtype, i * hidden + col),
                       gate.weight.dtype, w, n);
        z[i] += dot(x, w, n);
      }
    }
    const bool softmax = gate.desc->shared == MOEC_SHARED_SOFTMAX2;
    mix[2 * t] = softmax ? math::sigmoid(z[0] - z[1]) : 1.0f;
    mix[2 * t + 1] = math::sigmoid(softmax ? z[1] - z[0] : z[0]);
  };
  pool.parallel_for((gate.num_tokens + kTokens - 1) / kTokens, [&](int32_t, int64_t i) {
    for (int64_t t = i * kTokens; t < std::min(gate.num_tokens, (i + 1) * kTokens); ++t) mix_of(t);
  });
}

void shared_gate_backward(const SharedGate& gate, int64_t t, const float* mix, const float* d_mix,
                          float* d_logits) {
  const float c0 = mix[2 * t], c1 = mix[2 * t + 1], d0 = d_mix[2 * t], d1 = d_mix[2 * t + 1];
  const bool softmax = gate.desc->shared == MOEC_SHARED_SOFTMAX2;
  const float d = softmax ? c0 * c1 * (d0 - d1) : c1 * (1.0f - c1) * d1;
  d_logits[2 * t] = d;
  d_logits[2 * t + 1] = softmax ? -d : 0.0f;
}

}  // namespace moec::cpu
