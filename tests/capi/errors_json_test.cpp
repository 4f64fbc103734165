// SPDX-License-Identifier: Apache-2.0
// The error cases that every binding runs, in C: tests/errors.json holds one right problem as
// fields of C structs, and rows that say what is broken in which call and what must come back.
// Fields are found at the offsets of bindings/api.json. Shown once to fail: with the code of one
// row changed, that row alone fails.
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <list>
#include <sstream>

#include "problem.h"
#include "support/json.h"

namespace moec::test {
namespace {

Json read_file(const char* path) {
  std::ifstream stream(path);
  std::stringstream text;
  text << stream.rdbuf();
  return parse_json(text.str());
}
const Json& file() {
  static const Json json = read_file(MOEC_TESTS_DIR "/errors.json");
  return json;
}
const Json& layout(const std::string& name) {
  static const Json api = read_file(MOEC_TESTS_DIR "/../bindings/api.json");
  for (const Json& row : api.at("structs").array)
    if (row.at("name").string == name) return row;
  throw std::runtime_error("no struct " + name);
}

struct Field {
  char* address;
  size_t bytes;
  bool is_float;
};

// Structs as memory, whose calls succeed until a field is mutated.
class RawProblem {
 public:
  RawProblem() {
    for (const auto& [root, name] : file().at("structs").object) {
      structs_[root].resize(static_cast<size_t>(layout(name.string).at("bytes").number) / 8);
      if (layout(name.string).at("sized").boolean) put(root + ".struct_size", bytes_of(root));
    }
    for (const auto& [path, value] : file().at("values").object) put(path, value.number);
    for (const auto& [path, entry] : file().at("tensors").object) put_tensor(path, entry);
    for (const auto& [path, root] : file().at("pointers").object)
      put_bits(path, address_bits(structs_[root.string].data()));
    layer_ = make<LayerHandle>(moec_layer_create, context_, at<moec_layer_desc>("layer"));
    plan_ = make<PlanHandle>(moec_plan_create, context_, at<moec_plan_desc>("plan"),
                             static_cast<const moec_buffer*>(nullptr));
    weights_ = make<Weights>(moec_weights_create, context_, at<moec_weights_desc>("weights"));
    unbound_ = make<Weights>(moec_weights_create, context_, at<moec_weights_desc>("weights"));
    check(moec_weights_bind(weights_.get(), at<moec_weight_set>("set")));
    auto sizes = sized<moec_experts_sizes>();
    check(moec_layer_query(layer_.get(), &sizes));
    const uint64_t bytes =
        sizes.saved.base + get_bits("forward.x.shape[0]") * sizes.saved.per_token;
    put_bits("forward.weights", address_bits(weights_.get()));
    put_bits("forward.saved.ptr", address_bits(room(bytes)));
    put_bits("forward.saved.bytes", bytes);
  }

  void mutate(const std::string& path, const Json& value) {
    if (value.kind == Json::Kind::kNumber)
      put(path, value.number);
    else if (value.string == "unbound")
      put_bits(path, address_bits(unbound_.get()));
    else
      put_bits(path, get_bits(value.string));
  }

  moec_status call(const std::string& name) {
    if (name == "moec_context_create")
      return create<moec_context_free, moec_context>(
          [&](auto out) { return moec_context_create(at<moec_context_desc>("context"), out); });
    if (name == "moec_layer_create")
      return create<moec_layer_free, moec_layer>(
          [&](auto out) { return moec_layer_create(context_, at<moec_layer_desc>("layer"), out); });
    if (name == "moec_weights_create")
      return create<moec_weights_free, moec_weights>([&](auto out) {
        return moec_weights_create(context_, at<moec_weights_desc>("weights"), out);
      });
    if (name == "moec_plan_create")
      return create<moec_plan_free, moec_plan>([&](auto out) {
        return moec_plan_create(context_, at<moec_plan_desc>("plan"), nullptr, out);
      });
    if (name == "moec_weights_bind")
      return moec_weights_bind(weights_.get(), at<moec_weight_set>("set"));
    if (name == "moec_plan_from_topk")
      return moec_plan_from_topk(plan_.get(), at<moec_tensor>("ids"), nullptr, nullptr);
    int32_t totals[4];
    if (name == "moec_plan_totals_sync") return moec_plan_totals_sync(plan_.get(), totals, nullptr);
    if (name == "moec_layer_forward")
      return moec_layer_forward(layer_.get(), at<moec_layer_args>("forward"), nullptr);
    if (name == "moec_layer_backward")
      return moec_layer_backward(layer_.get(), at<moec_layer_grad_args>("grads"), nullptr);
    throw std::runtime_error("no call " + name);
  }

