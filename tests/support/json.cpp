// SPDX-License-Identifier: Apache-2.0
#include "json.h"

#include <charconv>
#include <stdexcept>

namespace moec::test {
namespace {

bool is_space(char c) {
  return c == ' ' || c == '\t' || c == '\r' || c == '\n';
}

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  Json document() {
    Json value = parse_value();
    skip_space();
    if (position_ != text_.size()) fail("end of text");
    return value;
  }

 private:
  [[noreturn]] void fail(const std::string& expected) const {
    throw std::runtime_error("parse_json: byte " + std::to_string(position_) + ": expected " +
                             expected);
  }
  void skip_space() {
    while (position_ < text_.size() && is_space(text_[position_])) ++position_;
  }
  char peek() {
    skip_space();
    if (position_ == text_.size()) fail("more text");
    return text_[position_];
  }
  bool accept(char c) {
    if (peek() != c) return false;
    ++position_;
    return true;
  }
  void expect(char c) {
    if (!accept(c)) fail(std::string(1, c));
  }
  bool accept_word(std::string_view word) {
    if (text_.substr(position_, word.size()) != word) return false;
    position_ += word.size();
    return true;
  }

  Json parse_value() {
    Json value;
    const char c = peek();
    if (c == '{') {
      value.kind = Json::Kind::kObject;
      parse_object(&value);
    } else if (c == '[') {
      value.kind = Json::Kind::kArray;
      parse_array(&value);
    } else if (c == '"') {
      value.kind = Json::Kind::kString;
      value.string = parse_string();
    } else if (accept_word("true") || accept_word("false")) {
      value.kind = Json::Kind::kBool;
      value.boolean = c == 't';
    } else if (!accept_word("null")) {
      value.kind = Json::Kind::kNumber;
      value.number = parse_number();
    }
    return value;
  }
  void parse_object(Json* value) {
    expect('{');
    if (accept('}')) return;
    do {
      if (peek() != '"') fail("a key");
      std::string key = parse_string();
      expect(':');
      value->object[std::move(key)] = parse_value();
    } while (accept(','));
    expect('}');
  }
  void parse_array(Json* value) {
    expect('[');
    if (accept(']')) return;
    do {
      value->array.push_back(parse_value());
    } while (accept(','));
    expect(']');
  }
  double parse_number() {
    double number = 0;
    const char* first = text_.data() + position_;
    const auto [end, error] = std::from_chars(first, text_.data() + text_.size(), number);
    if (error != std::errc() || end == first) fail("a value");
    position_ += static_cast<size_t>(end - first);
    return number;
  }
  std::string parse_string() {
    expect('"');
    std::string out;
    while (position_ < text_.size() && text_[position_] != '"') {
      const char c = text_[position_++];
      out += c == '\\' ? parse_escape() : std::string(1, c);
    }
    expect('"');
    return out;
  }
  std::string parse_escape() {
    if (position_ == text_.size()) fail("an escape");
    const char c = text_[position_++];
    static const std::string_view kFrom = "\"\\/bfnrt";
    static const std::string_view kTo = "\"\\/\b\f\n\r\t";
    const size_t known = kFrom.find(c);
    if (known != std::string_view::npos) return std::string(1, kTo[known]);
    unsigned code = 0;
    const char* first = text_.data() + position_;
    if (c != 'u' || position_ + 4 > text_.size() ||
        std::from_chars(first, first + 4, code, 16).ptr != first + 4 || code > 0x7F)
      fail("an escape of one ASCII character");
    position_ += 4;
    return std::string(1, static_cast<char>(code));
  }

  std::string_view text_;
  size_t position_ = 0;
};

}  // namespace

const Json* Json::find(const std::string& key) const {
  const auto found = object.find(key);
  return found == object.end() ? nullptr : &found->second;
}

const Json& Json::at(const std::string& key) const {
  const Json* value = find(key);
  if (value == nullptr) throw std::runtime_error("Json::at: no key " + key);
  return *value;
}

Json parse_json(std::string_view text) {
  return Parser(text).document();
}

}  // namespace moec::test
