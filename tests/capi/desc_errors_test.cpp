// SPDX-License-Identifier: Apache-2.0
// Mistakes in descriptors, and devices that are not there.
// Mutation noted: without check_selection() the row about groups fails.
#include "mistakes.h"

namespace moec::test {
namespace {

template <class Spoil>
moec_status router_with(Problem& p, Spoil spoil) {
  auto desc = p.router_desc;
  spoil(desc);
  moec_router* out = nullptr;
  const moec_status status = moec_router_create(p.context, &desc, &out);
  EXPECT_EQ(out, nullptr);
  return status;
}
template <class Spoil>
moec_status plan_with(Problem& p, Spoil spoil) {
  auto desc = p.plan_desc;
  spoil(desc);
  moec_plan* out = nullptr;
  const moec_status status = moec_plan_create(p.context, &desc, nullptr, &out);
  EXPECT_EQ(out, nullptr);
  return status;
}
template <class Spoil>
moec_status experts_desc_with(Problem& p, Spoil spoil) {
  auto desc = p.experts_desc;
  spoil(desc);
  moec_experts* out = nullptr;
  const moec_status status = moec_experts_create(p.context, &desc, &out);
  EXPECT_EQ(out, nullptr);
  return status;
}
template <class Spoil>
moec_status weights_with(Problem& p, Spoil spoil) {
  auto desc = p.weights_desc;
  spoil(desc);
  moec_weights* out = nullptr;
  const moec_status status = moec_weights_create(p.context, &desc, &out);
  EXPECT_EQ(out, nullptr);
  return status;
}

// The experts' forward with MOEC_EXPERTS_SKIP_ABSENT and something that it would lose.
moec_status skip_with(Problem& p, void (*spoil)(Problem&, moec_experts_args&)) {
  p.build_plan();
  auto args = p.experts_args();
  args.flags = MOEC_EXPERTS_SKIP_ABSENT;
  spoil(p, args);
  return moec_experts_forward(p.experts.get(), &args, nullptr);
}

const Mistake kMistakes[] = {
    // ---- ranges of descriptors
    {"no_experts", MOEC_E_INVALID_ARG, "num_experts is 0",
     [](Problem& p) { return router_with(p, [](auto& d) { d.num_experts = 0; }); }},
    {"top_k_zero", MOEC_E_INVALID_ARG, "top_k is 0; expected 1 to 4",
     [](Problem& p) { return router_with(p, [](auto& d) { d.top_k = 0; }); }},
    {"top_k_above_experts", MOEC_E_INVALID_ARG, "top_k is 5; expected 1 to 4",
     [](Problem& p) { return router_with(p, [](auto& d) { d.top_k = 5; }); }},
    {"unknown_score", MOEC_E_INVALID_ARG, "desc.score is 9; expected 0 to ",
     [](Problem& p) { return router_with(p, [](auto& d) { d.score = 9; }); }},
    {"jitter_one", MOEC_E_INVALID_ARG, "desc.jitter is 1",
     [](Problem& p) { return router_with(p, [](auto& d) { d.jitter = 1; }); }},
    {"eps_of_norm_p", MOEC_E_INVALID_ARG,
     "desc.norm_eps is 1e-06; expected 0 with MOEC_NORM_P, which has none",
     [](Problem& p) {
       return router_with(p, [](auto& d) { d.norm = MOEC_NORM_P, d.norm_eps = 1e-6f; });
     }},
    {"negative_eps", MOEC_E_INVALID_ARG, "desc.norm_eps is -1",
     [](Problem& p) { return router_with(p, [](auto& d) { d.norm_eps = -1; }); }},
    {"groups", MOEC_E_INVALID_ARG, "num_groups is 3; expected a divisor of the 4",
     [](Problem& p) {
       return router_with(p, [](auto& d) {
         d.selection = MOEC_SELECT_GROUP_TOPK;
         d.num_groups = 3;
         d.top_groups = 1;
       });
     }},
    {"plan_align", MOEC_E_INVALID_ARG, "align is 3; expected 0 or a power of two",
     [](Problem& p) { return plan_with(p, [](auto& d) { d.align = 3; }); }},
    {"plan_capacity", MOEC_E_OVERFLOW, "desc.capacity is 9223372036854775807; expected less than",
     [](Problem& p) {
       return plan_with(p, [](auto& d) {
         d.kind = MOEC_PLAN_EXPERT_CHOICE;
         d.top_k = 0;
         d.align = 2;
         d.capacity = INT64_MAX;
       });
     }},
    {"plan_range", MOEC_E_INVALID_ARG, "expert_end is 5; expected 2 to 4",
     [](Problem& p) {
       return plan_with(p, [](auto& d) {
         d.expert_begin = 1;
         d.expert_end = 5;
       });
     }},
    {"capacity_without_drop", MOEC_E_INVALID_ARG, "with a capacity",
     [](Problem& p) { return plan_with(p, [](auto& d) { d.capacity = 3; }); }},
    {"plan_overflow", MOEC_E_OVERFLOW, "less than 2^31",
     [](Problem& p) {
       return plan_with(p, [](auto& d) {
         d.max_tokens = 0x7fffffff;
         d.top_k = 4;
       });
     }},
    {"unused_activation_parameter", MOEC_E_INVALID_ARG, "alpha is 1; expected 0 for swiglu",
     [](Problem& p) { return experts_desc_with(p, [](auto& d) { d.activation.alpha = 1; }); }},
    {"missing_limit", MOEC_E_INVALID_ARG, "needs a limit above 0",
     [](Problem& p) {
       return experts_desc_with(p, [](auto& d) { d.activation.kind = MOEC_ACT_CLAMP_SWIGLU; });
     }},
    {"plain_activation_of_gated_experts", MOEC_E_INVALID_ARG, "relu2, which is plain",
     [](Problem& p) {
       return experts_desc_with(p, [](auto& d) { d.activation.kind = MOEC_ACT_RELU2; });
     }},
    {"experts_overflow", MOEC_E_OVERFLOW, "less than 2^63",
     [](Problem& p) {
       return experts_desc_with(p, [](auto& d) { d.hidden = d.inter = int64_t(1) << 40; });
     }},
    {"weights_overflow", MOEC_E_OVERFLOW, "less than 2^63",
     [](Problem& p) { return weights_with(p, [](auto& d) { d.hidden = int64_t(1) << 55; }); }},
    {"packed_weights_overflow", MOEC_E_OVERFLOW, "less than 2^63",  // found by the fuzzer
     [](Problem& p) {
       return weights_with(p, [](auto& d) {
         d.num_experts = d.inter = 1;
         d.hidden = int64_t(1) << 57;
       });
     }},
    {"experts_align_overflow", MOEC_E_OVERFLOW, "experts * (desc.align - 1) is 1125899905794048",
     [](Problem& p) {
       return experts_desc_with(p, [](auto& d) {
         d.num_experts = 1 << 20;
         d.align = 1 << 30;
       });
     }},
    {"quantised_scheme", MOEC_E_UNSUPPORTED, "the scheme is 99; this version has 0 (none) to ",
     [](Problem& p) { return weights_with(p, [](auto& d) { d.down_scheme = 99; }); }},
    {"layer_disagrees", MOEC_E_INVALID_ARG, "desc.router.top_k is 1 and desc.experts.top_k is 2",
     [](Problem& p) {
       auto router = p.router_desc;
       router.top_k = 1;
       auto desc = p.layer_desc();
       desc.router = &router;
       moec_layer* out = nullptr;
       return moec_layer_create(p.context, &desc, &out);
     }},
    // ---- devices
    {"no_such_device", MOEC_E_NO_BACKEND, "cpu:7 is absent; there are 1",
     [](Problem&) {
       auto desc = sized<moec_context_desc>();
       desc.device_id = 7;
       moec_context* out = nullptr;
       return moec_context_create(&desc, &out);
     }},
    {"no_such_device_type", MOEC_E_INVALID_ARG, "device_type is 13",
     [](Problem&) {
       int32_t count = -5;
       const moec_status status = moec_device_count(13, &count);
       EXPECT_EQ(count, -5);
       return status;
     }},
    {"no_such_plug_in", MOEC_E_NO_BACKEND, "cannot open /nonexistent/plugin.so: ",
     [](Problem&) { return moec_backend_load("/nonexistent/plugin.so"); }},
    {"no_such_plug_in_far_away", MOEC_E_NO_BACKEND, "/plugin.so: cannot open",
     [](Problem&) {
       std::string path;
       for (int i = 0; i < 60; ++i) path += "/nonexistent";
       return moec_backend_load((path + "/plugin.so").c_str());
     }},
    // ---- rows of y that are left as they are hold nothing but the experts' sum
    {"skip_absent_with_a_residual", MOEC_E_INVALID_ARG, "SKIP_ABSENT with a residual",
     [](Problem& p) { return skip_with(p, [](auto& q, auto& a) { a.residual = q.rows(q.d_y); }); }},
    {"skip_absent_with_an_output_bias", MOEC_E_INVALID_ARG, "SKIP_ABSENT with an output_bias",
     [](Problem& p) {
       return skip_with(p, [](auto& q, auto& a) {
         a.output_bias = tensor_of(q.d_y.data(), MOEC_F32, {Problem::kHidden});
       });
     }},
    {"skip_absent_with_identity_experts", MOEC_E_INVALID_ARG, "SKIP_ABSENT with identity experts",
     [](Problem& p) {
       p.experts_desc.num_zero_experts = p.plan_desc.num_zero_experts = 1;
       p.plan = make<PlanHandle>(moec_plan_create, p.context, &p.plan_desc,
                                 static_cast<const moec_buffer*>(nullptr));
       p.experts = make<Experts>(moec_experts_create, p.context, &p.experts_desc);
       return skip_with(p, [](auto&, auto&) {});
     }},
    {"skip_absent_with_a_shared_expert", MOEC_E_INVALID_ARG, "SKIP_ABSENT with a shared expert",
     [](Problem& p) {
       auto desc = p.weights_desc;
       desc.num_experts = 1;
       const auto shared = make<Weights>(moec_weights_create, p.context,
                                         static_cast<const moec_weights_desc*>(&desc));
       auto set = p.weight_set(p.gate_up, p.down);
       set.gate_up.data.shape[0] = set.down.data.shape[0] = 1;
       check(moec_weights_bind(shared.get(), &set));
       p.experts_desc.shared = MOEC_SHARED_ADD;
       p.experts_desc.shared_inter = Problem::kInter;
       p.experts = make<Experts>(moec_experts_create, p.context, &p.experts_desc);
       check(moec_experts_query(p.experts.get(), &p.experts_sizes));
       p.experts_saved.resize(p.bytes(p.experts_sizes.saved));
       p.build_plan();
       auto args = p.experts_args();
       args.flags = MOEC_EXPERTS_SKIP_ABSENT;
       args.shared_weights = shared.get();
       return moec_experts_forward(p.experts.get(), &args, nullptr);
     }},
    {"unknown_flag_of_experts_desc", MOEC_E_INVALID_ARG,
     "desc.flags is 0x2; the known bits are 0x1",
     [](Problem& p) {
       p.experts_desc.flags = 2;
       moec_experts* out = nullptr;
       return moec_experts_create(p.context, &p.experts_desc, &out);
     }},
    {"unknown_flag_of_experts", MOEC_E_INVALID_ARG, "args.flags is 0x2",
     [](Problem& p) {
       p.build_plan();
       auto args = p.experts_args();
       args.flags = 2;
       return moec_experts_forward(p.experts.get(), &args, nullptr);
     }},
};
MOEC_TEST_MISTAKES(kMistakes);

// They size scratch on the CPU: a negative one made arrays overlap, a large one asked for 34 GB.
TEST(Router, groups_that_are_not_used_change_nothing) {
  std::vector<int32_t> expected;
  for (const int32_t groups : {0, -8, -680, INT32_MAX, INT32_MIN}) {
    Problem p;
    p.router_desc.num_groups = p.router_desc.top_groups = p.router_desc.group_top_m = groups;
    p.router = make<Router>(moec_router_create, p.context, &p.router_desc);
    std::vector<float> logits(size_t(p.T * Problem::kExperts));
    for (size_t i = 0; i < logits.size(); ++i) logits[i] = float(i * 7 % 5);
    auto args = sized<moec_route_args>();
    args.logits = tensor_of(logits.data(), MOEC_F32, {p.T, Problem::kExperts});
    args.expert_ids = tensor_of(p.ids.data(), MOEC_I32, {p.T, Problem::kTopK});
    args.routing_weights = tensor_of(p.routing.data(), MOEC_F32, {p.T, Problem::kTopK});
    check(moec_route_forward(p.router.get(), &args, nullptr));
    if (expected.empty()) expected = p.ids;
    EXPECT_EQ(p.ids, expected) << groups;
  }
}

TEST(Plan, capacity_keeps_whole_numbers_whole) {
  Problem p;
  for (const int64_t tokens : {int64_t(3), int64_t(1) << 22, int64_t(1) << 26}) {
    auto desc = p.plan_desc;
    desc.max_tokens = tokens;
    desc.num_experts = desc.top_k = 1;
    desc.drop = MOEC_DROP_BY_POSITION;
    desc.capacity_factor = 1;
    uint64_t bytes = 0;
    int64_t rows = 0;
    check(moec_plan_size(&desc, &bytes, &rows));
    EXPECT_EQ(rows, tokens);
  }
}

TEST(Plan, capacity_is_the_ceiling_of_many_rows_too) {
  Problem p;
  auto desc = p.plan_desc;
  desc.max_tokens = (int64_t(1) << 23) + 1;
  desc.num_experts = 4;
  desc.top_k = 1;
  desc.drop = MOEC_DROP_BY_POSITION;
  desc.capacity_factor = 1;
  uint64_t bytes = 0;
  int64_t rows = 0;
  check(moec_plan_size(&desc, &bytes, &rows));
  EXPECT_EQ(rows, desc.max_tokens);  // and not 4 * 2^21
}

TEST(Losses, a_score_that_is_not_read_is_not_refused) {
  Problem p;
  float loss = 0;
  const moec_tensor logits = tensor_of(p.x.data(), MOEC_F32, {p.T, Problem::kExperts});
  auto args = sized<moec_loss_args>();
  args.kind = MOEC_LOSS_Z;
  args.score = MOEC_SCORE_IDENTITY;
  args.logits = &logits;
  args.count = 1;
  args.loss = tensor_of(&loss, MOEC_F32, {1});
  EXPECT_EQ(moec_loss_forward(p.context, &args, nullptr), MOEC_OK) << error_info().message;
  args.kind = MOEC_LOSS_BALANCE_SWITCH;
  args.top_k = 2;
  EXPECT_EQ(moec_loss_forward(p.context, &args, nullptr), MOEC_E_INVALID_ARG);
}

}  // namespace
}  // namespace moec::test
