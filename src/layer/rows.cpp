// SPDX-License-Identifier: Apache-2.0
#include "layer/rows.h"

#include "core/dtype.h"

namespace moec {
namespace {

constexpr Dtypes kMovable = {MOEC_F32, MOEC_F16, MOEC_BF16, MOEC_I8, MOEC_U8, MOEC_BOOL, MOEC_I32};

const PlanView& plan_of(const Context& context, const Plan& plan) {
  check_same_device("plan", plan.context(), context);
  return plan.view();
}

// Extent 0 of a tensor of rows: at least the plan's.
int64_t num_rows(const char* name, const moec_tensor& tensor, const TensorCheck& check,
                 const PlanView& plan) {
  const int64_t rows = check.tokens(name, tensor);
  MOEC_REQUIRE(rows >= plan.max_rows, MOEC_E_SHAPE, "%s has %lld rows; the plan needs %lld", name,
               static_cast<long long>(rows), static_cast<long long>(plan.max_rows));
  MOEC_REQUIRE(rows % plan.align == 0, MOEC_E_SHAPE,
               "%s has %lld rows; expected a multiple of the plan's align %d", name,
               static_cast<long long>(rows), plan.align);
  return rows;
}

int64_t width(const char* name, const moec_tensor& tensor) {
  if (is_absent(tensor)) return 0;
  check_is_matrix(name, tensor);
  return tensor.shape[1];
}

}  // namespace

void permute(const Context& context, const Plan& plan, const moec_permute_args& args,
             moec_stream stream) {
  check_flags("args.flags", args.flags, 0);
  const PlanView& view = plan_of(context, plan);
  TensorCheck check(context);
  const int64_t T = view.num_tokens, P = num_rows("rows", args.rows, check, view);
  const int64_t H = width("x", args.x), S = width("x_scale", args.x_scale);
  const Array x = check.in("x", args.x, {T, H}, kMovable);
  const Array scale = check.optional_in("x_scale", args.x_scale, {T, S}, kMovable);
  PermuteArgs rows = {};
  rows.plan = &view;
  rows.x = x.data;
  rows.row_bytes = H * dtype_bytes(x.dtype);
  rows.out_rows = P;
  rows.rows = check.out("rows", args.rows, {P, H}, {x.dtype}).data;
  if (scale) {
    rows.x_scale = scale.data;
    rows.scale_bytes = S * dtype_bytes(scale.dtype);
    rows.row_scale = check.out("row_scale", args.row_scale, {P, S}, {scale.dtype}).data;
  } else {
    check.absent("row_scale", args.row_scale, "x_scale");
  }
  rows.row_weight =
      static_cast<float*>(check.optional_out("row_weight", args.row_weight, {P}, kFloat).data);
  plan.check_memory(check);
  check.finish();
  context.backend().run(rows, stream);
}

void unpermute(const Context& context, const Plan& plan, const moec_unpermute_args& args,
               moec_stream stream) {
  check_flags("args.flags", args.flags, 0);
  const PlanView& view = plan_of(context, plan);
  TensorCheck check(context);
  const int64_t T = view.num_tokens, K = view.top_k, P = num_rows("rows", args.rows, check, view);
  const int64_t H = width("rows", args.rows);
  const Array from = check.in("rows", args.rows, {P, H}, kReal);
  UnpermuteArgs rows = {};
  rows.plan = &view;
  rows.hidden = H;
  rows.dtype = from.dtype;
  rows.rows = from.data;
  rows.routing_weights = static_cast<const float*>(
      check.optional_in("routing_weights", args.routing_weights, {T, K}, kFloat).data);
  rows.residual = check.optional_in("residual", args.residual, {T, H}, {from.dtype}).data;
  rows.y = check.out("y", args.y, {T, H}, {from.dtype}).data;
  plan.check_memory(check);
  check.may_be_same("y", "residual");
  check.finish();
  const Context::Timer timer(context, Phase::kCombine);
  context.backend().run(rows, stream);
}

void permute_backward(const Context& context, const Plan& plan, const moec_permute_grad_args& args,
                      moec_stream stream) {
  check_flags("args.flags", args.flags, 0);
  const PlanView& view = plan_of(context, plan);
  TensorCheck check(context);
  const int64_t T = view.num_tokens, K = view.top_k,
                P = num_rows("d_rows", args.d_rows, check, view);
  const int64_t H = width("d_rows", args.d_rows);
  const Array from = check.in("d_rows", args.d_rows, {P, H}, kReal);
  PermuteGradArgs rows = {};
  rows.plan = &view;
  rows.hidden = H;
  rows.dtype = from.dtype;
  rows.d_rows = from.data;
  rows.d_row_weight = static_cast<const float*>(
      check.optional_in("d_row_weight", args.d_row_weight, {P}, kFloat).data);
  rows.d_x = check.out("d_x", args.d_x, {T, H}, {from.dtype}).data;
  if (!rows.d_row_weight) check.absent("d_routing_weights", args.d_routing_weights, "d_row_weight");
  rows.d_routing_weights = static_cast<float*>(
      check.optional_out("d_routing_weights", args.d_routing_weights, {T, K}, kFloat).data);
  plan.check_memory(check);
  check.finish();
  context.backend().run(rows, stream);
}

void unpermute_backward(const Context& context, const Plan& plan,
                        const moec_unpermute_grad_args& args, moec_stream stream) {
  check_flags("args.flags", args.flags, 0);
  const PlanView& view = plan_of(context, plan);
  TensorCheck check(context);
  const int64_t T = view.num_tokens, K = view.top_k, H = width("d_y", args.d_y);
  const int64_t P = num_rows("d_rows", args.d_rows, check, view);
  const Array from = check.in("d_y", args.d_y, {T, H}, kReal);
  const bool weighted = !is_absent(args.d_routing_weights);
  UnpermuteGradArgs rows = {};
  rows.plan = &view;
  rows.hidden = H;
  rows.out_rows = P;
  rows.dtype = from.dtype;
  rows.d_y = from.data;
  if (weighted) {
    const int64_t in_rows = num_rows("rows", args.rows, check, view);
    rows.rows = check.in("rows", args.rows, {in_rows, H}, {from.dtype}).data;
  }
  rows.routing_weights = static_cast<const float*>(
      check.optional_in("routing_weights", args.routing_weights, {T, K}, kFloat).data);
  rows.d_rows = check.out("d_rows", args.d_rows, {P, H}, {from.dtype}).data;
  rows.d_routing_weights = static_cast<float*>(
      check.optional_out("d_routing_weights", args.d_routing_weights, {T, K}, kFloat).data);
  plan.check_memory(check);
  check.finish();
  context.backend().run(rows, stream);
}

}  // namespace moec
