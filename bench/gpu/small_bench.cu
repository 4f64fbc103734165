// SPDX-License-Identifier: Apache-2.0
// A layer (plan, experts, combine) over few tokens, as a CUDA graph on cold weights: the
// kernels of one token and of few tokens beside the tiled ones, the floor (bytes of the experts
// hit, x and y at the copy rate measured here) and, at equal counts, cuBLAS. Before each replay 256
// MiB are read, so that no weight is in L2, nor anything that would have to be written back;
// implementations take turns; median. `chain`: the mean of 8 layers of other experts in one graph.
//
// Usage: small_bench OUTPUT.json REPEATS SHAPE:TOKENS...
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <set>
#include <string>

#include "backend/cuda/few_tokens/one_token.h"
#include "backend/cuda/few_tokens/small_gemm.h"
#include "backend/cuda/sm90/row_gemm.h"
#include "bound.cuh"
#include "gpu/device_problem.h"

using namespace moec;
using namespace moec::test;

namespace {

constexpr int kChain = 8, kPlans = 20;

__global__ void read_all(const uint4* from, int64_t count, uint4* to) {
  uint4 sum = {};
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i + 7 * step < count; i += 8 * step) {
    uint4 v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = __ldcg(from + i + j * step);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum.x ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  if (to && sum.x == 12345) *to = sum;
}

// A capture of `body`, replayed.
class Graph {
 public:
  Graph(cudaStream_t stream, const std::function<void()>& body) : stream_(stream) {
    cudaGraph_t graph;
    CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    body();
    CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
    CHECK_CUDA(cudaGraphInstantiate(&exec_, graph, 0));
    CHECK_CUDA(cudaGraphDestroy(graph));
    CHECK_CUDA(cudaGraphUpload(exec_, stream));
  }
  Graph(const Graph&) = delete;
  ~Graph() { cudaGraphExecDestroy(exec_); }
  void replay() const { CHECK_CUDA(cudaGraphLaunch(exec_, stream_)); }

 private:
  cudaStream_t stream_;
  cudaGraphExec_t exec_;
};

class Clock {
 public:
  explicit Clock(cudaStream_t stream) : stream_(stream), flush_(256 << 20) {
    CHECK_CUDA(cudaEventCreate(&start_));
    CHECK_CUDA(cudaEventCreate(&stop_));
  }
  // Microseconds of one call on cold weights.
  float time(const std::function<void()>& call) {
    read_all<<<132 * 8, 512, 0, stream_>>>(reinterpret_cast<uint4*>(flush_.data()),
                                           int64_t(flush_.size()) / 16, nullptr);
    CHECK_CUDA(cudaEventRecord(start_, stream_));
    call();
    CHECK_CUDA(cudaEventRecord(stop_, stream_));
    CHECK_CUDA(cudaEventSynchronize(stop_));
    float ms = 0;
    CHECK_CUDA(cudaEventElapsedTime(&ms, start_, stop_));
    return ms * 1000;
  }

 private:
  cudaStream_t stream_;
  DeviceArray<char> flush_;
  cudaEvent_t start_, stop_;
};

class SmallLayer {
 public:
  SmallLayer(const Shape& shape, int64_t tokens, cudaStream_t stream)
      : s_(shape), t_(tokens), r_(tokens * shape.top_k), stream_(stream) {
    for (int i = 0; i < kChain; ++i) {
      ids_.push_back(random_routing(shape, tokens, 50 + i));
      plans_.emplace_back(ids_.back(), shape);
    }
    const int64_t h = s_.hidden, i = s_.inter, e = s_.experts;
    x_ = normal_array<Half>(t_ * h, 1.0f, 1);
    gate_up_ = normal_array<Half>(e * 2 * i * h, 1.0f / std::sqrt(float(h)), 3);
    down_ = normal_array<Half>(e * i * h, 1.0f / std::sqrt(float(i)), 4);
    act_ = normal_array<Half>(r_ * i, 1.0f, 5);
    rows_ = normal_array<Half>(r_ * h, 1.0f, 6);
    both_ = DeviceArray<Half>(r_ * 2 * i);
    y_ = DeviceArray<Half>(t_ * h);
    CHECK_CUDA(cudaDeviceGetAttribute(&sms_, cudaDevAttrMultiProcessorCount, 0));
    CHECK_CUDA(cudaDeviceSynchronize());
  }
  int hit() const { return int(std::set<int32_t>(ids_[0].begin(), ids_[0].end()).size()); }
  double bytes() const { return 6.0 * hit() * s_.hidden * s_.inter + 4.0 * double(t_) * s_.hidden; }

