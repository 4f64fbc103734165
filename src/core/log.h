// SPDX-License-Identifier: Apache-2.0
// The process-wide log sink. Silent until one is set.
#pragma once

#include <moec/moec.h>

namespace moec {

void set_log(moec_log_function function, void* user, int32_t min_level);

#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
void log(int32_t level, const char* format, ...);

}  // namespace moec
