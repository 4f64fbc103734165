// SPDX-License-Identifier: Apache-2.0
// The products of the experts, forward and backward, against plain loops.
#pragma once

#include "gpu/experts_problem.cuh"

namespace {

class Check : ExpertsProblem {
 public:
  using ExpertsProblem::ExpertsProblem;

  void run() {
    up(MOEC_ACT_SWIGLU);
    up(MOEC_ACT_GPTOSS);
    up(MOEC_ACT_GEGLU_TANH);
    if (transposed_) up(MOEC_ACT_SWIGLU, true);
    if (transposed_) up(MOEC_ACT_GPTOSS, true);
    down();
    grad_up();
    grad_down(MOEC_ACT_SWIGLU);
    grad_down(MOEC_ACT_GPTOSS);
    grad_down(MOEC_ACT_GEGLU_TANH);
    grad_down(MOEC_ACT_SWIGLU, true);
    grads<Half>(1);
    if (c_.stride > 1) return;
    grads<Half>(2);
    grads<float>(1);
    grads<float>(2);
  }

 private:
  // pairs: the same weights, read as columns of gate and up in turn.
  void up(uint32_t kind, bool pairs = false) {
    const int h = c_.shape.hidden, inter = c_.shape.inter;
    const std::string name = name_ + act_name(kind) + (kind == MOEC_ACT_SWIGLU ? "" : " biases,") +
                             (pairs ? " pairs of columns," : "");
    const auto gate_bias = normal_array<float>(c_.shape.experts * inter, 0.5f, seed + 11);
    const auto up_bias = normal_array<Half>(c_.shape.experts * inter, 0.5f, seed + 12);
    const auto gate_bias_of = gate_bias.host();
    const auto up_bias_of = up_bias.host();
    auto a = plan_.row_gemm(cuda::RowGemm::kUp, inter, h);
    set_gate_up(a, false);
    a.alternating = pairs;
    a.activation = activation(kind);
    if (kind != MOEC_ACT_SWIGLU) {
      a.bias[0] = {gate_bias.data(), inter, 1, true};
      a.bias[1] = {up_bias.data(), inter, 1, false};
    }
    a.x = x_.data();
    a.x_stride = h;
    DeviceArray<Half> act(rows_ * inter), bare(rows_ * inter), pre(rows_ * 2 * inter);
    a.out = act.data();
    a.out_stride = inter;
    a.pre = pre.data();
    launch(a);
    a.out = bare.data();
    a.pre = nullptr;
    launch(a);
    // Other values in all odd tokens: the bits of even ones stay.
    auto changed = x_.host();
    for (size_t i = 0; i < changed.size(); ++i)
      if (i / h % 2 == 1) changed[i] = __float2bfloat16(-3.0f * __bfloat162float(changed[i]));
    DeviceArray<Half> changed_x(changed.size()), beside(rows_ * inter);
    changed_x.assign(changed);
    a.x = changed_x.data();
    a.out = beside.data();
    launch(a);
    const int64_t fs = pairs ? 2 : transposed_ ? 1 : h, ks = transposed_ ? 2 * inter : 1;
    const int64_t second = pairs ? 1 : inter * fs;
    auto gate = plain(plan_.plan.row_token, inter, h, x_.data(), h, gate_up_.data(),
                      2LL * inter * h, fs, ks);
    auto upper = plain(plan_.plan.row_token, inter, h, x_.data(), h, gate_up_.data() + second,
                       2LL * inter * h, fs, ks);
    const auto got = act.host(), got_bare = bare.host(), got_pre = pre.host();
    double worst = 0, worst_pre = 0;
    std::vector<float> value(inter);
    for (size_t i = 0; i < sample_.size(); ++i) {
      const int64_t r = sample_[i];
      if (row_token_[r] < 0) continue;
      float *g = &gate[i * inter], *u = &upper[i * inter];
      for (int f = 0; f < inter; ++f) {
        if (kind != MOEC_ACT_SWIGLU) {
          g[f] += gate_bias_of[sample_expert_[i] * inter + f];
          u[f] += __bfloat162float(up_bias_of[sample_expert_[i] * inter + f]);
        }
        value[f] = float(plain_activation(kind, g[f], u[f]).value);
      }
      worst = worse(worst, row_error(value.data(), &got[r * inter], 1, inter));
      worst = worse(worst, row_error(value.data(), &got_bare[r * inter], 1, inter));
      worst_pre = worse(worst_pre, row_error(g, &got_pre[r * 2 * inter], 1, inter));
      worst_pre = worse(worst_pre, row_error(u, &got_pre[(r * 2 + 1) * inter], 1, inter));
    }
    report(name + " up", worst, 1e-2);
    report(name + " up pre-activations", worst_pre, 5e-3);
    const bool same = std::memcmp(got.data(), got_bare.data(), got.size() * 2) == 0;
    report(name + " up, with and without pre-activations equal", same ? 0 : 1, 0);
    const auto got_beside = beside.host();
    int64_t moved = 0;
    for (int64_t r = 0; r < rows_; ++r) {
      if (row_token_[r] < 0 || row_token_[r] % 2 == 1) continue;
      moved += std::memcmp(&got[r * inter], &got_beside[r * inter], inter * 2) != 0;
    }
    report(name + " up, rows that feel their neighbours", double(moved), 0);
    guards(act, "up");
    guards(pre, "up pre-activations");
  }

