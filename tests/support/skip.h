// SPDX-License-Identifier: Apache-2.0
// A test program that includes this ends with 77 (CTest: skipped) where the device under test or
// the instruction set that MOEC_CPU_ISA names is not there.
#pragma once

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>

#include "handles.h"

namespace moec::test {

class DeviceEnvironment : public testing::Environment {
 public:
  void SetUp() override {
    try {
      auto info = sized<moec_device_info>();
      check(moec_context_device(test_context(), &info));
    } catch (const Failure& failure) {
      if (failure.status != MOEC_E_UNSUPPORTED && failure.status != MOEC_E_NO_BACKEND) throw;
      std::printf("skipped: %s\n", failure.what());
      std::exit(77);
    }
  }
};

inline testing::Environment* const kDeviceEnvironment =
    testing::AddGlobalTestEnvironment(new DeviceEnvironment);

}  // namespace moec::test
