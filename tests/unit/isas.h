// SPDX-License-Identifier: Apache-2.0
// The instruction sets that this machine can run.
#pragma once

#include <gtest/gtest.h>

#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include "backend/cpu/isa.h"

namespace moec::test {

inline std::vector<std::string> isa_names() {
  std::istringstream names(cpu::available_isas());
  return {std::istream_iterator<std::string>(names), {}};
}

// body() with each set in use.
template <class Body>
void on_each_isa(Body body) {
  for (const std::string& isa : isa_names()) {
    SCOPED_TRACE(isa);
    cpu::select_isa(isa.c_str());
    body();
  }
  cpu::select_isa(nullptr);
}

}  // namespace moec::test
