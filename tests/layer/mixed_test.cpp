// SPDX-License-Identifier: Apache-2.0
// Layers whose every property is drawn at random, in every type, experts in every format: what no
// list of cases crosses. Forward and every gradient against the oracle. MOEC_MIXED_CASES of them
// (48), others for each MOEC_TEST_SEED. Mutations noted: an output bias left out beside a residual;
// in bf16, x times a weight on the input, and one column of the gradient at the gates, 1 % too
// large; zero points of codes left out; in the oracle, the nibbles of a stream exchanged.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "cases/feature_cases.h"
#include "support/draw.h"
#include "support/layer_check.h"
#include "support/quant_draw.h"
#include "support/skip.h"

namespace moec::test {
namespace {

using oracle::Act;
using oracle::Shared;
using oracle::Vec;

constexpr int64_t kMostProducts = 3'000'000;  // of one matrix and all rows

struct Problem {
  oracle::Config config;
  oracle::Inputs in;
  Vec d_y;
  std::unique_ptr<DrawnCodes> codes, shared_codes;  // null: the matrices are plain
  RunOptions options;
  std::string text;  // what was drawn
};

class Maker {
 public:
  Maker(int index, moec_dtype dtype) : name_("mixed" + std::to_string(index)), draw_(seed(index)) {
    p_.options.dtype = dtype;
    draw_formats();
    draw_sizes();
    draw_experts();
    draw_shared();
    draw_ids();
    draw_options();
    draw_codes(index);
  }
  Problem take() { return std::move(p_); }

 private:
  static uint64_t seed(int index) { return 7919 * static_cast<uint64_t>(index) + 1; }
  template <typename T>
  T noted(const char* what, T value) {
    p_.text += std::string(" ") + what + " " + std::to_string(static_cast<long long>(value));
    return value;
  }
  Vec values(const char* what, int64_t count, double scale) {
    Vec v = oracle::random_values(name_ + what, static_cast<size_t>(count), scale);
    oracle::round_to_all(&v);
    return v;
  }
  Vec values_if(double p, const char* what, int64_t count, double scale) {
    return noted(what, draw_.chance(p)) ? values(what, count, scale) : Vec{};
  }

  // Of frozen codes in the place of the matrices, of the shared expert or not; of a few cases gate
  // and up are coded alone.
  void draw_formats() {
    if (!noted("codes", draw_.chance(0.3))) return;
    const auto format = [&](const char* what) {
      const QuantCase& c = kQuantCases[size_t(draw_.below(int64_t(kQuantCases.size())))];
      p_.text += std::string(" ") + what + " " + c.name;
      return &c;
    };
    gate_up_format_ = format("gate_up");
    down_format_ = gate_up_format_;
    if (draw_.chance(0.5)) down_format_ = draw_.chance(0.3) ? nullptr : format("down");
    if (draw_.chance(0.5)) shared_format_ = format("of shared");
  }
  // That extents of these formats are multiples of.
  static int multiple_of(std::initializer_list<const QuantCase*> formats) {
    int multiple = 1;
    for (const QuantCase* c : formats)
      if (c) multiple = std::lcm(multiple, std::lcm(c->multiple_n, c->multiple_k));
    return multiple;
  }

