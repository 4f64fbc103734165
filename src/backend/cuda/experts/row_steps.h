// SPDX-License-Identifier: Apache-2.0
// The steps of a program that do not multiply, which every path runs alike.
#pragma once

#include "backend/cuda/rows/combine.h"
#include "backend/cuda/rows/row_ops.h"
#include "backend/program.h"

namespace moec::cuda {

inline Rows rows_of(const Mlp& mlp) {
  return {mlp.groups, mlp.row_token};
}

// y and d_x by the kernel of rows/combine.cu: rows of the type of x, without a shared expert.
CombineParams combine_params(const Combine& step);
CombineParams combine_params(const CombineGrad& step, int dot_parts);

class RowSteps {
 public:
  // Dots lie as [parts, rows]: dot_parts(inter) parts, and one more for the bias of down. Null: one
  // part holds all.
  RowSteps(const Op& op, int (*dot_parts)(int64_t inter)) : op_(op), dot_parts_(dot_parts) {}

  void operator()(const ListTokens& step) const;
  void operator()(const ScaleRows& step) const;
  void operator()(const MixForward& step) const;
  void operator()(const Combine& step) const;
  void operator()(const ClearPadding& step) const;
  void operator()(const RowFactors& step) const;
  void operator()(const MixFactors& step) const;
  void operator()(const BiasDots& step) const;
  void operator()(const GateGrad& step) const;
  void operator()(const CombineGrad& step) const;
  void operator()(const DirectGrads& step) const;
  int parts_of(const Dots& dots) const;

 private:
  const Op& op_;
  int (*dot_parts_)(int64_t);
};

}  // namespace moec::cuda
