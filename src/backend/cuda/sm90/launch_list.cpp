// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/sm90/launch_list.h"

#include <type_traits>
#include <utility>

#include "backend/cuda/device/check.h"
#include "backend/cuda/weights/factors.h"
#include "core/dtype.h"
#include "core/json_text.h"
#include "quant/format.h"

namespace moec::cuda {
namespace {

// Which axis of a gradient is contiguous, and the stride of the other one. Columns of gate and up
// may alternate, too.
struct Orientation {
  const char* refused;
  bool k_contiguous;
  int64_t stride;
};
Orientation orientation(const ExpertMatrix& first, const ExpertMatrix* second) {
  for (const ExpertMatrix* m : {&first, second}) {
    if (!m) continue;
    if (m->values.pointers) return {"experts that are separate tensors", false, 0};
    if (m->row_stride != first.row_stride || m->col_stride != first.col_stride ||
        m->values.expert_stride != first.values.expert_stride)
      return {"gate and up of different layouts", false, 0};
  }
  if (first.col_stride == 1) return {nullptr, true, first.row_stride};
  const bool contiguous = first.row_stride == 1 || (second && columns_alternate(first, *second));
  return {contiguous ? nullptr : "columns that are not contiguous", false, first.col_stride};
}

}  // namespace

LaunchList::LaunchList(const Program& program) : program_(program) {
  refuse_adapters(program.routed);
  for (int i = 0; i < program.num_steps && !refused_; ++i) {
    current_ = &program.steps[size_t(i)];
    std::visit(*this, *current_);
  }
}

void LaunchList::add(const Launch& launch, const Mlp* mlp, const char* step) {
  entries_[size_t(count_++)] = {mlp, step, launch};
}

// CTAs take the work of the routed experts from counters. The first product clears them.
void LaunchList::use_counters(const Mlp& mlp) {
  if (!is_routed(mlp) || counters_) return;
  auto* const counters = static_cast<WorkCounters*>(program_.scratch);
  counters_ = counters->gemms;
  done_ = mlp.groups.count <= WorkCounters::kExperts ? counters->done : nullptr;
  add(ClearCounters{counters});
}

// The products behind grad down read what it wrote, and nothing of each other. So the first waits
// for it, and the others for nothing. All take their tiles from counters: the small tiles of weight
// gradients fill the gaps that grad up leaves. Without rows no row product is launched, and each
// waits for those before.
Early LaunchList::after_grad_down(const Mlp& mlp) {
  if (!is_routed(mlp) || mlp.groups.max_rows == 0) return Early::kNothing;
  return std::exchange(next_, Early::kAll);
}

RowGemmProblem LaunchList::problem(RowGemm op, const Mlp& mlp, int64_t n, int64_t k,
                                   const ExpertMatrix& first, const ExpertMatrix* second) {
  RowGemmProblem p = {};
  p.op = op;
  p.dtype = mlp.dtype;
  refuse(set_matrices(p, n, k, first, second));
  p.row_token = mlp.row_token;
  p.group_offsets = mlp.groups.offsets;
  p.num_experts = mlp.groups.count;
  p.max_rows = mlp.groups.max_rows;
  p.out_stride = p.features;
  p.activation = mlp.activation;
  return p;
}

void LaunchList::add_row_gemm(RowGemmProblem problem, const Mlp& mlp) {
  if (counters_ && is_routed(mlp)) {
    problem.work_counter = &counters_->work;
    problem.steps = &counters_++->steps;
  }
  if (!refused_) refuse(row_gemm_refuses(problem));
  if (problem.early == Early::kNothing) fresh_.wait();
  for (const void* written : {problem.out, problem.d_pre}) fresh_.add(written);
  constexpr const char* kSteps[] = {"up", "down", "grad_up", "grad_down"};
  add(problem, &mlp, kSteps[int(problem.op)]);
}

void LaunchList::operator()(const Up& s) {
  const Mlp& mlp = *s.mlp;
  use_counters(mlp);
  const WeightsView& w = *mlp.weights;
  RowGemmProblem p = problem(RowGemm::kUp, mlp, mlp.inter, mlp.hidden, w.gate, &w.up);
  p.x = mlp.x.data.data;
  p.x_stride = mlp.hidden;
  p.pre = s.pre.gate;
  p.out = s.act;
  p.done = may_count_rows(mlp) ? done_ : nullptr;
  add_term(p, mlp.gate_up_adapters, s.narrow, mlp.gate_up_adapters.b[0],
           &mlp.gate_up_adapters.b[1]);
  add_row_gemm(p, mlp);
}

void LaunchList::operator()(const Down& s) {
  const Mlp& mlp = *s.mlp;
  RowGemmProblem p =
      problem(RowGemm::kDown, mlp, mlp.hidden, mlp.inter, mlp.weights->down, nullptr);
  p.rows = s.act;
  p.out = s.rows.data;
  p.early = Early::kWeights;
  p.done = may_count_rows(mlp) ? done_ : nullptr;
  add_term(p, mlp.down_adapters, s.narrow, mlp.down_adapters.b[0]);
  add_row_gemm(p, mlp);
}

void LaunchList::operator()(const ActGrad& s) {
  const Mlp& mlp = *s.mlp;
  use_counters(mlp);
  RowGemmProblem p =
      problem(RowGemm::kGradDown, mlp, mlp.hidden, mlp.inter, mlp.weights->down, nullptr);
  p.alternating = alternating(mlp);
  p.x = s.d_y.data;
  p.x_stride = mlp.hidden;
  p.pre = s.pre.gate;
  p.d_pre = s.d_pre.gate;
  p.out = s.weighted;
  p.row_weight = s.factor;
  p.d_weight_parts = s.dots;
  add_term(p, mlp.down_adapters, s.narrow, mlp.down_adapters.a);
  add_row_gemm(p, mlp);
}

void LaunchList::operator()(const InputGrad& s) {
  const Mlp& mlp = *s.mlp;
  const WeightsView& w = *mlp.weights;
  RowGemmProblem p = problem(RowGemm::kGradUp, mlp, mlp.inter, mlp.hidden, w.gate, &w.up);
  p.rows = s.d_pre.gate;
  p.out = s.rows.data;
  p.early = after_grad_down(mlp);
  add_term(p, mlp.gate_up_adapters, s.narrow, mlp.gate_up_adapters.a);
  add_row_gemm(p, mlp);
}

void LaunchList::operator()(const WeightGrads& s) {
  const Mlp& mlp = *s.mlp;
  const WeightsView& d = *mlp.gradients;
  if (d.gate.present() != d.up.present()) refuse("the gradient of only one of gate and up");
  if (d.down.present()) add_weight_grad(mlp, s.weighted, s.d_y.data, d.down, nullptr, s.accumulate);
  if (d.gate.present())
    add_weight_grad(mlp, s.d_pre.gate, mlp.x.data.data, d.gate, &d.up, s.accumulate);
  add_bias_grads(s);
}

void LaunchList::add_weight_grad(const Mlp& mlp, const void* rows, const void* gathered,
                                 const ExpertMatrix& first, const ExpertMatrix* second,
                                 bool accumulate) {
  const Orientation out = orientation(first, second);
  refuse(out.refused);
  const bool inter_is_k = second == nullptr;  // down: [H,I]
  const bool in_turn = second && alternating(mlp);
  if (second && columns_alternate(first, *second) != alternating(mlp))
    refuse("gradients of another layout");
  WeightGradArgs args = {};
  args.dtype = mlp.dtype;
  args.out_f32 = first.dtype == MOEC_F32;
  if (!args.out_f32 && first.dtype != mlp.dtype) refuse("weight gradients of this type");
  if (second && second->dtype != first.dtype) refuse("gradients of gate and up of two types");
  args.out_m_contiguous = out.k_contiguous == inter_is_k;
  args.parts = second && !in_turn ? 2 : 1;
  args.m_size = in_turn ? 2 * mlp.inter : mlp.inter;
  args.n_size = mlp.hidden;
  args.max_rows = mlp.groups.max_rows;
  args.rows = rows;
  args.out[0] = first.values.base;
  args.out[1] = second ? second->values.base : nullptr;
  args.out_stride = out.stride;
  args.out_expert_stride = first.values.expert_stride;
  args.params.x = gathered;
  args.params.x_stride = mlp.hidden;
  args.params.row_token = mlp.row_token;
  args.params.group_offsets = mlp.groups.offsets;
  args.params.num_experts = mlp.groups.count;
  args.params.accumulate = accumulate;
  args.params.early = after_grad_down(mlp);
  if (counters_ && is_routed(mlp)) args.params.work_counter = &counters_++->work;
  if (!refused_) refuse(weight_grad_refuses(args));
  add(args, &mlp, second ? "grad_weights_gate_up" : "grad_weights_down");
}

// Sums of columns of d_pre, and of d_y times factor.
void LaunchList::add_bias_grads(const WeightGrads& s) {
  const Mlp& mlp = *s.mlp;
  const WeightsView& d = *mlp.gradients;
  ColumnSums sums = {};
  sums.rows = rows_of(mlp);
  sums.accumulate = s.accumulate;
  sums.from = {s.d_pre.gate, mlp.dtype};
  sums.stride = 2 * mlp.inter;
  sums.width = mlp.inter;
  if (alternating(mlp)) {
    ExpertMatrix both = d.gate;
    const void* const next = both.bias.from(1).base;
    if (both.has_bias() != d.up.has_bias() ||
        (both.has_bias() && (both.bias_stride != 2 || d.up.bias.base != next)))
      refuse("gradients of biases of another layout");
    both.bias_stride = 1;
    sums.width = 2 * mlp.inter;
    add_bias_grad(both, sums);
  } else {
    add_bias_grad(d.gate, sums);
    sums.from.data = s.d_pre.up;
    add_bias_grad(d.up, sums);
  }
  ColumnSums of_down = {};
  of_down.rows = rows_of(mlp);
  of_down.accumulate = s.accumulate;
  of_down.of_tokens = true;
  of_down.from = s.d_y;
  of_down.stride = of_down.width = mlp.hidden;
  of_down.weight = s.factor;
  add_bias_grad(d.down, of_down);
}

void LaunchList::add_bias_grad(const ExpertMatrix& matrix, ColumnSums sums) {
  if (!matrix.has_bias()) return;
  if (matrix.bias.pointers) refuse("biases that are separate tensors");
  sums.out = matrix.bias;
  sums.out_stride = matrix.bias_stride;
  add(sums);
}

void LaunchList::operator()(const Combine& s) {
  if (s.shared_down) return add(current_);
  if (s.output_bias && s.output_bias.dtype != s.x.dtype)
    refuse("an output bias of another type than x");
  add_combine(combine_params(s));
}

void LaunchList::operator()(const CombineGrad& s) {
  if (s.desc->output_scale != 1.0f || s.mix || program_.shared || s.plan->num_zero > 0)
    return add(current_);
  const int parts = grad_down_dot_parts(program_.routed.inter) + (s.dots.biased ? 1 : 0);
  add_combine(combine_params(s, parts));
}

void LaunchList::add_combine(const CombineParams& params) {
  refuse(combine_refuses(params, program_.desc->dtype));
  add(params);
}

namespace {

// Steps that are compiled to products and never launched as they are.
template <class Kind>
constexpr bool kMultiplies =
    std::is_same_v<Kind, Up> || std::is_same_v<Kind, Down> || std::is_same_v<Kind, ActGrad> ||
    std::is_same_v<Kind, InputGrad> || std::is_same_v<Kind, WeightGrads> ||
    std::is_same_v<Kind, NarrowRows> || std::is_same_v<Kind, FactorGrads>;

// Queues one entry.
struct Launcher {
  const Op& op;
  moec_dtype dtype;