  void draw_sizes() {
    oracle::RouterConfig& r = p_.config.router;
    r.num_experts = noted("E", draw_.one_of({1, 2, 3, 5, 8, 12, 33, 70}));
    if (gate_up_format_) r.num_experts = noted("coded E", std::min(r.num_experts, 12));
    r.num_zero_experts = noted("Z", draw_.one_of({0, 0, 0, 1, 2}));
    r.top_k = noted("K", 1 + static_cast<int>(draw_.below(std::min(r.columns(), 8))));
    hidden_ = noted("H", rounded_up(draw_.one_of({8, 16, 31, 64, 72, 136, 200, 264, 520}),
                                    multiple_of({gate_up_format_, down_format_, shared_format_})));
    inter_ = noted("I", rounded_up(draw_.one_of({8, 16, 31, 64, 72, 136, 200, 264}),
                                   multiple_of({gate_up_format_, down_format_})));
    const int tokens = draw_.one_of({1, 2, 3, 4, 5, 8, 16, 17, 40, 100, 129, 200, 300});
    const int64_t most = kMostProducts / (int64_t{r.top_k} * hidden_ * inter_);
    tokens_ = noted("T", std::clamp<int>(tokens, 1, static_cast<int>(std::max<int64_t>(most, 1))));
    p_.config.experts.hidden = hidden_;
    p_.config.experts.inter = inter_;
    p_.in.tokens = tokens_;
    p_.in.x = values("x", int64_t{tokens_} * hidden_, 1);
    p_.d_y = values("d_y", int64_t{tokens_} * hidden_, 1);
    p_.in.gate_weight = values("router", int64_t{r.columns()} * hidden_, 1 / std::sqrt(hidden_));
    r.select = oracle::Select::kGiven;
    // Not where a weight is 1 whatever the logits: its gradient would be rounding on both sides.
    r.score = r.columns() == 1 ? oracle::Score::kSigmoid
                               : draw_.one_of({oracle::Score::kSoftmax, oracle::Score::kSigmoid});
    empty_slots_ = noted("empty_slots", draw_.chance(0.2));
    const bool sums = r.top_k > 1 && r.num_zero_experts == 0 && !empty_slots_;
    r.norm = sums ? draw_.one_of({oracle::Norm::kNone, oracle::Norm::kSum}) : oracle::Norm::kNone;
    r.scale = draw_.one_of({1.0, 1.0, 2.5});
  }

