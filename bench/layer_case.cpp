// SPDX-License-Identifier: Apache-2.0
#include "layer_case.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <fstream>
#include <new>
#include <sstream>
#include <stdexcept>

#include "calls.h"
#include "support/json.h"

namespace moec::bench {
namespace {

constexpr double kColdBytes = 1.2 * (1 << 30);

const Shape kOverhead = {"overhead", 32, 32, 128, 8};  // of no published model

float value_at(const Memory& memory, moec_dtype dtype, int64_t index) {
  if (dtype == MOEC_F32) return memory.as<float>()[index];
  return std::bit_cast<float>(uint32_t(memory.as<uint16_t>()[index]) << 16);
}

}  // namespace

Memory::Memory(size_t bytes) : bytes_(bytes) {
  data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data_ == MAP_FAILED) throw std::bad_alloc();
  madvise(data_, bytes, MADV_HUGEPAGE);
}

Memory::~Memory() {
  munmap(data_, bytes_);
}

void fill_random(const Memory& memory, moec_dtype dtype, double spread) {
  uint64_t state = 88172645463325252u;
  const auto next = [&] {  // xorshift64 (Marsaglia 2003), uniform with the wanted deviation
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return float((double(state >> 11) * 0x1p-53 - 0.5) * std::sqrt(12.0) * spread);
  };
  if (dtype == MOEC_F32)
    for (size_t i = 0; i < memory.bytes() / 4; ++i) memory.as<float>()[i] = next();
  else
    for (size_t i = 0; i < memory.bytes() / 2; ++i)
      memory.as<uint16_t>()[i] = uint16_t(std::bit_cast<uint32_t>(next()) >> 16);
}

std::vector<Shape> load_shapes(const std::string& path, const std::vector<std::string>& names) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error("cannot read " + path);
  std::stringstream text;
  text << file.rdbuf();
  std::vector<Shape> shapes;
  std::string known;
  const test::Json document = test::parse_json(text.str());
  for (const std::string& name : names) {
    if (name == kOverhead.name) {
      shapes.push_back(kOverhead);
      continue;
    }
    for (const test::Json& one : document.array) {
      const auto number = [&](const char* key) { return one.at(key).number; };
      if (&name == &names.front()) known += " " + one.at("name").string;
      if (one.at("name").string == name)
        shapes.push_back({name, int64_t(number("hidden")), int64_t(number("inter")),
                          int32_t(number("experts")), int32_t(number("top_k"))});
    }
    if (shapes.empty() || shapes.back().name != name)
      throw std::runtime_error("no model \"" + name + "\"; there are: overhead" + known);
  }
  return shapes;
}

LayerCase::LayerCase(const Shape& shape, moec_dtype dtype, int32_t threads, int64_t max_tokens)
    : shape_(shape),
      dtype_(dtype),
      max_tokens_(max_tokens),
      value_bytes_(dtype == MOEC_F32 ? 4 : 2),
      ids_(size_t(max_tokens * shape.top_k)) {
  const int64_t H = shape.hidden, I = shape.inter, E = shape.experts;
  auto context = sized<moec_context_desc>();
  context.num_threads = threads;
  check(moec_context_create(&context, &context_));

  auto router = sized<moec_router_desc>();
  router.num_experts = shape.experts;
  router.top_k = shape.top_k;
  router.norm = MOEC_NORM_SUM;
  auto experts = sized<moec_experts_desc>();
  experts.hidden = H;
  experts.inter = I;
  experts.num_experts = shape.experts;
  experts.top_k = shape.top_k;
  experts.dtype = dtype;
  auto layer = sized<moec_layer_desc>();
  layer.router = &router;
  layer.experts = &experts;
  check(moec_layer_create(context_, &layer, &layer_));

  const auto bytes = size_t(E * H * I * value_bytes_);
  for (auto& source : source_) {
    source = std::make_unique<Memory>(bytes);
    fill_random(*source, dtype, 1 / std::sqrt(double(&source == &source_[2] ? I : H)));
  }
  auto desc = sized<moec_weights_desc>();
  desc.flags = MOEC_WEIGHTS_FROZEN;
  desc.num_experts = shape.experts;
  desc.gate_layout = MOEC_GATE_SPLIT;
  desc.hidden = H;
  desc.inter = I;
  desc.dtype = dtype;
  auto set = sized<moec_weight_set>();
  set.gate.data = tensor(source_[0]->as<void>(), dtype, {E, I, H});
  set.up.data = tensor(source_[1]->as<void>(), dtype, {E, I, H});
  set.down.data = tensor(source_[2]->as<void>(), dtype, {E, H, I});
  check(moec_weights_create(context_, &desc, &bound_));
  check(moec_weights_bind(bound_, &set));
  weights_.resize(size_t(std::ceil(kColdBytes / double(3 * bytes))));
  for (moec_weights*& weights : weights_) {
    check(moec_weights_create(context_, &desc, &weights));
    check(moec_weights_bind(weights, &set));
    check(moec_weights_pack(weights, nullptr, nullptr));
    check(moec_weights_release_source(weights));
  }
  x_ = std::make_unique<Memory>(size_t((max_tokens + 4096) * H * value_bytes_));
  y_ = std::make_unique<Memory>(size_t(max_tokens * H * value_bytes_));
  gate_ = std::make_unique<Memory>(size_t(E * H * 4));
  fill_random(*x_, dtype, 1);
  fill_random(*gate_, MOEC_F32, 1 / std::sqrt(double(H)));
}

