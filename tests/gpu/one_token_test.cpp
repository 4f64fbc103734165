// SPDX-License-Identifier: Apache-2.0
// One token and experts of codes along k, whose two kernels (sm80/one_token_codes.cu) do all of a
// forward: each format against the oracle in shapes of every kind of line, and with all that a
// layer has beside its products. Mutations noted: sums of warps that share a set in one place; a
// scale and an operand behind the end of lines.
#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "cases/feature_cases.h"
#include "support/draw.h"
#include "support/layer_check.h"
#include "value_bits.h"

namespace moec::test {
namespace {

const testing::Environment* const kPortable =
    testing::AddGlobalTestEnvironment(new OnePath("portable", false));

// body for each path that has these kernels.
template <class Body>
void for_each_path(const Body& body) {
  for (const char* path : {"portable", "few_rows"}) {
    if (path == std::string("few_rows") && !is_hopper()) continue;
    setenv("MOEC_CUDA_KERNELS", path, 1);
    SCOPED_TRACE(path);
    body();
  }
  setenv("MOEC_CUDA_KERNELS", "portable", 1);
}

std::vector<QuantCase> cases() {
  return cases_of({"int8", "fp8_channel", "fp8_tensor", "fp8_block128", "codebook4_64",
                   "codebook4_32_bf16", "mxfp4", "int4_g32"},
                  {32, 128});
}

class OneToken : public testing::TestWithParam<QuantCase> {};
INSTANTIATE_TEST_SUITE_P(Schemes, OneToken, testing::ValuesIn(cases()),
                         [](const auto& one) { return std::string(one.param.name); });

constexpr int kExperts = 9;
void route(QuantProblem* p, int top_k, Random* random) {
  std::vector<int> ids(kExperts);
  std::iota(ids.begin(), ids.end(), 0);
  p->tokens = 1;
  p->top_k = top_k;
  p->ids.clear();
  p->routing_weights.clear();
  for (int k = 0; k < top_k; ++k) {
    std::swap(ids[size_t(k)], ids[size_t(k + random->below(kExperts - k))]);
    p->ids.push_back(ids[size_t(k)]);
    p->routing_weights.push_back(
        oracle::round_to(oracle::Rounding::kFp32, random->uniform() + 0.25));
  }
  p->x.resize(size_t(p->hidden));
  p->d_y.resize(size_t(p->hidden));
}

// Lines that end in each piece of a step, of less than a step and of several; more sets than CTAs
// and fewer; slots of an odd number.
TEST_P(OneToken, MatchesTheOracle) {
  const QuantCase& c = GetParam();
  if (is_small_run() && !runs_when_small(c)) GTEST_SKIP() << "another one runs";
  SCOPED_TRACE(seed_note());
  constexpr struct {
    uint32_t layout;
    int hidden, inter, top_k;
  } kShapes[] = {{MOEC_GATE_SPLIT, 64, 96, 1},           {MOEC_GATE_INTERLEAVED, 288, 160, 5},
                 {MOEC_GATE_THEN_UP, 416, 1056, 8},      {MOEC_UP_THEN_GATE, 1184, 704, 4},
                 {MOEC_GATE_INTERLEAVED, 1440, 1440, 4}, {MOEC_GATE_THEN_UP, 2048, 384, 8}};
  constexpr oracle::Act kGated[] = {oracle::Act::kSwiglu, oracle::Act::kGptoss};
  Random random(93);
  int turn = 0;
  for (const auto& of : kShapes) {
    if (is_small_run() && turn > 1) return;
    const int multiple = std::lcm(32, std::lcm(c.block_k, std::lcm(c.multiple_n, c.multiple_k)));
    const QuantShape shape = {of.layout,
                              false,
                              false,
                              false,
                              rounded_up(of.hidden, c.block_k ? multiple : 32),
                              rounded_up(of.inter, c.block_k ? multiple : 32)};
    QuantProblem p = random_quant_problem(c, shape, MOEC_BF16, 1, &random, kExperts);
    route(&p, of.top_k, &random);
    p.activation.kind = kGated[turn % 2];
    p.activation.limit = 7;
    p.save = turn % 2 ? MOEC_SAVE_PREACT : MOEC_SAVE_INPUT;
    SCOPED_TRACE(std::to_string(p.hidden) + " x " + std::to_string(p.inter) + ", " +
                 std::to_string(of.top_k) + " slots");
    ++turn;
    const QuantResults want = reference(p);
    for_each_path([&] {
      Json described;
      const QuantResults got = run(p, false, &described);
      ASSERT_EQ(got.status, MOEC_OK) << got.message;
      int kernels = 0;
      for (const Json& entry : described.at("forward").at("kernels").array)
        kernels += entry.at("kernel").string == "one token";
      EXPECT_EQ(kernels, 2);
      const auto near = [&](const char* name, const oracle::Vec& from, const oracle::Vec& wanted,
                            size_t columns) {
        const RowError error = row_error(from, wanted, columns, kTypicalRow, {});
        EXPECT_LE(error.error, 2e-2) << name << ": " << error;
      };
      near("y", got.y, want.y, size_t(p.hidden));
      near("d_x", got.d_x, want.d_x, size_t(p.hidden));
      near("d_routing_weights", got.d_routing_weights, want.d_routing_weights, size_t(p.top_k));
      EXPECT_TRUE(run(p, false) == got) << "other bits the second time";
    });
  }
}

// ---- what a layer has beside its products
struct Beside {
  oracle::FeatureCase of;
  RunOptions options;
  std::unique_ptr<DrawnCodes> codes;
  std::string text;
};
Beside draw_beside(int number) {
  const std::string name = "one_token" + std::to_string(number);
  Draw draw(7717 * uint64_t(number) + 3);
  const std::vector<QuantCase> formats = cases();
  const QuantCase& format = formats[size_t(draw.below(int64_t(formats.size())))];
  Beside b;
  const auto noted = [&](const char* what, auto value) {
    b.text += std::string(" ") + what + " " + std::to_string(value);
    return value;
  };
  oracle::Config& config = b.of.config;
  oracle::Inputs& in = b.of.in;
  oracle::RouterConfig& r = config.router;
  r.num_experts = kExperts;
  r.num_zero_experts = noted("Z", draw.one_of({0, 2}));
  r.top_k = noted("K", 1 + int(draw.below(8)));
  r.select = oracle::Select::kGiven;
  r.score = oracle::Score::kSigmoid;
  r.norm = oracle::Norm::kNone;
  const int hidden = noted("H", draw.one_of({128, 384})),
            inter = noted("I", draw.one_of({128, 256}));
  config.experts.hidden = hidden;
  config.experts.inter = inter;
  std::vector<oracle::Act> gated;
  for (const auto& act : oracle::kActs)
    if (is_gated(act.kind) && !info_of(act.kind).limit) gated.push_back(act.kind);
  config.experts.activation.kind = gated[size_t(draw.below(int64_t(gated.size())))];
  noted("act", int(config.experts.activation.kind));
  config.experts.output_scale = draw.one_of({1.0, 0.5, -2.0});
  const auto values = [&](const char* what, int64_t count, double scale) {
    oracle::Vec v = oracle::random_values(name + what, size_t(count), scale);
    oracle::round_to_all(&v);
    return v;
  };
  in.tokens = 1;
  in.x = values("x", hidden, 1);
  b.of.d_y = values("d_y", hidden, 1);
  in.gate_weight = values("router", int64_t{r.columns()} * hidden, 1 / std::sqrt(hidden));
  if (noted("residual", draw.chance(0.5))) in.residual = values("residual", hidden, 1);
  if (noted("output_bias", draw.chance(0.5))) in.output_bias = values("output_bias", hidden, 0.5);
  std::vector<int> ids(size_t(r.columns()));
  std::iota(ids.begin(), ids.end(), 0);
  for (int k = 0; k < r.top_k; ++k) {
    std::swap(ids[size_t(k)], ids[size_t(k + draw.below(r.columns() - k))]);
    in.given_ids.push_back(draw.chance(0.2) ? -1 : ids[size_t(k)]);
  }
  const int64_t matrix = int64_t{kExperts} * hidden * inter;
  oracle::MlpWeights& w = in.experts;
  w.gate = w.up = w.down = oracle::Vec(size_t(matrix));
  if (noted("biased", draw.chance(0.5))) {
    w.gate_bias = values("gate_bias", int64_t{kExperts} * inter, 0.5);
    w.up_bias = values("up_bias", int64_t{kExperts} * inter, 0.5);
    w.down_bias = values("down_bias", int64_t{kExperts} * hidden, 0.5);
  }
  config.plan.align = noted("align", draw.one_of({1, 16, 128}));
  RunOptions& o = b.options;
  o.dtype = MOEC_BF16;
  o.layout.gate_layout =
      noted("layout", draw.one_of<uint32_t>({MOEC_GATE_SPLIT, MOEC_GATE_THEN_UP, MOEC_UP_THEN_GATE,
                                             MOEC_GATE_INTERLEAVED}));
  o.save = noted("save", draw.one_of<uint32_t>({MOEC_SAVE_INPUT, MOEC_SAVE_PREACT, MOEC_SAVE_ALL}));
  Random random(uint64_t(number) + 5);
  const QuantShape shape = {o.layout.gate_layout, false, false, false, hidden, inter};
  b.codes = std::make_unique<DrawnCodes>(&format, &format, shape, kExperts, &random);
  b.codes->replace(o.dtype, &w);
  o.bound = &b.codes->bound();
  b.text += std::string(" ") + format.name;
  return b;
}

// Identities, empty slots, residuals, biases, scales, each activation.
TEST(OneTokenLayer, HasAllBesideItsProducts) {
  SCOPED_TRACE(seed_note());
  const int draws = is_small_run() ? 3 : 40;
  for (int number = 0; number < draws; ++number) {
    Beside b = draw_beside(number);
    SCOPED_TRACE(std::to_string(number) + b.text);
    for_each_path([&] {
      const LayerRun got = run_layer(b.of.config, b.of.in, b.of.d_y, {}, b.options);
      OracleRun want = run_oracle(as_rounded(b.of.config, got.rounding), b.of.in, b.of.d_y, {});
      oracle::MlpWeights& frozen = want.grads.experts;
      frozen.gate = frozen.up = frozen.down = {};
      expect_matches(got, want, b.of.config, b.of.in, 2e-2, kTypicalRow);
    });
  }
}

}  // namespace
}  // namespace moec::test