  // Clamps have another gradient on either side: of few elements none is near.
  oracle::Activation activation(const char* what, int64_t elements) {
    oracle::Activation a;
    do {
      a.kind = draw_.one_of(oracle::kActs).kind;
    } while (elements > 2'000 && info_of(a.kind).limit);
    a.limit = 1.5;
    a.linear_beta = draw_.one_of({0.0, 2.0});
    noted(what, static_cast<int>(a.kind));
    return a;
  }
  oracle::MlpWeights mlp(const std::string& what, int experts, int inter, Act act) {
    const std::string gate = what + "gate", up = what + "up", down = what + "down";
    const int64_t matrix = int64_t{experts} * hidden_ * inter;
    const double by_hidden = 1 / std::sqrt(hidden_);
    oracle::MlpWeights w;
    const bool biased = noted((what + "biased").c_str(), draw_.chance(0.5));
    if (is_gated(act)) {
      w.gate = values(gate.c_str(), matrix, by_hidden);
      if (biased) w.gate_bias = values((gate + "_bias").c_str(), int64_t{experts} * inter, 0.5);
    }
    w.up = values(up.c_str(), matrix, by_hidden);
    if (biased) w.up_bias = values((up + "_bias").c_str(), int64_t{experts} * inter, 0.5);
    w.down = values(down.c_str(), matrix, 1 / std::sqrt(inter));
    w.down_bias = values_if(0.5, (down + "_bias").c_str(), int64_t{experts} * hidden_, 0.5);
    return w;
  }
  void draw_experts() {
    oracle::ExpertsConfig& e = p_.config.experts;
    e.weight_position =
        draw_.chance(0.8)
            ? oracle::WeightPosition::kOutput
            : draw_.one_of({oracle::WeightPosition::kActivation, oracle::WeightPosition::kInput});
    noted("position", static_cast<int>(e.weight_position));
    e.activation = activation("act", int64_t{tokens_} * p_.config.router.top_k * inter_);
    e.output_scale = draw_.one_of({1.0, 1.0, 0.5, -2.0});
    noted("scale*2", 2 * e.output_scale);
    p_.in.experts = mlp("", p_.config.router.num_experts, inter_, e.activation.kind);
    p_.in.residual = values_if(0.3, "residual", int64_t{tokens_} * hidden_, 1);
    p_.in.output_bias = values_if(0.3, "output_bias", hidden_, 0.5);
  }
  void draw_shared() {
    oracle::ExpertsConfig& e = p_.config.experts;
    e.shared = draw_.one_of(
        {Shared::kNone, Shared::kNone, Shared::kAdd, Shared::kSigmoidGate, Shared::kSoftmax2});
    if (tokens_ < 8 && e.shared != Shared::kNone) e.shared = Shared::kAdd;  // one sum may cancel
    noted("shared", static_cast<int>(e.shared));
    if (e.shared == Shared::kNone) return;
    e.shared_inter = noted(
        "shared_I", rounded_up(draw_.one_of({8, 16, 31, 88, 136}), multiple_of({shared_format_})));
    e.shared_activation = activation("shared_act", int64_t{tokens_} * e.shared_inter);
    p_.in.shared = mlp("shared_", 1, e.shared_inter, e.shared_activation.kind);
    if (e.shared == Shared::kAdd) return;
    const int gates = e.shared == Shared::kSoftmax2 ? 2 : 1;
    p_.in.shared_gate = values("mix", int64_t{gates} * hidden_, 1 / std::sqrt(hidden_));
    if (gates == 2) p_.in.shared_gate_bias = values_if(0.5, "mix_bias", 2, 0.5);
  }

  // K of the experts that have any rows, in random order; some slots, some tokens have none.
  void draw_ids() {
    const oracle::RouterConfig& r = p_.config.router;
    std::vector<int> ids(static_cast<size_t>(r.columns()));
    std::iota(ids.begin(), ids.end(), 0);
    const auto shuffle = [&](size_t most) {
      for (size_t n = most; n > 1; --n)
        std::swap(ids[n - 1], ids[static_cast<size_t>(draw_.below(static_cast<int64_t>(n)))]);
    };
    shuffle(ids.size());
    size_t used = ids.size();
    if (draw_.chance(0.4))
      used = static_cast<size_t>(r.top_k + draw_.below(1 + (r.columns() - r.top_k) / 2));
    noted("used", used);
    for (int t = 0; t < tokens_; ++t) {
      shuffle(used);
      for (int k = 0; k < r.top_k; ++k)
        p_.in.given_ids.push_back(empty_slots_ && draw_.chance(0.2) ? -1
                                                                    : ids[static_cast<size_t>(k)]);
    }
    if (noted("masked", draw_.chance(0.15)))
      for (int t = 0; t < tokens_; ++t) p_.in.token_mask.push_back(!draw_.chance(0.3));
    oracle::PlanConfig& plan = p_.config.plan;
    plan.align = noted("align", draw_.one_of({1, 1, 1, 2, 16, 64, 128}));
    if (!draw_.chance(0.15)) return;
    plan.drop = draw_.one_of({oracle::Drop::kByPosition, oracle::Drop::kByWeight});
    plan.capacity = 1 + draw_.below(2 * tokens_ * r.top_k / r.num_experts + 1);
    noted("drop", static_cast<int>(plan.drop));
    noted("capacity", plan.capacity);
  }

  void draw_options() {
    RunOptions& o = p_.options;
    o.layout.gate_layout = draw_.one_of<uint32_t>(
        {MOEC_GATE_SPLIT, MOEC_GATE_THEN_UP, MOEC_UP_THEN_GATE, MOEC_GATE_INTERLEAVED});
    o.layout.gate_up_orientation = draw_.one_of<uint32_t>({MOEC_OUT_IN, MOEC_IN_OUT});
    o.layout.down_orientation = draw_.one_of<uint32_t>({MOEC_OUT_IN, MOEC_IN_OUT});
    o.layout.per_expert = draw_.chance(0.2);
    o.layout.per_expert_bias = draw_.chance(0.2);
    o.save = draw_.one_of<uint32_t>(
        {MOEC_SAVE_NONE, MOEC_SAVE_INPUT, MOEC_SAVE_PREACT, MOEC_SAVE_PREACT, MOEC_SAVE_ALL});
    o.combine = draw_.one_of<uint32_t>(
        {MOEC_COMBINE_FP32_SLOT, MOEC_COMBINE_FP32_SLOT, MOEC_COMBINE_FP32_EXPERT});
    o.grad_dtype = draw_.chance(0.5) ? o.dtype : moec_dtype{MOEC_F32};
    o.accumulate = o.dtype == MOEC_F32 && draw_.chance(0.3);
    o.frozen = draw_.chance(0.15);
    o.num_threads = draw_.one_of({0, 1, 3});
    noted("layout", o.layout.gate_layout);
    noted("in_out", o.layout.gate_up_orientation * 2 + o.layout.down_orientation);
    noted("per_expert", o.layout.per_expert * 2 + o.layout.per_expert_bias);
    noted("save", o.save);
    noted("combine", o.combine);
    noted("f32 grads", o.grad_dtype == MOEC_F32);
    noted("accumulate", o.accumulate);
    noted("frozen", o.frozen);
  }

  void draw_codes(int index) {
    Random random(seed(index));
    const auto replace = [&](const QuantCase* gate_up, const QuantCase* down, int experts,
                             int inter, oracle::MlpWeights* w, std::unique_ptr<DrawnCodes>* to) {
      if (!gate_up || w->up.empty()) return;
      const WeightLayout& layout = p_.options.layout;
      const QuantShape shape = {w->gate.empty() ? uint32_t{MOEC_GATE_NONE} : layout.gate_layout,
                                layout.gate_up_orientation == MOEC_IN_OUT,
                                layout.down_orientation == MOEC_IN_OUT,
                                layout.per_expert,
                                hidden_,
                                inter};
      *to = std::make_unique<DrawnCodes>(gate_up, down, shape, experts, &random);
      (*to)->replace(p_.options.dtype, w);
    };
    replace(gate_up_format_, down_format_, p_.config.router.num_experts, inter_, &p_.in.experts,
            &p_.codes);
    replace(shared_format_, shared_format_, 1, p_.config.experts.shared_inter, &p_.in.shared,
            &p_.shared_codes);
  }

  std::string name_;
  Draw draw_;
  const QuantCase *gate_up_format_ = nullptr, *down_format_ = nullptr, *shared_format_ = nullptr;
  int tokens_ = 0, hidden_ = 0, inter_ = 0;
  bool empty_slots_ = false;
  Problem p_;
};

struct Bound {
  double error, floor;
};
// Sums that nearly cancel are no rarer here than elsewhere, but nobody has chosen the seed: in fp32
// they need a floor. In 16 bits the oracle rounds as the layer does. What is left is the rounding
// of the result, and values that fp32 rounds to their other neighbour: once on the way, or twice
// where products leave 16 bits.
Bound bound(const Problem& p, const Type& type, const InnerRounding& rounding) {
  if (type.dtype == MOEC_F32) return {p.options.accumulate ? 1e-4 : 4e-5, kTypicalRow};
  if (rounding.between == oracle::Rounding::kNone) return {type.tolerance, kRowFloor};
  return {2 * type.tolerance, kTypicalRow};
}

// Codes have no gradient; their biases have.
void drop_frozen(const Problem& p, oracle::Gradients* gradients) {
  for (const auto& [codes, of] : {std::pair{p.codes.get(), &gradients->experts},
                                  std::pair{p.shared_codes.get(), &gradients->shared}}) {
    if (codes && codes->bound().gate_up_scheme) of->gate = of->up = {};
    if (codes && codes->bound().down_scheme) of->down = {};
  }
}

class Mixed : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Layer, Mixed, testing::Range(0, mixed_cases(48)));

TEST_P(Mixed, MatchesTheOracle) {
  SCOPED_TRACE(seed_note());
  int number = 3 * GetParam();
  for (const Type& type : kTypes) {
    Problem p = Maker(number++, type.dtype).take();
    if (p.codes) p.options.bound = &p.codes->bound();
    if (p.shared_codes) p.options.shared_bound = &p.shared_codes->bound();
    SCOPED_TRACE(std::string(type.name) + p.text);
    const LayerRun run = run_layer(p.config, p.in, p.d_y, {}, p.options);
    OracleRun reference = run_oracle(as_rounded(p.config, run.rounding), p.in, p.d_y, {});
    drop_frozen(p, &reference.grads);
    const Bound most = bound(p, type, run.rounding);
    expect_matches(run, reference, p.config, p.in, most.error, most.floor);
  }
}

}  // namespace
}  // namespace moec::test
