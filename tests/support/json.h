// SPDX-License-Identifier: Apache-2.0
// A JSON value and its parser, enough for safetensors headers and model configurations.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace moec::test {

struct Json {
  enum class Kind { kNull, kBool, kNumber, kString, kArray, kObject };
  Kind kind = Kind::kNull;
  bool boolean = false;
  double number = 0;
  std::string string;
  std::vector<Json> array;
  std::map<std::string, Json> object;

  // The member, or null when it is absent or this is no object.
  const Json* find(const std::string& key) const;
  // The member; throws std::runtime_error naming the key when it is absent.
  const Json& at(const std::string& key) const;
};

// Throws std::runtime_error with the byte offset of what it does not understand.
Json parse_json(std::string_view text);

}  // namespace moec::test
