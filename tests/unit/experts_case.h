// SPDX-License-Identifier: Apache-2.0
// One experts call of the CPU backend beside the oracle: random problem, layouts of the weights,
// plan, buffers of exactly the stated size (poisoned, guarded), and the errors of every result.
#pragma once

#include <gtest/gtest.h>

#include <memory>

#include "backend/cpu/packing.h"
#include "oracle/moe_oracle.h"
#include "support/compare.h"
#include "support/guard.h"
#include "support/random.h"
#include "unit/cpu_device.h"

namespace moec::test {

enum class Layout { kOutIn, kInOut, kInterleaved, kPointers };  // of the weights and gradients

struct ExpertsCase {
  std::string name = "";
  int tokens = 13, experts = 6, hidden = 40, inter = 24, top_k = 2, zero = 0;
  moec_dtype dtype = MOEC_F32, grad_dtype = MOEC_F32;
  uint32_t act = MOEC_ACT_SWIGLU, shared_act = MOEC_ACT_SWIGLU;
  uint32_t position = 0, combine = 0, rounding = 0, shared = 0, save = MOEC_SAVE_PREACT;
  int shared_inter = 0, align = 1, begin = 0, end = 0, capacity = 0;  // capacity: expert choice
  bool bias = false, residual = false, output_bias = false, packed = false, accumulate = false;
  float scale = 1;
  Layout layout = Layout::kOutIn;
  double input_size = 1;  // standard deviation of x: large ones reach the clamps
};

// Of a row's error. In 16 bits fp32 and the oracle may round a value to two neighbours, which
// differ by up to 2^-7 or 2^-10 of it; a row of a gradient can be one value times x.
inline double tolerance(moec_dtype dtype) {
  constexpr double kFp32 = 2e-5;
  return kFp32 + (dtype == MOEC_F32 ? 0 : dtype == MOEC_BF16 ? 0x1p-7 : 0x1p-10);
}

// Values rounded to a dtype.
inline oracle::Vec representable(moec_dtype dtype, oracle::Vec values) {
  return Stored(dtype, values).values();
}

// [E,N,K] (and bias [E,N]) in one of the layouts, with room between experts that must stay
// poisoned.
class BoundMatrix {
 public:
  BoundMatrix() = default;
  // part 0 of 1, or 0 and 1 of 2 matrices that share rows alternately (kInterleaved).
  void place(Layout layout, moec_dtype dtype, int64_t E, int64_t N, int64_t K, int part, int parts,
             bool bias) {
    E_ = E, N_ = N, K_ = K;
    const bool mixed = layout == Layout::kInterleaved && parts == 2;
    const int64_t step = mixed ? 2 : 1, gap = 7;
    matrix_ = {};
    matrix_.dtype = matrix_.values.dtype = matrix_.bias.dtype = dtype;
    matrix_.row_stride = layout == Layout::kInOut ? 1 : step * K;
    matrix_.col_stride = layout == Layout::kInOut ? N : 1;
    matrix_.values.expert_stride = step * N * K + gap;
    memory_.assign(size_t((E * matrix_.values.expert_stride + 1) * dtype_bytes(dtype)), kPoison);
    char* const base = reinterpret_cast<char*>(memory_.data());
    const int64_t offset = mixed ? part * K : 0;
    for (int64_t e = 0; e < E; ++e)
      pointers_.push_back(base + (E - 1 - e) * matrix_.values.expert_stride * dtype_bytes(dtype));
    matrix_.values.base = base + offset * dtype_bytes(dtype);
    matrix_.values.pointer_offset = offset;
    if (layout == Layout::kPointers)
      matrix_.values.base = nullptr, matrix_.values.pointers = pointers_.data();
    if (!bias) return;
    bias_.assign(size_t(E * N * 2 * dtype_bytes(dtype)), kPoison);
    matrix_.bias_stride = step;
    matrix_.bias.expert_stride = step * N;
    matrix_.bias.base = bias_.data();
  }
  void write(const oracle::Vec& values, const oracle::Vec& bias) {
    each([&](const MatrixView& m, int64_t at, size_t i) {
      store_real(m.data, m.dtype, at, float(values[i]));
    });
    each_bias([&](const MatrixView& m, int64_t at, size_t i) {
      store_real(m.data, m.dtype, at, float(bias[i]));
    });
  }
  void drop() { matrix_.values.base = nullptr, matrix_.values.pointers = nullptr; }
  oracle::Vec values() const {
    oracle::Vec all(matrix_.present() ? size_t(E_ * N_ * K_) : 0);
    each([&](const MatrixView& m, int64_t at, size_t i) {
      all[i] = load_real(m.data, m.dtype, at);
    });
    return all;
  }
  oracle::Vec bias_values() const {
    oracle::Vec all(matrix_.has_bias() ? size_t(E_ * N_) : 0);
    each_bias([&](const MatrixView& m, int64_t at, size_t i) {
      all[i] = load_real(m.data, m.dtype, at);
    });
    return all;
  }
  const ExpertMatrix& matrix() const { return matrix_; }

 private:
  template <class Body>
  void each(const Body& body) const {
    for (int64_t e = 0, i = 0; matrix_.present() && e < E_; ++e) {
      const MatrixView m = matrix_.expert(e);
      for (int64_t n = 0; n < N_; ++n)
        for (int64_t k = 0; k < K_; ++k, ++i)
          body(m, n * m.row_stride + k * m.col_stride, size_t(i));
    }
  }
  template <class Body>
  void each_bias(const Body& body) const {
    for (int64_t e = 0, i = 0; matrix_.has_bias() && e < E_; ++e)
      for (int64_t n = 0; n < N_; ++n, ++i)
        body(matrix_.bias_of(e), n * matrix_.bias_of(e).row_stride, size_t(i));
  }
  int64_t E_ = 0, N_ = 0, K_ = 0;
  ExpertMatrix matrix_;
  std::vector<uint8_t> memory_, bias_;
  std::vector<void*> pointers_;
};

// A set of experts' weights or gradients, and its view.
struct BoundMlp {
  BoundMatrix gate, up, down;
  WeightsView view;
  std::vector<uint8_t> packed;

