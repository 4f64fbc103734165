// SPDX-License-Identifier: Apache-2.0
// The experts by the kernels of compute capability 9.0.
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/experts/cuda_path.h"
#include "backend/cuda/sm90/launch_list.h"

namespace moec::cuda {
namespace {

// Products read factors as they read the weights beside them.
FactorForm factor_form(const ExpertMatrix& first, const ExpertMatrix* second) {
  if (second && columns_alternate(first, *second)) return FactorForm::kAlternating;
  return first.col_stride == 1 ? FactorForm::kAlongK : FactorForm::kAlongN;
}

class Sm90Path final : public CudaPath {
 public:
  using CudaPath::CudaPath;
  const char* name() const override { return "sm90"; }
  const char* refuses(const moec_experts_desc& desc) const override { return sm90_refuses(desc); }

  Between between(const moec_experts_desc& desc) const override {
    Between between = types(desc);
    between.recomputes_act = true;
    between.shared_group = SharedGroup::kTokens;
    between.adds_bias_dots = true;
    between.dot_floats = [](int64_t inter) { return int64_t(grad_down_dot_parts(inter)) + 1; };
    between.input_dot_floats = [](int64_t) { return int64_t(0); };
    Arena arena;
    lay_out_scratch(desc, arena);
    between.scratch = arena.size().base;
    between.factor_form = factor_form;
    return between;
  }

  const char* run(const Program& program, moec_stream stream) const override {
    const LaunchList list(program);
    if (list.refused()) return list.refused();
    const CudaBackend::Call call(backend_, stream);
    list.launch(call.op);
    call.op.count(0, program.flops);
    return nullptr;
  }

  const char* describe(const Program& program, std::string& text) const override {
    const LaunchList list(program);
    if (!list.refused()) list.describe({backend_.multiprocessors()}, text);
    return list.refused();
  }
};

}  // namespace

const char* sm90_refuses(const moec_experts_desc& desc) {
  const bool shared = desc.shared != MOEC_SHARED_NONE;
  const Lack rules[] = {
      {desc.dtype != MOEC_BF16 && desc.dtype != MOEC_F16, "f32"},
      {desc.hidden % 8 || desc.inter % 8, "a hidden or inter that is not a multiple of 8"},
      {desc.gate_layout == MOEC_GATE_NONE, "plain MLPs"},
      {!has_gate_form(desc.activation),
       "an activation that is not g sigmoid(p(g)) u with a rising p"},
      {desc.weight_position != MOEC_WEIGHT_ON_OUTPUT, "weights that are not on the output"},
      {desc.combine != MOEC_COMBINE_FP32_SLOT, "combines other than FP32_SLOT"},
      {desc.act_rounding != MOEC_ACT_FP32_ONCE, "act_rounding other than FP32_ONCE"},
      {shared && (desc.shared_inter % 8 || !has_gate_form(desc.shared_activation)),
       "this shared expert"},
      {desc.max_rows_base != 0, "expert choice"},
  };
  return first_lack(rules);
}

std::unique_ptr<const ExpertsPath> make_sm90_path(const CudaBackend& backend) {
  return std::make_unique<Sm90Path>(PathCounter::kSm90, backend, false);
}

}  // namespace moec::cuda
