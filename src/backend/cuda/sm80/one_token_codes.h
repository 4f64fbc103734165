// SPDX-License-Identifier: Apache-2.0
// The experts of one token whose weights are codes along k: their time is that of reading the codes
// of the experts hit. Two launches, each of one CTA on every multiprocessor, which fit beside each
// other:
//   up    x -> pre-activations and act [P,I]
//   down  act -> y; a CTA owns columns of y, over all slots
#pragma once

#include "backend/cuda/experts/row_steps.h"
#include "backend/cuda/sm80/row_product.h"

namespace moec::cuda {

// The steps up, down and combine of a forward, as products one after the other would be asked for.
struct OneTokenSteps {
  RowProduct up, down;
  ProductOutput pre, rows;  // rows are not written
  void* act;                // [P,I]
  CombineParams combine;
  int expert_begin;  // the global id of the first local expert
  moec_activation activation;
  int multiprocessors;
};

// Whether a program begins with such steps, and asks for nothing beside the products that kernels
// lack.
bool is_of_one_token(const Program& program);
// Queues them, where there is an op. Why there is no kernel for these, or null: a function of the
// problem and the device.
const char* one_token_codes(const Op* op, const OneTokenSteps& steps);

}  // namespace moec::cuda
