// SPDX-License-Identifier: Apache-2.0
// The kernel and the tile of each product of a program, at the mean number of rows per expert.
#include <algorithm>

#include "backend/cpu/experts_path.h"
#include "backend/cpu/gemm.h"
#include "backend/cpu/mlp.h"
#include "core/dtype.h"
#include "core/json_text.h"
#include "quant/format.h"

namespace moec::cpu {
namespace {

class Describer {
 public:
  Describer(const Program& program, std::string& text) : program_(program), text_(text) {}

  template <class Other>
  void operator()(const Other&) const {}  // no product
  void operator()(const Up& s) const { add_product(*s.mlp, "gate_up", up_product(s)); }
  void operator()(const Down& s) const { add_product(*s.mlp, "down", down_product(s)); }
  void operator()(const ActGrad& s) const {
    if (s.wants_d_pre || s.wants_dots) add_product(*s.mlp, "d_act", act_grad_product(s));
  }
  void operator()(const InputGrad& s) const { add_product(*s.mlp, "d_x", input_grad_product(s)); }
  void operator()(const WeightGrads& s) const {  // both operands are of the type of x
    const Mlp& mlp = *s.mlp;
    const auto add = [&](const char* step, int64_t n, int64_t k, int matrices) {
      append(text_, product(mlp, step, wgrad_kernel_name(mlp.dtype, rows_per_expert(mlp)), n, k,
                            matrices));
    };
    if (mlp.gradients->down.present()) add("d_down", mlp.hidden, mlp.inter, 1);
    if (mlp.gradients->up.present()) add("d_gate_up", mlp.inter, mlp.hidden, mlp.parts());
  }

 private:
  bool is_shared(const Mlp& mlp) const { return &mlp == &program_.shared; }

  // A kernel's name ends with its tile: "avx512 f32 12x32".
  JsonObject product(const Mlp& mlp, const char* step, const std::string& kernel, int64_t n,
                     int64_t k, int matrices) const {
    const size_t space = kernel.rfind(' ');
    return JsonObject()
        .add("step", (is_shared(mlp) ? "shared_" : "") + std::string(step))
        .add("kernel", kernel.substr(0, space))
        .add("tile", kernel.substr(space + 1))
        .add("rows_per_expert", rows_per_expert(mlp))
        .add("n", n)
        .add("k", k)
        .add("matrices", int64_t(matrices));
  }
  void add_product(const Mlp& mlp, const char* step, const GroupedGemm& gemm) const {
    const ExpertMatrix& weights = *gemm.terms[0].b.matrix;
    const int64_t n = gemm.n, k = gemm.terms[0].k;
    const int matrices = gemm.num_terms;  // there are no adapters
    const auto* const format = quant::find_format(weights.scheme);
    const int64_t bits = format ? format->code_bits : 8 * dtype_bytes(weights.values.dtype);
    append(text_, product(mlp, step, gemm_kernel_name(gemm, rows_per_expert(mlp)), n, k, matrices)
                      .add("weight_bytes", experts_hit(mlp) * matrices * n * k * bits / 8));
  }
  int64_t experts_hit(const Mlp& mlp) const {  // at most
    if (is_shared(mlp) || program_.desc->max_rows_base) return mlp.groups.count;
    return std::min<int64_t>(mlp.groups.count, program_.num_tokens * program_.desc->top_k);
  }
  int64_t rows_per_expert(const Mlp& mlp) const {
    const moec_experts_desc& desc = *program_.desc;
    const int64_t tokens = program_.num_tokens;
    if (is_shared(mlp)) return tokens;
    if (!desc.max_rows_base) return (tokens * desc.top_k + desc.num_experts - 1) / desc.num_experts;
    return std::min<int64_t>(desc.max_rows_base / std::max(1, mlp.groups.count), tokens);
  }

  const Program& program_;
  std::string& text_;
};

}  // namespace

const char* CpuExperts::describe(const Program& program, std::string& text) const {
  for (int i = 0; i < program.num_steps; ++i)
    std::visit(Describer(program, text), program.steps[size_t(i)]);
  return nullptr;
}

}  // namespace moec::cpu
