// SPDX-License-Identifier: Apache-2.0
// The experts on one device: which kernels run, on which memory.
//   forward    up (gather, activation; pre-activations when saved), down, combine
//   backward   grad down (gather; d_pre, weighted act, parts of the weight gradient), down's weight
//              gradient, grad up, gate and up's weight gradient, combine
#include <algorithm>
#include <cstdio>

#include "backend/cuda/check.h"
#include "backend/cuda/combine.h"
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/row_gemm.h"
#include "backend/cuda/weight_grad.h"
#include "core/dtype.h"
#include "core/workspace.h"

namespace moec::cuda {
namespace {

constexpr int kElementBytes = 2;  // bf16 and f16

void require(const char* what) {  // what a kernel refuses
  if (what) MOEC_FAIL(MOEC_E_UNSUPPORTED, "the CUDA backend has no kernel here: %s", what);
}

struct Rows {  // extent of the row arrays: base + per_token * T
  uint64_t base, per_token;
};
Rows row_bound(const moec_experts_desc& desc) {
  const uint64_t local =
      uint64_t(desc.expert_end ? desc.expert_end - desc.expert_begin : desc.num_experts);
  const uint64_t align = uint64_t(std::max(desc.align, 1));
  return {round_up(local * (align - 1), align), uint64_t(desc.top_k)};
}
void* take_rows(Arena& arena, const moec_experts_desc& desc, int64_t row_bytes) {
  const Rows rows = row_bound(desc);
  return arena.take(rows.base * uint64_t(row_bytes), rows.per_token * uint64_t(row_bytes));
}
int weight_parts(const moec_experts_desc& desc) {
  return 2 * int((desc.inter + 255) / 256);
}

struct Memory {
  void *pre, *act, *rows;  // [P,2,I], [P,I], [P,H]
  void *d_pre, *weighted;  // [P,2,I], [P,I]
  float* d_weight_parts;   // [parts, P]
};
void lay_out_saved(const moec_experts_desc& desc, Arena& saved, Memory& memory) {
  if (desc.save < MOEC_SAVE_PREACT) return;
  memory.pre = take_rows(saved, desc, 2 * desc.inter * kElementBytes);
}
void lay_out_forward(const moec_experts_desc& desc, Arena& work, Memory& memory) {
  memory.act = take_rows(work, desc, desc.inter * kElementBytes);
  memory.rows = take_rows(work, desc, desc.hidden * kElementBytes);
}
void lay_out_backward(const moec_experts_desc& desc, Arena& work, Memory& memory) {
  if (desc.save == MOEC_SAVE_INPUT) {
    memory.pre = take_rows(work, desc, 2 * desc.inter * kElementBytes);
  }
  memory.d_pre = take_rows(work, desc, 2 * desc.inter * kElementBytes);
  memory.weighted = take_rows(work, desc, desc.inter * kElementBytes);
  memory.act = memory.weighted;  // recomputed, then overwritten
  memory.rows = take_rows(work, desc, desc.hidden * kElementBytes);
  memory.d_weight_parts =
      static_cast<float*>(take_rows(work, desc, weight_parts(desc) * int64_t(sizeof(float))));
}

// One axis of a weight matrix is contiguous: which, and the stride of the other one.
struct Orientation {
  bool k_contiguous;
  int64_t stride;
};
Orientation orientation(const ExpertMatrix& matrix) {
  if (matrix.pointers) require("experts are separate tensors; bind one stacked tensor");
  if (matrix.has_bias()) require("biases of experts");
  if (matrix.col_stride == 1) return {true, matrix.row_stride};
  if (matrix.row_stride != 1) require("interleaved gate and up columns; bind them [E,2I,H]");
  return {false, matrix.col_stride};
}

// Everything the products of one call share.
class Products {
 public:
  Products(const moec_experts_desc& desc, const PlanView& plan, const WeightsView& weights,
           int multiprocessors, cudaStream_t stream)
      : desc_(desc), plan_(plan), weights_(weights), sms_(multiprocessors), stream_(stream) {}

