// SPDX-License-Identifier: Apache-2.0
// A text in the caller's buffer, and how long it is.
#pragma once

#include <cstring>
#include <string>

#include "boundary.h"

namespace moec::capi {

// *need counts the final NUL. A NULL buffer only asks for it; one too small is E_WORKSPACE.
inline void write_text(const std::string& text, char* buffer, uint64_t bytes, uint64_t& need) {
  need = text.size() + 1;
  if (!buffer) return;
  check_buffer("buffer", {buffer, bytes}, need);
  std::memcpy(buffer, text.c_str(), need);
}

}  // namespace moec::capi
