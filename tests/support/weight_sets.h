// SPDX-License-Identifier: Apache-2.0
// The oracle's canonical expert weights in any layout of moec_weights_desc, and gradients back.
#pragma once

#include <deque>
#include <vector>

#include "oracle/moe_oracle.h"
#include "tensors.h"

namespace moec::test {

// Matrices of codes of any format as they are bound, without biases. NONE: those are plain.
struct BoundCodes {
  moec_weight_set set{};
  uint32_t gate_up_scheme = MOEC_SCHEME_NONE, down_scheme = MOEC_SCHEME_NONE;
  uint32_t gate_up_orientation = MOEC_OUT_IN, down_orientation = MOEC_OUT_IN;
};

struct WeightLayout {
  uint32_t gate_layout = MOEC_GATE_SPLIT;  // of a gated MLP; a plain one has GATE_NONE
  uint32_t gate_up_orientation = MOEC_OUT_IN;
  uint32_t down_orientation = MOEC_OUT_IN;
  bool per_expert = false;       // an array of pointers instead of one stack
  bool per_expert_bias = false;  // of biases alone
  moec_dtype dtype = MOEC_F32;
  // Matrices with codes are bound as INT8; their gradients are absent.
  const oracle::CodedMlp* codes = nullptr;
  moec_dtype scale_dtype = MOEC_F32;
  const BoundCodes* bound = nullptr;  // likewise, in the place of matrices and orientations
};

// One set of matrices on the device: bound weights, or the place for their gradients.
class WeightSet {
 public:
  // A matrix without values is absent: codes take its place. A plain MLP has no gate, but up.
  // as_output: memory of the shapes of `weights`, poisoned or full of *before; else their values.
  WeightSet(const oracle::MlpWeights& weights, int experts, int hidden, int inter,
            const WeightLayout& layout, bool as_output, const double* before = nullptr);

  const moec_weight_set* set() const { return &set_; }
  moec_weights_desc desc(bool frozen) const;
  oracle::MlpWeights read() const;
  bool neighbours_untouched() const { return tensors_.neighbours_untouched(); }
  // Every byte of the set, in the order of moec_weight_set.
  std::vector<uint8_t> bytes() const;

 private:
  struct Stored {  // one moec_matrix: the stacks behind it
    moec_tensor data{}, bias{};
  };
  struct Values {  // of one moec_matrix in the stored order; with scales, data are codes
    oracle::Vec data, bias, scales, zeros;
  };
  moec_matrix matrix(const Values& values, int rows, int inputs, bool in_out, bool as_output,
                     Stored* stored);
  const moec_quant* quant(const Values& values, int rows, bool in_out);
  moec_tensor stack(const oracle::Vec& values, const std::vector<int64_t>& shape, bool as_output);
  const moec_tensor* pointers(const moec_tensor& stack);

  int experts_, hidden_, inter_;
  WeightLayout layout_;
  bool has_gate_up_bias_, has_down_bias_;
  uint32_t gate_up_scheme_, down_scheme_;
  const double* before_;
  Tensors tensors_;
  std::deque<std::vector<moec_tensor>> pointer_arrays_;
  std::deque<moec_quant> quants_;
  Stored gate_up_, gate_, up_, down_;
  moec_weight_set set_{};
};

}  // namespace moec::test
