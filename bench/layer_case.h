// SPDX-License-Identifier: Apache-2.0
// One layer of a published model through the public C API, with random weights and tokens.
#pragma once

#include <moec/moec.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace moec::bench {

struct Shape {
  std::string name;
  int64_t hidden = 0, inter = 0;
  int32_t experts = 0, top_k = 0;
};
// From bench/shapes.json; throws std::runtime_error that names the shapes there are.
std::vector<Shape> load_shapes(const std::string& path, const std::vector<std::string>& names);

class Memory {  // zeroed pages, huge where the system allows
 public:
  explicit Memory(size_t bytes);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  size_t bytes() const { return bytes_; }

 private:
  void* data_;
  size_t bytes_;
};

// Random values of a dtype with the spread that keeps a layer's outputs near 1.
void fill_random(const Memory& memory, moec_dtype dtype, double spread);

class LayerCase {
 public:
  // Frozen, packed weights; as many copies as fill 1.2 GiB, so that rotating finds them cold.
  LayerCase(const Shape& shape, moec_dtype dtype, int32_t threads, int64_t max_tokens);
  ~LayerCase();

  struct Work {
    double flops = 0, weight_bytes = 0, rows_per_expert = 0;  // of active experts
  };
  Work forward(int64_t tokens);  // the next tokens through the next copy
  Work naive(int64_t tokens);    // the same as plain loops over experts, rows, outputs; one thread
  std::string describe(int64_t tokens) const;
  int64_t copies() const { return int64_t(weights_.size()); }

 private:
  void check(moec_status status) const;
  moec_tensor tensor(void* data, moec_dtype dtype, std::vector<int64_t> dims) const;
  Work work_of(int64_t tokens) const;

  Shape shape_;
  moec_dtype dtype_;
  int64_t max_tokens_, value_bytes_, next_token_ = 0;
  size_t next_copy_ = 0;
  moec_context* context_ = nullptr;
  moec_layer* layer_ = nullptr;
  std::vector<moec_weights*> weights_;
  std::unique_ptr<Memory> x_, y_, gate_, source_[3];
  std::vector<int32_t> ids_;
};

}  // namespace moec::bench
