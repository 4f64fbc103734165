// SPDX-License-Identifier: Apache-2.0
// Frozen experts twice: as codes that moec_quantise makes, and as the bf16 values that they stand
// for.
#pragma once

#include <cmath>
#include <cstring>
#include <ctime>
#include <memory>
#include <stdexcept>

#include "calls.h"
#include "layer_case.h"

namespace moec::bench {

struct Kind {
  const char* name;
  uint32_t kind;
  int64_t block_n, block_k;
  uint32_t flags = 0;
};
inline constexpr Kind kKinds[] = {
    {"nf4", MOEC_QUANTISE_NF4, 0, 64},
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
  clockid_t clock = CLOCK_MONOTONIC;
  std::string out, commit = "unknown", command;
};

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

}  // namespace moec::bench
