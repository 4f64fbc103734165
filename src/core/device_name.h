// SPDX-License-Identifier: Apache-2.0
// Devices as users name them: "cpu", "cuda:0".
#pragma once

#include <moec/moec.h>

#include <cstdio>

namespace moec {

struct DeviceName {
  char text[24];
  const char* c_str() const { return text; }
};

// Of MOEC_CPU or MOEC_CUDA; there is one CPU, so its number 0 is not named.
inline DeviceName device_name(int32_t device_type, int32_t device_id) {
  DeviceName out;
  const char* const kind = device_type == MOEC_CPU ? "cpu" : "cuda";
  const bool numbered = device_type != MOEC_CPU || device_id;
  std::snprintf(out.text, sizeof out.text, numbered ? "%s:%d" : "%s", kind, device_id);
  return out;
}

}  // namespace moec
