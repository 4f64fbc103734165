// SPDX-License-Identifier: Apache-2.0
// Rows of fp32 values: activations, sums and products, vectorised for the instruction set in use.
// Every set does the same IEEE operations in the same order.
#pragma once

#include <moec/moec.h>

#include <cstdint>

namespace moec::cpu {

enum class StepRounding { kNone, kBf16, kF16 };  // after each step of an activation
inline constexpr int kStepRoundings = 3;

// out[i] = activation(g[i], u[i]); out may be u. Plain kinds do not read g.
void activate(const moec_activation& act, StepRounding rounding, const float* g, const float* u,
              float* out, int64_t n);
// g[i], u[i] become the slopes there, h[i] the value.
void activation_slopes(const moec_activation& act, float* g, float* u, float* h, int64_t n);

void add(float* y, const float* x, int64_t n);                       // y += x
void scale(float* y, float a, int64_t n);                            // y *= a
void add_scaled(float* y, float a, const float* x, int64_t n);       // y += a x
void multiply_scaled(float* y, float a, const float* x, int64_t n);  // y *= a x
void scale_or_zero(float* y, float a, int64_t n);  // as scale; a = 0 gives 0, whatever y
void round_to(moec_dtype dtype, float* y, int64_t n);
float dot(const float* a, const float* b, int64_t n);  // in 16 interleaved sums

}  // namespace moec::cpu
