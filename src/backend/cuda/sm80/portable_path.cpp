// SPDX-License-Identifier: Apache-2.0
// The experts on every GPU from compute capability 8.0 on: products and row kernels, one after the
// other. What no wanted gradient needs is not computed.
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/device/pointer_table.h"
#include "backend/cuda/experts/cuda_path.h"
#include "backend/cuda/experts/row_steps.h"
#include "backend/cuda/sm80/row_product.h"
#include "core/dtype.h"
#include "core/json_text.h"

namespace moec::cuda {
namespace {

// The matrices of an MLP and their gradients, with arrays of pointers on the device.
struct DeviceMlp {
  DeviceMatrix gate, up, down, d_gate, d_up, d_down;

  DeviceMlp() = default;
  DeviceMlp(const Mlp& mlp, PointerTable& table) {
    if (!mlp) return;
    place(*mlp.weights, table, gate, up, down);
    if (mlp.gradients) place(*mlp.gradients, table, d_gate, d_up, d_down);
  }

 private:
  static void place(const WeightsView& from, PointerTable& table, DeviceMatrix& gate,
                    DeviceMatrix& up, DeviceMatrix& down) {
    if (from.gated) gate = table.device(from.gate, from.num_experts);
    up = table.device(from.up, from.num_experts);
    down = table.device(from.down, from.num_experts);
  }
};

Preact preact_of(const Mlp& mlp, const PartRows& parts, moec_dtype dtype) {
  Preact pre;
  pre.data = {parts.gate ? parts.gate : parts.up, dtype};
  pre.gated = mlp.gated();
  pre.inter = mlp.inter;
  pre.activation = mlp.activation;
  if (mlp.act_rounding == MOEC_ACT_PER_OP && mlp.dtype != MOEC_F32) pre.rounding = mlp.dtype;
  return pre;
}

class Runner {
 public:
  Runner(const Op& op, const Program& program, moec_dtype pre)
      : op_(op), program_(program), pre_(pre), rows_(op, nullptr) {
    PointerTable table(op, program.scratch);
    routed_ = DeviceMlp(program.routed, table);
    shared_ = DeviceMlp(program.shared, table);
    table.flush();
  }

  template <class Other>
  void operator()(const Other& step) const {
    rows_(step);
  }

  void operator()(const Up& s) const {
    const Mlp& mlp = *s.mlp;
    const DeviceMlp& device = device_of(mlp);
    const Preact pre = preact_of(mlp, s.pre, pre_);
    RowProduct p;
    p.groups = mlp.groups;
    p.n = mlp.inter;
    p.k = mlp.hidden;
    p.parts = mlp.parts();
    p.a = mlp.x;
    p.b[0] = mlp.gated() ? &device.gate : &device.up;
    p.b[1] = mlp.gated() ? &device.up : nullptr;
    p.biased = true;
    p.c = pre.data;
    p.c_stride = s.pre.stride;
    row_product(op_, p);
    if (s.act) activate(op_, rows_of(mlp), pre, s.act_weight, {s.act, mlp.dtype});
  }

  void operator()(const Down& s) const {
    const Mlp& mlp = *s.mlp;
    RowProduct p;
    p.groups = mlp.groups;
    p.n = mlp.hidden;
    p.k = mlp.inter;
    p.a = {{const_cast<void*>(s.act), mlp.dtype}, mlp.inter, nullptr};
    p.b[0] = &device_of(mlp).down;
    p.biased = true;
    p.bias_weight = s.bias_weight;
    p.c = s.rows;
    p.c_stride = mlp.hidden;
    row_product(op_, p);
  }

  void operator()(const ActGrad& s) const {
    const Mlp& mlp = *s.mlp;
    ActGradient step;
    if (s.wants_d_pre || s.wants_dots) {
      step.q = s.d_act;
      RowProduct p;
      p.groups = mlp.groups;
      p.n = mlp.inter;
      p.k = mlp.hidden;
      p.a = output_rows(mlp, s.d_y);
      p.b[0] = &device_of(mlp).down;
      p.transposed = true;
      p.c = step.q;
      p.c_stride = mlp.inter;
      row_product(op_, p);
    }
    step.factor = s.factor;
    if (s.wants_d_pre) step.d_pre = elements(mlp, s.d_pre.gate ? s.d_pre.gate : s.d_pre.up);
    if (s.wants_weighted) step.weighted = elements(mlp, s.weighted);
    if (s.wants_dots) step.dots = s.dots;
    act_gradient(op_, rows_of(mlp), preact_of(mlp, s.pre, pre_), step);
  }

  void operator()(const BiasDots& s) const {
    const Mlp& mlp = *s.mlp;
    row_dots(op_, rows_of(mlp), mlp.hidden, {}, &device_of(mlp).down.view, s.d_y, true, s.dots);
  }

