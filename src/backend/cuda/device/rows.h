// SPDX-License-Identifier: Apache-2.0
// The rows and matrices that a kernel works on.
#pragma once

#include "backend/cuda/device/op.h"

namespace moec::cuda {

// Rows of group e are [offsets[e], offsets[e] + counts[e]). No offsets: one group of all rows.
struct RowGroups {
  int count = 1;
  const int32_t *offsets = nullptr, *counts = nullptr;  // on the device
  int64_t max_rows = 0;                                 // bound on the rows with padding
};

struct RowOperand {  // element (r, k) at data + r * stride + k
  Array data;
  int64_t stride = 0;
  const int32_t* gather = nullptr;  // read row gather[r] instead
};

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