  void operator()(const RowGemmProblem& problem) const {
    const RowGemmChoice choice = choose(problem, {op.multiprocessors});
    check(launch_row_gemm(problem, choice, op.stream), "row GEMM");
    op.count(1 + has_gradient_rows(problem));
  }
  void operator()(const WeightGradArgs& args) const {
    check(launch_weight_grad(args, op.multiprocessors, op.stream), "weight gradient");
    op.count(1);
  }
  void operator()(const ColumnSums& sums) const { column_sums(op, sums); }
  void operator()(const CombineParams& params) const {
    check(launch_combine(params, dtype, op.multiprocessors, op.stream), "combine");
    op.count(1);
  }
  void operator()(const NarrowRowsArgs& args) const {
    check(launch_narrow_rows(args, op.stream), "narrow rows");
    op.count(1);
  }
  void operator()(const FactorGradArgs& args) const {
    check(launch_factor_grad(args, op.stream), "gradient of a factor");
    op.count(1);
  }
  void operator()(const ExpertSums& s) const {
    add_experts(op, s.sums, s.num_experts, s.n, s.k, s.out, s.accumulate);
  }
  void operator()(const Step* step) const {
    std::visit(
        [&](const auto& s) {
          using Kind = std::remove_cvref_t<decltype(s)>;
          if constexpr (requires(RowSteps steps) { steps(s); })
            RowSteps(op, dot_parts)(s);
          else if constexpr (std::is_same_v<Kind, PackFactors>)
            pack_factors(op, s, false);
          else
            static_assert(kMultiplies<Kind>, "a step that nothing runs");
        },
        *step);
  }
  template <class Clear>
  void operator()(const Clear& clear) const {
    check(clear_work_counters(clear.counters, op.stream), "work counters");
    op.count(1);
  }
  static int dot_parts(int64_t inter) { return grad_down_dot_parts(inter); }
};

// Adds what is known of one entry, or nothing for the small kernels between.
struct Describer {
  const RowGemmDevice& device;
  std::string step;
  std::string& text;

