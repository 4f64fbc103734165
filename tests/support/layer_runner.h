// SPDX-License-Identifier: Apache-2.0
// Runs a problem of the oracle through the public C API: moec_layer_forward and _backward on the
// device under test, with every buffer of exactly the queried size.
#pragma once

#include <moec/moec.h>

#include <string>
#include <vector>

#include "adapter_set.h"
#include "oracle/moe_oracle.h"
#include "weight_sets.h"

namespace moec::test {

struct RunOptions {
  moec_dtype dtype = MOEC_F32;       // x, y, every matrix
  moec_dtype weights_dtype = 0;      // of the experts' matrices and biases; 0: dtype
  moec_dtype grad_dtype = MOEC_F32;  // of weight gradients
  WeightLayout layout;               // dtype is taken from above
  const oracle::CodedMlp *codes = nullptr, *shared_codes = nullptr;  // of matrices in INT8
  const BoundCodes *bound = nullptr, *shared_bound = nullptr;        // in any format
  AdapterLayout adapters;  // of the inputs' adapters; gradients are of grad_dtype
  bool no_adapter_grads = false;
  bool frozen = false;            // declare the weights frozen and pack them
  uint32_t save = MOEC_SAVE_ALL;  // SAVE_NONE: forward only
  uint32_t combine = MOEC_COMBINE_FP32_SLOT;
  uint32_t act_rounding = MOEC_ACT_FP32_ONCE;
  int num_threads = 0;
  // Every gradient that can be added to holds 1/4 before, which is taken off again.
  bool accumulate = false;
  bool only_bytes = false;      // of a run: status, bytes, neighbours_untouched
  uint8_t saved_before = 0xFF;  // each byte of the saved buffer before the forward call
};

// What a layer rounds on the way (oracle::ExpertsConfig).
struct InnerRounding {
  oracle::Rounding operands = oracle::Rounding::kNone, between = oracle::Rounding::kNone;
  auto operator<=>(const InnerRounding&) const = default;
};

struct LayerRun {
  moec_status status = MOEC_OK;
  std::string message;  // moec_last_error's when status is not MOEC_OK
  InnerRounding rounding;
  moec_dtype dtype = MOEC_F32, grad_dtype = MOEC_F32;  // of rows, of gradients of matrices
  oracle::Vec y, routing_weights, logits;
  oracle::Ids expert_ids;
  oracle::Gradients grads;
  std::vector<uint8_t> bytes;  // of every output, to compare runs bit for bit
  std::vector<uint8_t> saved;  // after the forward call
  bool neighbours_untouched = true;
};

// Throws only where there is no device to test on.
LayerRun run_layer(const oracle::Config& config, const oracle::Inputs& in, const oracle::Vec& d_y,
                   const oracle::Vec& d_logits_in, const RunOptions& options = {});

// Descriptors of a problem. data_dtype: what the rounding steps of the router round to.
moec_router_desc router_desc(const oracle::RouterConfig& config, const oracle::Inputs& in);
moec_experts_desc experts_desc(const oracle::Config& config, const oracle::Inputs& in,
                               const RunOptions& options);

// All data of a problem rounded to a type, as a run with that dtype will see them.
void round_inputs(oracle::Rounding rounding, oracle::Inputs* in);
oracle::Rounding rounding_of(moec_dtype dtype);

}  // namespace moec::test
