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

const char* step_of(RowGemm op) {
  constexpr const char* kSteps[] = {"up", "down", "grad_up", "grad_down"};
  return kSteps[int(op)];
}

}  // namespace

LaunchList::LaunchList(const Program& program) : program_(program) {
  Arena arena(program.scratch, 0);
  scratch_ = lay_out_scratch(*program.desc, arena);
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
  WorkCounters* const counters = scratch_.counters;
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
  p.row_token = mlp.row_token;
  p.group_offsets = mlp.groups.offsets;
  p.num_experts = mlp.groups.count;
  p.max_rows = mlp.groups.max_rows;
  p.activation = mlp.activation;
  RowGemmProblem bound = p;
  const char* why = set_matrices(bound, n, k, first, second);
  bound.out_stride = bound.features;
  decoded_ = {};
  const bool has_rows = !form_of(op).gathered || rows_of_later(op);
  bound.wide =
      is_routed(mlp) && !why && has_rows && takes_wide_tiles(bound, mlp.groups.choice_rows);
  if (is_routed(mlp) && first.is_coded() && !bound.wide) {
    const char* const refused = why ? why : row_gemm_refuses(bound);  // of the weights: no rows yet
    const char* const of_values = set_decoded(decoded_, p, mlp.groups.choice_rows, n, k, first,
                                              second, scratch_of(op), refused);
    if (decoded_.is_used()) why = of_values;
  }
  refuse(why);
  return decoded_.is_used() ? decoded_.problem : bound;
}

void LaunchList::add_row_gemm(RowGemmProblem problem, const Mlp& mlp) {
  if (counters_ && is_routed(mlp)) {
    problem.work_counter = &counters_->work;
    problem.steps = &counters_++->steps;
  }
  if (!refused_) refuse(row_gemm_refuses(problem));
  if (decoded_.is_used()) problem.early = Early::kNothing;
  if (problem.early == Early::kNothing) fresh_.wait();
  for (const void* written : {problem.out, problem.d_pre}) fresh_.add(written);
  const char* const step = step_of(problem.op);
  decoded_.problem = problem;
  decoded_.is_used() ? add(decoded_, &mlp, step) : add(problem, &mlp, step);
}

// Rows of x into those of down, which writes an expert's when up has read them; of d_y into those
// of grad up.
void LaunchList::put_in_order(RowGemmProblem& p, const Mlp& mlp) {
  void* const to = rows_of_later(p.op)->data;
  const OrderedRows rows = {p.x, p.x_stride, p.row_token, p.group_offsets + p.num_experts,
                            to,  p.k_size,   p.max_rows};
  if (!refused_) refuse(ordered_rows_refuses(rows));
  add(rows, &mlp, step_of(p.op));
  p.rows = to;
  p.in_order = true;
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
  if (p.wide) put_in_order(p, mlp);
  if (is_routed(mlp)) wide_up_ = p.wide;
  p.done = may_count_rows(mlp) ? done_ : nullptr;
  if (is_routed(mlp)) done_ = p.done;
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
  p.after_wide = is_routed(mlp) && wide_up_;
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
  if (p.wide) put_in_order(p, mlp);
  p.pre = s.pre.gate;
  p.d_pre = s.d_pre.gate;
  p.out = s.weighted;
  p.row_weight = s.factor;
  p.d_weight_parts = s.dots;
  p.keeps_act = s.wants_weighted;
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
  void operator()(const DecodedProduct& product) const { launch_decoded(op, product); }
  void operator()(const WeightGradArgs& args) const {
    check(launch_weight_grad(args, op.multiprocessors, op.stream), "weight gradient");
    op.count(1);
  }
  void operator()(const ColumnSums& sums) const { column_sums(op, sums); }
  void operator()(const CombineParams& params) const {
    check(launch_combine(params, dtype, op.multiprocessors, op.stream), "combine");
    op.count(1);
  }
  void operator()(const OrderedRows& args) const {
    check(launch_ordered_rows(args, op.multiprocessors, op.stream), "rows in order");
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
               .add("wide", int64_t(p.wide))
               .add("ctas", choice.ctas));
    if (has_gradient_rows(p))
      append(text, JsonObject().add("step", step).add("kernel", "sm90 gradient_rows"));
  }
  void operator()(const DecodedProduct& product) const {
    append(text, decoding_kernel(step, product.experts));
    (*this)(product.problem);
  }
  void operator()(const WeightGradArgs& a) const {
    append(text, JsonObject()
                     .add("step", step)
                     .add("kernel", "sm90 weight_grad")
                     .add("tile", "256x128x64")
                     .add("m", a.parts * a.m_size)
                     .add("n", a.n_size));
  }
  void operator()(const OrderedRows& a) const {
    append(text, JsonObject().add("step", step).add("kernel", "sm90 ordered_rows").add("k", a.k));
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
