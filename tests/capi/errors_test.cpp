// SPDX-License-Identifier: Apache-2.0
// Mistakes in the arguments of calls: each has its own code, a text with both values, and leaves
// every output as it was. Mutation noted: without TensorCheck::finish() the overlap rows fail;
// without the check of Plan::view() "plan not built" fails.
#include "mistakes.h"

namespace moec::test {
namespace {

moec_status forward(Problem& p, const moec_layer_args& args) {
  return moec_layer_forward(p.layer.get(), &args, nullptr);
}
template <class Spoil>
moec_status forward_with(Problem& p, Spoil spoil) {
  auto args = p.forward_args();
  spoil(args);
  return forward(p, args);
}
template <class Spoil>
moec_status backward_with(Problem& p, Spoil spoil) {
  const auto first = p.forward_args();
  check(forward(p, first));
  const std::vector<uint8_t> saved = p.saved;
  p.fill_outputs();
  std::vector<uint8_t> kept = saved;
  auto args = p.forward_args();
  args.saved = p.buffer(kept);
  auto grads = p.backward_args(&args);
  spoil(args, grads);
  return moec_layer_backward(p.layer.get(), &grads, nullptr);
}
template <class Spoil>
moec_status experts_with(Problem& p, Spoil spoil) {
  p.build_plan();
  auto args = p.experts_args();
  spoil(args);
  return moec_experts_forward(p.experts.get(), &args, nullptr);
}
// A plan as `desc` says, built from the first top_k of the given ids.
PlanHandle plan_of(Problem& p, const moec_plan_desc& desc, const moec_buffer* memory = nullptr) {
  PlanHandle plan = make<PlanHandle>(moec_plan_create, p.context, &desc, memory);
  const moec_tensor ids = tensor_of(p.given_ids.data(), MOEC_I32, {Problem::kTokens, desc.top_k});
  check(moec_plan_from_topk(plan.get(), &ids, nullptr, nullptr));
  return plan;
}
// What `write` does to a plan that lies in `memory`.
moec_status into_plan(Problem& p, std::vector<char>& memory,
                      const std::function<moec_status(const moec_plan*)>& write) {
  const moec_buffer place = {memory.data(), memory.size()};
  return write(plan_of(p, p.plan_desc, &place).get());
}
// Rows of another number than the plan's, whose experts are rounded up to `align`.
moec_status permute_into(Problem& p, int32_t align, int64_t more) {
  auto desc = p.plan_desc;
  desc.align = align;
  uint64_t bytes = 0;
  int64_t max_rows = 0;
  desc.max_tokens = Problem::kTokens;
  check(moec_plan_size(&desc, &bytes, &max_rows));
  const PlanHandle plan = plan_of(p, desc);
  std::vector<float> rows(size_t((max_rows + more) * Problem::kHidden));
  auto args = sized<moec_permute_args>();
  args.plan = plan.get();
  args.x = p.rows(p.x);
  args.rows = tensor_of(rows.data(), MOEC_F32, {max_rows + more, Problem::kHidden});
  return moec_permute(p.context, &args, nullptr);
}
const Mistake kMistakes[] = {
    // ---- NULL and absent
    {"null_handle", MOEC_E_INVALID_ARG, "layer is NULL",
     [](Problem& p) {
       const auto args = p.forward_args();
       return moec_layer_forward(nullptr, &args, nullptr);
     }},
    {"null_args", MOEC_E_INVALID_ARG, "args is NULL",
     [](Problem& p) { return moec_layer_forward(p.layer.get(), nullptr, nullptr); }},
    {"null_out", MOEC_E_INVALID_ARG, "out is NULL",
     [](Problem& p) { return moec_router_create(p.context, &p.router_desc, nullptr); }},
    {"null_weights", MOEC_E_INVALID_ARG, "args.weights is NULL",
     [](Problem& p) { return forward_with(p, [](auto& a) { a.weights = nullptr; }); }},
    {"absent_x", MOEC_E_INVALID_ARG, "x is absent",
     [](Problem& p) { return forward_with(p, [](auto& a) { a.x = {}; }); }},
    {"null_data", MOEC_E_INVALID_ARG, "x.data is NULL",
     [](Problem& p) { return forward_with(p, [](auto& a) { a.x.data = nullptr; }); }},
    {"absent_saved", MOEC_E_INVALID_ARG, "saved is absent",
     [](Problem& p) { return forward_with(p, [](auto& a) { a.saved = {}; }); }},
    {"extra_bias", MOEC_E_INVALID_ARG, "without LOGIT_BIAS",
     [](Problem& p) {
       return forward_with(p, [&](auto& a) {
         a.gate_bias = tensor_of(p.logits.data(), MOEC_F32, {Problem::kExperts});
       });
     }},
    {"unknown_flag", MOEC_E_INVALID_ARG, "args.flags is 0x100",
     [](Problem& p) { return forward_with(p, [](auto& a) { a.flags = 0x100; }); }},
    // ---- struct sizes
    {"struct_size_zero", MOEC_E_ABI, "args.struct_size is 0",
     [](Problem& p) { return forward_with(p, [](auto& a) { a.struct_size = 0; }); }},
    {"struct_size_odd", MOEC_E_ABI, "multiple of 8",
     [](Problem& p) { return forward_with(p, [](auto& a) { a.struct_size += 4; }); }},
    {"struct_size_huge", MOEC_E_ABI, "65536",
     [](Problem& p) { return forward_with(p, [](auto& a) { a.struct_size = 65544; }); }},
    // ---- tensors
    {"wrong_dtype", MOEC_E_DTYPE, "x has dtype i32; expected f32",
     [](Problem& p) { return forward_with(p, [](auto& a) { a.x.dtype = MOEC_I32; }); }},
    {"unknown_dtype", MOEC_E_DTYPE, "0x1234",
     [](Problem& p) { return forward_with(p, [](auto& a) { a.x.dtype = 0x1234; }); }},
    {"wrong_shape", MOEC_E_SHAPE, "y has shape [5,15]; expected [5,16]",
     [](Problem& p) {
       return forward_with(p, [](auto& a) { a.y.shape[1] = a.y.strides[0] = 15; });
     }},
    {"wrong_rank", MOEC_E_SHAPE, "x has 1 dimensions; expected 2",
     [](Problem& p) { return forward_with(p, [](auto& a) { a.x.ndim = 1, a.x.strides[0] = 1; }); }},
    {"negative_extent", MOEC_E_SHAPE, "[-5,16]",
     [](Problem& p) { return forward_with(p, [](auto& a) { a.x.shape[0] = -5; }); }},
    {"gate_of_no_columns", MOEC_E_INVALID_ARG, "H of x is 0; expected at least 1",
     [](Problem& p) {
       auto args = sized<moec_gate_args>();
       args.x = tensor_of(p.x.data(), MOEC_F32, {Problem::kTokens, 0});
       args.weight = tensor_of(p.gate_weight.data(), MOEC_F32, {Problem::kExperts, 0});
       args.logits = tensor_of(p.logits.data(), MOEC_F32, {Problem::kTokens, Problem::kExperts});
       return moec_gate_forward(p.router.get(), &args, nullptr);
     }},
    {"router_x_of_no_columns", MOEC_E_INVALID_ARG, "H of router_x is 0; expected at least 1",
     [](Problem& p) {
       return forward_with(p, [&](auto& a) {
         a.router_x = tensor_of(p.x.data(), MOEC_F32, {Problem::kTokens, 0});
       });
     }},
    {"loss_of_no_experts", MOEC_E_INVALID_ARG, "E of logits is 0; expected at least 1",
     [](Problem& p) {
       const moec_tensor logits = tensor_of(p.logits.data(), MOEC_F32, {Problem::kTokens, 0});
       auto args = sized<moec_loss_args>();
       args.kind = MOEC_LOSS_Z;
       args.count = 1;
       args.logits = &logits;
       args.loss = tensor_of(p.x.data(), MOEC_F32, {1});
       return moec_loss_forward(p.context, &args, nullptr);
     }},
    {"too_many_dims", MOEC_E_INVALID_ARG, "7",
     [](Problem& p) { return forward_with(p, [](auto& a) { a.x.ndim = 7; }); }},
    {"strides", MOEC_E_LAYOUT, "x has strides [17,1] for shape [5,16]",
     [](Problem& p) { return forward_with(p, [](auto& a) { a.x.strides[0] = 17; }); }},
    {"many_strides", MOEC_E_LAYOUT, "[4611686018427387904,4611686018427387904,...]",
     [](Problem& p) {
       auto tensor = p.forward_args().x;
       tensor.ndim = 6;
       for (int i = 0; i < 6; ++i) tensor.shape[i] = 2, tensor.strides[i] = int64_t(1) << 62;
       return moec_tensor_check(&tensor);
     }},
    {"device", MOEC_E_DEVICE, "x is on cuda:0; expected cpu",
     [](Problem& p) { return forward_with(p, [](auto& a) { a.x.device_type = MOEC_CUDA; }); }},
    {"unknown_device", MOEC_E_DEVICE, "device_type 99",
     [](Problem& p) { return forward_with(p, [](auto& a) { a.x.device_type = 99; }); }},
    {"alignment", MOEC_E_INVALID_ARG, "multiple of its 4-byte element",
     [](Problem& p) { return forward_with(p, [](auto& a) { a.x.byte_offset = 2; }); }},
    {"overflowing_tensor", MOEC_E_OVERFLOW, "less than 2^63 bytes",
     [](Problem& p) {
       return forward_with(p, [](auto& a) {
         a.x.shape[0] = a.x.shape[1] = int64_t(1) << 40;
         a.x.strides[0] = a.x.strides[1] = 0;
       });
     }},
    // ---- sizes
    {"short_saved", MOEC_E_WORKSPACE, "saved has",
     [](Problem& p) { return forward_with(p, [](auto& a) { a.saved.bytes -= 1; }); }},
    {"short_workspace", MOEC_E_WORKSPACE, "workspace has",
     [](Problem& p) {
       std::vector<uint8_t> memory(p.bytes(p.layer_sizes.forward_workspace) - 1);
       return forward_with(p, [&](auto& a) { a.workspace = p.buffer(memory); });
     }},
    {"short_plan_memory", MOEC_E_WORKSPACE, "memory has",
     [](Problem& p) {
       uint64_t bytes = 0;
       int64_t rows = 0;
       check(moec_plan_size(&p.plan_desc, &bytes, &rows));
       std::vector<uint8_t> memory(bytes);
       const moec_buffer buffer = {memory.data(), bytes - 1};
       moec_plan* out = nullptr;
       return moec_plan_create(p.context, &p.plan_desc, &buffer, &out);
     }},
    {"rows_fewer_than_the_plans", MOEC_E_SHAPE, "the plan needs",
     [](Problem& p) { return permute_into(p, 8, -8); }},
    {"rows_off_the_alignment", MOEC_E_SHAPE, "expected a multiple of the plan's align 8",
     [](Problem& p) { return permute_into(p, 8, 4); }},
    {"too_many_tokens", MOEC_E_SHAPE, "the plan's max_tokens is 8",
     [](Problem& p) {
       std::vector<int32_t> ids(18);
       const moec_tensor tensor = tensor_of(ids.data(), MOEC_I32, {9, 2});
       return moec_plan_from_topk(p.plan.get(), &tensor, nullptr, nullptr);
     }},
    // ---- states and mismatches
    {"plan_not_built", MOEC_E_INVALID_STATE, "plan is not built",
     [](Problem& p) {
       const auto args = p.experts_args();
       return moec_experts_forward(p.experts.get(), &args, nullptr);
     }},
    {"weights_not_bound", MOEC_E_INVALID_STATE, "weights are not bound",
     [](Problem& p) {
       const auto empty = make<Weights>(moec_weights_create, p.context, &p.weights_desc);
       return forward_with(p, [&](auto& a) { a.weights = empty.get(); });
     }},
    {"release_before_pack", MOEC_E_INVALID_STATE, "no packed copy",
     [](Problem& p) { return moec_weights_release_source(p.weights.get()); }},
    {"pack_unfrozen", MOEC_E_INVALID_STATE, "MOEC_WEIGHTS_FROZEN",
     [](Problem& p) {
       auto desc = p.weights_desc;
       desc.flags = 0;
       const auto loose = make<Weights>(moec_weights_create, p.context, &desc);
       return moec_weights_pack(loose.get(), nullptr, nullptr);
     }},
    {"backward_without_save", MOEC_E_INVALID_STATE, "MOEC_SAVE_NONE",
     [](Problem& p) {
       Problem none(p.context, MOEC_SAVE_NONE);
       auto args = none.forward_args();
       args.saved = {};
       const auto grads = none.backward_args(&args);
       return moec_layer_backward(none.layer.get(), &grads, nullptr);
     }},
    {"plan_of_other_shape", MOEC_E_MISMATCH, "plan has E, Z, K = 4, 0, 1",
     [](Problem& p) {
       auto desc = p.plan_desc;
       desc.top_k = 1;
       const PlanHandle plan = plan_of(p, desc);
       return experts_with(p, [&](auto& a) { a.plan = plan.get(); });
     }},
    {"plan_of_other_align", MOEC_E_MISMATCH, "plan has align 8; the experts have 1",
     [](Problem& p) {
       auto desc = p.plan_desc;
       desc.align = 8;
       const PlanHandle plan = plan_of(p, desc);
       return experts_with(p, [&](auto& a) { a.plan = plan.get(); });
     }},
    {"row_id_map_too_small", MOEC_E_UNSUPPORTED, "token 1 has more rows than the 4 experts",
     [](Problem& p) {
       auto desc = p.plan_desc;
       desc.num_zero_experts = 1;
       desc.top_k = 5;
       const auto plan =
           make<PlanHandle>(moec_plan_create, p.context, static_cast<const moec_plan_desc*>(&desc),
                            static_cast<const moec_buffer*>(nullptr));
       std::vector<int32_t> ids = {0, -1, 1, -1, -1, 0, 1, 2, 3, 0}, map(2 * 9, 77);
       const moec_tensor given = tensor_of(ids.data(), MOEC_I32, {2, 5});
       check(moec_plan_from_topk(plan.get(), &given, nullptr, nullptr));
       const moec_tensor to = tensor_of(map.data(), MOEC_I32, {2, 9});
       const moec_status status = moec_plan_export(plan.get(), MOEC_PLAN_ROW_ID_MAP, &to, nullptr);
       EXPECT_EQ(map, std::vector<int32_t>(2 * 9, 77));
       return status;
     }},
    {"weights_of_other_shape", MOEC_E_MISMATCH, "weights are 4 experts of H, I = 16, 12",
     [](Problem& p) {
       auto desc = p.weights_desc;
       desc.inter = 12;
       const auto other = make<Weights>(moec_weights_create, p.context, &desc);
       auto set = sized<moec_weight_set>();
       set.gate_up.data = tensor_of(p.gate_up.data(), MOEC_F32, {4, 24, 16});
       set.down.data = tensor_of(p.down.data(), MOEC_F32, {4, 16, 12});
       check(moec_weights_bind(other.get(), &set));
       return forward_with(p, [&](auto& a) { a.weights = other.get(); });
     }},
    {"saved_of_nothing", MOEC_E_MISMATCH, "saved was not written by a forward call",
     [](Problem& p) {
       return backward_with(
           p, [](auto& a, auto&) { std::memset(a.saved.ptr, 0, size_t(a.saved.bytes)); });
     }},
    {"saved_of_other_tokens", MOEC_E_MISMATCH, "saved is of 4 tokens",
     [](Problem& p) {
       Problem other(p.context, MOEC_SAVE_ALL, 4);
       const auto args = other.forward_args();
       check(forward(other, args));
       return backward_with(p, [&](auto& a, auto&) {
         std::memcpy(a.saved.ptr, other.saved.data(), other.saved.size());
       });
     }},
    {"saved_of_other_experts", MOEC_E_MISMATCH, "saved has the description",
     [](Problem& p) {
       auto router = p.router_desc;
       router.scale = 2;
       auto desc = p.layer_desc();
       desc.router = &router;
       const auto other = make<LayerHandle>(moec_layer_create, p.context,
                                            static_cast<const moec_layer_desc*>(&desc));
       std::vector<uint8_t> saved(p.saved.size());
       auto args = p.forward_args();
       args.saved = p.buffer(saved);
       check(moec_layer_forward(other.get(), &args, nullptr));
       return backward_with(
           p, [&](auto& a, auto&) { std::memcpy(a.saved.ptr, saved.data(), saved.size()); });
     }},
    // ---- overlaps
    {"y_overlaps_x", MOEC_E_ALIAS, "y [",
     [](Problem& p) { return forward_with(p, [](auto& a) { a.y.data = a.x.data; }); }},
    {"y_overlaps_part_of_the_residual", MOEC_E_ALIAS, "overlaps residual",
     [](Problem& p) {
       std::vector<float> memory(size_t(Problem::kTokens * Problem::kHidden + 4));
       return forward_with(p, [&](auto& a) {
         a.residual = tensor_of(memory.data(), MOEC_F32, {Problem::kTokens, Problem::kHidden});
         a.y.data = memory.data() + 4;
       });
     }},
    {"saving_a_plan_into_its_memory", MOEC_E_ALIAS, "buffer [",
     [](Problem& p) {
       std::vector<char> memory(1 << 20);
       return into_plan(p, memory, [&](const moec_plan* plan) {
         uint64_t need = 0;
         return moec_plan_save_sync(plan, memory.data(), memory.size(), &need, nullptr);
       });
     }},
    {"totals_into_the_plans_memory", MOEC_E_ALIAS, "totals [",
     [](Problem& p) {
       std::vector<char> memory(1 << 20);
       return into_plan(p, memory, [&](const moec_plan* plan) {
         return moec_plan_totals_sync(plan, reinterpret_cast<int32_t*>(memory.data()), nullptr);
       });
     }},
    {"rows_of_three_dimensions", MOEC_E_SHAPE, "x has 3 dimensions; expected 2",
     [](Problem& p) {
       const PlanHandle plan = plan_of(p, p.plan_desc);
       auto args = sized<moec_permute_args>();
       args.plan = plan.get();
       args.x = tensor_of(p.x.data(), MOEC_F32, {Problem::kTokens, 2, Problem::kHidden / 2});
       args.rows = p.rows(p.x);
       args.rows.shape[0] = 1 << 20;
       return moec_permute(p.context, &args, nullptr);
     }},
    {"a_table_of_one_dimension", MOEC_E_SHAPE, "table has 1 dimensions; expected 2",
     [](Problem& p) {
       p.router_desc.selection = MOEC_SELECT_TABLE;
       p.router = make<Router>(moec_router_create, p.context, &p.router_desc);
       auto args = sized<moec_route_args>();
       args.logits = tensor_of(p.logits.data(), MOEC_F32, {Problem::kTokens, Problem::kExperts});
       args.table = tensor_of(p.given_ids.data(), MOEC_I32, {6});
       return moec_route_forward(p.router.get(), &args, nullptr);
     }},
    {"y_overlaps_weights", MOEC_E_ALIAS, "overlaps weights",
     [](Problem& p) { return forward_with(p, [&](auto& a) { a.y.data = p.down.data() + 8; }); }},
    {"outputs_overlap", MOEC_E_ALIAS, "overlaps",
     [](Problem& p) {
       return forward_with(p, [](auto& a) { a.routing_weights.data = a.expert_ids.data; });
     }},
    {"saved_overlaps_y", MOEC_E_ALIAS, "saved",
     [](Problem& p) { return forward_with(p, [](auto& a) { a.y.data = a.saved.ptr; }); }},
    {"gradient_overlaps_weights", MOEC_E_ALIAS, "d_expert_weights",
     [](Problem& p) {
       return backward_with(p, [&](auto&, auto&) { p.gradients.down.data.data = p.down.data(); });
     }},
    {"gradients_overlap_each_other", MOEC_E_ALIAS, "two matrices of d_expert_weights",
     [](Problem& p) {
       return backward_with(
           p, [&](auto&, auto&) { p.gradients.down.data.data = p.gradients.gate_up.data.data; });
     }},
    {"packing_into_the_matrices", MOEC_E_ALIAS, "memory",
     [](Problem& p) {
       auto info = sized<moec_weights_info>();
       check(moec_weights_query(p.weights.get(), &info));
       const moec_buffer buffer = {p.gate_up.data(), info.packed_bytes};
       return moec_weights_pack(p.weights.get(), &buffer, nullptr);
     }},
    {"y_inside_the_packed_copy", MOEC_E_ALIAS, "y",
     [](Problem& p) {
       static std::vector<uint8_t> packed;
       auto info = sized<moec_weights_info>();
       check(moec_weights_query(p.weights.get(), &info));
       packed.assign(info.packed_bytes, 0);
       const moec_buffer buffer = p.buffer(packed);
       check(moec_weights_pack(p.weights.get(), &buffer, nullptr));
       return forward_with(p, [](auto& a) { a.y.data = packed.data() + packed.size() / 8 * 4; });
     }},
    {"d_x_overlaps_x", MOEC_E_ALIAS, "d_x",
     [](Problem& p) { return backward_with(p, [&](auto& a, auto& g) { g.d_x.data = a.x.data; }); }},
};
MOEC_TEST_MISTAKES(kMistakes);

TEST(Aliasing, y_may_be_the_residual) {
  Problem p;
  auto args = p.forward_args();
  check(forward(p, args));
  const std::vector<float> alone = p.y;
  std::fill(p.y.begin(), p.y.end(), 1.0f);
  args.residual = args.y;
  check(forward(p, args));
  for (size_t i = 0; i < alone.size(); ++i) EXPECT_NEAR(p.y[i], alone[i] + 1, 1e-6);
}

}  // namespace
}  // namespace moec::test
