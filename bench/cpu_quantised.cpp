// SPDX-License-Identifier: Apache-2.0
// cpu_quantised: one layer of frozen quantised experts through the C API, beside moec's own bf16 of
// the same values. Rounds over all cases, medians; weights are cold: consecutive calls read other
// experts, and all of them are more than a last-level cache holds.
//
//   cpu_quantised [--scheme bf16|nf4|mxfp4|int4|int8|fp8|...]... [--tokens N]... [--hidden N]
//                 [--inter N] [--experts N] [--top-k N] [--threads N] [--rounds N]
//                 [--packed 0|1] [--clock wall|cpu] [--out FILE.json]
//                 [--commit TEXT]
//
// --clock cpu counts the time of this process, for a busy machine, with one thread.
//
// The default shape is a quarter of qwen3-30b: its matrices, 32 of its 128 experts, top 2 of them,
// so that an expert has the rows that it has in the whole layer.
#include <algorithm>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <map>
#include <random>
#include <sstream>

#include "quantised_case.h"

namespace moec::bench {
namespace {

Options parse(int argc, char** argv) {
  Options o;
  for (int i = 0; i < argc; ++i) o.command.append(i ? " " : "").append(argv[i]);
  if (argc % 2 == 0) throw std::runtime_error("each option takes one value");
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string key = argv[i], value = argv[i + 1];
    if (key == "--scheme")
      o.schemes.push_back(value);
    else if (key == "--tokens")
      o.tokens.push_back(std::stoll(value));
    else if (key == "--hidden")
      o.hidden = std::stoll(value);
    else if (key == "--inter")
      o.inter = std::stoll(value);
    else if (key == "--experts")
      o.experts = std::stoi(value);
    else if (key == "--top-k")
      o.top_k = std::stoi(value);
    else if (key == "--threads")
      o.threads = std::stoi(value);
    else if (key == "--rounds")
      o.rounds = std::stoi(value);
    else if (key == "--packed")
      o.packed = value != "0";
    else if (key == "--clock")
      o.clock = value == "cpu" ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC;
    else if (key == "--out")
      o.out = value;
    else if (key == "--commit")
      o.commit = value;
    else
      throw std::runtime_error("unknown option " + key + "; see the top of cpu_quantised.cpp");
  }
  if (o.schemes.empty()) o.schemes = {"nf4", "mxfp4", "int4", "int8", "fp8"};
  if (o.tokens.empty()) o.tokens = {1, 16, 512, 2048};
  return o;
}

class Layer {
 public:
  Layer(const Options& o, moec_context* context) : o_(o), context_(context) {
    max_tokens_ = *std::max_element(o.tokens.begin(), o.tokens.end());
    for (const uint32_t save : {MOEC_SAVE_NONE, MOEC_SAVE_PREACT}) {
      auto desc = sized<moec_experts_desc>();
      desc.hidden = o.hidden;
      desc.inter = o.inter;
      desc.num_experts = o.experts;
      desc.top_k = o.top_k;
      desc.dtype = MOEC_BF16;
      desc.save = save;
      check(moec_experts_create(context, &desc, &experts_[save ? 1 : 0]));
    }
    auto sizes = sized<moec_experts_sizes>();
    check(moec_experts_query(experts_[1], &sizes));
    const auto values = size_t(max_tokens_ * o.hidden * 2);
    const auto saved_bytes = sizes.saved.base + uint64_t(max_tokens_) * sizes.saved.per_token;
    saved_ = std::make_unique<Memory>(size_t(saved_bytes));
    for (auto* m : {&x_, &y_, &d_y_, &d_x_}) *m = std::make_unique<Memory>(values);
    fill_random(*x_, MOEC_BF16, 1);
    fill_random(*d_y_, MOEC_BF16, 1);
    const auto slots = size_t(max_tokens_ * o.top_k);
    ids_.resize(slots);
    routing_.assign(slots, 1.0f / float(o.top_k));
    d_routing_.resize(slots);
  }
  ~Layer() {
    for (moec_experts* experts : experts_) moec_experts_free(experts);
  }
  Layer(const Layer&) = delete;
  Layer& operator=(const Layer&) = delete;

  // Seconds of a call, or of the mean of several for few tokens.
  double run(const moec_weights* weights, int64_t tokens, bool step) {
    const int calls = tokens <= 16 ? std::max(1, int(o_.experts / (tokens * o_.top_k))) * 4 : 1;
    auto plan_desc = sized<moec_plan_desc>();
    plan_desc.max_tokens = tokens;
    plan_desc.num_experts = o_.experts;
    plan_desc.top_k = o_.top_k;
    moec_plan* plan;
    check(moec_plan_create(context_, &plan_desc, nullptr, &plan));
    double seconds = 0;
    for (int call = 0; call < calls; ++call) {
      draw(tokens);
      const double begin = now();
      once(weights, plan, tokens, step);
      seconds += now() - begin;
    }
    moec_plan_free(plan);
    return seconds / calls;
  }

