// SPDX-License-Identifier: Apache-2.0
// A table of mistakes: each row spoils one thing and says what must come back. Every row also
// checks that the text names the entry point and stays short, and that no output was written.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <ostream>
#include <string>

#include "problem.h"

namespace moec::test {

struct Mistake {
  const char* name;
  moec_status expected;
  const char* text;  // part of the message
  std::function<moec_status(Problem&)> make;
};
void PrintTo(const Mistake& mistake, std::ostream* out) {
  *out << mistake.name;
}

inline void expect_mistake(const Mistake& mistake) {
  Problem p;
  p.fill_outputs();
  EXPECT_EQ(mistake.make(p), mistake.expected)
      << moec_status_name(mistake.expected) << " expected; last error: " << error_info().message;
  const moec_error_info info = error_info();
  const std::string message = info.message;
  EXPECT_EQ(info.code, mistake.expected);
  EXPECT_EQ(message.rfind(std::string(info.site) + ": ", 0), 0u) << message;
  EXPECT_NE(message.find(mistake.text), std::string::npos) << message;
  EXPECT_LT(message.size(), 250u) << message;
  EXPECT_TRUE(p.outputs_untouched());
}

#define MOEC_TEST_MISTAKES(rows)                                 \
  class Errors : public testing::TestWithParam<Mistake> {};      \
  TEST_P(Errors, has_its_code_and_leaves_outputs_alone) {        \
    expect_mistake(GetParam());                                  \
  }                                                              \
  INSTANTIATE_TEST_SUITE_P(All, Errors, testing::ValuesIn(rows), \
                           [](const auto& row) { return std::string(row.param.name); })

}  // namespace moec::test
