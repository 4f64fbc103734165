// SPDX-License-Identifier: Apache-2.0
#include <bit>
#include <cmath>

#include "core/dtype.h"
#include "layer/ep.h"
#include "layer/rows.h"
#include "math/score.h"

namespace moec {
namespace {

constexpr int64_t kMaxLayers = 512;  // more tensors than this in one loss is a mistake, not a model

void check_kind(const moec_loss_args& args, int64_t num_tokens, int64_t num_experts) {
  check_enum("args.kind", args.kind, MOEC_LOSS_Z);
  check_flags("args.flags", args.flags, 0);
  const bool balance = args.kind != MOEC_LOSS_Z;
  check_range("args.top_k", args.top_k, balance ? 1 : 0, num_experts);
  MOEC_REQUIRE(std::isfinite(args.coefficient), MOEC_E_INVALID_ARG,
               "args.coefficient is %g; expected a finite number", double(args.coefficient));
  const bool scores = balance && args.kind != MOEC_LOSS_BALANCE_MIXTRAL;  // others do not read it
  check_enum("args.score", args.score, math::Scores::kCount - 1);
  const math::ScoreInfo& score = math::Scores::kInfos[args.score];
  MOEC_REQUIRE(!scores || !score.negative, MOEC_E_INVALID_ARG,
               "args.score is %s, which may be negative; expected a score that is not", score.name);
  check_at_least("args.seq_len", args.seq_len, 0);
  if (args.kind != MOEC_LOSS_BALANCE_SEQUENCE) return;
  MOEC_REQUIRE(args.seq_len > 0 && num_tokens % args.seq_len == 0, MOEC_E_SHAPE,
               "args.seq_len is %lld; expected a divisor of the %lld tokens",
               static_cast<long long>(args.seq_len), static_cast<long long>(num_tokens));
}

// The arguments of both directions, checked; `layers` and `blocks` are the arrays that they point
// to.
class LossCall {
 public:
  LossCall(const Context& context, const moec_loss_args& args, bool backward)
      : count_(args.kind == MOEC_LOSS_BALANCE_MIXTRAL ? checked_count(args, kMaxLayers)
                                                      : checked_count(args, 1)),
        layers_(context, count_),
        blocks_(context, 2 * count_) {
    TensorCheck check(context);
    const int64_t T = first_logits(args, check), E = args.logits[0].shape[1];
    check_at_least("E of logits", E, 1);
    check_kind(args, T, E);
    MOEC_REQUIRE(!backward || args.d_logits, MOEC_E_INVALID_ARG,
                 "args.d_logits is NULL; backward writes there");
    checked_rows("tokens of all layers", count_ * T);
    loss.backward = backward;
    loss.kind = args.kind;
    loss.score = args.score;
    checked_rows("E", E);
    loss.num_experts = int32_t(E);
    loss.top_k = args.top_k;
    loss.coefficient = args.coefficient == 0 ? 1 : args.coefficient;
    loss.num_tokens = T;
    loss.seq_len = args.seq_len;
    loss.num_layers = count_;
    loss.layers = layers_.data();
    MemorySet logits{"logits", blocks_.data()}, d_logits{"d_logits", blocks_.data() + count_};
    for (int64_t i = 0; i < count_; ++i) {
      LossLayer& layer = *new (layers_.data() + i) LossLayer{};
      layer.logits = checked_array("logits", args.logits[i], {T, E}, kReal, context);
      logits.add(layer.logits.data, uint64_t(T * E * dtype_bytes(layer.logits.dtype)));
      if (!backward) continue;
      layer.d_logits = static_cast<float*>(
          checked_array("d_logits", args.d_logits[i], {T, E}, kFloat, context).data);
      d_logits.add(layer.d_logits, uint64_t(T * E) * sizeof(float));
    }
    logits.sort();
    d_logits.sort();
    check.set_in(logits);
    check.set_out(d_logits);
    if (args.kind != MOEC_LOSS_BALANCE_SWITCH)
      check.absent("counts", args.counts, "MOEC_LOSS_BALANCE_SWITCH");
    loss.counts = check.optional_in("counts", args.counts, {E}, kId);
    loss.token_mask = static_cast<const uint8_t*>(
        check.optional_in("token_mask", args.token_mask, {T}, kMask).data);
    if (backward)
      loss.d_loss =
          static_cast<const float*>(check.optional_in("d_loss", args.d_loss, {1}, kFloat).data);
    else
      loss.loss = static_cast<float*>(check.out("loss", args.loss, {1}, kFloat).data);
    check.finish();
  }

