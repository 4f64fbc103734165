// SPDX-License-Identifier: Apache-2.0
// Time of routing on a GPU, as a layer sees it: the mean of 20 calls in one CUDA graph, median of
// replays. Ids are drawn evenly, or all are one expert. A plan by weight drops what is above an
// even share; in a plan by experts each takes that share.
//
// Usage: plan_bench [OUTPUT.json]
#include <cuda_runtime_api.h>
#include <moec/moec.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <vector>

namespace {

constexpr int kCalls = 20, kReplays = 41;

void check(bool good, const char* what) {
  if (good) return;
  auto info = moec_error_info{};
  moec_struct_init(&info, sizeof info);
  moec_last_error(&info);
  std::printf("FAIL %s: %s\n", what, info.message);
  std::exit(1);
}
#define OK(call) check((call) == MOEC_OK, #call)
#define CUDA(call) check((call) == cudaSuccess, #call)

template <class T>
T sized() {
  T value;
  moec_struct_init(&value, sizeof value);
  return value;
}

struct Device {
  moec_context* context = nullptr;
  cudaStream_t stream = nullptr;
  Device() {
    auto desc = sized<moec_context_desc>();
    desc.device_type = MOEC_CUDA;
    OK(moec_context_create(&desc, &context));
    CUDA(cudaStreamCreate(&stream));
  }
  template <class T>
  moec_tensor tensor(moec_dtype dtype, std::vector<int64_t> shape, const std::vector<T>& from) {
    void* data = nullptr;
    int64_t count = 1;
    for (const int64_t extent : shape) count *= extent;
    const size_t bytes = size_t(count) * ((dtype >> 8 & 0xff) / 8);
    CUDA(cudaMalloc(&data, bytes + 64));
    if (!from.empty()) CUDA(cudaMemcpy(data, from.data(), bytes, cudaMemcpyDefault));
    moec_tensor tensor;
    OK(moec_tensor_make(&tensor, data, dtype, MOEC_CUDA, 0, int32_t(shape.size()), shape.data()));
    return tensor;
  }
  // Microseconds of one call.
  double time(const std::function<void()>& call) {
    for (int i = 0; i < 3; ++i) call();
    CUDA(cudaStreamSynchronize(stream));
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < kCalls; ++i) call();
    CUDA(cudaStreamEndCapture(stream, &graph));
    CUDA(cudaGraphInstantiate(&replay, graph, 0));
    cudaEvent_t start, stop;
    CUDA(cudaEventCreate(&start));
    CUDA(cudaEventCreate(&stop));
    std::vector<float> times;
    for (int i = 0; i < kReplays; ++i) {
      CUDA(cudaEventRecord(start, stream));
      CUDA(cudaGraphLaunch(replay, stream));
      CUDA(cudaEventRecord(stop, stream));
      CUDA(cudaEventSynchronize(stop));
      float ms;
      CUDA(cudaEventElapsedTime(&ms, start, stop));
      times.push_back(ms);
    }
    std::sort(times.begin(), times.end());
    CUDA(cudaGraphExecDestroy(replay));
    CUDA(cudaGraphDestroy(graph));
    return double(times[kReplays / 2]) * 1e3 / kCalls;
  }
};

struct Row {
  std::string name;
  int64_t tokens;
  int experts, top_k;
  double us;
};

std::vector<float> normal_values(int64_t count) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& v : values) v = normal(random);
  return values;
}

void plans(Device& device, std::vector<Row>& rows, int64_t tokens, int experts, int top_k,
           bool skewed, bool by_weight = false) {
  std::mt19937 random(1);
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < tokens * top_k; ++i)
    ids.push_back(skewed ? 0 : int32_t(random() % unsigned(experts)));
  const moec_tensor id = device.tensor(MOEC_I32, {tokens, top_k}, ids);
  const moec_tensor weight =
      device.tensor(MOEC_F32, {tokens, top_k}, normal_values(tokens * top_k));
  auto desc = sized<moec_plan_desc>();
  desc.max_tokens = tokens;
  desc.num_experts = experts;
  desc.top_k = top_k;
  if (by_weight) desc.drop = MOEC_DROP_BY_WEIGHT, desc.capacity_factor = 1.0f;
  moec_plan* plan = nullptr;
  OK(moec_plan_create(device.context, &desc, nullptr, &plan));
  const double us =
      device.time([&] { OK(moec_plan_from_topk(plan, &id, &weight, device.stream)); });
  const char* const name = by_weight ? "plan by weight" : skewed ? "plan, one expert" : "plan";
  rows.push_back({name, tokens, experts, top_k, us});
  moec_plan_free(plan);
  CUDA(cudaFree(id.data));
  CUDA(cudaFree(weight.data));
}