  void down() {
    const int h = c_.shape.hidden, inter = c_.shape.inter;
    for (int parity = 0; parity < 2; ++parity) {
      auto act = normal_array<Half>(rows_ * inter, 1.0f, seed + 4);
      poison_rows(act, inter, parity);
      auto a = plan_.row_gemm(cuda::RowGemm::kDown, h, inter);
      set_down(a, true);
      const auto bias = normal_array<Half>(c_.shape.experts * h, 0.5f, seed + 13);
      if (parity == 1) a.bias[0] = {bias.data(), h, 1, false};
      DeviceArray<Half> y(rows_ * h);
      a.rows = act.data();
      a.out = y.data();
      a.out_stride = h;
      launch(a);
      auto reference = plain(nullptr, h, inter, act.data(), inter, down_.data(), int64_t(inter) * h,
                             transposed_ ? 1 : inter, transposed_ ? h : 1);
      const auto bias_of = bias.host();
      for (size_t i = 0; i < reference.size() && parity == 1; ++i) {
        reference[i] += __bfloat162float(bias_of[sample_expert_[i / h] * h + i % h]);
      }
      compare_rows(
          name_ + (parity == 1 ? " down with bias, NaN neighbours" : " down, NaN neighbours"),
          reference, y.host(), h, parity);
      guards(y, "down");
    }
  }

  void grad_up() {
    const int h = c_.shape.hidden, inter = c_.shape.inter;
    for (int parity = 0; parity < 2; ++parity) {
      auto d_pre = normal_array<Half>(rows_ * 2 * inter, 1.0f, seed + 5);
      poison_rows(d_pre, 2 * inter, parity);
      auto a = plan_.row_gemm(cuda::RowGemm::kGradUp, h, inter);
      set_gate_up(a, true);
      a.parts = 2;
      a.rows = d_pre.data();
      DeviceArray<Half> d_x(rows_ * h);
      a.out = d_x.data();
      a.out_stride = h;
      launch(a);
      const auto reference =
          plain(nullptr, h, 2 * inter, d_pre.data(), 2 * inter, gate_up_.data(), 2LL * inter * h,
                transposed_ ? 2 * inter : 1, transposed_ ? 1 : h);
      compare_rows(name_ + " grad up, NaN neighbours", reference, d_x.host(), h, parity);
      guards(d_x, "grad up");
    }
  }

