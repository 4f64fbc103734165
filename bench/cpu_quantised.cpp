// SPDX-License-Identifier: Apache-2.0
// cpu_quantised: one layer of frozen quantised experts through the C API, beside moec's own bf16 of
// the same values. Rounds over all cases, medians; weights are cold: consecutive calls read other
// experts, and all of them are more than a last-level cache holds.
//
//   cpu_quantised [--scheme bf16|nf4|mxfp4|int4|int8|fp8|...]... [--tokens N]... [--hidden N]
//                 [--inter N] [--experts N] [--top-k N] [--threads N] [--rounds N]
//                 [--packed 0|1] [--out FILE.json] [--commit TEXT]
//
// The default shape is a quarter of qwen3-30b: its matrices, 32 of its 128 experts, top 2 of them,
// so that an expert has the rows that it has in the whole layer.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <random>
#include <sstream>
#include <stdexcept>

#include "layer_case.h"

namespace moec::bench {
namespace {

struct Kind {
  const char* name;
  uint32_t kind;
  int64_t block_n, block_k;
  uint32_t flags = 0;
};
constexpr Kind kKinds[] = {{"nf4", MOEC_QUANTISE_NF4, 0, 64},
                           {"nf4_nested", MOEC_QUANTISE_NF4, 0, 64, MOEC_QUANTISE_NESTED},
                           {"fp4", MOEC_QUANTISE_FP4, 0, 64},
                           {"mxfp4", MOEC_QUANTISE_MXFP4, 0, 0},
                           {"nvfp4", MOEC_QUANTISE_NVFP4, 0, 0},
                           {"int4", MOEC_QUANTISE_INT4, 0, 32},
                           {"int4_asym", MOEC_QUANTISE_INT4, 0, 32, MOEC_QUANTISE_ASYMMETRIC},
                           {"int8", MOEC_QUANTISE_INT8, 0, 0},
                           {"int8_asym", MOEC_QUANTISE_INT8, 0, 0, MOEC_QUANTISE_ASYMMETRIC},
                           {"fp8", MOEC_QUANTISE_FP8, 128, 128},
                           {"fp8_channel", MOEC_QUANTISE_FP8, 0, 0},
                           {"mxfp8", MOEC_QUANTISE_MXFP8, 0, 0}};

struct Options {
  std::vector<std::string> schemes;
  std::vector<int64_t> tokens;
  int64_t hidden = 2048, inter = 768;
  int32_t experts = 32, top_k = 2, threads = 2;
  int rounds = 5;
  bool packed = true;
  std::string out, commit = "unknown", command;
};

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

template <class Struct>
Struct sized() {
  Struct s;
  moec_struct_init(&s, sizeof s);
  return s;
}

void check(moec_status status) {
  if (status == MOEC_OK) return;
  auto info = sized<moec_error_info>();
  throw std::runtime_error(moec_last_error(&info) == MOEC_OK ? info.message
                                                             : moec_status_name(status));
}

moec_tensor tensor(void* data, moec_dtype dtype, std::vector<int64_t> dims) {
  moec_tensor out;
  check(moec_tensor_make(&out, data, dtype, MOEC_CPU, 0, int32_t(dims.size()), dims.data()));
  return out;
}

// gate and up in one matrix, and down: as values, or as codes.
class Case {
 public:
  Case(const Options& o, moec_context* context, const Kind& kind) : o_(o), context_(context) {
    const int64_t H = o.hidden, I = o.inter;
    make(kind, 0, 2 * I, H);
    make(kind, 1, H, I);
    auto desc = sized<moec_weights_desc>();
    desc.flags = MOEC_WEIGHTS_FROZEN;
    desc.num_experts = o.experts;
    desc.gate_layout = MOEC_GATE_THEN_UP;
    desc.hidden = H;
    desc.inter = I;
    desc.dtype = MOEC_BF16;
    auto set = sized<moec_weight_set>();
    moec_matrix* const to[2] = {&set.gate_up, &set.down};
    for (int i = 0; i < 2; ++i) {
      const int64_t N = i ? H : 2 * I, K = i ? I : H;
      to[i]->data = tensor(values_[i]->as<void>(), MOEC_BF16, {o.experts, N, K});
    }
    // The packed copy of the values, whose memory the quantised case does not need.
    add(desc, set, false);
    for (int i = 0; i < 2; ++i) {
      to[i]->data = codes_[i];
      to[i]->quant = &quant_[i];
    }
    desc.gate_up_scheme = desc.down_scheme = scheme_;
    add(desc, set, !o.packed);
  }
  ~Case() {
    for (moec_weights* weights : weights_) moec_weights_free(weights);
  }
  Case(const Case&) = delete;
  Case& operator=(const Case&) = delete;

  const moec_weights* weights(bool coded) const { return weights_[coded]; }
  double code_bytes() const { return code_bytes_; }

