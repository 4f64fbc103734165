// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/experts_path.h"

#include "backend/cpu/adapters.h"
#include "backend/cpu/combine.h"
#include "backend/cpu/dots.h"
#include "backend/cpu/mlp.h"
#include "backend/cpu/shared_gate.h"

namespace moec::cpu {
namespace {

class StepRunner {
 public:
  StepRunner(const ThreadPool& pool, void* scratch) : pool_(pool), scratch_(scratch) {}

  void operator()(const ListTokens& s) const {
    s.offsets[0] = 0;
    s.offsets[1] = int32_t(s.num_tokens);
  }
  void operator()(const ScaleRows& s) const { scale_rows(pool_, s); }
  void operator()(const MixForward& s) const { mix_forward(pool_, s); }
  void operator()(const Up& s) const { run_up(pool_, s, scratch_); }
  void operator()(const Down& s) const {
    if (s.rows) store_rows(pool_, s, scratch_);
  }
  void operator()(const Combine& s) const { combine(pool_, s, scratch_); }
  void operator()(const ClearPadding& s) const { clear_padding(s); }
  void operator()(const RowFactors& s) const { row_factors(pool_, s); }
  void operator()(const MixFactors& s) const { mix_factors(pool_, s); }
  void operator()(const ActGrad& s) const { run_act_grad(pool_, s, scratch_); }
  void operator()(const BiasDots&) const {}  // output_dot() adds it
  void operator()(const InputGrad& s) const {
    if (s.rows) store_rows(pool_, s, scratch_);
  }
  void operator()(const WeightGrads& s) const { run_weight_grads(pool_, s, scratch_); }
  void operator()(const GateGrad& s) const { gate_grad(pool_, s); }
  void operator()(const CombineGrad& s) const {
    if (s.d_x) combine(pool_, s, scratch_);
    if (s.d_routing_weights) routing_weight_grads(pool_, s);
  }
  void operator()(const DirectGrads& s) const { direct_grads(pool_, s); }
  void operator()(const PackFactors& s) const { pack_factors(pool_, s); }
  void operator()(const NarrowRows& s) const { run_narrow_rows(pool_, s, scratch_); }
  void operator()(const FactorGrads& s) const { run_factor_grads(pool_, s, scratch_); }

 private:
  const ThreadPool& pool_;
  void* const scratch_;  // of the grouped products
};

}  // namespace

Between CpuExperts::between(const moec_experts_desc&) const {
  Between between;
  between.pre = between.d_act = between.rows = MOEC_F32;
  between.parts_apart = true;
  between.fuses_shared = true;
  between.shared_group = SharedGroup::kOffsets;
  between.host_plan = true;
  between.dot_floats = between.input_dot_floats = dot_columns;
  between.scratch = uint64_t(gemm_scratch_bytes(pool_.size()));
  return between;
}

const char* CpuExperts::run(const Program& program, moec_stream) const {
  const StepRunner runner(pool_, program.scratch);
  for (int i = 0; i < program.num_steps; ++i) std::visit(runner, program.steps[size_t(i)]);
  if (host_.count_launch) host_.count_launch(host_.self, 1, program.flops);
  return nullptr;
}

}  // namespace moec::cpu