  LossArgs loss = {};

 private:
  static int64_t checked_count(const moec_loss_args& args, int64_t most) {
    check_range("args.count", args.count, 1, most);
    return args.count;
  }
  static int64_t first_logits(const moec_loss_args& args, const TensorCheck& check) {
    MOEC_REQUIRE(args.logits, MOEC_E_INVALID_ARG, "args.logits is NULL; it is required");
    return check.tokens("logits", args.logits[0]);
  }

  int64_t count_;
  HostArray<LossLayer> layers_;
  HostArray<MemoryBlock> blocks_;
};

// Sums over the ranks of a comm, of as many values as a row of logits has at most.
class LossSums final : public RankSums {
 public:
  LossSums(const Context& context, ep::Communicator& transport, int64_t num_experts,
           moec_stream stream)
      : context_(context),
        transport_(transport),
        stream_(stream),
        scratch_(context, {}, 0, stream,
                 uint64_t(transport.size() * (num_experts + kPadding)) * sizeof(double)) {}
  void add(float* values, int64_t count) const override { sum(values, count); }
  void add(double* values, int64_t count) const override { sum(values, count); }
  void add(int64_t* values, int64_t count) const override { sum(values, count); }

 private:
  static constexpr int64_t kPadding = 64;  // lanes of a backend beyond the experts

  template <class T>
  void sum(T* values, int64_t count) const {
    sum_over_ranks(context_, transport_, values, count, reinterpret_cast<T*>(scratch_.extra()),
                   stream_);
  }
  const Context& context_;
  ep::Communicator& transport_;
  const moec_stream stream_;
  const Workspace scratch_;
};

// With sums over the ranks of `comm`, or without.
void run_loss(const Context& context, const moec_loss_args& args, Comm* comm, bool backward,
              moec_stream stream) {
  if (!comm) return context.backend().run(LossCall(context, args, backward).loss, stream);
  ep::Communicator& transport = comm->transport();
  transport.require_well();
  MOEC_REQUIRE(&comm->context() == &context, MOEC_E_INVALID_ARG,
               "args.comm is of another context; expected one of this context");
  transport.attend(ep::Call::kLoss, !transport.queues(), [&] {
    transport.require_capturable(stream);
    LossCall call(context, args, backward);
    const LossArgs& loss = call.loss;
    const LossSums sums(context, transport, loss.num_experts, stream);
    call.loss.ranks = &sums;
    const ep::Fact facts[] = {
        {"args.kind", loss.kind},
        {"backward", backward},
        {"E of logits", loss.num_experts},
        {"args.top_k", loss.top_k},
        {"args.count", loss.num_layers},
        {"args.score", loss.score},
        {"args.seq_len", loss.seq_len},
        {"the bits of args.coefficient", std::bit_cast<int32_t>(loss.coefficient)}};
    if (!transport.queues()) transport.meet(ep::Call::kLoss, facts);
    transport.in_step([&] { context.backend().run(loss, stream); });
  });
}

}  // namespace

void loss_forward(const Context& context, const moec_loss_args& args, Comm* comm,
                  moec_stream stream) {
  run_loss(context, args, comm, false, stream);
}

void loss_backward(const Context& context, const moec_loss_args& args, Comm* comm,
                   moec_stream stream) {
  run_loss(context, args, comm, true, stream);
}

}  // namespace moec
