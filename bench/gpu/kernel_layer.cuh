// SPDX-License-Identifier: Apache-2.0
// A layer made of the CUDA kernels, and each of them, on random data; beside it the same products
// as dense batched GEMMs of cuBLAS (equal counts; no routing, gather, activation or combine).
#pragma once

#include <cmath>
#include <cstring>
#include <string>

#include "backend/cuda/rows/combine.h"
#include "backend/cuda/sm90/row_gemm.h"
#include "backend/cuda/sm90/weight_grad.h"
#include "backend/cuda/sm90/work_counters.h"
#include "bound.cuh"
#include "gpu/device_problem.h"
#include "windows.cuh"

namespace moec::test {

struct Timed : Turn {
  Timed(const char* name, double flops, double bytes, std::function<void()> run)
      : Turn{std::move(run)}, name(name), flops(flops), bytes(bytes) {}
  const char* name;
  double flops, bytes;  // of real rows; bytes that must move
};

// ---- one shape -------------------------------------------------------------------------------
class Layer {
 public:
  Layer(const Shape& shape, int64_t tokens)
      : s_(shape),
        t_(tokens),
        r_(tokens * shape.top_k),
        plan_(random_routing(shape, tokens, 5), shape) {
    const int64_t h = s_.hidden, i = s_.inter, e = s_.experts;
    x_ = normal_array<Half>(t_ * h, 1.0f, 1);
    d_y_ = normal_array<Half>(t_ * h, 1.0f, 2);
    gate_up_ = normal_array<Half>(e * 2 * i * h, 1.0f / std::sqrt(float(h)), 3);
    down_ = normal_array<Half>(e * i * h, 1.0f / std::sqrt(float(i)), 4);
    act_ = DeviceArray<Half>(r_ * i);
    pre_ = DeviceArray<Half>(r_ * 2 * i);
    d_pre_ = DeviceArray<Half>(r_ * 2 * i);
    scaled_ = DeviceArray<Half>(r_ * i);
    rows_ = DeviceArray<Half>(r_ * h);
    y_ = DeviceArray<Half>(t_ * h);
    d_gate_up_ = DeviceArray<Half>(e * 2 * i * h);
    d_down_ = DeviceArray<Half>(e * i * h);
    parts_ = DeviceArray<float>(r_ * cuda::grad_down_dot_parts(i));
    d_weights_ = DeviceArray<float>(r_);
    CHECK_CUDA(cudaDeviceGetAttribute(&sms_, cudaDevAttrMultiProcessorCount, 0));
    plan();
  }

  void plan() const { plan_.build(); }
  void up(bool training, bool chained = false) const {
    auto a = row_args(cuda::RowGemm::kUp, s_.inter, s_.hidden, gate_up_.data());
    a.weights[1] = gate_up_.data() + int64_t(s_.inter) * s_.hidden;
    a.weight_stride = s_.hidden;
    a.expert_stride *= 2;
    a.x = x_.data();
    a.x_stride = s_.hidden;
    a.out = act_.data();
    a.out_stride = s_.inter;
    a.pre = training ? pre_.data() : nullptr;
    a.done = chained ? done() : nullptr;
    run(a, 0);
  }
  void down(cuda::Early early = cuda::Early::kNothing) const {
    auto a = row_args(cuda::RowGemm::kDown, s_.hidden, s_.inter, down_.data());
    a.weight_stride = s_.inter;
    a.early = early;
    if (early == cuda::Early::kWeights) a.done = done();
    a.rows = act_.data();
    a.out = rows_.data();
    a.out_stride = s_.hidden;
    run(a, 1);
  }
  void grad_down() const {
    auto a = row_args(cuda::RowGemm::kGradDown, s_.inter, s_.hidden, down_.data());
    a.weight_stride = s_.inter;
    a.weights_mn_major = true;
    a.x = d_y_.data();
    a.x_stride = s_.hidden;
    a.pre = pre_.data();
    a.d_pre = d_pre_.data();
    a.out = scaled_.data();
    a.out_stride = s_.inter;
    a.d_weight_parts = parts_.data();
    run(a, 2);
  }
  void grad_up(cuda::Early early = cuda::Early::kNothing) const {
    auto a = row_args(cuda::RowGemm::kGradUp, s_.hidden, s_.inter, gate_up_.data());
    a.weights[1] = gate_up_.data() + int64_t(s_.inter) * s_.hidden;
    a.weight_stride = s_.hidden;
    a.expert_stride *= 2;
    a.weights_mn_major = true;
    a.early = early;
    a.parts = 2;
    a.rows = d_pre_.data();
    a.out = rows_.data();
    a.out_stride = s_.hidden;
    run(a, 3);
  }
  void grad_weights(int parts, cuda::Early early = cuda::Early::kNothing) const {
    cuda::WeightGradArgs a = {};
    a.dtype = MOEC_BF16;
    a.out_m_contiguous = parts == 1;
    a.parts = parts;
    a.m_size = s_.inter;
    a.n_size = s_.hidden;
    a.max_rows = r_;
    a.rows = parts == 2 ? d_pre_.data() : scaled_.data();
    a.params.x = parts == 2 ? x_.data() : d_y_.data();
    a.params.x_stride = s_.hidden;
    a.params.row_token = plan_.plan.row_token;
    a.params.group_offsets = plan_.plan.group_offsets;
    a.params.num_experts = s_.experts;
    a.params.early = early;
    a.params.work_counter = &counters_.data()->gemms[3 + parts].work;
    a.out_expert_stride = int64_t(parts) * s_.inter * s_.hidden;
    a.out_stride = parts == 2 ? s_.hidden : s_.inter;
    a.out[0] = parts == 2 ? d_gate_up_.data() : d_down_.data();
    a.out[1] = d_gate_up_.data() + int64_t(s_.inter) * s_.hidden;
    CHECK_CUDA(cuda::launch_weight_grad(a, sms_, nullptr));
  }
  void combine(bool backward) const {
    cuda::CombineParams p = plan_.combine(s_.hidden, rows_.data(), y_.data());
    if (backward) {
      p.routing_weights = nullptr;
      p.d_weight_parts = parts_.data();
      p.parts = cuda::grad_down_dot_parts(s_.inter);
      p.max_rows = r_;
      p.d_routing_weights = d_weights_.data();
    }
    CHECK_CUDA(cuda::launch_combine(p, MOEC_BF16, sms_, nullptr));
  }
  void poison_counters() { counters_.poison(); }
  void clear() const { CHECK_CUDA(cuda::clear_work_counters(counters_.data(), nullptr)); }
  void forward(bool training) const {
    plan();
    clear();
    up(training, true);
    down(cuda::Early::kWeights);
    combine(false);
  }
  void backward() const {
    clear();
    grad_down();
    grad_up();
    grad_weights(1, cuda::Early::kAll);
    grad_weights(2, cuda::Early::kAll);
    combine(true);
  }
  void bound(const Cublas& cublas) const {
    const int n = int(r_ / s_.experts);
    cublas.batched(s_.experts, 2 * s_.inter, n, s_.hidden, gate_up_.data(), rows_.data(),
                   pre_.data());
    cublas.batched(s_.experts, s_.hidden, n, s_.inter, down_.data(), scaled_.data(), rows_.data());
  }

