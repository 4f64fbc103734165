// SPDX-License-Identifier: Apache-2.0
// The rows that a kernel works on.
#pragma once

#include "backend/cuda/device/op.h"
#include "backend/product.h"

namespace moec::cuda {

struct Rows {
  RowGroups groups;
  const int32_t* row_token = nullptr;  // token of a row; null: the row itself
};

}  // namespace moec::cuda
