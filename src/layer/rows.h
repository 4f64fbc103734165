// SPDX-License-Identifier: Apache-2.0
// Rows between token order and expert order: permute, unpermute and their gradients; and auxiliary
// losses.
#pragma once

#include "layer/plan.h"

namespace moec {

class Comm;

void permute(const Context& context, const Plan& plan, const moec_permute_args& args,
             moec_stream stream);
void unpermute(const Context& context, const Plan& plan, const moec_unpermute_args& args,
               moec_stream stream);
void permute_backward(const Context& context, const Plan& plan, const moec_permute_grad_args& args,
                      moec_stream stream);
void unpermute_backward(const Context& context, const Plan& plan,
                        const moec_unpermute_grad_args& args, moec_stream stream);

// comm: or null.
void loss_forward(const Context& context, const moec_loss_args& args, Comm* comm,
                  moec_stream stream);
void loss_backward(const Context& context, const moec_loss_args& args, Comm* comm,
                   moec_stream stream);

}  // namespace moec
