// SPDX-License-Identifier: Apache-2.0
// Quantised experts at random.
#pragma once

#include "quant_runner.h"
#include "random.h"
#include "weight_sets.h"

namespace moec::test {

inline int rounded_up(int value, int multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

struct QuantShape {
  uint32_t gate_layout;
  bool gate_up_in_out, down_in_out, per_expert;
  int hidden, inter;
};
QuantisedMatrix random_quant_matrix(const QuantCase& c, const QuantShape& shape, int N, int K,
                                    bool in_out, int parts, int experts, Random* random);
// All matrices of one format, with biases. Of the experts the first has no rows, the next one
// `many`, the last ones few.
QuantProblem random_quant_problem(const QuantCase& c, const QuantShape& shape, moec_dtype dtype,
                                  int many, Random* random, int experts = 4);

// The matrices of an MLP in formats at random, for layers that the oracle knows
// (RunOptions::bound). null: gate and up, or down, are plain. A format that has one orientation
// alone has it, whatever the shape says.
class DrawnCodes {
 public:
  DrawnCodes(const QuantCase* gate_up, const QuantCase* down, const QuantShape& shape, int experts,
             Random* random);
  const BoundCodes& bound() const { return bound_; }
  // Values of the codes in the place of matrices.
  void replace(moec_dtype dtype, oracle::MlpWeights* weights);

 private:
  QuantProblem matrices_;
  Tensors tensors_;
  QuantBinder binder_{tensors_};
  BoundCodes bound_;
};

}  // namespace moec::test
