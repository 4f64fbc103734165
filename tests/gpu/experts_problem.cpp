// SPDX-License-Identifier: Apache-2.0
#include "gpu/experts_problem.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <stdexcept>

namespace moec::test {

std::vector<int32_t> ids_of(const std::vector<int>& counts) {
  std::vector<int32_t> ids(5, -1);
  for (size_t e = 0; e < counts.size(); ++e) ids.insert(ids.end(), counts[e], int32_t(e));
  std::shuffle(ids.begin(), ids.end(), std::mt19937_64(test_seed()));
  return ids;
}

namespace {
constexpr float kAlpha = 1.702f, kLimit = 1.0f;  // of MOEC_ACT_GPTOSS
}

Activated plain_activation(uint32_t kind, double g, double u) {
  if (kind == MOEC_ACT_GEGLU_TANH) {
    const double c = std::sqrt(2 / M_PI), th = std::tanh(c * (g + 0.044715 * g * g * g));
    const double slope = (1 - th * th) * c * (1 + 3 * 0.044715 * g * g);
    return {g * (1 + th) / 2 * u, u * ((1 + th) / 2 + g / 2 * slope), g * (1 + th) / 2};
  }
  const bool swiglu = kind == MOEC_ACT_SWIGLU;
  const double alpha = swiglu ? 1 : kAlpha, limit = swiglu ? 1e30 : kLimit;
  const double gate = std::min(g, limit), up = std::clamp(u, -limit, limit) + (swiglu ? 0 : 1);
  const double s = 1 / (1 + std::exp(-alpha * gate));
  return {gate * s * up, g <= limit ? up * s * (1 + alpha * gate * (1 - s)) : 0,
          std::fabs(u) <= limit ? gate * s : 0};
}

moec_activation activation_of(uint32_t kind) {
  moec_activation a = {};
  a.kind = kind;
  a.alpha = kAlpha;
  a.limit = kLimit;
  return a;
}

std::string activation_name(uint32_t kind) {
  return kind == MOEC_ACT_SWIGLU ? "swiglu" : kind == MOEC_ACT_GPTOSS ? "gptoss" : "geglu_tanh";
}

int multiprocessors() {
  int count = 0;
  CHECK_CUDA(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0));
  return count;
}

void must_take(const char* refusal) {
  if (refusal) throw std::runtime_error(std::string("refused: ") + refusal);
}

ExpertsProblem::ExpertsProblem(const ExpertsCase& c)
    : c_(c),
      hidden_(c.shape.hidden),
      inter_(c.shape.inter),
      experts_(c.shape.experts),
      plan_(c.ids, c.shape, c.align),
      tokens_(int64_t(c.ids.size()) / c.shape.top_k),
      rows_(plan_.plan.max_rows) {
  const uint64_t seed = test_seed();
  plan_.build();
  offsets_ = download(plan_.plan.group_offsets, experts_ + 1);
  row_token_ = download(plan_.plan.row_token, rows_);
  x_ = normal_array<Half>(tokens_ * hidden_, 1.0f, seed + 1);
  gate_up_ = normal_array<Half>(experts_ * 2 * inter_ * hidden_, 1.0f / std::sqrt(float(hidden_)),
                                seed + 2);
  down_ =
      normal_array<Half>(experts_ * inter_ * hidden_, 1.0f / std::sqrt(float(inter_)), seed + 3);
  std::vector<bool> used(tokens_);
  for (const int t : row_token_)
    if (t >= 0) used[t] = true;
  for (int64_t t = 0; t < tokens_; ++t)
    if (!used[t]) CHECK_CUDA(cudaMemset(x_.data() + t * hidden_, 0xff, hidden_ * sizeof(Half)));
  for (int r = 0; r < offsets_.back(); r += c.stride) {
    sample_.push_back(r);
    sample_expert_.push_back(
        int(std::upper_bound(offsets_.begin(), offsets_.end(), r) - offsets_.begin() - 1));
  }
  sample_device_ = DeviceArray<int>(sample_);
  experts_device_ = DeviceArray<int>(sample_expert_);
}

PlainMatrix ExpertsProblem::gate_up(int part, bool alternate) const {
  const int64_t feature = c_.transposed ? 1 : hidden_, k_step = c_.transposed ? 2 * inter_ : 1;
  return {gate_up_.data() + part * feature * (alternate ? 1 : inter_), 2 * inter_ * hidden_,
          feature * (alternate ? 2 : 1), k_step};
}

PlainMatrix ExpertsProblem::down() const {
  return {down_.data(), inter_ * hidden_, c_.transposed ? 1 : inter_, c_.transposed ? hidden_ : 1};
}

PlainRows ExpertsProblem::gathered(const DeviceArray<Half>& of_tokens, int64_t width) const {
  return {of_tokens.data(), width, plan_.plan.row_token};
}

std::vector<float> ExpertsProblem::plain(const PlainRows& a, const PlainMatrix& w, int64_t features,
                                         int64_t k_size) const {
  const DeviceArray<float> out(sample_.size() * features);
  plain_gemm(sample_device_.data(), experts_device_.data(), int64_t(sample_.size()), int(features),
             int(k_size), a, w, out.data());
  return out.host();
}

void ExpertsProblem::expect_rows(const std::string& what, const std::vector<float>& want,
                                 const DeviceArray<Half>& got, int64_t width, int parity,
                                 bool padded) const {
  const auto values = got.host();
  RowPairs pairs(width);
  for (size_t i = 0; i < sample_.size(); ++i) {
    const int r = sample_[i];
    if (sample_expert_[i] % 2 == parity || (!padded && row_token_[r] < 0)) continue;
    pairs.add(&want[i * width], &values[r * width]);
  }
  pairs.expect(what, 5e-3);
}

}  // namespace moec::test
