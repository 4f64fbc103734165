// SPDX-License-Identifier: Apache-2.0
// Adapters (LoRA): low-rank terms beside the matrices of experts. With s the scale of an adapter,
//
//   y = x W^T + t B^T        t = s x A^T                 narrow rows [P,R]
//   d_x += u A               u = s d_y B                 narrow rows of the backward
//   d_A = u^T x              d_B = d_y^T t
//
// All factors that read the same rows lie side by side for the products: ranks add up to R, and
// t B^T is one term of the product whatever the number of adapters.
#pragma once

#include "backend/weights.h"

namespace moec {

// The factors of one adapter, or their gradients, at one place: beside gate and up, or beside down.
struct Factors {
  int32_t adapter = 0;  // its index in what is bound
  int64_t rank = 0;
  float scale = 0;
  bool one_for_all = false;  // A: every expert has the same
  ExpertMatrix a;            // [rank, in]; a gradient may be absent
  ExpertMatrix b[2];         // [out, rank] of gate and up, of down the first; either may be absent
};

struct FactorList {
  const Factors* first = nullptr;
  int32_t count = 0;
  int64_t rank = 0;                 // of all, rounded up to kRankMultiple
  int64_t largest_shared_rank = 0;  // of those with one A for all experts

  const Factors* begin() const { return first; }
  const Factors* end() const { return first + count; }
};
inline constexpr int64_t kRankMultiple = 8;  // 16 bytes of 16-bit values

struct AdaptersView {
  FactorList gate_up, down;
  int32_t num_experts = 0;  // local
  int64_t hidden = 0, inter = 0;
};

// Which axis of the factors [n,k] products want to be contiguous.
enum class FactorForm {
  kAny,         // either
  kAlongK,      //
  kAlongN,      //
  kAlternating  // n; columns of gate's and up's B alternate
};

// The factors of one place as products read them, of the type of x: those of a list side by side,
// and zeros up to `rank` and where a factor is absent.
struct LowRank {
  int64_t rank = 0;                  // R; 0: there are none
  int32_t count = 0;                 // adapters
  float only_scale = 0;              // of one adapter; of several see `scale`
  ExpertMatrix a, b[2];              // [R, in], [out, R]
  const float* scale = nullptr;      // [R]
  const int32_t* adapter = nullptr;  // [R] whose rank it is
  const int32_t* ids = nullptr;      // [T] the only adapter of a token, null: all
  explicit operator bool() const { return rank != 0; }
};

}  // namespace moec
