// SPDX-License-Identifier: Apache-2.0
// What a call would run: the program is recorded for memory that is nowhere, and the path that
// takes it names its kernels from the record that it would launch.
#include "backend/coded_packing.h"
#include "core/dtype.h"
#include "core/json_text.h"
#include "experts/experts.h"
#include "experts/memory.h"

namespace moec::experts {
namespace {

// An address for arrays that are present and never read.
void* nowhere() {
  return reinterpret_cast<void*>(uintptr_t(kCacheLine));
}

ExpertMatrix some_matrix(int64_t n, int64_t k, moec_dtype dtype) {
  ExpertMatrix m;
  m.values = {nowhere(), nullptr, n * k, 0, dtype};
  m.dtype = dtype;
  m.row_stride = k;
  m.col_stride = 1;
  return m;
}

WeightsView some_shared_weights(const moec_experts_desc& desc) {
  const int64_t H = desc.hidden, I = desc.shared_inter;
  WeightsView view;
  view.hidden = H;
  view.inter = I;
  view.num_experts = 1;
  view.gated = is_shared_gated(desc);
  if (view.gated) view.gate = some_matrix(I, H, desc.dtype);
  view.up = some_matrix(I, H, desc.dtype);
  view.down = some_matrix(H, I, desc.dtype);
  return view;
}

// Every gradient that these weights can have.
WeightsView all_gradients(WeightsView view) {
  for (ExpertMatrix* m : {&view.gate, &view.up, &view.down})
    if (m->is_coded()) m->values = {};
  return view;
}

struct Call {
  PlanView plan;
  WeightsView shared, d_weights, d_shared;
  ExpertsArgs forward = {};
  ExpertsGradArgs backward = {};

  Call(const moec_experts_desc& desc, const WeightsView& weights, int64_t num_tokens) {
    plan.num_tokens = num_tokens;
    plan.max_rows = num_tokens * desc.top_k + desc.max_rows_base;
    plan.choice_tokens = num_tokens;
    plan.choice_rows = plan.max_rows;
    plan.num_experts = desc.num_experts;
    plan.num_zero = desc.num_zero_experts;
    plan.top_k = desc.top_k;
    plan.expert_begin = desc.expert_begin;
    plan.num_local = desc.expert_end - desc.expert_begin;
    plan.group_offsets = static_cast<int32_t*>(nowhere());
    d_weights = all_gradients(weights);
    const bool shares = has_shared(desc);
    if (shares) shared = d_shared = some_shared_weights(desc);
    const Array x = {nowhere(), desc.dtype};

    forward.desc = &desc;
    forward.num_tokens = num_tokens;
    forward.plan = &plan;
    forward.weights = &weights;
    forward.shared_weights = shares ? &shared : nullptr;
    forward.x = x;
    if (is_mixed(desc)) forward.shared_gate = x;
    forward.y = forward.workspace = nowhere();
    forward.saved = desc.save == MOEC_SAVE_NONE ? nullptr : nowhere();

    backward.desc = &desc;
    backward.num_tokens = num_tokens;
    backward.plan = &plan;
    backward.weights = &weights;
    backward.shared_weights = forward.shared_weights;
    backward.x = x;
    backward.shared_gate = forward.shared_gate;
    backward.d_y = backward.d_x = backward.workspace = nowhere();
    backward.saved = nowhere();
    backward.d_routing_weights = static_cast<float*>(nowhere());
    backward.d_expert_weights = &d_weights;
    backward.d_shared_weights = shares ? &d_shared : nullptr;
  }
};

// The first path that takes what `record` records, and its kernels.
template <class Record>
JsonObject describe_call(const Backend& backend, const ExpertsCall& call, const Record& record) {
  JsonObject result;
  for (const ExpertsPath* path : backend.experts_paths()) {
    if (path->refuses(call.desc) || path->leaves(call)) continue;
    const Between between = path->between(call.desc);
    Program program;
    record(between, program);
    std::string kernels;
    if (path->describe(program, kernels)) continue;
    return result.add("path", path->name())
        .add("between_products", dtype_name(between.pre))
        .add_json("kernels", '[' + kernels + ']');
  }
  return result;
}

}  // namespace

std::string describe(const Backend& backend, const moec_experts_desc& desc,
                     const WeightsView& weights, int64_t num_tokens) {
  const Call call(desc, weights, num_tokens);
  moec_device_info info = {};
  backend.device_info(info);
  JsonObject result;
  result.add("backend", backend.name())
      .add("arch", info.arch)
      .add("num_tokens", num_tokens)
      .add("dtype", dtype_name(desc.dtype))
      .add("weights", weights.packed ? DevicePacking(backend).get().format(weights) : "as bound");
  const auto add = [&](const char* name, bool is_backward, const auto& record) {
    const ExpertsCall asked = {desc, weights, call.plan, is_backward};
    result.add_json(name, '{' + describe_call(backend, asked, record).members() + '}');
  };
  add("forward", false, [&](const Between& between, Program& program) {
    record_forward(between, call.forward, program);
  });
  if (desc.save != MOEC_SAVE_NONE)
    add("backward", true, [&](const Between& between, Program& program) {
      record_backward(between, call.backward, program);
    });
  return result.members();
}

}  // namespace moec::experts
