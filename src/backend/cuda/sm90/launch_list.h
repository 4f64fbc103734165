// SPDX-License-Identifier: Apache-2.0
// A program as launches of the kernels of compute capability 9.0. The list is compiled whole before
// anything is queued, so that it can refuse. It is then launched or described: one record for both.
//   forward    up (gather, activation; pre-activations when saved), down, combine
//   backward   grad down (gather; d_pre, weighted act, parts of the routing weights' gradient),
//              grad up, weight gradients of down and of gate and up, combine; gradients of biases
// and the same products before them for a shared expert. Adapters add narrow rows before a product
// and a term to it, and gradients of factors (launch_adapters.cpp). Experts of many coded rows are
// decoded in front of their product (launch_decoded.cpp).
#pragma once

#include <algorithm>
#include <array>
#include <string>
#include <variant>

#include "backend/cuda/experts/row_steps.h"
#include "backend/cuda/sm90/decoded_product.h"
#include "backend/cuda/sm90/narrow.h"
#include "backend/cuda/sm90/ordered_rows.h"
#include "backend/cuda/sm90/row_gemm.h"
#include "backend/cuda/sm90/weight_grad.h"
#include "backend/cuda/sm90/work_counters.h"
#include "core/workspace.h"

namespace moec::cuda {

inline bool alternating(const Mlp& mlp) {
  return columns_alternate(mlp.weights->gate, mlp.weights->up);
}

struct ExpertSums {  // out (+)= sums [experts, n, k], added up in the order of experts
  const float* sums;
  int num_experts;
  int64_t n, k;
  MatrixView out;
  bool accumulate;
};

// The path's scratch of a call.
DecodedScratch lay_out_scratch(const moec_experts_desc& desc, Arena& arena);
void launch_decoded(const Op& op, const DecodedProduct& product);

class LaunchList {
 public:
  explicit LaunchList(const Program& program);

  const char* refused() const { return refused_; }  // the first reason, or null
  void launch(const Op& op) const;
  // JSON objects, one for each launch of a product or a sum.
  void describe(const RowGemmDevice& device, std::string& text) const;

  // Compiles one step.
  void operator()(const Up& step);
  void operator()(const Down& step);
  void operator()(const Combine& step);
  void operator()(const ActGrad& step);
  void operator()(const InputGrad& step);
  void operator()(const WeightGrads& step);
  void operator()(const CombineGrad& step);
  void operator()(const NarrowRows& step);
  void operator()(const FactorGrads& step);
  template <class Other>
  void operator()(const Other&) {
    add(current_);
  }

 private:
  struct ClearCounters {
    WorkCounters* counters;
  };
  using Launch = std::variant<ClearCounters, RowGemmProblem, DecodedProduct, WeightGradArgs,
                              ColumnSums, CombineParams, OrderedRows, NarrowRowsArgs,
                              FactorGradArgs, ExpertSums, const Step*>;
  struct Entry {
    const Mlp* mlp = nullptr;  // whose product it is ...
    const char* step = "";     // ... and which one, for describe
    Launch launch;
  };

  // What was written from the last kNothing launch (early.h) on: who reads nothing of it may be
  // kAll. Before there is one, nobody may be anything else.
  struct Fresh {
    static constexpr int kMost = 8;
    bool settled = false;
    int count = 0;
    const void* data[kMost] = {};

    void add(const void* written) {
      if (written && count < kMost) data[count++] = written;
    }
    void wait() { *this = {true, 0, {}}; }
    bool has(const void* read) const {
      return count == kMost || std::find(data, data + count, read) != data + count;
    }
  };

  void refuse(const char* why) {
    if (!refused_) refused_ = why;
  }
  void add(const Launch& launch, const Mlp* mlp = nullptr, const char* step = "");
  bool is_routed(const Mlp& mlp) const { return &mlp == &program_.routed; }
  // Down may wait for rows of up: no kernel between them reads all.
  bool may_count_rows(const Mlp& mlp) const {
    return is_routed(mlp) && !mlp.down_adapters && !decoded_.is_used();
  }
  Early after_grad_down(const Mlp& mlp);
  // Rows of the width of x that hold nothing before a later product of the call: down's, or those
  // of grad up. Null: there are none behind this product.
  const Array* rows_of_later(RowGemm op) const;
  DecodedScratch scratch_of(RowGemm op) const;
  void put_in_order(RowGemmProblem& problem, const Mlp& mlp);
  void use_counters(const Mlp& mlp);
  RowGemmProblem problem(RowGemm op, const Mlp& mlp, int64_t n, int64_t k,
                         const ExpertMatrix& first, const ExpertMatrix* second);
  void add_row_gemm(RowGemmProblem problem, const Mlp& mlp);
  void refuse_adapters(const Mlp& mlp);
  void add_term(RowGemmProblem& problem, const LowRank& ranks, const void* narrow,
                const ExpertMatrix& first, const ExpertMatrix* second = nullptr);
  void add_weight_grad(const Mlp& mlp, const void* rows, const void* gathered,
                       const ExpertMatrix& first, const ExpertMatrix* second, bool accumulate);
  void add_bias_grads(const WeightGrads& step);
  void add_bias_grad(const ExpertMatrix& matrix, ColumnSums sums);
  void add_combine(const CombineParams& params);
  void add_factor_grad(FactorGradArgs args, const Mlp& mlp, const RowOperand& wide, int64_t width,
                       const void* narrow);

  static constexpr int kMost = 40;
  const Program& program_;
  const Step* current_ = nullptr;
  const char* refused_ = nullptr;
  DecodedScratch scratch_ = {};
  WorkCounters::Gemm* counters_ = nullptr;  // of the next product of the routed experts
  unsigned* done_ = nullptr;                // of the tiles of up, for down
  bool wide_up_ = false;                    // whether up has wide tiles
  Early next_ = Early::kNothing;            // of the products behind grad down
  DecodedProduct decoded_ = {};             // the product being compiled, where it is one
  Fresh fresh_;
  int count_ = 0;
  std::array<Entry, kMost> entries_;
};

}  // namespace moec::cuda
