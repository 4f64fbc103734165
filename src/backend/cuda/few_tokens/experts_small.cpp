// SPDX-License-Identifier: Apache-2.0
// The experts over few tokens: two kernels that read the weights of the experts hit, once. Forward
// only; pre-activations are kept as the fast path keeps them, so backward goes its way.
#include <initializer_list>

#include "backend/cuda/experts/experts_memory.h"
#include "backend/cuda/experts/experts_path.h"
#include "backend/cuda/experts/experts_sums.h"
#include "backend/cuda/few_tokens/one_token.h"
#include "backend/cuda/few_tokens/small_gemm.h"
#include "math/activation.h"

namespace moec::cuda {
namespace {

struct Memory {
  void *act, *rows;  // [P,I], [P,H]
};
Memory lay_out(const moec_experts_desc& desc, Arena& work) {
  const int64_t size = dtype_bytes(desc.dtype);
  Memory memory;
  memory.act = take_rows(work, desc, desc.inter * size);
  memory.rows = take_rows(work, desc, desc.hidden * size);
  return memory;
}

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
    if (m->dtype != args.dtype) return "weights of another type than x";
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

SmallArgs base(const ExpertsArgs& args, int64_t features, int64_t k_size, const void* operand,
               void* out) {
  SmallArgs small = {};
  small.dtype = args.desc->dtype;
  small.features = features;
  small.k_size = small.operand_stride = k_size;
  small.operand = operand;
  small.out = out;
  small.group_offsets = args.plan->group_offsets;
  small.num_experts = args.weights->num_experts;
  small.expert_begin = args.plan->expert_begin;
  return small;
}

// Up to how many tokens this is the faster way: than the fast path, and than the portable one for
// what the fast path never takes.
constexpr int64_t kBesideFast = 4, kBesidePortable = 64;
int64_t most_tokens(const moec_experts_desc& desc) {
  return kFastPath.refuses(desc) ? kBesidePortable : kBesideFast;
}

const char* forward(const Op& op, const ExpertsArgs& args) {
  const moec_experts_desc& desc = *args.desc;
  if (args.num_tokens == 0 || args.num_tokens > most_tokens(desc)) return "this many tokens";
  if (args.output_bias && args.output_bias.dtype != desc.dtype)
    return "an output bias of another type than x";
  if (args.skip_absent) return "rows of y that are left as they are";
  Arena work(args.workspace, args.num_tokens), saved(args.saved, args.num_tokens);
  const Memory memory = lay_out(desc, work);
  SmallArgs up = base(args, desc.inter, desc.hidden, args.x.data, memory.act);
  if (args.saved) up.pre = lay_out_saved(desc, saved).pre;
  if (up.pre && intermediates(desc).pre != desc.dtype) return "pre-activations kept in f32";
  up.row_token = args.plan->row_token;
  up.activation = desc.activation;
  SmallArgs down = base(args, desc.hidden, desc.inter, memory.act, memory.rows);
  down.combine = sum_of_outputs(args, memory.rows);
  if (const char* why = set_weights(up, {&args.weights->gate, &args.weights->up})) return why;
  if (const char* why = set_weights(down, {&args.weights->down})) return why;
  if (const char* why = combine_refuses(down.combine, desc.dtype)) return why;
  if (!one_token_refuses(up, down)) {
    check(launch_one_token(up, down, op.multiprocessors, op.stream), "the experts of one token");
  } else {
    check(launch_small_up(up, op.multiprocessors, op.stream), "up of few tokens");
    check(launch_small_down(down, op.multiprocessors, op.stream), "down of few tokens");
  }
  op.count(2, 3 * product_flops(args.num_tokens * desc.top_k, desc.hidden, desc.inter));
  return nullptr;
}

const char* backward(const Op&, const ExpertsGradArgs&) {
  return "gradients";
}

void measure(const moec_experts_desc& desc, moec_size& forward_size, moec_size& backward_size) {
  Arena work;
  lay_out(desc, work);
  forward_size = work.size();
  backward_size = {};
}

const char* refuses(const moec_experts_desc& desc) {
  const struct {
    bool lacks;
    const char* what;
  } rules[] = {
      {desc.dtype != MOEC_BF16 && desc.dtype != MOEC_F16, "f32"},
      {desc.hidden % 8 || desc.inter % 8, "a hidden or inter that is not a multiple of 8"},
      {!is_gated(desc), "plain MLPs"},
      {desc.weight_position != MOEC_WEIGHT_ON_OUTPUT, "weights that are not on the output"},
      {desc.combine != MOEC_COMBINE_FP32_SLOT, "combines other than FP32_SLOT"},
      {desc.act_rounding != MOEC_ACT_FP32_ONCE, "act_rounding other than FP32_ONCE"},
      {has_shared(desc), "shared experts"},
      {desc.max_rows_base != 0, "expert choice"},
  };
  for (const auto& rule : rules)
    if (rule.lacks) return rule.what;
  return nullptr;
}

}  // namespace

const ExpertsPath kSmallPath = {
    "small",
    true,
    refuses,
    forward,
    backward,
    measure,
    "\"small\": {\"most_tokens\": 4, \"most_tokens_beside_portable\": 64, \"features\": 8, "
    "\"rows\": \"8, down 4\", \"k\": \"128, down 256\"}, "
    "\"one_token\": {\"warps\": \"16, 8\", \"piece_bytes\": 2048}"};

}  // namespace moec::cuda
