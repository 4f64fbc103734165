// SPDX-License-Identifier: Apache-2.0
// One layer of experts with its plan and random weights, and what its checks share.
#pragma once

#include <cstring>
#include <map>
#include <vector>

#include "backend/cuda/sm90/row_gemm.h"
#include "backend/cuda/sm90/weight_grad.h"
#include "gpu/plain.cuh"

namespace {

// ---- one problem -----------------------------------------------------------------------------
// Tokens that nobody selects hold NaN, so a wrong gather shows.
struct Case {
  Shape shape;
  std::vector<int32_t> ids;  // -1 = nobody
  int align = 1;
  int stride = 1;  // check every stride-th row
};

class ExpertsProblem {
 public:
  ExpertsProblem(const Case& c, bool transposed)
      : c_(c),
        transposed_(transposed),
        plan_(c.ids, c.shape, c.align),
        tokens_(int64_t(c.ids.size()) / c.shape.top_k),
        rows_(plan_.plan.max_rows) {
    plan_.build();
    CHECK_CUDA(cudaDeviceSynchronize());
    name_ = std::string(c.shape.name) + (transposed ? " IN_OUT" : "");
    offsets_ = download(plan_.plan.group_offsets, c.shape.experts + 1);
    row_token_ = download(plan_.plan.row_token, rows_);
    const int64_t h = c.shape.hidden, inter = c.shape.inter, e = c.shape.experts;
    x_ = normal_array<Half>(tokens_ * h, 1.0f, seed + 1);
    poison_unused_tokens();
    gate_up_ = normal_array<Half>(e * 2 * inter * h, 1.0f / std::sqrt(float(h)), seed + 2);
    down_ = normal_array<Half>(e * inter * h, 1.0f / std::sqrt(float(inter)), seed + 3);
    for (int64_t r = 0; r < offsets_.back(); r += c.stride) {
      sample_.push_back(int(r));
      sample_expert_.push_back(
          int(std::upper_bound(offsets_.begin(), offsets_.end(), int(r)) - offsets_.begin() - 1));
    }
    sample_device_ = DeviceArray<int>(std::max<size_t>(1, sample_.size()));
    experts_device_ = DeviceArray<int>(std::max<size_t>(1, sample_.size()));
    sample_device_.assign(sample_);
    experts_device_.assign(sample_expert_);
  }