LayerCase::~LayerCase() {
  for (moec_weights* weights : weights_) moec_weights_free(weights);
  moec_weights_free(bound_);
  moec_layer_free(layer_);
  moec_context_free(context_);
}

LayerCase::Work LayerCase::work_of(int64_t tokens) const {
  std::vector<int32_t> used(ids_.begin(), ids_.begin() + tokens * shape_.top_k);
  std::sort(used.begin(), used.end());
  const double active = double(std::unique(used.begin(), used.end()) - used.begin());
  const double rows = double(tokens * shape_.top_k), matrix = double(shape_.hidden * shape_.inter);
  return {6 * rows * matrix, 3 * active * matrix * double(value_bytes_), rows / active};
}

LayerCase::Work LayerCase::forward(int64_t tokens) {
  return forward(tokens, weights_[next_copy_++ % weights_.size()]);
}
LayerCase::Work LayerCase::not_packed(int64_t tokens) {
  return forward(tokens, bound_);
}

LayerCase::Work LayerCase::forward(int64_t tokens, moec_weights* weights) {
  const int64_t H = shape_.hidden;
  auto args = sized<moec_layer_args>();
  args.weights = weights;
  args.x = tensor(x_->as<char>() + next_token_ * H * value_bytes_, dtype_, {tokens, H});
  args.gate_weight = tensor(gate_->as<void>(), MOEC_F32, {shape_.experts, H});
  args.y = tensor(y_->as<void>(), dtype_, {tokens, H});
  args.expert_ids = tensor(ids_.data(), MOEC_I32, {tokens, shape_.top_k});
  next_token_ = (next_token_ + tokens) % 4096;
  check(moec_layer_forward(layer_, &args, nullptr));
  return work_of(tokens);
}

LayerCase::Work LayerCase::naive(int64_t tokens) {
  const int64_t H = shape_.hidden, I = shape_.inter;
  draw_ids(tokens);
  std::vector<float> x(size_t(H), 0), act(size_t(I), 0), y(size_t(tokens * H), 0);
  const auto dot = [&](const Memory& weight, int64_t row, const std::vector<float>& values) {
    float sums[16] = {};
    const int64_t n = int64_t(values.size());
    for (int64_t i = 0; i + 16 <= n; i += 16)
      for (int64_t j = 0; j < 16; ++j)
        sums[j] += values[size_t(i + j)] * value_at(weight, dtype_, row * n + i + j);
    float sum = 0;
    for (const float part : sums) sum += part;
    return sum;
  };
  for (int32_t e = 0; e < shape_.experts; ++e)
    for (int64_t a = 0; a < tokens * shape_.top_k; ++a) {
      if (ids_[size_t(a)] != e) continue;
      const int64_t token = a / shape_.top_k;
      for (int64_t h = 0; h < H; ++h) x[size_t(h)] = value_at(*x_, dtype_, token * H + h);
      for (int64_t i = 0; i < I; ++i) {
        const float gate = dot(*source_[0], e * I + i, x), up = dot(*source_[1], e * I + i, x);
        act[size_t(i)] = gate / (1 + std::exp(-gate)) * up;
      }
      for (int64_t h = 0; h < H; ++h)
        y[size_t(token * H + h)] += dot(*source_[2], e * H + h, act) / float(shape_.top_k);
    }
  volatile float sink = y[0];
  (void)sink;
  return work_of(tokens);
}

void LayerCase::draw_ids(int64_t tokens) {
  const auto begin = ids_.begin();
  for (int64_t t = 0; t < tokens; ++t)
    for (int32_t k = 0; k < shape_.top_k; ++k) {
      const auto token = begin + t * shape_.top_k;
      do token[k] = int32_t(random_() % uint32_t(shape_.experts));
      while (std::find(token, token + k, token[k]) != token + k);
    }
}

#if MOEC_HAVE_ONEDNN
LayerCase::Work LayerCase::onednn(int64_t tokens) {
  if (tokens != onednn_tokens_) {  // in the first, untimed call
    const int64_t rows = std::max<int64_t>(1, tokens * shape_.top_k / shape_.experts);
    const Memory* const source[3] = {source_[0].get(), source_[1].get(), source_[2].get()};
    onednn_ = nullptr;
    onednn_ = std::make_unique<OneDnnLayer>(shape_, dtype_, source, rows, tokens);
    onednn_tokens_ = tokens;
  }
  draw_ids(tokens);
  std::vector<int64_t> rows(size_t(shape_.experts), 0);
  for (int64_t a = 0; a < tokens * shape_.top_k; ++a) ++rows[size_t(ids_[size_t(a)])];
  onednn_->forward(rows, *x_);
  return work_of(tokens);
}
#endif

std::string LayerCase::describe(int64_t tokens) const {
  uint64_t need = 0;
  check(moec_layer_describe(layer_, weights_[0], tokens, nullptr, 0, &need));
  std::string text(need, '\0');
  check(moec_layer_describe(layer_, weights_[0], tokens, text.data(), need, &need));
  text.resize(std::strlen(text.c_str()));
  return text;
}

}  // namespace moec::bench
