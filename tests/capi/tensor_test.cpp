// SPDX-License-Identifier: Apache-2.0
// Tensors as plain data, and those of DLPack.
#include <gtest/gtest.h>
#include <moec/moec.h>

#include <cstdint>

#include "problem.h"

namespace moec::test {
namespace {

struct DlTensor {  // as DLPack lays it out
  void* data;
  int32_t device_type = 1, device_id = 0, ndim;
  uint8_t code = 2, bits = 32;
  uint16_t lanes = 1;
  int64_t *shape, *strides;
  uint64_t byte_offset = 0;
};

float values[24];

struct Case {
  const char* name;
  int32_t ndim;
  int64_t shape[2], strides[2];
  bool has_strides;
  moec_status make, check;  // moec_tensor_from_dlpack, moec_tensor_check
};
const Case kCases[] = {
    {"no_strides", 2, {4, 6}, {}, false, MOEC_OK, MOEC_OK},
    {"compact", 2, {4, 6}, {6, 1}, true, MOEC_OK, MOEC_OK},
    {"turned", 2, {4, 6}, {1, 4}, true, MOEC_OK, MOEC_E_LAYOUT},
    {"every_second", 1, {12}, {2}, true, MOEC_OK, MOEC_E_LAYOUT},
    {"backwards", 1, {12}, {-1}, true, MOEC_OK, MOEC_E_LAYOUT},
    {"one_row_for_all", 2, {4, 6}, {0, 1}, true, MOEC_OK, MOEC_E_LAYOUT},
    {"one_element_for_all", 2, {4, 6}, {0, 0}, true, MOEC_E_LAYOUT, MOEC_OK},
    {"one_element_for_a_row", 2, {1, 6}, {0, 0}, true, MOEC_E_LAYOUT, MOEC_OK},
    {"one_element", 2, {1, 1}, {0, 0}, true, MOEC_OK, MOEC_OK},
    {"nothing", 2, {0, 6}, {0, 0}, true, MOEC_OK, MOEC_OK},
    {"a_number", 0, {}, {}, true, MOEC_OK, MOEC_OK},
    {"seven_dimensions", 7, {1, 1}, {}, false, MOEC_E_INVALID_ARG, MOEC_OK},
};

TEST(Dlpack, strides_mean_what_they_do_there) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(c.name);
    int64_t shape[2] = {c.shape[0], c.shape[1]}, strides[2] = {c.strides[0], c.strides[1]};
    const DlTensor from = {.data = values,
                           .ndim = c.ndim,
                           .shape = shape,
                           .strides = c.has_strides ? strides : nullptr};
    moec_tensor to;
    EXPECT_EQ(moec_tensor_from_dlpack(&from, &to), c.make);
    if (c.make != MOEC_OK) continue;
    EXPECT_EQ(moec_tensor_check(&to), c.check) << error_info().message;
    EXPECT_EQ(to.data, values);
    EXPECT_EQ(to.dtype, moec_dtype(MOEC_F32));
  }
}

TEST(Dlpack, the_offset_is_kept) {
  int64_t shape[1] = {4};
  const DlTensor from = {
      .data = values, .ndim = 1, .shape = shape, .strides = nullptr, .byte_offset = 8};
  moec_tensor to;
  ASSERT_EQ(moec_tensor_from_dlpack(&from, &to), MOEC_OK);
  EXPECT_EQ(to.byte_offset, 8u);
  EXPECT_EQ(moec_tensor_bytes(&to), 16);
}

TEST(Bytes, are_known_of_known_types_alone) {
  int64_t shape[1] = {10};
  DlTensor from = {.data = values, .ndim = 1, .lanes = 4, .shape = shape, .strides = nullptr};
  moec_tensor to;
  ASSERT_EQ(moec_tensor_from_dlpack(&from, &to), MOEC_OK);
  EXPECT_EQ(moec_tensor_bytes(&to), -1);
  from.lanes = 1;
  from.bits = 4;
  ASSERT_EQ(moec_tensor_from_dlpack(&from, &to), MOEC_OK);
  EXPECT_EQ(moec_tensor_bytes(&to), -1);
}

}  // namespace
}  // namespace moec::test
