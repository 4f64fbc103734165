// SPDX-License-Identifier: Apache-2.0
// cpu_adapters: a layer with adapters beside the same layer without, in turns: forward, and the
// step of frozen weights, which is forward and backward to x, with the gradients of the factors
// where there are any. Adapters of one rank on gate_up and on down, bf16, each factor compact.
//
//   cpu_adapters SHAPES.json MODEL RANK ROUNDS TOKENS...
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <stdexcept>

#include "calls.h"
#include "layer_case.h"

namespace moec::bench {
namespace {

class AdapterCase {
 public:
  AdapterCase(const Shape& s, int64_t rank, int64_t tokens) {
    const int64_t H = s.hidden, I = s.inter, E = s.experts;
    auto context = sized<moec_context_desc>();
    check(moec_context_create(&context, &context_));
    auto router = sized<moec_router_desc>();
    router.num_experts = s.experts;
    router.top_k = s.top_k;
    router.norm = MOEC_NORM_SUM;
    auto experts = sized<moec_experts_desc>();
    experts.hidden = H;
    experts.inter = I;
    experts.num_experts = s.experts;
    experts.top_k = s.top_k;
    experts.dtype = MOEC_BF16;
    experts.save = MOEC_SAVE_PREACT;
    auto layer = sized<moec_layer_desc>();
    layer.router = &router;
    layer.experts = &experts;
    check(moec_layer_create(context_, &layer, &layer_));
    auto desc = sized<moec_weights_desc>();
    desc.num_experts = s.experts;
    desc.gate_layout = MOEC_GATE_THEN_UP;
    desc.hidden = H;
    desc.inter = I;
    desc.dtype = MOEC_BF16;
    auto set = sized<moec_weight_set>();
    set.gate_up.data = values({E, 2 * I, H}, 1 / std::sqrt(double(H)));
    set.down.data = values({E, H, I}, 1 / std::sqrt(double(I)));
    check(moec_weights_create(context_, &desc, &weights_));
    check(moec_weights_bind(weights_, &set));
    auto of_adapters = sized<moec_adapters_desc>();
    of_adapters.num_experts = s.experts;
    of_adapters.gate_layout = MOEC_GATE_THEN_UP;
    of_adapters.hidden = H;
    of_adapters.inter = I;
    moec_adapter adapter = {};
    for (moec_adapter* to : {&adapter, &gradients_}) {
      to->gate_up.a = values({E, rank, H}, 1 / std::sqrt(double(H)));
      to->gate_up.b = values({E, 2 * I, rank}, 0.1);
      to->down.a = values({E, rank, I}, 1 / std::sqrt(double(I)));
      to->down.b = values({E, H, rank}, 0.1);
    }
    adapter.gate_up.scale = adapter.down.scale = 2;
    check(moec_adapters_create(context_, &of_adapters, &adapters_));
    check(moec_adapters_bind(adapters_, &adapter, 1));
    auto sizes = sized<moec_experts_sizes>();
    check(moec_layer_query_adapters(layer_, adapters_, &sizes));
    saved_ = std::make_unique<Memory>(
        size_t(sizes.saved.base + uint64_t(tokens) * sizes.saved.per_token));
    x_ = values({tokens, H}, 1);
    d_y_ = values({tokens, H}, 1);
    y_ = values({tokens, H}, 0);
    d_x_ = values({tokens, H}, 0);
    memories_.push_back(std::make_unique<Memory>(size_t(E * H * 4)));
    fill_random(*memories_.back(), MOEC_F32, 1 / std::sqrt(double(H)));
    gate_ = tensor(memories_.back()->as<void>(), MOEC_F32, {E, H});
  }
  ~AdapterCase() {
    moec_adapters_free(adapters_);
    moec_weights_free(weights_);
    moec_layer_free(layer_);
    moec_context_free(context_);
  }

  // Seconds of forward, and of forward and backward.
  std::pair<double, double> run(bool with) const {
    using Clock = std::chrono::steady_clock;
    auto args = sized<moec_layer_args>();
    args.weights = weights_;
    args.x = x_;
    args.gate_weight = gate_;
    args.y = y_;
    args.saved = {saved_->as<void>(), saved_->bytes()};
    if (with) args.adapters = adapters_;
    auto grads = sized<moec_layer_grad_args>();
    grads.forward = &args;
    grads.d_y = d_y_;
    grads.d_x = d_x_;
    if (with) grads.d_adapters = &gradients_;
    const auto start = Clock::now();
    check(moec_layer_forward(layer_, &args, nullptr));
    const auto middle = Clock::now();
    check(moec_layer_backward(layer_, &grads, nullptr));
    const std::chrono::duration<double> forward = middle - start, step = Clock::now() - start;
    return {forward.count(), step.count()};
  }

 private:
  moec_tensor values(const std::vector<int64_t>& dims, double spread) {
    int64_t count = 1;
    for (const int64_t extent : dims) count *= extent;
    memories_.push_back(std::make_unique<Memory>(size_t(count * 2)));
    fill_random(*memories_.back(), MOEC_BF16, spread);
    return tensor(memories_.back()->as<void>(), MOEC_BF16, dims);
  }

  moec_context* context_ = nullptr;
  moec_layer* layer_ = nullptr;
  moec_weights* weights_ = nullptr;
  moec_adapters* adapters_ = nullptr;
  moec_adapter gradients_ = {};
  moec_tensor x_{}, d_y_{}, y_{}, d_x_{}, gate_{};
  std::vector<std::unique_ptr<Memory>> memories_;
  std::unique_ptr<Memory> saved_;
};

void measure(const Shape& shape, int64_t rank, int rounds, int64_t tokens) {
  const AdapterCase layer(shape, rank, tokens);
  layer.run(false);
  layer.run(true);
  std::vector<double> forward[3], step[3];  // without, with, the ratio of neighbours
  for (int i = 0; i < rounds; ++i) {
    const auto without = layer.run(false), with = layer.run(true);
    forward[0].push_back(without.first);
    forward[1].push_back(with.first);
    forward[2].push_back(with.first / without.first);
    step[0].push_back(without.second);
    step[1].push_back(with.second);
    step[2].push_back(with.second / without.second);
  }
  const auto print = [&](const char* what, const std::vector<double>(&v)[3]) {
    const auto [low, high] = std::minmax_element(v[2].begin(), v[2].end());
    std::printf("%s T=%lld r=%lld %s: %.1f ms without, %.1f ms with, ratio %.3f (%.3f to %.3f)\n",
                shape.name.c_str(), static_cast<long long>(tokens), static_cast<long long>(rank),
                what, median(v[0]) * 1e3, median(v[1]) * 1e3, median(v[2]), *low, *high);
  };
  print("forward", forward);
  print("step", step);
}

}  // namespace
}  // namespace moec::bench

int main(int argc, char** argv) {
  try {
    if (argc < 6) throw std::runtime_error("cpu_adapters SHAPES.json MODEL RANK ROUNDS TOKENS...");
    for (const auto& shape : moec::bench::load_shapes(argv[1], {argv[2]}))
      for (int i = 5; i < argc; ++i)
        moec::bench::measure(shape, std::atoll(argv[3]), std::atoi(argv[4]), std::atoll(argv[i]));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "cpu_adapters: %s\n", error.what());
    return 1;
  }
}