  void operator()(const RowGemmProblem& p) const {
    const RowGemmChoice choice = choose(p, device);
    const RowGemmTiles& t = choice.tiles;
    append(text,
           JsonObject()
               .add("step", step)
               .add("kernel", "sm90 row_gemm")
               .add("weights", p.scheme ? quant::find_format(p.scheme)->name : dtype_name(p.dtype))
               .add("tile_features", int64_t(t.tile_blocks + (t.wider_tiles > 0)) * 64)
               .add("feature_tiles", t.feature_tiles)
               .add("k", p.parts * p.k_size)
               .add("k_blocks", t.k_blocks)
               .add("rank", p.rank)
               .add("shares_weights", int64_t(t.shares))
               .add("in_pace", int64_t(choice.in_pace))
               .add("few_rows", int64_t(choice.few_rows))
               .add("ctas", choice.ctas));
    if (has_gradient_rows(p))
      append(text, JsonObject().add("step", step).add("kernel", "sm90 gradient_rows"));
  }
  void operator()(const WeightGradArgs& a) const {
    append(text, JsonObject()
                     .add("step", step)
                     .add("kernel", "sm90 weight_grad")
                     .add("tile", "256x128x64")
                     .add("m", a.parts * a.m_size)
                     .add("n", a.n_size));
  }
  void operator()(const CombineParams& p) const {
    append(text, JsonObject().add("step", "combine").add("kernel", "combine").add("k", p.top_k));
  }
  void operator()(const NarrowRowsArgs& a) const {
    add_narrow("sm90 narrow_rows", a.k * a.num_terms, a.rank);
  }
  void operator()(const FactorGradArgs& a) const {
    add_narrow("sm90 factor_grad", a.width, a.rank);
  }
  void add_narrow(const char* kernel, int64_t k, int64_t rank) const {
    append(text,
           JsonObject().add("step", step).add("kernel", kernel).add("k", k).add("rank", rank));
  }
  template <class Other>
  void operator()(const Other&) const {}
};

}  // namespace

void LaunchList::launch(const Op& op) const {
  const Launcher launcher{op, program_.desc->dtype};
  for (int i = 0; i < count_; ++i) std::visit(launcher, entries_[size_t(i)].launch);
}

void LaunchList::describe(const RowGemmDevice& device, std::string& text) const {
  for (int i = 0; i < count_; ++i) {
    const Entry& entry = entries_[size_t(i)];
    const char* const shared = entry.mlp == &program_.shared ? "shared_" : "";
    std::visit(Describer{device, std::string(shared) + entry.step, text}, entry.launch);
  }
}

}  // namespace moec::cuda
