// SPDX-License-Identifier: Apache-2.0
// A forward of few tokens: two kernels run the whole program of up, down and combine. They read the
// weights of each expert that has rows once. Pre-activations are saved as every path of the context
// saves them, so the backward takes another path.
#include <initializer_list>

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/device/check.h"
#include "backend/cuda/experts/cuda_path.h"
#include "backend/cuda/experts/row_steps.h"
#include "backend/cuda/few_tokens/one_token.h"
#include "backend/cuda/few_tokens/small_gemm.h"
#include "core/json_text.h"

namespace moec::cuda {
namespace {

bool small_bias(const ExpertMatrix& matrix, moec_dtype dtype, SmallBias& bias) {
  if (!matrix.has_bias()) return true;
  bias = {matrix.bias.base, matrix.bias.expert_stride, matrix.bias_stride,
          matrix.bias.dtype == MOEC_F32};
  return !matrix.bias.pointers && (bias.f32 || matrix.bias.dtype == dtype);
}

const char* set_weights(SmallArgs& args, std::initializer_list<const ExpertMatrix*> matrices) {
  int part = 0;
  for (const ExpertMatrix* m : matrices) {
    if (m->values.pointers) return "experts that are separate tensors";
    if (m->values.dtype != args.dtype) return "weights of another type than x";
    if (m->col_stride != 1) return "weights whose input features are not contiguous";
    if (part > 0 &&
        (m->row_stride != args.weight_stride || m->values.expert_stride != args.expert_stride))
      return "gate and up of different layouts";
    if (!small_bias(*m, args.dtype, args.bias[part])) return "biases of this type or layout";
    args.weights[part++] = m->values.base;
    args.weight_stride = m->row_stride;
    args.expert_stride = m->values.expert_stride;
  }
  return small_refuses(args);
}

SmallArgs base(const Program& program, int64_t features, int64_t k_size, const void* operand,
               void* out) {
  SmallArgs small = {};
  small.dtype = program.desc->dtype;
  small.features = features;
  small.k_size = small.operand_stride = k_size;
  small.operand = operand;
  small.out = out;
  small.group_offsets = program.plan->group_offsets;
  small.num_experts = program.routed.groups.count;
  small.expert_begin = program.plan->expert_begin;
  return small;
}

// The most tokens for which this path is the faster one: beside sm90, and beside portable for what
// sm90 never takes.
constexpr int64_t kBesideSm90 = 4, kBesidePortable = 64;

// The two launches of a program, or why they cannot be.
struct Launches {
  SmallArgs up, down;
  bool one_token = false;
  const ClearPadding* padding = nullptr;
  const char* refused;

  explicit Launches(const Program& program) : refused(compile(program)) {}

 private:
  const char* compile(const Program& program) {
    const moec_experts_desc& desc = *program.desc;
    if (program.has_adapters()) return "adapters";
    const auto* const first = std::get_if<Up>(&program.steps[0]);
    const auto* const second = std::get_if<Down>(&program.steps[1]);
    const auto* const last = std::get_if<Combine>(&program.steps[2]);
    if (!first || !second || !last) return "gradients";
    if (last->output_bias && last->output_bias.dtype != desc.dtype)
      return "an output bias of another type than x";
    if (last->skip_absent) return "rows of y that are left as they are";
    if (program.num_steps > 3) {
      padding = std::get_if<ClearPadding>(&program.steps[3]);
      if (padding->bytes_of_row != 2 * desc.inter * dtype_bytes(desc.dtype))
        return "pre-activations kept in f32";
    }
    up = base(program, desc.inter, desc.hidden, first->mlp->x.data.data, first->act);
    up.pre = first->pre.gate;
    up.row_token = program.plan->row_token;
    up.activation = desc.activation;
    down = base(program, desc.hidden, desc.inter, second->act, second->rows.data);
    down.combine = combine_params(*last);
    const WeightsView& w = *program.routed.weights;
    if (const char* why = set_weights(up, {&w.gate, &w.up})) return why;
    if (const char* why = set_weights(down, {&w.down})) return why;
    if (const char* why = combine_refuses(down.combine, desc.dtype)) return why;
    one_token = !one_token_refuses(up, down);
    return nullptr;
  }
};

class FewTokensPath final : public CudaPath {
 public:
  using CudaPath::CudaPath;
  const char* name() const override { return "few_tokens"; }

  const char* refuses(const moec_experts_desc& desc) const override {
    const Lack rules[] = {
        {desc.dtype != MOEC_BF16 && desc.dtype != MOEC_F16, "f32"},
        {desc.hidden % 8 || desc.inter % 8, "a hidden or inter that is not a multiple of 8"},
    };
    const char* const why = first_lack(rules);
    return why ? why : whole_forward_refuses(desc);
  }

  const char* leaves(const ExpertsCall& call) const override {
    const WeightsView& w = call.weights;
    const int64_t tokens = call.plan.choice_tokens;
    const Lack rules[] = {
        {call.is_backward, "gradients"},
        {w.gate.is_coded() || w.up.is_coded() || w.down.is_coded(), "quantised weights"},
        {call.plan.num_tokens == 0 || tokens > kBesidePortable ||
             (tokens > kBesideSm90 && !sm90_refuses(call.desc)),
         "this many tokens"},
    };
    return first_lack(rules);
  }

  Between between(const moec_experts_desc& desc) const override {
    Between between = types(desc);
    between.rows = desc.dtype;
    between.dot_floats = between.input_dot_floats = [](int64_t) { return int64_t(0); };
    return between;
  }

  const char* run(const Program& program, moec_stream stream) const override {
    const Launches launches(program);
    if (launches.refused) return launches.refused;
    const CudaBackend::Call call(backend_, stream);
    const Op& op = call.op;
    const SmallArgs &up = launches.up, &down = launches.down;
    if (launches.one_token) {
      check(launch_one_token(up, down, op.multiprocessors, op.stream), "the experts of one token");
    } else {
      check(launch_small_up(up, op.multiprocessors, op.stream), "up of few tokens");
      check(launch_small_down(down, op.multiprocessors, op.stream), "down of few tokens");
    }
    if (launches.padding) RowSteps(op, nullptr)(*launches.padding);
    op.count(2, program.flops);
    return nullptr;
  }

  const char* describe(const Program& program, std::string& text) const override {
    const Launches launches(program);
    if (launches.refused) return launches.refused;
    const bool one = launches.one_token;
    for (const char* step : {"up", "down and combine"})
      append(text, JsonObject()
                       .add("step", step)
                       .add("kernel", one ? "one_token" : "few_tokens")
                       .add("tile_features", int64_t(one ? 1 : 8)));
    return nullptr;
  }
};

}  // namespace

std::unique_ptr<const ExpertsPath> make_few_tokens_path(const CudaBackend& backend) {
  return std::make_unique<FewTokensPath>(PathCounter::kFewTokens, backend, false);
}

}  // namespace moec::cuda