  // pairs: d_pre as [P, I, 2].
  void grad_down(uint32_t kind, bool pairs = false) {
    const int h = c_.shape.hidden, inter = c_.shape.inter;
    const std::string name = name_ + act_name(kind) + (pairs ? " pairs," : "");
    const auto pre = normal_array<Half>(rows_ * 2 * inter, 1.5f, seed + 6);
    auto a = plan_.row_gemm(cuda::RowGemm::kGradDown, inter, h);
    set_down(a, false);
    a.activation = activation(kind);
    a.alternating = pairs;
    a.x = x_.data();  // stands for d_y
    a.x_stride = h;
    a.pre = const_cast<Half*>(pre.data());
    const int parts = cuda::grad_down_dot_parts(inter);
    DeviceArray<Half> d_pre(rows_ * 2 * inter), scaled(rows_ * inter);
    DeviceArray<float> d_weight(parts * rows_);
    a.d_pre = d_pre.data();
    a.out = scaled.data();
    a.out_stride = inter;
    a.d_weight_parts = d_weight.data();
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
        const double d = d_act[i * inter + f], w = row_weight[r];
        const Value v = plain_activation(kind, g, u);
        value[f] = float(w * v.value);
        d_gate[f] = float(w * d * v.d_gate);
        d_up[f] = float(w * d * v.d_up);
        weight += d * v.value;
        scale += std::fabs(d * v.value);
      }
      worst = worse(worst, row_error(value.data(), &got[r * inter], 1, inter));
      const Half *const d_pre_row = &got_pre[r * 2 * inter],
                        *d_pre_up = d_pre_row + (pairs ? 1 : inter);
      worst_pre = worse(worst_pre, row_error(d_gate.data(), d_pre_row, pairs ? 2 : 1, inter));
      worst_pre = worse(worst_pre, row_error(d_up.data(), d_pre_up, pairs ? 2 : 1, inter));
      double sum = 0;
      for (int part = 0; part < parts; ++part) sum += got_weight[part * rows_ + r];
      worst_weight = worse(worst_weight, std::fabs(sum - weight) / scale);
    }
    // d_act is rounded once before it is used: half an ulp of bf16 is at most 2^-8 of each term.
    report(name + " grad down, d_pre", worst_pre, 8e-3);
    report(name + " grad down, weighted act", worst, 5e-3);
    report(name + " grad down, routing weight gradient", worst_weight, 4e-3);
    guards(d_pre, "grad down");
    guards(scaled, "grad down");
    guards(d_weight, "grad down");
  }

  // Both weight gradients in both orientations of the output.
  // Out: the type of the gradient. The second of two launches adds to the first.
  template <typename Out>
  void grads(int launches) {
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
        DeviceArray<Out> out(size * c_.shape.experts);
        a.out_f32 = sizeof(Out) == 4;
        a.out_expert_stride = size;
        a.out_stride = a.out_m_contiguous ? inter : h;
        for (int part = 0; part < parts; ++part)
          a.out[part] = out.data() + part * int64_t(inter) * h;
        if (const char* why = cuda::weight_grad_refuses(a)) {
          std::printf("FAIL refused: %s\n", why);
          ++failures;
          continue;
        }
        for (int i = 0; i < launches; ++i) {
          a.params.accumulate = i > 0;
          const unsigned turn = turn_of({a.out_f32, a.out_m_contiguous});
          a.single_tiles = turn % 2 ? cuda::kSingleTiles : 0;  // 0: all in runs
          a.params.work_counter = cleared_counter(turn);
          CHECK_CUDA(cuda::launch_weight_grad(a, multiprocessors(), nullptr));
        }
        CHECK_CUDA(cudaDeviceSynchronize());
        compare_grad(a, out, rows, parity, launches);
        guards(out, "weight gradient");
      }
    }
  }

  template <typename Out>
  void compare_grad(const cuda::WeightGradArgs& a, const DeviceArray<Out>& out,
                    const DeviceArray<Half>& rows, int parity, int launches) {
    const int inter = int(a.m_size), h = int(a.n_size), parts = a.parts;
    DeviceArray<float> reference(int64_t(inter) * h);
    const auto got = out.host();
    double worst = 0;
    bool zeros = true;
    const int step = c_.stride == 1 ? 1 : std::max(1, c_.shape.experts / 3);
    int fullest = 0;
    const auto count = [&](int e) { return offsets_[e + 1] - offsets_[e]; };
    for (int e = 1; e < c_.shape.experts; ++e) fullest = count(e) > count(fullest) ? e : fullest;
    for (int e = 0; e < c_.shape.experts; ++e) {
      if (e % step != 0 && e != fullest) continue;
      if (e % 2 == parity && count(e) > 0) continue;
      for (int part = 0; part < parts; ++part) {
        plain_grad<<<unsigned((int64_t(inter) * h + 255) / 256), 256>>>(
            offsets_[e], offsets_[e + 1], plan_.plan.row_token, inter, h,
            rows.data() + part * inter, parts * inter, x_.data(), reference.data());
        CHECK_CUDA(cudaGetLastError());
        auto ref = reference.host();
        for (float& value : ref) value *= float(launches);
        const Out* const mine = &got[(int64_t(e) * parts + part) * inter * h];
        for (int m = 0; m < inter; ++m) {
          const Out* row = a.out_m_contiguous ? mine + m : mine + int64_t(m) * h;
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
               (a.out_m_contiguous ? " (m contiguous)" : "") + (a.out_f32 ? " f32" : "") +
               (launches > 1 ? " added" : ""),
           worst, a.out_f32 ? 1e-5 : 5e-3);
    report(name_ + " empty experts exactly zero", zeros ? 0 : 1, 0);
  }
};

}  // namespace