 private:
  void make(const Kind& kind, int i, int64_t N, int64_t K) {
    const int64_t E = o_.experts;
    const auto count = size_t(E * N * K);
    Memory source(count * 2);
    fill_random(source, MOEC_BF16, 1 / std::sqrt(double(K)));
    auto desc = sized<moec_quantise_desc>();
    desc.kind = kind.kind;
    desc.flags = kind.flags;
    desc.dtype = MOEC_BF16;
    desc.num_experts = E;
    desc.out_features = N;
    desc.in_features = K;
    desc.block_n = kind.block_n;
    desc.block_k = kind.block_k;
    auto info = sized<moec_quantise_info>();
    quant_[i] = sized<moec_quant>();
    check(moec_quantise_query(context_, &desc, &info, &quant_[i]));
    scheme_ = info.scheme;
    codes_[i] = info.codes;
    const auto give = [&](moec_tensor& t) {
      if (!t.ndim) return;
      int64_t bytes = t.dtype == MOEC_F32 || t.dtype == MOEC_I32 ? 4 : 1;
      if (t.dtype == MOEC_BF16 || t.dtype == MOEC_F16) bytes = 2;
      for (int32_t d = 0; d < t.ndim; ++d) bytes *= t.shape[d];
      memory_.push_back(std::make_unique<Memory>(size_t(bytes)));
      t.data = memory_.back()->as<void>();
      t.device_type = MOEC_CPU;
      code_bytes_ += double(bytes);
    };
    give(codes_[i]);
    moec_quant& q = quant_[i];
    for (moec_tensor* t :
         {&q.scales, &q.scales2, &q.zeros, &q.codebook, &q.scale_book, &q.scale_offset})
      give(*t);
    auto args = sized<moec_quantise_args>();
    args.desc = &desc;
    args.source = tensor(source.as<void>(), MOEC_BF16, {E, N, K});
    args.codes = codes_[i];
    args.quant = &q;
    check(moec_quantise(context_, &args, nullptr));
    values_[i] = std::make_unique<Memory>(count * 2);
    dequantise(i, N, K);
  }
  void dequantise(int i, int64_t N, int64_t K) {
    auto desc = sized<moec_weights_desc>();
    desc.num_experts = o_.experts;
    desc.gate_layout = MOEC_GATE_NONE;
    desc.hidden = K;
    desc.inter = N;
    desc.dtype = MOEC_BF16;
    desc.gate_up_scheme = scheme_;
    auto set = sized<moec_weight_set>();
    set.up.data = codes_[i];
    set.up.quant = &quant_[i];
    set.down.data = tensor(values_[i]->as<void>(), MOEC_BF16, {o_.experts, K, N});
    moec_weights* weights;
    check(moec_weights_create(context_, &desc, &weights));
    check(moec_weights_bind(weights, &set));
    Memory one(size_t(N * K * 2));
    for (int32_t e = 0; e < o_.experts; ++e) {
      const moec_tensor to = tensor(one.as<void>(), MOEC_BF16, {N, K});
      check(moec_weights_dequantise(weights, MOEC_MATRIX_UP, e, &to, nullptr));
      std::memcpy(values_[i]->as<char>() + size_t(e) * one.bytes(), one.as<char>(), one.bytes());
    }
    moec_weights_free(weights);
  }
  void add(const moec_weights_desc& desc, const moec_weight_set& set, bool as_bound) {
    moec_weights* weights;
    check(moec_weights_create(context_, &desc, &weights));
    weights_.push_back(weights);
    check(moec_weights_bind(weights, &set));
    auto info = sized<moec_weights_info>();
    check(moec_weights_query(weights, &info));
    if (as_bound || !info.packed_bytes) return;
    check(moec_weights_pack(weights, nullptr, nullptr));
    check(moec_weights_release_source(weights));
    if (desc.gate_up_scheme)
      memory_.clear();
    else
      for (auto& values : values_) values = nullptr;
  }

  const Options& o_;
  moec_context* const context_;
  std::unique_ptr<Memory> values_[2];
  std::vector<std::unique_ptr<Memory>> memory_;
  moec_tensor codes_[2] = {};
  moec_quant quant_[2] = {};
  uint32_t scheme_ = 0;
  double code_bytes_ = 0;
  std::vector<moec_weights*> weights_;  // of values, of codes
};

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
      const auto begin = std::chrono::steady_clock::now();
      once(weights, plan, tokens, step);
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
      seconds += took.count();
    }
    moec_plan_free(plan);
    return seconds / calls;
  }

 private:
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

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

int run(int argc, char** argv) {
  const Options o = parse(argc, argv);
  auto device = sized<moec_device_info>();
  check(moec_device_query(MOEC_CPU, 0, &device));
  auto desc = sized<moec_context_desc>();
  desc.num_threads = o.threads;
  moec_context* context;
  check(moec_context_create(&desc, &context));
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
                        "{\"shape\": \"qwen3-30b/4\", \"scheme\": \"%s\", \"tokens\": %lld, "
                        "\"mode\": \"%s\", \"impl\": \"moec-%s\", \"ms\": %.4g, \"spread\": %.2g, "
                        "\"x_bf16\": %.3g}",
                        name.c_str(), static_cast<long long>(tokens), step ? "step" : "fwd",
                        coded ? name.c_str() : "bf16", middle * 1e3, (*high - *low) / middle,
                        median(seconds[0]) / middle);
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