 protected:
  void poison_unused_tokens() {
    std::vector<bool> used(tokens_);
    for (const int t : row_token_)
      if (t >= 0) used[t] = true;
    for (int64_t t = 0; t < tokens_; ++t) {
      if (!used[t])
        CHECK_CUDA(cudaMemset(x_.data() + t * c_.shape.hidden, 0xff, c_.shape.hidden * 2));
    }
  }
  // Rows of experts whose number is odd (or even) become NaN.
  template <typename T>
  void poison_rows(DeviceArray<T>& rows, int64_t width, int parity) {
    for (int e = parity; e < c_.shape.experts; e += 2) {
      CHECK_CUDA(cudaMemset(rows.data() + offsets_[e] * width, 0xff,
                            (offsets_[e + 1] - offsets_[e]) * width * sizeof(T)));
    }
    CHECK_CUDA(cudaMemset(rows.data() + offsets_.back() * width, 0xff,
                          (rows_ - offsets_.back()) * width * sizeof(T)));
  }
  std::vector<float> plain(const int* source, int features, int k_size, const Half* a, int64_t lda,
                           const Half* w, int64_t es, int64_t fs, int64_t ks) {
    DeviceArray<float> out(std::max<size_t>(1, sample_.size() * features));
    const int64_t count = int64_t(sample_.size()) * features;
    if (count > 0) {
      plain_gemm<<<unsigned((count + 255) / 256), 256>>>(
          sample_device_.data(), experts_device_.data(), source, int(sample_.size()), features,
          k_size, a, lda, w, es, fs, ks, out.data());
    }
    CHECK_CUDA(cudaGetLastError());
    return out.host();
  }
  void launch(const cuda::RowGemmProblem& a) {
    if (const char* why = cuda::row_gemm_refuses(a)) {
      std::printf("FAIL refused: %s\n", why);
      ++failures;
      return;
    }
    cuda::RowGemmProblem p = a;
    const unsigned turn = turn_of(
        {int(p.op), p.weights_mn_major, p.alternating, p.pre != nullptr, int(p.activation.kind)});
    p.work_counter = cleared_counter(turn);
    p.steps = &counters_.data()->steps;
    cuda::RowGemmChoice choice = cuda::choose(p, {multiprocessors()});
    choice.tiles.shares = turn % 2 == 0;
    choice.in_pace = turn < 2;
    CHECK_CUDA(cuda::launch_row_gemm(p, choice, nullptr));
    CHECK_CUDA(cudaDeviceSynchronize());
  }
  // Each kernel takes all four ways in turn, over all problems: CTAs of a pair load for each other
  // or not, work from a counter or dealt, clusters keep pace or not. The first has all, as it is
  // where a kernel runs once.
  // Each round begins one later: what comes second in all problems shall not always go one way.
  static unsigned turn_of(const std::vector<int>& kernel) {
    static std::map<std::vector<int>, unsigned> turns;
    const unsigned turn = turns[kernel]++;
    return (turn + turn / 4) % 4;
  }
  unsigned* cleared_counter(unsigned turn) {
    CHECK_CUDA(cudaMemset(counters_.data(), 0, sizeof(cuda::WorkCounters::Gemm)));
    return turn == 0 || turn == 3 ? &counters_.data()->work : nullptr;
  }
  static int multiprocessors() {
    int count = 0;
    CHECK_CUDA(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0));
    return count;
  }
  // Limits that many values reach. All but SwiGLU go with biases: gate's in f32, up's in bf16.
  static moec_activation activation(uint32_t kind) {
    moec_activation a = {};
    a.kind = kind;
    a.alpha = 1.702f;
    a.limit = 1.0f;
    return a;
  }
  static const char* act_name(uint32_t kind) {
    return kind == MOEC_ACT_SWIGLU ? "" : kind == MOEC_ACT_GPTOSS ? " gptoss," : " geglu,";
  }
  struct Value {
    double value, d_gate, d_up;
  };
  static Value plain_activation(uint32_t kind, double g, double u) {
    if (kind == MOEC_ACT_GEGLU_TANH) {
      const double c = std::sqrt(2 / M_PI), th = std::tanh(c * (g + 0.044715 * g * g * g));
      const double slope = (1 - th * th) * c * (1 + 3 * 0.044715 * g * g);
      return {g * (1 + th) / 2 * u, u * ((1 + th) / 2 + g / 2 * slope), g * (1 + th) / 2};
    }
    const bool swiglu = kind == MOEC_ACT_SWIGLU;
    const double alpha = swiglu ? 1 : 1.702f, limit = swiglu ? 1e30 : 1;
    const double gate = std::min(g, limit), up = std::clamp(u, -limit, limit) + (swiglu ? 0 : 1);
    const double s = 1 / (1 + std::exp(-alpha * gate));
    return {gate * s * up, g <= limit ? up * s * (1 + alpha * gate * (1 - s)) : 0,
            std::fabs(u) <= limit ? gate * s : 0};
  }

  // Gate and up weights: OUT_IN [E,2I,H] or IN_OUT [E,H,2I].
  void set_gate_up(cuda::RowGemmProblem& a, bool feature_is_hidden) {
    const int64_t h = c_.shape.hidden, inter = c_.shape.inter;
    a.weights[0] = gate_up_.data();
    a.weights[1] = gate_up_.data() + (transposed_ ? inter : inter * h);
    a.weights_mn_major = transposed_ != feature_is_hidden;
    a.weight_stride = transposed_ ? 2 * inter : h;
    a.expert_stride = 2 * inter * h;
  }
  void set_down(cuda::RowGemmProblem& a, bool feature_is_hidden) {  // [E,H,I] or [E,I,H]
    const int64_t h = c_.shape.hidden, inter = c_.shape.inter;
    a.weights[0] = down_.data();
    a.weights_mn_major = transposed_ == feature_is_hidden;
    a.weight_stride = transposed_ ? h : inter;
    a.expert_stride = inter * h;
  }

  template <typename T>
  static bool is_zero(T v) {
    const T zero = {};
    return std::memcmp(&v, &zero, sizeof(T)) == 0;
  }

  static double worse(double a, double b) { return a != a || b <= a ? a : b; }  // NaN stays

  void compare_rows(const std::string& what, const std::vector<float>& reference,
                    const std::vector<Half>& got, int width, int parity) {
    double worst = 0;
    for (size_t i = 0; i < sample_.size(); ++i) {
      if (sample_expert_[i] % 2 == parity) continue;
      worst = worse(worst,
                    row_error(&reference[i * width], &got[int64_t(sample_[i]) * width], 1, width));
    }
    report(what, worst, 5e-3);
  }
  template <typename T>
  void guards(const DeviceArray<T>& array, const char* what) {
    if (!array.guards_intact()) report(name_ + " guard bytes of " + what, 1, 0);
  }

  Case c_;
  bool transposed_;
  DevicePlan plan_;
  int64_t tokens_, rows_;
  std::string name_;
  std::vector<int> offsets_, row_token_, sample_, sample_expert_;
  DeviceArray<Half> x_, gate_up_, down_;
  DeviceArray<int> sample_device_, experts_device_;
  DeviceArray<cuda::WorkCounters::Gemm> counters_{1};
};

}  // namespace
