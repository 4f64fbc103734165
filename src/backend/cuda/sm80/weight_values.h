// SPDX-License-Identifier: Apache-2.0
// The values of one expert's matrix, plain or coded in any format.
#pragma once

#include "backend/cuda/device/op.h"

namespace moec::cuda {

// Arrays of pointers are the host's.
void weight_values(const Op& op, const ValuesArgs& args);

}  // namespace moec::cuda
