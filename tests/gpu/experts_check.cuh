// SPDX-License-Identifier: Apache-2.0
// The products of the experts, forward and backward, against plain loops.
#pragma once

#include <cstring>
#include <vector>

#include "backend/cuda/row_gemm.h"
#include "backend/cuda/weight_grad.h"
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

class Check {
 public:
  Check(const Case& c, bool transposed)
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

  void run() {
    up();
    down();
    grad_up();
    grad_down();
    grads();
  }

 private:
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
  cuda::RowGemmArgs args(cuda::RowGemm op, int64_t features, int64_t k_size) {
    cuda::RowGemmArgs a = {};
    a.op = op;
    a.dtype = MOEC_BF16;
    a.features = features;
    a.k_size = k_size;
    a.parts = 1;
    a.params.row_token = plan_.plan.row_token;
    a.params.group_offsets = plan_.plan.group_offsets;
    a.params.num_experts = c_.shape.experts;
    a.params.row_weight = plan_.plan.row_weight;
    a.params.max_rows = rows_;
    return a;
  }
  void launch(const cuda::RowGemmArgs& a) {
    if (const char* why = cuda::row_gemm_refuses(a)) {
      std::printf("FAIL refused: %s\n", why);
      ++failures;
      return;
    }
    CHECK_CUDA(cuda::launch_row_gemm(a, multiprocessors(), nullptr));
    CHECK_CUDA(cudaDeviceSynchronize());
  }
  static int multiprocessors() {
    int count = 0;
    CHECK_CUDA(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0));
    return count;
  }
  // Gate and up weights: OUT_IN [E,2I,H] or IN_OUT [E,H,2I].
  void set_gate_up(cuda::RowGemmArgs& a, bool feature_is_hidden) {
    const int64_t h = c_.shape.hidden, inter = c_.shape.inter;
    a.weights[0] = gate_up_.data();
    a.weights[1] = gate_up_.data() + (transposed_ ? inter : inter * h);
    a.weights_mn_major = transposed_ != feature_is_hidden;
    a.weight_stride = transposed_ ? 2 * inter : h;
    a.expert_stride = 2 * inter * h;
  }
  void set_down(cuda::RowGemmArgs& a, bool feature_is_hidden) {  // [E,H,I] or [E,I,H]
    const int64_t h = c_.shape.hidden, inter = c_.shape.inter;
    a.weights[0] = down_.data();
    a.weights_mn_major = transposed_ == feature_is_hidden;
    a.weight_stride = transposed_ ? h : inter;
    a.expert_stride = inter * h;
  }

  void up() {
    const int h = c_.shape.hidden, inter = c_.shape.inter;
    auto a = args(cuda::RowGemm::kUp, inter, h);
    set_gate_up(a, false);
    a.params.x = x_.data();
    a.params.x_stride = h;
    DeviceArray<Half> act(rows_ * inter), bare(rows_ * inter), pre(rows_ * 2 * inter);
    a.params.out = act.data();
    a.params.out_stride = inter;
    a.params.pre = pre.data();
    launch(a);
    a.params.out = bare.data();
    a.params.pre = nullptr;
    launch(a);
    const int64_t fs = transposed_ ? 1 : h, ks = transposed_ ? 2 * inter : 1;
    const auto gate = plain(plan_.plan.row_token, inter, h, x_.data(), h, gate_up_.data(),
                            2LL * inter * h, fs, ks);
    const auto upper = plain(plan_.plan.row_token, inter, h, x_.data(), h,
                             gate_up_.data() + inter * fs, 2LL * inter * h, fs, ks);
    const auto got = act.host(), got_bare = bare.host(), got_pre = pre.host();
    double worst = 0, worst_pre = 0;
    std::vector<float> value(inter);
    for (size_t i = 0; i < sample_.size(); ++i) {
      const int64_t r = sample_[i];
      if (row_token_[r] < 0) continue;
      const float *g = &gate[i * inter], *u = &upper[i * inter];
      for (int f = 0; f < inter; ++f) value[f] = g[f] / (1 + std::exp(-g[f])) * u[f];
      worst = worse(worst, row_error(value.data(), &got[r * inter], 1, inter));
      worst = worse(worst, row_error(value.data(), &got_bare[r * inter], 1, inter));
      worst_pre = worse(worst_pre, row_error(g, &got_pre[r * 2 * inter], 1, inter));
      worst_pre = worse(worst_pre, row_error(u, &got_pre[(r * 2 + 1) * inter], 1, inter));
    }
    report(name_ + " up", worst, 1e-2);
    report(name_ + " up pre-activations", worst_pre, 5e-3);
    const bool same = std::memcmp(got.data(), got_bare.data(), got.size() * 2) == 0;
    report(name_ + " up, with and without pre-activations equal", same ? 0 : 1, 0);
    guards(act, "up");
    guards(pre, "up pre-activations");
  }

  void down() {
    const int h = c_.shape.hidden, inter = c_.shape.inter;
    for (int parity = 0; parity < 2; ++parity) {
      auto act = normal_array<Half>(rows_ * inter, 1.0f, seed + 4);
      poison_rows(act, inter, parity);
      auto a = args(cuda::RowGemm::kDown, h, inter);
      set_down(a, true);
      DeviceArray<Half> y(rows_ * h);
      a.rows = act.data();
      a.params.out = y.data();
      a.params.out_stride = h;
      launch(a);
      const auto reference =
          plain(nullptr, h, inter, act.data(), inter, down_.data(), int64_t(inter) * h,
                transposed_ ? 1 : inter, transposed_ ? h : 1);
      compare_rows(name_ + " down, NaN neighbours", reference, y.host(), h, parity);
      guards(y, "down");
    }
  }

  void grad_up() {
    const int h = c_.shape.hidden, inter = c_.shape.inter;
    for (int parity = 0; parity < 2; ++parity) {
      auto d_pre = normal_array<Half>(rows_ * 2 * inter, 1.0f, seed + 5);
      poison_rows(d_pre, 2 * inter, parity);
      auto a = args(cuda::RowGemm::kGradUp, h, inter);
      set_gate_up(a, true);
      a.parts = 2;
      a.rows = d_pre.data();
      DeviceArray<Half> d_x(rows_ * h);
      a.params.out = d_x.data();
      a.params.out_stride = h;
      launch(a);
      const auto reference =
          plain(nullptr, h, 2 * inter, d_pre.data(), 2 * inter, gate_up_.data(), 2LL * inter * h,
                transposed_ ? 2 * inter : 1, transposed_ ? 1 : h);
      compare_rows(name_ + " grad up, NaN neighbours", reference, d_x.host(), h, parity);
      guards(d_x, "grad up");
    }
  }

  void grad_down() {
    const int h = c_.shape.hidden, inter = c_.shape.inter;
    const auto pre = normal_array<Half>(rows_ * 2 * inter, 1.5f, seed + 6);
    auto a = args(cuda::RowGemm::kGradDown, inter, h);
    set_down(a, false);
    a.params.x = x_.data();  // stands for d_y
    a.params.x_stride = h;
    a.params.pre = const_cast<Half*>(pre.data());
    const int parts = 2 * ((inter + 255) / 256);
    DeviceArray<Half> d_pre(rows_ * 2 * inter), scaled(rows_ * inter);
    DeviceArray<float> d_weight(parts * rows_);
    a.params.d_pre = d_pre.data();
    a.params.out = scaled.data();
    a.params.out_stride = inter;
    a.params.d_weight_parts = d_weight.data();
    launch(a);
    const auto d_act = plain(plan_.plan.row_token, inter, h, x_.data(), h, down_.data(),
                             int64_t(inter) * h, transposed_ ? h : 1, transposed_ ? 1 : inter);
    const auto got_pre = d_pre.host(), got = scaled.host(), saved = pre.host();
    const auto got_weight = d_weight.host();
    const auto row_weight = download(plan_.plan.row_weight, rows_);
    double worst_pre = 0, worst = 0, worst_weight = 0;
    std::vector<float> value(inter), d_gate(inter), d_up(inter);
    for (size_t i = 0; i < sample_.size(); ++i) {
      const int64_t r = sample_[i];
      if (row_token_[r] < 0) continue;
      double weight = 0, scale = 0;
      for (int f = 0; f < inter; ++f) {
        const double g = __bfloat162float(saved[r * 2 * inter + f]);
        const double u = __bfloat162float(saved[(r * 2 + 1) * inter + f]);
        const double s = 1 / (1 + std::exp(-g)), d = d_act[i * inter + f], w = row_weight[r];
        value[f] = float(w * g * s * u);
        d_gate[f] = float(w * d * u * s * (1 + g * (1 - s)));
        d_up[f] = float(w * d * g * s);
        weight += d * g * s * u;
        scale += std::fabs(d * g * s * u);
      }
      worst = worse(worst, row_error(value.data(), &got[r * inter], 1, inter));
      worst_pre = worse(worst_pre, row_error(d_gate.data(), &got_pre[r * 2 * inter], 1, inter));
      worst_pre = worse(worst_pre, row_error(d_up.data(), &got_pre[(r * 2 + 1) * inter], 1, inter));
      double sum = 0;
      for (int part = 0; part < parts; ++part) sum += got_weight[part * rows_ + r];
      worst_weight = worse(worst_weight, std::fabs(sum - weight) / scale);
    }
    report(name_ + " grad down, d_pre", worst_pre, 5e-3);
    report(name_ + " grad down, weighted act", worst, 5e-3);
    report(name_ + " grad down, routing weight gradient", worst_weight, 1e-5);
    guards(d_pre, "grad down");
    guards(scaled, "grad down");
    guards(d_weight, "grad down");
  }

  // Both weight gradients in both orientations of the output.
  void grads() {
    const int h = c_.shape.hidden, inter = c_.shape.inter;
    for (int parts = 1; parts <= 2; ++parts) {
      for (int parity = 0; parity < 2; ++parity) {
        auto rows = normal_array<Half>(rows_ * parts * inter, 1.0f, seed + 7);
        poison_rows(rows, parts * inter, parity);
        cuda::WeightGradArgs a = {};
        a.dtype = MOEC_BF16;
        a.out_m_contiguous = (parts == 1) != transposed_;  // [E,H,I] and [E,2I,H], or transposed
        a.parts = parts;
        a.m_size = inter;
        a.n_size = h;
        a.max_rows = rows_;
        a.rows = rows.data();
        a.params.x = x_.data();
        a.params.x_stride = h;
        a.params.row_token = plan_.plan.row_token;
        a.params.group_offsets = plan_.plan.group_offsets;
        a.params.num_experts = c_.shape.experts;
        const int64_t size = int64_t(parts) * inter * h;
        DeviceArray<Half> out(size * c_.shape.experts);
        a.out_expert_stride = size;
        a.out_stride = a.out_m_contiguous ? inter : h;
        for (int part = 0; part < parts; ++part)
          a.out[part] = out.data() + part * int64_t(inter) * h;
        if (const char* why = cuda::weight_grad_refuses(a)) {
          std::printf("FAIL refused: %s\n", why);
          ++failures;
          continue;
        }
        CHECK_CUDA(cuda::launch_weight_grad(a, multiprocessors(), nullptr));
        CHECK_CUDA(cudaDeviceSynchronize());
        compare_grad(a, out, rows, parity);
        guards(out, "weight gradient");
      }
    }
  }

  void compare_grad(const cuda::WeightGradArgs& a, const DeviceArray<Half>& out,
                    const DeviceArray<Half>& rows, int parity) {
    const int inter = int(a.m_size), h = int(a.n_size), parts = a.parts;
    DeviceArray<float> reference(int64_t(inter) * h);
    const auto got = out.host();
    double worst = 0;
    bool zeros = true;
    const int step = c_.stride == 1 ? 1 : std::max(1, c_.shape.experts / 3);
    for (int e = 0; e < c_.shape.experts; e += step) {
      if (e % 2 == parity && offsets_[e + 1] > offsets_[e]) continue;
      for (int part = 0; part < parts; ++part) {
        plain_grad<<<unsigned((int64_t(inter) * h + 255) / 256), 256>>>(
            offsets_[e], offsets_[e + 1], plan_.plan.row_token, inter, h,
            rows.data() + part * inter, parts * inter, x_.data(), reference.data());
        CHECK_CUDA(cudaGetLastError());
        const auto ref = reference.host();
        const Half* const mine = &got[(int64_t(e) * parts + part) * inter * h];
        for (int m = 0; m < inter; ++m) {
          const Half* row = a.out_m_contiguous ? mine + m : mine + int64_t(m) * h;
          if (offsets_[e] == offsets_[e + 1]) {
            for (int n = 0; n < h; ++n)
              zeros = zeros && is_zero(row[n * (a.out_m_contiguous ? inter : 1)]);
          } else {
            const double error =
                row_error(&ref[int64_t(m) * h], row, a.out_m_contiguous ? inter : 1, h);
            worst = worse(worst, error);
          }
        }
      }
    }
    report(name_ + (parts == 2 ? " weight gradient gate_up" : " weight gradient down") +
               (a.out_m_contiguous ? " (m contiguous)" : ""),
           worst, 5e-3);
    report(name_ + " empty experts exactly zero", zeros ? 0 : 1, 0);
  }
  static bool is_zero(Half v) {
    uint16_t bits;
    std::memcpy(&bits, &v, 2);
    return bits == 0;
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
};

}  // namespace
