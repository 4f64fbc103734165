// SPDX-License-Identifier: Apache-2.0
// What an experts call will run, as members of a JSON object: the kernel and tile of each product
// at the mean number of rows per expert.
#include <algorithm>

#include "backend/cpu/expert_weights.h"
#include "backend/cpu/experts_memory.h"
#include "backend/cpu/isa.h"
#include "backend/cpu/ops.h"
#include "core/dtype.h"

namespace moec::cpu {
namespace {

std::string text(const std::string& value) {
  return '"' + value + '"';
}  // nothing here needs escapes
std::string text(int64_t value) {
  return std::to_string(value);
}

// {"name": value, ...}; values are JSON already.
class JsonObject {
 public:
  template <class Value>
  JsonObject& add(const char* name, const Value& value) {
    return add_json(name, text(value));
  }
  JsonObject& add_json(const char* name, const std::string& json) {
    body_ += (body_.empty() ? "" : ", ") + text(std::string(name)) + ": " + json;
    return *this;
  }
  const std::string& members() const { return body_; }
  std::string str() const { return '{' + body_ + '}'; }

 private:
  std::string body_;
};

class JsonArray {
 public:
  void add(const JsonObject& object) { body_ += (body_.empty() ? "" : ", ") + object.str(); }
  std::string str() const { return '[' + body_ + ']'; }

 private:
  std::string body_;
};

struct Product {
  const char* name;
  moec_dtype dtype, other_dtype, weight_dtype;  // of the operands, and what is bound
  int64_t rows, n, k;                           // of one expert; `matrices` of them share the rows
  int matrices;
  int64_t experts;  // with rows
};

// A kernel's name ends with its tile: "avx512 f32 12x32".
JsonObject describe_product(const Product& p) {
  const std::string kernel = gemm_kernel_name(p.dtype, p.other_dtype, p.rows);
  const size_t space = kernel.rfind(' ');
  JsonObject object;
  object.add("name", std::string(p.name))
      .add("kernel", kernel.substr(0, space))
      .add("tile", kernel.substr(space + 1))
      .add("rows_per_expert", p.rows)
      .add("n", p.n)
      .add("k", p.k)
      .add("matrices", int64_t(p.matrices))
      .add("weight_bytes", p.experts * p.matrices * p.n * p.k * dtype_bytes(p.weight_dtype));
  return object;
}

struct MlpShape {
  const char *first, *down, *d_act, *d_input, *d_down, *d_first;
  int64_t rows, hidden, inter, experts;
  bool gated;
};

void describe_mlp(const MlpShape& m, moec_dtype dtype, moec_dtype weight_dtype, bool backward,
                  JsonArray& products) {
  const int first = m.gated ? 2 : 1;
  // other: weight_dtype, or dtype where both operands are activations or their gradients.
  const auto add = [&](const char* name, moec_dtype other, int64_t n, int64_t k, int matrices) {
    products.add(
        describe_product({name, dtype, other, weight_dtype, m.rows, n, k, matrices, m.experts}));
  };
  add(m.first, weight_dtype, m.inter, m.hidden, first);
  add(m.down, weight_dtype, m.hidden, m.inter, 1);
  if (!backward) return;
  add(m.d_act, weight_dtype, m.inter, m.hidden, 1);
  add(m.d_input, weight_dtype, m.hidden, m.inter, first);
  add(m.d_down, dtype, m.hidden, m.inter, 1);
  add(m.d_first, dtype, m.inter, m.hidden, first);
}

}  // namespace

std::string experts_describe(const Device& device, const moec_experts_desc& desc,
                             const WeightsView& weights, int64_t num_tokens) {
  const int64_t local = desc.expert_end - desc.expert_begin;
  const int64_t choices = desc.max_rows_base / std::max<int64_t>(1, local);
  const int64_t rows = desc.max_rows_base
                           ? std::min(choices, num_tokens)
                           : (num_tokens * desc.top_k + desc.num_experts - 1) / desc.num_experts;
  const int64_t active = desc.max_rows_base ? local : std::min(local, num_tokens * desc.top_k);
  const bool backward = desc.save != MOEC_SAVE_NONE;
  JsonArray products;
  describe_mlp({"gate_up", "down", "d_act", "d_x", "d_down", "d_gate_up", rows, desc.hidden,
                desc.inter, active, weights.gated},
               desc.dtype, weights.down.dtype, backward, products);
  if (desc.shared != MOEC_SHARED_NONE)
    describe_mlp(
        {"shared_gate_up", "shared_down", "d_shared_act", "d_shared_x", "d_shared_down",
         "d_shared_gate_up", num_tokens, desc.hidden, desc.shared_inter, 1, is_shared_gated(desc)},
        desc.dtype, desc.dtype, backward, products);
  JsonObject result;
  result.add("backend", std::string("cpu"))
      .add("isa", std::string(tile_kernels().isa))
      .add("threads", int64_t(device.pool.size()))
      .add("num_tokens", num_tokens)
      .add("dtype", std::string(dtype_name(desc.dtype)))
      .add("weights", weights.packed ? packed_format(weights) : std::string("as bound"))
      .add_json("products", products.str());
  return result.members();
}

}  // namespace moec::cpu
