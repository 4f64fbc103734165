// SPDX-License-Identifier: Apache-2.0
// JSON of a few known values: texts and numbers.
#pragma once

#include <cstdint>
#include <string>

namespace moec {

// {"name": value, ...}
class JsonObject {
 public:
  JsonObject& add(const char* name, const std::string& text) {
    return add_json(name, quoted(text));
  }
  JsonObject& add(const char* name, const char* text) { return add(name, std::string(text)); }
  JsonObject& add(const char* name, int64_t number) {
    return add_json(name, std::to_string(number));
  }
  JsonObject& add_json(const char* name, const std::string& json) {
    members_ += (members_.empty() ? "" : ", ") + quoted(name) + ": " + json;
    return *this;
  }
  const std::string& members() const { return members_; }

 private:
  static std::string quoted(const std::string& text) {
    std::string out = "\"";
    for (const char c : text) {
      if (c == '"' || c == '\\') out += '\\';
      out += static_cast<unsigned char>(c) < 0x20 ? '?' : c;
    }
    return out + '"';
  }
  std::string members_;
};

// Appends {...} to the objects of an array.
inline void append(std::string& objects, const JsonObject& object) {
  objects.append(objects.empty() ? "{" : ", {").append(object.members()) += '}';
}

}  // namespace moec