void choices(Device& device, std::vector<Row>& rows, int64_t tokens, int experts, int top_k) {
  const moec_tensor scores =
      device.tensor(MOEC_F32, {tokens, experts}, normal_values(tokens * experts));
  auto desc = sized<moec_plan_desc>();
  desc.max_tokens = tokens;
  desc.num_experts = experts;
  desc.kind = MOEC_PLAN_EXPERT_CHOICE;
  desc.capacity = std::max<int64_t>(1, tokens * top_k / experts);
  moec_plan* plan = nullptr;
  OK(moec_plan_create(device.context, &desc, nullptr, &plan));
  const double us =
      device.time([&] { OK(moec_plan_from_scores(plan, &scores, nullptr, device.stream)); });
  rows.push_back({"plan by experts", tokens, experts, top_k, us});
  moec_plan_free(plan);
  CUDA(cudaFree(scores.data));
}

void losses(Device& device, std::vector<Row>& rows, int64_t tokens, int experts, int top_k) {
  moec_tensor logits = device.tensor(MOEC_F32, {tokens, experts}, normal_values(tokens * experts));
  moec_tensor d_logits = device.tensor<int>(MOEC_F32, {tokens, experts}, {});
  CUDA(cudaMemset(d_logits.data, 0, size_t(tokens * experts) * 4));
  auto args = sized<moec_loss_args>();
  args.top_k = top_k;
  args.logits = &logits;
  args.d_logits = &d_logits;
  args.count = 1;
  args.loss = device.tensor<int>(MOEC_F32, {1}, {});
  for (const bool is_z : {false, true}) {
    args.kind = is_z ? MOEC_LOSS_Z : MOEC_LOSS_BALANCE_SWITCH;
    args.score = is_z ? 0u : uint32_t(MOEC_SCORE_SOFTMAX);
    const double forward =
        device.time([&] { OK(moec_loss_forward(device.context, &args, device.stream)); });
    const double backward =
        device.time([&] { OK(moec_loss_backward(device.context, &args, device.stream)); });
    rows.push_back({is_z ? "z loss" : "balance", tokens, experts, top_k, forward});
    rows.push_back({is_z ? "z backward" : "balance backward", tokens, experts, top_k, backward});
  }
  for (const moec_tensor* t : {&logits, &d_logits, &args.loss}) CUDA(cudaFree(t->data));
}