  void operator()(const InputGrad& s) const {
    const Mlp& mlp = *s.mlp;
    const DeviceMlp& device = device_of(mlp);
    RowProduct p;
    p.groups = mlp.groups;
    p.n = mlp.hidden;
    p.k = mlp.inter;
    p.parts = mlp.parts();
    p.sum = true;
    p.a = {elements(mlp, mlp.gated() ? s.d_pre.gate : s.d_pre.up), s.d_pre.stride, nullptr};
    p.b[0] = mlp.gated() ? &device.gate : &device.up;
    p.b[1] = mlp.gated() ? &device.up : nullptr;
    p.transposed = true;
    p.c = s.rows;
    p.c_stride = mlp.hidden;
    row_product(op_, p);
    if (s.input_dots)
      row_dots(op_, rows_of(mlp), mlp.hidden, s.rows, nullptr, s.x, false, s.input_dots);
  }

  void operator()(const WeightGrads& s) const {
    const Mlp& mlp = *s.mlp;
    const DeviceMlp& device = device_of(mlp);
    const RowOperand gate = {elements(mlp, s.d_pre.gate), s.d_pre.stride, nullptr};
    const RowOperand up = {elements(mlp, s.d_pre.up), s.d_pre.stride, nullptr};
    const RowOperand act = {elements(mlp, s.weighted), mlp.inter, nullptr};
    const struct {
      const DeviceMatrix& d;
      int64_t n, k;
      RowOperand g, x;
      const float* weight;  // of g's rows in the gradient of the bias; x already has it
    } products[] = {{device.d_down, mlp.hidden, mlp.inter, output_rows(mlp, s.d_y), act, s.factor},
                    {device.d_gate, mlp.inter, mlp.hidden, gate, mlp.x, nullptr},
                    {device.d_up, mlp.inter, mlp.hidden, up, mlp.x, nullptr}};
    for (const auto& p : products) {
      const ExpertMatrix& d = p.d.view;
      if (d.present()) weight_product(op_, {mlp.groups, p.n, p.k, p.g, p.x, &p.d, s.accumulate});
      if (d.has_bias())
        column_sums(op_, {rows_of(mlp), p.g.gather != nullptr, p.g.data, p.g.stride, p.n, p.weight,
                          1, d.bias, d.bias_stride, s.accumulate});
    }
  }

 private:
  const DeviceMlp& device_of(const Mlp& mlp) const {
    return &mlp == &program_.shared ? shared_ : routed_;
  }
  static Array elements(const Mlp& mlp, const void* data) {
    return {const_cast<void*>(data), mlp.dtype};
  }
  static RowOperand output_rows(const Mlp& mlp, const Array& d_y) {
    return {d_y, mlp.hidden, mlp.row_token};
  }

  const Op& op_;
  const Program& program_;
  const moec_dtype pre_;  // type of pre-activations
  const RowSteps rows_;
  DeviceMlp routed_, shared_;
};

// The products of a program, by name.
struct Describer {
  const Program& program;
  std::string& text;

  template <class Other>
  void operator()(const Other&) const {}
  void operator()(const Up& s) const { add(*s.mlp, "up", s.mlp->inter, s.mlp->hidden); }
  void operator()(const Down& s) const { add(*s.mlp, "down", s.mlp->hidden, s.mlp->inter); }
  void operator()(const ActGrad& s) const { add(*s.mlp, "grad_down", s.mlp->inter, s.mlp->hidden); }
  void operator()(const InputGrad& s) const { add(*s.mlp, "grad_up", s.mlp->hidden, s.mlp->inter); }
  void operator()(const WeightGrads& s) const {
    add(*s.mlp, "grad_weights", s.mlp->inter, s.mlp->hidden);
  }
  // Unaligned operands take the plain kernel, too, but alignment is not known before the memory.
  void add(const Mlp& mlp, const char* step, int64_t n, int64_t k) const {
    const bool halves = mlp.dtype != MOEC_F32 && n % 8 == 0 && k % 8 == 0;
    append(text, JsonObject()
                     .add("step", (&mlp == &program.shared ? "shared_" : "") + std::string(step))
                     .add("kernel", halves ? "portable mma" : "portable plain")
                     .add("tile", halves ? "128x128x32" : "128x128x16")
                     .add("n", n)
                     .add("k", k));
  }
};

class PortablePath final : public CudaPath {
 public:
  using CudaPath::CudaPath;
  const char* name() const override { return "portable"; }
  const char* refuses(const moec_experts_desc&) const override { return nullptr; }

  Between between(const moec_experts_desc& desc) const override {
    Between between = types(desc);
    between.keeps_pre = between.keeps_d_act = true;
    between.adds_bias_dots = true;
    between.dot_floats = between.input_dot_floats = [](int64_t) { return int64_t(1); };
    between.scratch = PointerTable::bytes(desc.expert_end - desc.expert_begin + 1);
    return between;
  }

  const char* run(const Program& program, moec_stream stream) const override {
    const CudaBackend::Call call(backend_, stream);
    const Runner runner(call.op, program, types(*program.desc).pre);
    for (int i = 0; i < program.num_steps; ++i) std::visit(runner, program.steps[size_t(i)]);
    call.op.count(0, program.flops);
    return nullptr;
  }

  const char* describe(const Program& program, std::string& text) const override {
    for (int i = 0; i < program.num_steps; ++i)
      std::visit(Describer{program, text}, program.steps[size_t(i)]);
    return nullptr;
  }
};

}  // namespace

std::unique_ptr<const ExpertsPath> make_portable_path(const CudaBackend& backend, bool wide) {
  return std::make_unique<PortablePath>(backend, wide);
}

}  // namespace moec::cuda
