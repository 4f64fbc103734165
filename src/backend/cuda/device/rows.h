// SPDX-License-Identifier: Apache-2.0
// The rows and matrices that a kernel works on.
#pragma once

#include "backend/cuda/device/op.h"
#include "backend/product.h"

namespace moec::cuda {

// An ExpertMatrix whose arrays of pointers lie on the device.
struct DeviceMatrix {
  ExpertMatrix view;
  bool aligned = false;  // every expert begins at 16 bytes
};

struct Rows {
  RowGroups groups;
  const int32_t* row_token = nullptr;  // token of a row; null: the row itself
};

}  // namespace moec::cuda