void routers(Device& device, std::vector<Row>& rows, int64_t tokens, int experts, int top_k,
             int64_t hidden) {
  auto desc = sized<moec_router_desc>();
  desc.num_experts = experts;
  desc.top_k = top_k;
  desc.norm = MOEC_NORM_SUM;
  moec_router* router = nullptr;
  OK(moec_router_create(device.context, &desc, &router));
  auto route = sized<moec_route_args>();
  route.logits = device.tensor(MOEC_F32, {tokens, experts}, normal_values(tokens * experts));
  route.expert_ids = device.tensor<int>(MOEC_I32, {tokens, top_k}, {});
  route.routing_weights = device.tensor<int>(MOEC_F32, {tokens, top_k}, {});
  auto back = sized<moec_route_grad_args>();
  back.logits = route.logits;
  back.expert_ids = route.expert_ids;
  back.d_routing_weights = device.tensor<int>(MOEC_F32, {tokens, top_k}, {});
  back.d_logits = device.tensor<int>(MOEC_F32, {tokens, experts}, {});
  CUDA(cudaMemset(back.d_routing_weights.data, 0, size_t(tokens * top_k) * 4));
  auto gate = sized<moec_gate_args>();
  gate.x = device.tensor<int>(MOEC_BF16, {tokens, hidden}, {});
  gate.weight = device.tensor<int>(MOEC_BF16, {experts, hidden}, {});
  gate.logits = back.d_logits;
  CUDA(cudaMemset(gate.x.data, 0, size_t(tokens * hidden) * 2));
  CUDA(cudaMemset(gate.weight.data, 0, size_t(experts * hidden) * 2));
  auto grad = sized<moec_gate_grad_args>();
  grad.x = gate.x;
  grad.weight = gate.weight;
  grad.d_logits = back.d_logits;
  grad.d_x = device.tensor<int>(MOEC_BF16, {tokens, hidden}, {});
  grad.d_weight = device.tensor<int>(MOEC_BF16, {experts, hidden}, {});
  moec_tensor counts = device.tensor(MOEC_I32, {experts}, std::vector<int>(size_t(experts)));
  moec_tensor bias = device.tensor(MOEC_F32, {experts}, std::vector<float>(size_t(experts)));
  const struct {
    const char* name;
    std::function<void()> call;
  } calls[] = {
      {"route", [&] { OK(moec_route_forward(router, &route, device.stream)); }},
      {"route backward", [&] { OK(moec_route_backward(router, &back, device.stream)); }},
      {"gate", [&] { OK(moec_gate_forward(router, &gate, device.stream)); }},
      {"gate backward", [&] { OK(moec_gate_backward(router, &grad, device.stream)); }},
      {"bias update",
       [&] { OK(moec_router_bias_update(router, &counts, 1e-3f, &bias, device.stream)); }},
  };
  for (const auto& call : calls)
    rows.push_back({call.name, tokens, experts, top_k, device.time(call.call)});
  moec_router_free(router);
  for (const moec_tensor* t :
       {&route.logits, &route.expert_ids, &route.routing_weights, &back.d_routing_weights,
        &back.d_logits, &gate.x, &gate.weight, &grad.d_x, &grad.d_weight, &counts, &bias})
    CUDA(cudaFree(t->data));
}

}  // namespace

int main(int argc, char** argv) {
  int32_t devices = 0;
  OK(moec_device_count(MOEC_CUDA, &devices));
  if (devices == 0) return 77;
  Device device;
  std::vector<Row> rows;
  for (const int64_t tokens : {1, 8, 64, 128, 512, 1024, 2048, 4096, 16384, 32768, 65536}) {
    plans(device, rows, tokens, 128, 8, false);
    plans(device, rows, tokens, 128, 8, true);
  }
  plans(device, rows, 32768, 256, 8, false);
  plans(device, rows, 4096, 8, 2, false);
  plans(device, rows, 1024, 256, 8, false);
  plans(device, rows, 1024, 512, 8, false);
  for (const int64_t tokens : {64, 1024, 4096, 16384}) {
    plans(device, rows, tokens, 128, 8, false, true);
    choices(device, rows, tokens, 128, 8);
    losses(device, rows, tokens, 128, 8);
  }
  losses(device, rows, 60000, 8, 2);
  for (const int64_t tokens : {1, 64, 1024, 4096, 16384})
    routers(device, rows, tokens, 128, 8, 2048);
  std::FILE* const out = argc > 1 ? std::fopen(argv[1], "w") : nullptr;
  for (size_t i = 0; i < rows.size(); ++i) {
    const Row& r = rows[i];
    std::printf("%-18s T %6lld E %4d K %d %9.2f us\n", r.name.c_str(), (long long)r.tokens,
                r.experts, r.top_k, r.us);
    if (out)
      std::fprintf(out,
                   "%s{\"op\": \"%s\", \"tokens\": %lld, \"experts\": %d, \"top_k\": %d, "
                   "\"us\": %.2f}%s\n",
                   i ? " " : "[", r.name.c_str(), (long long)r.tokens, r.experts, r.top_k, r.us,
                   i + 1 < rows.size() ? "," : "]");
  }
  if (out) std::fclose(out);
  return 0;
}
