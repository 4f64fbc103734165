// SPDX-License-Identifier: Apache-2.0
// The steps of an MLP by Hopper's kernels. A call is walked twice: first every kernel is asked,
// then all are queued, so that a refused call has queued nothing.
#pragma once

#include "backend/cuda/rows/combine.h"
#include "backend/cuda/rows/row_ops.h"
#include "backend/cuda/sm90/row_gemm.h"
#include "backend/cuda/sm90/weight_grad.h"
#include "backend/cuda/sm90/work_counters.h"

namespace moec::cuda {

struct FastMlp {  // the experts of a call
  int64_t hidden, inter;
  moec_dtype dtype;  // MOEC_BF16 or MOEC_F16
  moec_activation activation;
  const WeightsView* weights;
  Rows rows;
};

struct GradDown {  // what it reads and writes besides d_y
  const void* pre;
  void *d_pre, *weighted;  // [P,2,I], [P,I]
  const float* factor;     // [P] d(y) / d(expert output)
  float* d_weight_parts;   // [fast_dot_parts(inter), P]
};

class FastProducts {
 public:
  FastProducts(const Op& op, const FastMlp& mlp, bool queues)
      : op_(op),
        mlp_(mlp),
        queues_(queues),
        pairs_(columns_alternate(mlp.weights->gate, mlp.weights->up)) {}

  // First of all, where work is not to be dealt in turn.
  void use(WorkCounters* counters);
  void up(const void* x, void* pre, void* act);  // pre: null or kept
  void down(const void* act, void* rows, Early early);
  void grad_down(const void* d_y, const GradDown& step);
  void grad_up(const void* d_pre, void* rows, Early early);
  // Gradients of matrices whose inputs or outputs are `rows`: of down, or of gate and up.
  void grad_weights(const void* rows, const void* gathered, const ExpertMatrix& first,
                    const ExpertMatrix* second, bool accumulate, Early early);
  // Of the biases that there are: sums of columns of d_pre, and of d_y times factor.
  void grad_biases(const WeightsView& d, const void* d_pre, const void* d_y, const float* factor,
                   bool accumulate);
  void combine(const CombineParams& params);
  // Steps that nothing refuses.
  template <class Step>
  void queue(const Step& step) {
    if (!refused && queues_) step();
  }
  void refuse(const char* why) {
    if (!refused) refused = why;
  }

  const FastMlp& mlp() const { return mlp_; }

  const char* refused = nullptr;  // the first reason

 private:
  // One axis of a gradient is contiguous: which, and the stride of the other one. Or columns of
  // gate and up alternate there.
  struct Orientation {
    bool k_contiguous;
    int64_t stride;
  };
  void grad_bias(const ExpertMatrix& matrix, const ColumnSums& sums);
  Orientation orientation(const ExpertMatrix& matrix, const ExpertMatrix* other);
  RowGemmProblem problem(RowGemm operation, int64_t n, int64_t k, const ExpertMatrix& first,
                         const ExpertMatrix* second);
  void run(RowGemmProblem& problem);

  const Op& op_;
  const FastMlp& mlp_;
  const bool queues_, pairs_;  // pairs: columns of gate and up alternate, in d_pre as well
  WorkCounters::Gemm* counters_ = nullptr;  // of the next GEMM
  unsigned* done_ = nullptr;                // of the tiles of up, for down
};

}  // namespace moec::cuda