 private:
  double now() const {
    timespec time;
    clock_gettime(o_.clock, &time);
    return double(time.tv_sec) + 1e-9 * double(time.tv_nsec);
  }
  // The experts follow each other, so that those of a call have not been read for a round of all.
  void draw(int64_t tokens) {
    const int64_t slots = tokens * o_.top_k;
    if (slots <= o_.experts) {
      for (int64_t i = 0; i < slots; ++i) ids_[size_t(i)] = next_++ % o_.experts;
      return;
    }
    for (int64_t t = 0; t < tokens; ++t) {
      const int32_t first = int32_t(random_() % uint32_t(o_.experts));
      for (int32_t k = 0; k < o_.top_k; ++k)
        ids_[size_t(t * o_.top_k + k)] = (first + k * (1 + int32_t(random_() % 3))) % o_.experts;
    }
  }
  void once(const moec_weights* weights, moec_plan* plan, int64_t tokens, bool step) {
    const moec_tensor ids = tensor(ids_.data(), MOEC_I32, {tokens, o_.top_k});
    const moec_tensor routing = tensor(routing_.data(), MOEC_F32, {tokens, o_.top_k});
    check(moec_plan_from_topk(plan, &ids, &routing, nullptr));
    auto args = sized<moec_experts_args>();
    args.plan = plan;
    args.weights = weights;
    args.x = tensor(x_->as<void>(), MOEC_BF16, {tokens, o_.hidden});
    args.y = tensor(y_->as<void>(), MOEC_BF16, {tokens, o_.hidden});
    if (step) args.saved = {saved_->as<void>(), saved_->bytes()};
    check(moec_experts_forward(experts_[step], &args, nullptr));
    if (!step) return;
    auto grad = sized<moec_experts_grad_args>();
    grad.plan = plan;
    grad.weights = weights;
    grad.x = args.x;
    grad.saved = args.saved;
    grad.d_y = tensor(d_y_->as<void>(), MOEC_BF16, {tokens, o_.hidden});
    grad.d_x = tensor(d_x_->as<void>(), MOEC_BF16, {tokens, o_.hidden});
    grad.d_routing_weights = tensor(d_routing_.data(), MOEC_F32, {tokens, o_.top_k});
    check(moec_experts_backward(experts_[1], &grad, nullptr));
  }

  const Options& o_;
  moec_context* const context_;
  moec_experts* experts_[2] = {};
  int64_t max_tokens_ = 0;
  std::unique_ptr<Memory> x_, y_, d_y_, d_x_, saved_;
  std::vector<int32_t> ids_;
  std::vector<float> routing_, d_routing_;
  int32_t next_ = 0;
  std::mt19937 random_{1};
};

int run(int argc, char** argv) {
  const Options o = parse(argc, argv);
  auto device = sized<moec_device_info>();
  check(moec_device_query(MOEC_CPU, 0, &device));
  auto desc = sized<moec_context_desc>();
  desc.num_threads = o.threads;
  moec_context* context;
  check(moec_context_create(&desc, &context));
  const bool is_default = o.hidden == 2048 && o.inter == 768 && o.experts == 32 && o.top_k == 2;
  const std::string sizes = std::to_string(o.hidden) + " x " + std::to_string(o.inter);
  const std::string shape =
      is_default ? "qwen3-30b/4" : sizes + ", " + std::to_string(o.experts) + " experts";
  std::string rows;
  {
    Layer layer(o, context);
    for (const std::string& name : o.schemes) {
      const Kind* kind = nullptr;
      for (const Kind& one : kKinds)
        if (name == one.name) kind = &one;
      if (!kind) throw std::runtime_error("no scheme \"" + name + "\"; see cpu_quantised.cpp");
      const Case c(o, context, *kind);
      std::vector<std::pair<int64_t, bool>> modes;
      for (const int64_t tokens : o.tokens) modes.emplace_back(tokens, false);
      if (o.tokens.back() >= 512) modes.emplace_back(o.tokens.back(), true);
      for (const auto& [tokens, step] : modes) {
        std::vector<double> seconds[2];
        for (int round = -1; round < o.rounds; ++round)
          for (int coded = 0; coded < 2; ++coded) {
            const double took = layer.run(c.weights(coded), tokens, step);
            if (round >= 0) seconds[coded].push_back(took);
          }
        for (int coded = 0; coded < 2; ++coded) {
          const auto [low, high] =
              std::minmax_element(seconds[coded].begin(), seconds[coded].end());
          const double middle = median(seconds[coded]);
          char line[300];
          std::snprintf(line, sizeof line,
                        "{\"shape\": \"%s\", \"scheme\": \"%s\", \"tokens\": %lld, "
                        "\"mode\": \"%s\", \"impl\": \"moec-%s\", \"ms\": %.4g, \"spread\": %.2g, "
                        "\"x_bf16\": %.3g}",
                        shape.c_str(), name.c_str(), static_cast<long long>(tokens),
                        step ? "step" : "fwd", coded ? name.c_str() : "bf16", middle * 1e3,
                        (*high - *low) / middle, median(seconds[0]) / middle);
          std::puts(line);
          std::fflush(stdout);
          rows.append(rows.empty() ? "  " : ",\n  ").append(line);
        }
      }
    }
  }
  moec_context_free(context);
  if (o.out.empty()) return 0;
  std::ofstream file(o.out);
  file << "{\"machine\": \"" << device.name << "\", \"isa\": \"" << device.arch
       << "\", \"commit\": \"" << o.commit << "\",\n \"command\": \"" << o.command
       << "\", \"rounds\": " << o.rounds << ",\n \"rows\": [\n"
       << rows << "\n]}\n";
  if (!file) throw std::runtime_error("cannot write " + o.out);
  return 0;
}

}  // namespace
}  // namespace moec::bench

int main(int argc, char** argv) {
  try {
    return moec::bench::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "cpu_quantised: %s\n", error.what());
    return 1;
  }
}