  std::vector<Timed> timed(const Cublas& cublas) const {
    const double flops = 2.0 * double(r_) * s_.hidden * s_.inter;
    const double w = 2.0 * s_.experts * double(s_.hidden) * s_.inter;  // bytes of one matrix
    const double xb = 2.0 * double(t_) * s_.hidden, ib = 2.0 * double(r_) * s_.inter;
    const double rb = 2.0 * double(r_) * s_.hidden;
    const auto cleared = [this](auto kernel) {
      return [this, kernel] {
        clear();
        kernel();
      };
    };
    std::vector<Timed> all = {
        {"plan", 0, 28.0 * r_, [this] { plan(); }},
        {"up", 2 * flops, 2 * w + xb + ib, cleared([this] { up(false); })},
        {"up_train", 2 * flops, 2 * w + xb + 3 * ib, cleared([this] { up(true); })},
        {"down", flops, w + ib + rb, cleared([this] { down(); })},
        {"combine", 0, rb + xb, [this] { combine(false); }},
        {"grad_down", flops, w + xb + 5 * ib, cleared([this] { grad_down(); })},
        {"grad_w_down", flops, w + xb + ib, cleared([this] { grad_weights(1); })},
        {"grad_up", 2 * flops, 2 * w + 2 * ib + rb, cleared([this] { grad_up(); })},
        {"grad_w_up", 2 * flops, 2 * w + xb + 2 * ib, cleared([this] { grad_weights(2); })},
        {"combine_back", 0, rb + xb, [this] { combine(true); }},
        {"forward", 3 * flops, 3 * w + 2 * xb + 2 * ib + 2 * rb, [this] { forward(false); }},
        {"forward_backward", 9 * flops, 9 * w,
         [this] {
           forward(true);
           backward();
         }},
    };
    if (cublas.present()) {
      all.push_back({"cublas_bmm_bound", 3 * flops, 3 * w, [this, &cublas] { bound(cublas); }});
    }
    return all;
  }

 private:
  cuda::RowGemmProblem row_args(cuda::RowGemm op, int features, int k_size,
                                const Half* weights) const {
    cuda::RowGemmProblem a = plan_.row_gemm(op, features, k_size);
    a.weights[0] = weights;
    a.expert_stride = int64_t(s_.inter) * s_.hidden;
    return a;
  }
  unsigned* done() const { return counters_.data()->done; }
  void run(cuda::RowGemmProblem a, int counter) const {
    a.work_counter = &counters_.data()->gemms[counter].work;
    a.steps = &counters_.data()->gemms[counter].steps;
    CHECK_CUDA(cuda::launch_row_gemm(a, cuda::choose(a, {sms_}), nullptr));
  }

  Shape s_;
  int64_t t_, r_;
  int sms_ = 0;
  DevicePlan plan_;
  DeviceArray<Half> x_, d_y_, gate_up_, down_, act_, pre_, d_pre_, scaled_, rows_, y_, d_gate_up_,
      d_down_;
  DeviceArray<float> parts_, d_weights_;
  DeviceArray<cuda::WorkCounters> counters_{1};
};

}  // namespace moec::test
