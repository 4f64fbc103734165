// SPDX-License-Identifier: Apache-2.0
// Routed experts of quantised matrices through moec_experts_forward and _backward, and the oracle
// with the values that these matrices stand for.
#pragma once

#include <string>
#include <vector>

#include "adapter_set.h"
#include "json.h"
#include "oracle/moe_oracle.h"
#include "quantised.h"

namespace moec::test {

struct QuantProblem {
  moec_dtype dtype = MOEC_F32;
  uint32_t gate_layout = MOEC_GATE_SPLIT;
  uint32_t save = MOEC_SAVE_PREACT;
  int experts = 0, hidden = 0, inter = 0, tokens = 0, top_k = 1;
  oracle::Activation activation;
  // gate and up, or gate_up; a matrix that is empty is plain: it holds the values below.
  QuantisedMatrix gate_up, gate, up, down;
  uint32_t gate_up_orientation = MOEC_OUT_IN, down_orientation = MOEC_OUT_IN;  // of plain ones
  oracle::MlpWeights values;  // of plain matrices; biases of all
  std::vector<oracle::Adapter> adapters;
  AdapterLayout adapter_layout;
  bool whole_shape = false;
  // Runs from a file of the packed copy, without what was bound, and compares what unpacking gives.
  bool packed = false;
  oracle::Vec x, d_y, routing_weights;
  oracle::Ids ids;

  // All values in the type of the layer, [E,I,H] and [E,H,I].
  oracle::MlpWeights dequantised() const;
};

struct QuantResults {
  moec_status status = MOEC_OK;
  std::string message;  // where status is another
  oracle::Vec y, d_x, d_routing_weights;
  std::vector<oracle::Adapter> d_adapters;
  oracle::Vec routing_terms = {};  // of a reference: what d_routing_weights are sums of
  bool operator==(const QuantResults&) const = default;
};
// The matrices as they are, or, `as_values`, plain ones of the values that they stand for.
// described: what moec_experts_describe says of the call.
QuantResults run(const QuantProblem& problem, bool as_values, Json* described = nullptr);
QuantResults reference(const QuantProblem& problem);

// Every tensor of a set, and the bytes of one.
std::vector<moec_tensor> tensors_of(const moec_weight_set& set);
size_t tensor_bytes(const moec_tensor& tensor);

}  // namespace moec::test
