// SPDX-License-Identifier: Apache-2.0
// Random auxiliary losses and their gradients, bit for bit.
#include "gpu/agree.h"
#include "oracle/kinds.h"

namespace moec::test {
namespace {

struct LossCase {
  moec_loss_args args;
  int64_t tokens, experts;
  std::vector<Values> logits, d_logits;
  Values counts, mask, d_loss;
  bool counted, masked, scaled;
};

LossCase draw_loss(TensorDraw& draw) {
  LossCase c = {};
  moec_loss_args& args = c.args = sized<moec_loss_args>();
  args.kind = uint32_t(draw.below(4));
  c.experts = draw.one_of<int64_t>({1, 2, 3, 8, 16, 31, 60, 64, 128, 384, 7000});
  c.tokens = draw.one_of<int64_t>({0, 1, 16, 30, 96, 500, 1200});
  if (c.experts == 7000) c.tokens = std::min<int64_t>(c.tokens, 30);
  args.top_k = 1 + int32_t(draw.below(std::min<int64_t>(c.experts, 9)));
  args.coefficient = draw.one_of({0.0f, 0.01f, 1.5f});
  do args.score = uint32_t(draw.below(std::size(oracle::kScores)));
  while (oracle::kScores[args.score].negative);
  args.seq_len = 1;
  if (args.kind == MOEC_LOSS_BALANCE_SEQUENCE) do
      args.seq_len = 1 + draw.below(std::max<int64_t>(c.tokens, 1));
    while (c.tokens % args.seq_len != 0);
  args.count = args.kind == MOEC_LOSS_BALANCE_MIXTRAL ? 1 + draw.below(4) : 1;
  for (int64_t i = 0; i < args.count; ++i) {
    c.logits.push_back(
        draw.normals(draw.real(), {c.tokens, c.experts}, 2.0, draw.chance(0.5) ? 0.5 : 0));
    for (int64_t n = draw.chance(0.1) ? 3 : 0; n > 0 && c.tokens > 0; --n)
      c.logits.back().of[draw.below(c.tokens * c.experts)] =
          draw.one_of<double>({NAN, -double(NAN), INFINITY, -INFINITY});
    c.d_logits.push_back(draw.normals(MOEC_F32, {c.tokens, c.experts}, 1e-3));
  }
  c.counts = draw.integers(draw.one_of<moec_dtype>({MOEC_I32, MOEC_I64}), {c.experts}, 0, 1000);
  if (c.counts.dtype == MOEC_I64) c.counts.of[0] = 0x1p40;
  c.mask = draw.integers(MOEC_U8, {c.tokens}, 0, 2);
  c.d_loss = draw.normals(MOEC_F32, {1}, 1.0);
  c.counted = args.kind == MOEC_LOSS_BALANCE_SWITCH && draw.chance(0.3);
  c.masked = draw.chance(0.4);
  c.scaled = draw.chance(0.5);
  return c;
}

std::vector<Result> losses(Side& side, const LossCase& c) {
  moec_loss_args args = c.args;
  std::vector<moec_tensor> logits, d_logits;
  for (const Values& values : c.logits) logits.push_back(side.in(values));
  for (const Values& values : c.d_logits)
    d_logits.push_back(side.out("d_logits", MOEC_F32, {c.tokens, c.experts}, {}, &values));
  args.logits = logits.data();
  args.d_logits = d_logits.data();
  if (c.counted) args.counts = side.in(c.counts);
  if (c.masked) args.token_mask = side.in(c.mask);
  args.loss = side.out("loss", MOEC_F32, {1});
  check(moec_loss_forward(side.context(), &args, nullptr));
  args.loss = {};
  if (c.scaled) args.d_loss = side.in(c.d_loss);
  check(moec_loss_backward(side.context(), &args, nullptr));
  return side.results();
}

class Losses : public Agree {};
INSTANTIATE_TEST_SUITE_P(Drawn, Losses, testing::Range(0, agree_cases(150)));

TEST_P(Losses, agree) {
  TensorDraw draw(number());
  const LossCase c = draw_loss(draw);
  char name[160];
  std::snprintf(name, sizeof name, "loss %u T=%d E=%d K=%d score %u seq %d layers %d", c.args.kind,
                int(c.tokens), int(c.experts), c.args.top_k, c.args.score, int(c.args.seq_len),
                int(c.args.count));
  expect_same(name, [&](Side& side) { return losses(side, c); });
}

}  // namespace
}  // namespace moec::test