  void place(Layout layout, moec_dtype dtype, bool gated, int64_t E, int64_t H, int64_t I,
             bool bias) {
    view.hidden = H, view.inter = I, view.num_experts = int32_t(E), view.gated = gated;
    if (gated) gate.place(layout, dtype, E, I, H, 0, 2, bias);
    up.place(layout, dtype, E, I, H, 1, gated ? 2 : 1, bias);
    down.place(layout, dtype, E, H, I, 0, 1, bias);
    view.gate = gate.matrix(), view.up = up.matrix(), view.down = down.matrix();
  }
  void write(const oracle::MlpWeights& w) {
    if (view.gated) gate.write(w.gate, w.gate_bias);
    up.write(w.up, w.up_bias);
    down.write(w.down, w.down_bias);
  }
  void fill(double value) {
    const auto all = [&](BoundMatrix& m) {
      m.write(oracle::Vec(m.values().size(), value), oracle::Vec(m.bias_values().size(), value));
    };
    all(gate), all(up), all(down);
  }
  // Leave out matrices (their biases stay).
  void drop(bool inner, bool down_too) {
    if (!inner) gate.drop(), up.drop();
    if (!down_too) down.drop();
    view.gate = gate.matrix(), view.up = up.matrix(), view.down = down.matrix();
  }
  // Packed, and then nothing else to read.
  void pack(const cpu::Device& device) {
    const cpu::CpuPacking packing(device.pool);
    packed.assign(packing.bytes(view) + kCacheLine, kPoison);
    void* const start = reinterpret_cast<void*>(round_up(uint64_t(packed.data()), kCacheLine));
    packing.pack(view, start, 0, view.num_experts, nullptr);
    view.packed = start;
    view.source_present = false;
    for (ExpertMatrix* m : {&view.gate, &view.up, &view.down})
      m->values.base = nullptr, m->values.pointers = nullptr;
  }
};

// The oracle's plan as the backend sees it.
struct BoundPlan {
  oracle::Plan plan;
  std::vector<float> row_weight, weights;
  std::vector<int32_t> token_offsets, token_rows;
  PlanView view;

  void bind(const ExpertsCase& c, const oracle::Config& config, const oracle::Route& route) {
    plan = oracle::build_plan(config, c.tokens, route.slots, route.ids, route.weights);
    row_weight = to_floats(plan.row_weight), weights = to_floats(route.weights);
    view.num_tokens = c.tokens, view.max_rows = int64_t(plan.row_token.size());
    view.num_experts = c.experts, view.num_zero = c.zero, view.top_k = c.capacity ? 0 : c.top_k;
    view.expert_begin = c.begin, view.num_local = int32_t(plan.counts.size()), view.align = c.align;
    view.counts = plan.counts.data(), view.group_offsets = plan.group_offsets.data();
    view.row_token = plan.row_token.data(), view.row_slot = plan.row_slot.data();
    view.row_weight = row_weight.data(), view.assignment_row = plan.assignment_row.data();
    view.expert_ids = plan.expert_ids.data(), view.routing_weights = weights.data();
    view.totals = plan.totals.data();
    if (!c.capacity) return;
    view.kind = MOEC_PLAN_EXPERT_CHOICE, view.capacity = c.capacity;
    token_offsets.push_back(0);
    for (int t = 0; t < c.tokens; ++t) {
      for (int e = 0; e < route.slots; ++e) {
        const int row = plan.assignment_row[size_t(t * route.slots + e)];
        if (row >= 0) token_rows.push_back(row);
      }
      token_offsets.push_back(int32_t(token_rows.size()));
    }
    view.token_offsets = token_offsets.data(), view.token_rows = token_rows.data();
    view.assignment_row = view.expert_ids = nullptr, view.routing_weights = nullptr;
  }
};

class ExpertsProblem {
 public:
  explicit ExpertsProblem(const ExpertsCase& given);

  const ExpertsCase c;
  moec_experts_desc desc = {};
  oracle::Config config;
  oracle::Inputs in;
  oracle::Route route;
  BoundPlan plan;
  BoundMlp experts, shared;
  Stored x, shared_gate, shared_gate_bias, output_bias, residual, d_y;
  bool gated() const { return is_gated(oracle::Act(c.act)); }
  bool shared_gated() const { return is_gated(oracle::Act(c.shared_act)); }

  struct Output {
    Stored y;
    std::vector<uint8_t> saved;
  };
  Output forward(const cpu::Device& device);

  struct Gradients {  // absent ones are empty
    Stored x, routing, shared_gate, shared_gate_bias, output_bias, residual;
    BoundMlp experts, shared;
  };
  // Which gradients are asked for; all of them by default.
  struct Wanted {
    bool x = true, routing = true, inner = true, down = true, bias = true, gate = true, rest = true;
  };
  std::unique_ptr<Gradients> backward(const cpu::Device& device, const std::vector<uint8_t>& saved,
                                      const Wanted& wanted);
  // The largest error of all gradients that are there; which one goes to *worst.
  double gradient_error(const Gradients& gradients, std::string* worst) const;
  oracle::Vec expected_y() const {
    return oracle::experts_forward(config, in, in.x, route, plan.plan);
  }
};

}  // namespace moec::test
