// SPDX-License-Identifier: Apache-2.0
// Handles: freed in any order, wrong kinds refused, NULL tolerated. Run under ASan as well.
// Mutation noted: a Router that does not retain its context crashes any_order.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "problem.h"

namespace moec::test {
namespace {

TEST(Lifetime, any_order) {
  int order[] = {0, 1, 2, 3, 4, 5};
  do {
    Problem p;
    const auto args = p.forward_args();
    check(moec_layer_forward(p.layer.get(), &args, nullptr));
    const std::function<void()> frees[] = {
        [&] { p.own_context.reset(); }, [&] { p.router.reset(); },  [&] { p.experts.reset(); },
        [&] { p.plan.reset(); },        [&] { p.weights.reset(); }, [&] { p.layer.reset(); }};
    for (const int i : order) frees[i]();
  } while (std::next_permutation(std::begin(order), std::end(order)));
}

TEST(Lifetime, children_work_after_the_context_handle_is_gone) {
  Problem p;
  p.own_context.reset();
  const auto args = p.forward_args();
  EXPECT_EQ(moec_layer_forward(p.layer.get(), &args, nullptr), MOEC_OK);
}

TEST(Lifetime, null_may_be_freed) {
  moec_context_free(nullptr);
  moec_router_free(nullptr);
  moec_plan_free(nullptr);
  moec_weights_free(nullptr);
  moec_experts_free(nullptr);
  moec_layer_free(nullptr);
}

// A live handle of the wrong kind, as a binding without types could pass it.
TEST(Lifetime, wrong_kind_is_refused_and_not_freed) {
  Problem p;
  const auto as_layer = reinterpret_cast<moec_layer*>(p.router.get());
  const auto args = p.forward_args();
  EXPECT_EQ(moec_layer_forward(as_layer, &args, nullptr), MOEC_E_INVALID_ARG);
  EXPECT_NE(std::string(error_info().message).find("moec_router"), std::string::npos);
  EXPECT_EQ(error_info().arg_index, 1);
  moec_layer_free(as_layer);
  auto gate = sized<moec_gate_args>();
  EXPECT_EQ(moec_gate_forward(p.router.get(), &gate, nullptr), MOEC_E_INVALID_ARG);
  EXPECT_NE(std::string(error_info().message).find("x is absent"), std::string::npos);
}

TEST(Lifetime, weights_serve_layers_of_several_contexts) {
  Problem a;
  Problem b;
  auto args = b.forward_args();
  args.weights = a.weights.get();
  EXPECT_EQ(moec_layer_forward(b.layer.get(), &args, nullptr), MOEC_OK);
}

TEST(Lifetime, struct_init_zeroes_and_sets_the_size) {
  moec_plan_desc desc;
  std::memset(&desc, 0xff, sizeof desc);
  moec_struct_init(&desc, sizeof desc);
  moec_plan_desc expected = {};
  expected.struct_size = sizeof desc;
  EXPECT_EQ(std::memcmp(&desc, &expected, sizeof desc), 0);
  moec_struct_init(nullptr, 64);
  std::memset(&desc, 0xff, sizeof desc);
  moec_struct_init(&desc, 7);
  EXPECT_EQ(desc.struct_size, 0xffffffffu);
}

TEST(Lifetime, last_error_is_of_the_thread_and_is_kept) {
  Problem p;
  EXPECT_EQ(moec_plan_attach(nullptr, 1), MOEC_E_INVALID_ARG);
  EXPECT_EQ(moec_context_trim(p.context), MOEC_OK);
  EXPECT_STREQ(error_info().site, "moec_plan_attach");
  EXPECT_EQ(error_info().code, MOEC_E_INVALID_ARG);
  moec_error_info wrong = {};
  EXPECT_EQ(moec_last_error(&wrong), MOEC_E_ABI);
  EXPECT_STREQ(error_info().site, "moec_plan_attach");
}

TEST(Lifetime, names_and_versions) {
  EXPECT_STREQ(moec_status_name(MOEC_E_SHAPE), "MOEC_E_SHAPE");
  EXPECT_STREQ(moec_status_name(12345), "MOEC_E_UNKNOWN");
  EXPECT_EQ(moec_version(), uint32_t(MOEC_VERSION_MAJOR << 22 | MOEC_VERSION_MINOR << 12));
  EXPECT_EQ(moec_abi_version(), uint32_t(MOEC_ABI_VERSION));
  EXPECT_NE(std::string(moec_build_info()).find("build_id"), std::string::npos);
}

TEST(Lifetime, log_delivers_at_and_above_its_level) {
  static std::vector<std::string> lines;
  lines.clear();
  const auto sink = [](void*, int32_t, const char* message, size_t length) {
    EXPECT_EQ(std::strlen(message), length);
    lines.push_back(message);
  };
  check(moec_set_log(sink, nullptr, MOEC_LOG_DEBUG));
  EXPECT_EQ(moec_plan_attach(nullptr, 1), MOEC_E_INVALID_ARG);
  EXPECT_EQ(lines.size(), 1u);
  check(moec_set_log(sink, nullptr, MOEC_LOG_ERROR));
  EXPECT_EQ(moec_plan_attach(nullptr, 1), MOEC_E_INVALID_ARG);
  check(moec_set_log(nullptr, nullptr, MOEC_LOG_TRACE));
  EXPECT_EQ(moec_plan_attach(nullptr, 1), MOEC_E_INVALID_ARG);
  EXPECT_EQ(lines.size(), 1u);
  EXPECT_EQ(moec_set_log(nullptr, nullptr, 77), MOEC_E_INVALID_ARG);
}

}  // namespace
}  // namespace moec::test
