// SPDX-License-Identifier: Apache-2.0
// The activations and the scores that the oracle knows. Every test that walks kinds walks these
// tables. Enumerators have the values of moec.h; row i of a table is the kind with value i.
#pragma once

#include <cstddef>
#include <iterator>

namespace moec::oracle {

enum class Act {
  kSwiglu,
  kGptoss,
  kClampSwiglu,
  kSwigluClamp,
  kGegluTanh,
  kGegluErf,
  kQuickGeglu,
  kSitu,
  kRelu2,
  kSilu,
  kIdentity
};
struct ActInfo {
  Act kind;
  const char* name;
  bool gated = true;
  bool alpha = false, limit = false, offset = false, beta = false;  // parameters that it reads
};
inline constexpr ActInfo kActs[] = {
    {.kind = Act::kSwiglu, .name = "swiglu"},
    {.kind = Act::kGptoss, .name = "gptoss", .alpha = true, .limit = true},
    {.kind = Act::kClampSwiglu, .name = "clamp_swiglu", .limit = true},
    {.kind = Act::kSwigluClamp, .name = "swiglu_clamp", .limit = true},
    {.kind = Act::kGegluTanh, .name = "geglu_tanh"},
    {.kind = Act::kGegluErf, .name = "geglu_erf"},
    {.kind = Act::kQuickGeglu, .name = "quick_geglu", .alpha = true, .offset = true},
    {.kind = Act::kSitu, .name = "situ", .beta = true},
    {.kind = Act::kRelu2, .name = "relu2", .gated = false},
    {.kind = Act::kSilu, .name = "silu", .gated = false},
    {.kind = Act::kIdentity, .name = "identity", .gated = false},
};

enum class Score { kSoftmax, kSigmoid, kSqrtSoftplus, kIdentity };
struct ScoreInfo {
  Score kind;
  const char* name;
  bool negative = false;  // may be below 0, and so no score of a balance loss
};
inline constexpr ScoreInfo kScores[] = {
    {.kind = Score::kSoftmax, .name = "softmax"},
    {.kind = Score::kSigmoid, .name = "sigmoid"},
    {.kind = Score::kSqrtSoftplus, .name = "sqrt_softplus"},
    {.kind = Score::kIdentity, .name = "identity", .negative = true},
};

template <typename Info, size_t kCount>
constexpr bool in_order(const Info (&infos)[kCount]) {
  for (size_t i = 0; i < kCount; ++i)
    if (static_cast<size_t>(infos[i].kind) != i) return false;
  return true;
}
static_assert(in_order(kActs) && in_order(kScores));

constexpr const ActInfo& info_of(Act kind) {
  return kActs[static_cast<size_t>(kind)];
}
constexpr const ScoreInfo& info_of(Score kind) {
  return kScores[static_cast<size_t>(kind)];
}
constexpr bool is_gated(Act kind) {
  return info_of(kind).gated;
}

}  // namespace moec::oracle
