// SPDX-License-Identifier: Apache-2.0
// Names of files.
#pragma once

#include <cstdlib>
#include <string>

namespace moec {

// Without links and "..", or as it is where there is no such file.
inline std::string real_path(const std::string& file) {
  char* const real = realpath(file.c_str(), nullptr);
  std::string path = real ? real : file;
  std::free(real);
  return path;
}

}  // namespace moec