 private:
  template <typename T>
  T* at(const std::string& root) {
    return reinterpret_cast<T*>(structs_.at(root).data());
  }
  static uint64_t address_bits(const void* address) { return reinterpret_cast<uintptr_t>(address); }
  double bytes_of(const std::string& root) {
    return static_cast<double>(structs_.at(root).size() * sizeof(uint64_t));
  }
  void* room(uint64_t bytes) { return memory_.emplace_back(bytes / 8 + 1).data(); }

  // What a create call makes is freed at once; its status and its error stay as they are.
  template <auto Free, typename T, typename Call>
  static moec_status create(Call call) {
    T* made = nullptr;
    const moec_status status = call(&made);
    Free(made);
    return status;
  }

  // A field such as "forward.x.shape[1]".
  Field field(const std::string& path) {
    std::stringstream parts(path);
    std::string part;
    std::getline(parts, part, '.');
    Field out = {reinterpret_cast<char*>(structs_.at(part).data()), 0, false};
    std::string name = file().at("structs").at(part).string;
    while (std::getline(parts, part, '.')) {
      const size_t bracket = part.find('[');
      const Json* row = nullptr;
      for (const Json& one : layout(name).at("fields").array)
        if (one.at("name").string == part.substr(0, bracket)) row = &one;
      if (row == nullptr) throw std::runtime_error("no field " + path);
      const Json* type = &row->at("type");
      out.address += static_cast<size_t>(row->at("offset").number);
      out.bytes = static_cast<size_t>(row->at("bytes").number);
      if (bracket != std::string::npos) {
        out.bytes /= static_cast<size_t>(type->at("count").number);
        out.address += out.bytes * std::stoul(part.substr(bracket + 1));
        type = &type->at("of");
      }
      out.is_float = type->at("kind").string == "float";
      name = type->find("name") == nullptr ? "" : type->at("name").string;
    }
    return out;
  }
  void put_bits(const std::string& path, uint64_t bits) {
    const Field f = field(path);
    std::memcpy(f.address, &bits, f.bytes);  // little-endian, as every machine of the project
  }
  uint64_t get_bits(const std::string& path) {
    const Field f = field(path);
    uint64_t bits = 0;
    std::memcpy(&bits, f.address, f.bytes);
    return bits;
  }
  void put(const std::string& path, double value) {
    const auto narrow = static_cast<float>(value);
    uint32_t bits = 0;
    std::memcpy(&bits, &narrow, sizeof(bits));
    put_bits(path,
             field(path).is_float ? bits : static_cast<uint64_t>(static_cast<int64_t>(value)));
  }
  void put_tensor(const std::string& path, const Json& entry) {
    uint64_t count = 1;
    for (size_t i = 0; i < entry.array[1].array.size(); ++i) {
      put(path + ".shape[" + std::to_string(i) + "]", entry.array[1].array[i].number);
      count *= static_cast<uint64_t>(entry.array[1].array[i].number);
    }
    put_bits(path + ".data", address_bits(room(4 * count)));
    put_bits(path + ".dtype", entry.array[0].string == "f32" ? MOEC_F32 : MOEC_I32);
    put_bits(path + ".ndim", entry.array[1].array.size());
    put_bits(path + ".device_type", MOEC_CPU);
  }

  std::map<std::string, std::vector<uint64_t>> structs_;
  std::list<std::vector<uint64_t>> memory_;
  Context owner_ =
      make<Context>(moec_context_create, static_cast<const moec_context_desc*>(nullptr));
  const moec_context* context_ = owner_.get();
  LayerHandle layer_;
  PlanHandle plan_;
  Weights weights_, unbound_;
};

TEST(ErrorsJson, EveryRow) {
  ASSERT_EQ(file().at("rows").array.size(), 71u);
  for (const Json& row : file().at("rows").array) {
    RawProblem problem;
    const std::string call = row.at("call").string;
    if (call == "moec_layer_backward") check(problem.call("moec_layer_forward"));
    std::string mutated = call;
    for (const auto& [path, value] : row.at("mutation").object) {
      problem.mutate(path, value);
      mutated += " " + path;
    }
    EXPECT_EQ(moec_status_name(problem.call(call)), row.at("code").string) << mutated;
    const moec_error_info info = error_info();
    EXPECT_EQ(info.site, row.at("site").string) << mutated << ": " << info.message;
  }
}

TEST(ErrorsJson, TheProblemItselfIsRight) {
  RawProblem problem;
  for (const Json& row : file().at("rows").array) {
    const std::string call = row.at("call").string;
    if (call == "moec_plan_totals_sync") continue;  // its mistake is the call itself
    EXPECT_EQ(problem.call(call), MOEC_OK) << call << ": " << error_info().message;
  }
}

}  // namespace
}  // namespace moec::test