  void up(const void* x, void* pre, void* act) {
    RowGemmArgs args = gate_up(RowGemm::kUp, desc_.inter, desc_.hidden, false);
    args.params.x = x;
    args.params.x_stride = desc_.hidden;
    args.params.pre = pre;
    args.params.out = act;
    run(args);
  }
  void down(const void* act, void* rows) {
    RowGemmArgs args = with_down(RowGemm::kDown, desc_.hidden, desc_.inter, true);
    args.rows = act;
    args.params.out = rows;
    run(args);
  }
  void grad_down(const void* d_y, const Memory& memory) {
    RowGemmArgs args = with_down(RowGemm::kGradDown, desc_.inter, desc_.hidden, false);
    args.params.x = d_y;
    args.params.x_stride = desc_.hidden;
    args.params.pre = memory.pre;
    args.params.d_pre = memory.d_pre;
    args.params.out = memory.weighted;
    args.params.row_weight = plan_.row_weight;
    args.params.d_weight_parts = memory.d_weight_parts;
    run(args);
  }
  void grad_up(const void* d_pre, void* rows) {
    RowGemmArgs args = gate_up(RowGemm::kGradUp, desc_.hidden, desc_.inter, true);
    args.parts = 2;
    args.rows = d_pre;
    args.params.out = rows;
    run(args);
  }
  // `first` and, with two parts, `second`: gradients of matrices whose inputs or outputs are
  // `rows`.
  void grad_weights(const void* rows, const void* gathered, const ExpertMatrix& first,
                    const ExpertMatrix* second) {
    WeightGradArgs args = {};
    const Orientation out = orientation(first);
    const bool inter_is_k = second == nullptr;  // down: [H,I]
    args.dtype = desc_.dtype;
    if (first.dtype != desc_.dtype) require("weight gradients of another type than the weights");
    args.out_m_contiguous = out.k_contiguous == inter_is_k;
    args.parts = second ? 2 : 1;
    args.m_size = desc_.inter;
    args.n_size = desc_.hidden;
    args.max_rows = plan_.max_rows;
    args.rows = rows;
    args.out[0] = first.base;
    args.out[1] = second ? second->base : nullptr;
    args.out_stride = out.stride;
    args.out_expert_stride = first.expert_stride;
    args.params.x = gathered;
    args.params.x_stride = desc_.hidden;
    args.params.row_token = plan_.row_token;
    args.params.group_offsets = plan_.group_offsets;
    args.params.num_experts = weights_.num_experts;
    require(weight_grad_refuses(args));
    check(launch_weight_grad(args, sms_, stream_), "weight gradient");
    ++launches;
  }

  uint64_t launches = 0;

 private:
  RowGemmArgs base(RowGemm op, int64_t features, int64_t k_size) const {
    RowGemmArgs args = {};
    args.op = op;
    args.dtype = desc_.dtype;
    args.features = features;
    args.k_size = k_size;
    args.parts = 1;
    args.params.row_token = plan_.row_token;
    args.params.group_offsets = plan_.group_offsets;
    args.params.num_experts = weights_.num_experts;
    args.params.max_rows = plan_.max_rows;
    args.params.out_stride = features;
    args.params.activation = desc_.activation;
    return args;
  }
  RowGemmArgs gate_up(RowGemm op, int64_t features, int64_t k_size, bool transposed) const {
    RowGemmArgs args = base(op, features, k_size);
    const Orientation gate = orientation(weights_.gate), up = orientation(weights_.up);
    if (gate.k_contiguous != up.k_contiguous || gate.stride != up.stride ||
        weights_.gate.expert_stride != weights_.up.expert_stride) {
      require("gate and up of different layouts");
    }
    args.weights[0] = weights_.gate.base;
    args.weights[1] = weights_.up.base;
    args.weights_mn_major = gate.k_contiguous == transposed;
    args.weight_stride = gate.stride;
    args.expert_stride = weights_.gate.expert_stride;
    return args;
  }
  RowGemmArgs with_down(RowGemm op, int64_t features, int64_t k_size, bool forward) const {
    RowGemmArgs args = base(op, features, k_size);
    const Orientation down = orientation(weights_.down);
    args.weights[0] = weights_.down.base;
    args.weights_mn_major = down.k_contiguous != forward;
    args.weight_stride = down.stride;
    args.expert_stride = weights_.down.expert_stride;
    return args;
  }
  void run(const RowGemmArgs& args) {
    require(row_gemm_refuses(args));
    check(launch_row_gemm(args, sms_, stream_), "row GEMM");
    ++launches;
  }

