// SPDX-License-Identifier: Apache-2.0
// Routing on a CPU context and on a CUDA one through the public API, over random descriptions and
// inputs: everything that is made of integers, and every weight and score, must be equal bit for
// bit; what goes through a product within the rounding of its type, per row. The cases are in
// agree_router.cpp, agree_plan.cpp and agree_loss.cpp; MOEC_MIXED_CASES of each kind, others for
// each MOEC_TEST_SEED. MOEC_AGREE_CPU=1 compares the CPU with itself.
// Shown to fail: weights one bit off (9 of 30 routers agree), rows of a warp in reverse order (7 of
// 20 plans), a residual that token 0 does not get (with that, 4 of 15 permutes).
#include "gpu/agree.h"

namespace moec::test {
namespace {

// With CHECK_INPUTS an id out of range is refused (CPU) or reported by the next wait (CUDA), once.
TEST(WrongIds, are_reported_once) {
  Side side(other_device(), MOEC_CONTEXT_CHECK_INPUTS);
  auto desc = sized<moec_plan_desc>();
  desc.max_tokens = 300;
  desc.num_experts = 8;
  desc.top_k = 2;
  const moec_buffer* const own = nullptr;
  const auto plan = make<PlanHandle>(moec_plan_create, side.context(), &desc, own);
  const auto sync = [&] { return moec_context_sync(side.context(), nullptr); };
  const auto build_from = [&](const Values& ids) {
    const moec_tensor tensor = side.in(ids);
    const moec_status status = moec_plan_from_topk(plan.get(), &tensor, nullptr, nullptr);
    return status == MOEC_OK ? sync() : status;
  };
  Values ids = TensorDraw().integers(MOEC_I32, {300, 2}, -1, 8);
  EXPECT_EQ(build_from(ids), MOEC_OK) << last_error();
  ids.of[401] = 8;
  ids.of[500] = -2;
  EXPECT_EQ(build_from(ids), MOEC_E_INVALID_ARG);
  EXPECT_NE(last_error().find("expert_ids[200,1] is 8"), std::string::npos) << last_error();
  EXPECT_EQ(sync(), MOEC_OK) << last_error();
}

}  // namespace
}  // namespace moec::test
