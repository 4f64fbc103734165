// SPDX-License-Identifier: Apache-2.0
// The backends of this process: the CPU, compiled in, and plug-ins found on first need.
#pragma once

#include <memory>
#include <string>

#include "backend/backend.h"

namespace moec {

// Throws E_NO_BACKEND (cannot be opened) or E_BACKEND_ABI (built for another library).
void load_backend(const char* path);
// Throws E_INVALID_ARG for a type that no backend can have.
int32_t device_count(int32_t device_type);
// JSON: the plug-in, the state of its driver, who multiplies dense matrices.
std::string describe_backend(int32_t device_type);
void query_device(int32_t device_type, int32_t device_id, moec_device_info& info);
// Throws E_NO_BACKEND when the device is absent.
std::unique_ptr<Backend> make_backend(int32_t device_type, const BackendOptions& options);

}  // namespace moec