  const moec_experts_desc& desc_;
  const PlanView& plan_;
  const WeightsView& weights_;
  int sms_;
  cudaStream_t stream_;
};

CombineParams combine_params(const moec_experts_desc& desc, const PlanView& plan, const void* rows,
                             void* to, const void* residual) {
  CombineParams p = {};
  p.num_tokens = plan.num_tokens;
  p.hidden = desc.hidden;
  p.num_experts = plan.num_experts;
  p.num_zero = plan.num_zero;
  p.top_k = plan.top_k;
  p.rows = rows;
  p.assignment_row = plan.assignment_row;
  p.expert_ids = plan.expert_ids;
  p.residual = residual;
  p.scale = desc.output_scale;
  p.y = to;
  return p;
}

uint64_t product_flops(const moec_experts_desc& desc, const PlanView& plan) {  // of one matrix
  return 2 * uint64_t(plan.num_tokens) * uint64_t(plan.top_k) * uint64_t(desc.hidden * desc.inter);
}

}  // namespace

void CudaBackend::check_experts(const moec_experts_desc& desc) const {
  const struct {
    bool lacks;
    const char* what;
  } rules[] = {
      {desc.dtype != MOEC_BF16 && desc.dtype != MOEC_F16, "f32; it has bf16 and f16"},
      {desc.hidden % 8 || desc.inter % 8, "a hidden or inter that is not a multiple of 8"},
      {desc.gate_layout == MOEC_GATE_NONE, "plain MLPs; it has gated ones"},
      {desc.activation.kind != MOEC_ACT_SWIGLU, "this activation; it has MOEC_ACT_SWIGLU"},
      {desc.weight_position != MOEC_WEIGHT_ON_OUTPUT, "this weight_position; it has ON_OUTPUT"},
      {desc.combine != MOEC_COMBINE_FP32_SLOT, "this combine; it has FP32_SLOT"},
      {desc.act_rounding != MOEC_ACT_FP32_ONCE, "this act_rounding; it has FP32_ONCE"},
      {desc.shared != MOEC_SHARED_NONE, "shared experts"},
      {desc.max_rows_base != 0, "expert choice"},
      {desc.num_zero_experts > 0 && desc.save != MOEC_SAVE_NONE, "gradients of identity experts"},
      {desc.output_scale != 1.0f && desc.save != MOEC_SAVE_NONE, "gradients with output_scale"},
  };
  for (const auto& rule : rules) {
    MOEC_REQUIRE(!rule.lacks, MOEC_E_UNSUPPORTED,
                 "the CUDA backend has no kernel for %s; a CPU context has", rule.what);
  }
}

void CudaBackend::check_weights(const moec_weights_desc& desc) const {
  MOEC_REQUIRE(desc.dtype == MOEC_BF16 || desc.dtype == MOEC_F16, MOEC_E_UNSUPPORTED,
               "dtype is %s; the CUDA backend has bf16 and f16", dtype_name(desc.dtype));
}

Backend::Sizes CudaBackend::experts_sizes(const moec_experts_desc& desc) const {
  Arena forward, backward, saved;
  Memory memory = {};
  lay_out_forward(desc, forward, memory);
  lay_out_backward(desc, backward, memory);
  lay_out_saved(desc, saved, memory);
  return {forward.size(), desc.save == MOEC_SAVE_NONE ? moec_size{0, 0} : backward.size(),
          saved.size()};
}

void CudaBackend::experts_forward(const ExpertsArgs& args, moec_stream stream) const {
  const moec_experts_desc& desc = *args.desc;
  const PlanView& plan = *args.plan;
  if (args.output_bias && args.output_bias.dtype != desc.dtype) require("an f32 output bias");
  Memory memory = {};
  Arena work(args.workspace, args.num_tokens), saved(args.saved, args.num_tokens);
  lay_out_forward(desc, work, memory);
  if (args.saved) lay_out_saved(desc, saved, memory);

  CombineParams p = combine_params(desc, plan, memory.rows, args.y, args.residual);
  p.weights = plan.weights;
  p.x = args.x.data;
  p.bias = args.output_bias.data;
  require(combine_refuses(p, desc.dtype));
  const DeviceScope scope(device_);
  const auto queue = static_cast<cudaStream_t>(stream);
  Products products(desc, plan, *args.weights, multiprocessors_, queue);
  products.up(args.x.data, memory.pre, memory.act);
  products.down(memory.act, memory.rows);
  check(launch_combine(p, desc.dtype, multiprocessors_, queue), "combine");
  count(products.launches + 1, 3 * product_flops(desc, plan));
}

void CudaBackend::experts_backward(const ExpertsGradArgs& args, moec_stream stream) const {
  const moec_experts_desc& desc = *args.desc;
  const PlanView& plan = *args.plan;
  const WeightsView* const d_weights = args.d_expert_weights;
  const bool down = d_weights && d_weights->down.present();
  const bool gate = d_weights && d_weights->gate.present(),
             up = d_weights && d_weights->up.present();
  if (args.accumulate && (down || gate || up)) require("accumulating weight gradients");
  if (gate != up) require("the gradient of only one of gate and up");
  if (args.d_output_bias) require("the gradient of the output bias");
  Memory memory = {};
  Arena work(args.workspace, args.num_tokens);
  Arena saved(const_cast<void*>(args.saved), args.num_tokens);
  lay_out_saved(desc, saved, memory);
  lay_out_backward(desc, work, memory);

  CombineParams p =
      combine_params(desc, plan, memory.rows, args.d_x, args.accumulate_x ? args.d_x : nullptr);
  p.d_weight_parts = memory.d_weight_parts;
  p.parts = weight_parts(desc);
  p.max_rows = plan.max_rows;
  p.d_weights = args.d_weights;
  require(combine_refuses(p, desc.dtype));
  const DeviceScope scope(device_);
  const auto queue = static_cast<cudaStream_t>(stream);
  Products products(desc, plan, *args.weights, multiprocessors_, queue);
  if (desc.save == MOEC_SAVE_INPUT) products.up(args.x.data, memory.pre, memory.act);
  products.grad_down(args.d_y, memory);
  if (down) products.grad_weights(memory.weighted, args.d_y, d_weights->down, nullptr);
  if (args.d_x) products.grad_up(memory.d_pre, memory.rows);
  if (gate) products.grad_weights(memory.d_pre, args.x.data, d_weights->gate, &d_weights->up);
  if (args.d_x || args.d_weights) {
    check(launch_combine(p, desc.dtype, multiprocessors_, queue), "combine");
    ++products.launches;
  }
  if (args.d_residual) {
    copy(args.d_residual, args.d_y, uint64_t(args.num_tokens * desc.hidden) * kElementBytes,
         stream);
  }
  const uint64_t matrices = 1 + (down ? 1 : 0) + (args.d_x ? 2 : 0) + (gate ? 2 : 0);
  count(products.launches, matrices * product_flops(desc, plan));
}

std::string CudaBackend::describe(const moec_experts_desc& desc, const WeightsView&,
                                  int64_t num_tokens) const {
  const Sizes sizes = experts_sizes(desc);
  const auto bytes = [&](moec_size size) {
    return static_cast<unsigned long long>(bytes_for(size, num_tokens));
  };
  char text[640];
  std::snprintf(text, sizeof text,
                "{\"backend\": \"cuda\", \"arch\": \"sm_90a\", \"num_tokens\": %lld, "
                "\"dtype\": \"%s\", \"row_gemm\": {\"features\": 256, \"rows\": \"16..128 by 16\", "
                "\"k\": 64, \"cluster\": 2}, \"weight_grad\": {\"m\": 256, \"n\": 128, "
                "\"k\": \"64, tail 16\"}, \"forward_workspace_bytes\": %llu, "
                "\"backward_workspace_bytes\": %llu, \"saved_bytes\": %llu}",
                static_cast<long long>(num_tokens), dtype_name(desc.dtype), bytes(sizes.forward),
                bytes(sizes.backward), bytes(sizes.saved));
  return text;
}

}  // namespace moec::cuda