  void plan(int set = 0) const { plans_[set].build(stream_); }
  void small_layer(int set = 0) const {
    plan(set);
    CHECK_CUDA(launch_small_up(up(set), sms_, stream_));
    CHECK_CUDA(launch_small_down(down(set), sms_, stream_));
  }
  void experts_of_one(int set = 0) const {
    CHECK_CUDA(launch_one_token(up(set), down(set), sms_, stream_));
  }
  void one_token_layer(int set = 0) const {
    plan(set);
    experts_of_one(set);
  }
  void tiled_layer() const {
    plan();
    auto up = tiled(cuda::RowGemm::kUp, s_.inter, s_.hidden, gate_up_.data(), 2);
    up.weights[1] = gate_up_.data() + int64_t(s_.inter) * s_.hidden;
    up.x = x_.data();
    up.x_stride = s_.hidden;
    up.out = act_.data();
    CHECK_CUDA(cuda::launch_row_gemm(up, cuda::choose(up, {sms_}), stream_));
    auto down = tiled(cuda::RowGemm::kDown, s_.hidden, s_.inter, down_.data(), 1);
    down.rows = act_.data();
    down.out = rows_.data();
    CHECK_CUDA(cuda::launch_row_gemm(down, cuda::choose(down, {sms_}), stream_));
    CHECK_CUDA(cuda::launch_combine(combine_params(0), MOEC_BF16, sms_, stream_));
  }
  bool bounded() const { return r_ >= s_.experts; }
  void bound(const Cublas& cublas) const {
    const int n = int(r_ / s_.experts);
    cublas.batched(s_.experts, 2 * s_.inter, n, s_.hidden, gate_up_.data(), rows_.data(),
                   both_.data(), stream_);
    cublas.batched(s_.experts, s_.hidden, n, s_.inter, down_.data(), act_.data(), rows_.data(),
                   stream_);
  }

 private:
  cuda::SmallArgs up(int set) const {
    cuda::SmallArgs a = small(set, s_.inter, s_.hidden, gate_up_.data(), 2);
    a.weights[1] = gate_up_.data() + int64_t(s_.inter) * s_.hidden;
    a.operand = x_.data();
    a.row_token = plans_[set].plan.row_token;
    a.out = act_.data();
    return a;
  }
  cuda::SmallArgs down(int set) const {
    cuda::SmallArgs a = small(set, s_.hidden, s_.inter, down_.data(), 1);
    a.operand = act_.data();
    a.out = rows_.data();
    a.combine = combine_params(set);
    return a;
  }
  cuda::SmallArgs small(int set, int features, int k, const Half* weights, int parts) const {
    cuda::SmallArgs a = {};
    a.dtype = MOEC_BF16;
    a.features = features;
    a.k_size = a.weight_stride = a.operand_stride = k;
    a.weights[0] = weights;
    a.expert_stride = int64_t(parts) * s_.inter * s_.hidden;
    a.group_offsets = plans_[set].plan.group_offsets;
    a.num_experts = s_.experts;
    return a;
  }
  cuda::RowGemmProblem tiled(cuda::RowGemm op, int features, int k, const Half* weights,
                             int parts) const {
    cuda::RowGemmProblem a = plans_[0].row_gemm(op, features, k);
    a.out_stride = features;
    a.weight_stride = k;
    a.weights[0] = weights;
    a.expert_stride = int64_t(parts) * s_.inter * s_.hidden;
    return a;
  }
  cuda::CombineParams combine_params(int set) const {
    return plans_[set].combine(s_.hidden, rows_.data(), y_.data());
  }

