// SPDX-License-Identifier: Apache-2.0
// One call of the experts, forward and backward, and all that may vary in it.
#pragma once

#include "corpus.h"

namespace moec::bits {

struct Parameters {
  float alpha = 0, limit = 0, offset = 0, beta = 0, linear_beta = 0;
};
constexpr moec_activation activation(uint32_t kind, const Parameters& p = {}) {
  return {kind, p.alpha, p.limit, p.offset, p.beta, p.linear_beta, 0, 0};
}

// A set of expert weights: how it is stored. `dtype` 0: the type of x.
struct WeightForm {
  uint32_t gate_layout = MOEC_GATE_THEN_UP;
  uint32_t gate_up_orientation = MOEC_OUT_IN, down_orientation = MOEC_OUT_IN;
  moec_dtype bias_dtype = 0;
  bool biases = false, per_expert = false, frozen = false;
};

struct ExpertsCase {
  int64_t tokens = 0, hidden = 0, inter = 0;
  int32_t experts = 8, top_k = 2;
  moec_dtype dtype = MOEC_F32;
  WeightForm form = {};
  moec_activation activation = {};
  uint32_t weight_position = MOEC_WEIGHT_ON_OUTPUT, combine = MOEC_COMBINE_FP32_SLOT;
  uint32_t act_rounding = MOEC_ACT_FP32_ONCE, save = MOEC_SAVE_ALL;
  float output_scale = 0;
  // of the plan
  int32_t zero_experts = 0, expert_begin = 0, expert_end = 0, align = 0;
  int64_t choice_capacity = 0;  // above 0: an EXPERT_CHOICE plan
  int32_t busy_experts = 0;     // above 0: ids below it only, at least top_k; the others are empty
  bool nobodys = false;         // some ids are -1
  // of the shared expert
  uint32_t shared = MOEC_SHARED_NONE;
  int64_t shared_inter = 0;
  WeightForm shared_form = {};
  moec_activation shared_activation = {};
  // of the arguments
  moec_dtype parameter_dtype = 0;    // gates and output bias; 0: the type of x
  moec_dtype grad_dtype = MOEC_F32;  // of parameters; 0: the type of x
  bool output_bias = false, residual = false;
  bool accumulate = false;     // every gradient that can be
  bool few_gradients = false;  // d_x and the routing weights only

  int32_t local_experts() const {
    return expert_end > expert_begin ? expert_end - expert_begin : experts;
  }
  int32_t slots() const { return choice_capacity ? 0 : top_k; }
};

// The matrices of a set of experts, or their gradients, in the memory of a case.
class WeightTensors {
 public:
  enum class Use { kInput, kOutput, kSum };
  WeightTensors(Case& c, const std::string& name, const WeightForm& form, int64_t experts,
                int64_t hidden, int64_t inter, moec_dtype dtype, Use use);
  WeightTensors(const WeightTensors&) = delete;
  WeightTensors& operator=(const WeightTensors&) = delete;
  const moec_weight_set* set() const { return &set_; }

 private:
  moec_tensor stack(Case& c, const std::string& name, const Shape& shape, double scale) const;
  const moec_tensor* slices(const moec_tensor& stacked);
  moec_matrix matrix(Case& c, const std::string& name, int64_t rows, int64_t inputs,
                     uint32_t orientation);

  const WeightForm form_;
  const int64_t experts_;
  const moec_dtype dtype_;
  const Use use_;
  std::deque<std::vector<moec_tensor>> slices_;
  moec_weight_set set_ = sized<moec_weight_set>();
};

// Bound, and packed where they are frozen and a packed form exists.
Weights bind_weights(Case& c, const WeightTensors& tensors, const WeightForm& form, int32_t experts,
                     int64_t hidden, int64_t inter, moec_dtype dtype);

// Distinct ids of each token, in [0, most).
std::vector<int64_t> draw_ids(Draw& draw, int64_t tokens, int64_t top_k, int64_t most);

void run_experts(Case& c, const ExpertsCase& e);

}  // namespace moec::bits