  Shape s_;
  int64_t t_, r_;
  cudaStream_t stream_;
  int sms_ = 0;
  std::vector<std::vector<int32_t>> ids_;
  std::vector<DevicePlan> plans_;
  DeviceArray<Half> x_, gate_up_, down_, act_, rows_, both_, y_;
};

struct Timed {
  const char* name;
  std::function<void()> body;
  int layers = 1;
};

float median(std::vector<float> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) {
    std::printf("usage: small_bench OUTPUT.json REPEATS SHAPE:TOKENS...\n");
    return 2;
  }
  cudaStream_t stream;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  Clock clock(stream);
  double copy_rate = 0, read_rate = 0;
  {
    const int64_t bytes = int64_t(2) << 30;
    DeviceArray<char> from(bytes), to(bytes);
    for (int i = 0; i < 20; ++i) {
      const float copy = clock.time([&] {
        CHECK_CUDA(cudaMemcpyAsync(to.data(), from.data(), bytes, cudaMemcpyDefault, stream));
      });
      const float read = clock.time([&] {
        read_all<<<132 * 8, 512, 0, stream>>>(reinterpret_cast<uint4*>(from.data()), bytes / 16,
                                              reinterpret_cast<uint4*>(to.data()));
      });
      copy_rate = std::max(copy_rate, 2.0 * bytes / copy * 1e-6);
      read_rate = std::max(read_rate, 1.0 * bytes / read * 1e-6);
    }
  }
  std::printf("copy %.2f TB/s, read %.2f TB/s\n", copy_rate, read_rate);
  std::FILE* const out = std::fopen(argv[1], "w");
  if (!out) return 2;
  std::fprintf(out, "[{\"impl\": \"device_copy\", \"tb_s\": %.3f, \"read_tb_s\": %.3f}", copy_rate,
               read_rate);
  const Cublas cublas;
  for (int i = 3; i < argc; ++i) {
    const char* const colon = std::strchr(argv[i], ':');
    for (const Shape& shape : kShapes) {
      if (!colon || std::string(argv[i], size_t(colon - argv[i])) != shape.name) continue;
      const int64_t tokens = std::atoll(colon + 1);
      const SmallLayer layer(shape, tokens, stream);
      std::vector<Timed> all = {
          {"small", [&] { layer.small_layer(); }},
          {"plan", [&] { layer.plan(); }},
          {"plan_chain",
           [&] {
             for (int c = 0; c < kPlans; ++c) layer.plan();
           },
           kPlans},
          {"small_chain",
           [&] {
             for (int c = 0; c < kChain; ++c) layer.small_layer(c);
           },
           kChain},
          {"tiled", [&] { layer.tiled_layer(); }},
      };
      if (tokens == 1) {
        all.push_back({"one_token", [&] { layer.one_token_layer(); }});
        all.push_back({"its_experts", [&] { layer.experts_of_one(); }});
        all.push_back({"one_token_chain",
                       [&] {
                         for (int c = 0; c < kChain; ++c) layer.one_token_layer(c);
                       },
                       kChain});
      }
      if (cublas.present() && layer.bounded()) {
        all.push_back({"cublas_bmm_bound", [&] { layer.bound(cublas); }});
      }
      layer.bound(cublas);  // its first call may not be captured
      std::vector<std::unique_ptr<Graph>> graphs;
      for (const Timed& timed : all) graphs.push_back(std::make_unique<Graph>(stream, timed.body));
      std::vector<std::vector<float>> us(all.size());
      for (int round = 0; round < std::atoi(argv[2]); ++round) {
        for (size_t j = 0; j < all.size(); ++j) {
          const float time = clock.time([&] { graphs[j]->replay(); });
          if (round > 0) us[j].push_back(time / float(all[j].layers));
        }
      }
      const double floor = layer.bytes() / copy_rate * 1e-6;
      std::printf("%-14s T %4lld hit %3d floor %7.1f us |", shape.name, (long long)tokens,
                  layer.hit(), floor);
      for (size_t j = 0; j < all.size(); ++j) {
        const double time = median(us[j]);
        std::printf(" %s %.1f", all[j].name, time);
        std::fprintf(out,
                     ",\n {\"shape\": \"%s\", \"tokens\": %lld, \"impl\": \"%s\", \"us\": %.2f, "
                     "\"experts_hit\": %d, \"floor_us\": %.2f}",
                     shape.name, (long long)tokens, all[j].name, time, layer.hit(), floor);
      }
      std::printf(" | small / floor %.3f\n", median(us[0]) / floor);
      std::fflush(stdout);
    }
  }
  std::fprintf(out, "\n]\n");
  std::fclose(out);
  return 0;
}
