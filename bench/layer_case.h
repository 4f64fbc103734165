// SPDX-License-Identifier: Apache-2.0
// One layer of a published model through the public C API, with random weights and tokens.
#pragma once

#include <moec/moec.h>

#include <cstdint>
#include <memory>
#include <random>
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

#if MOEC_HAVE_ONEDNN
// The experts' products as a framework's loop runs them: one oneDNN matmul after the other on all
// threads, weights packed once in oneDNN's own layout. No routing, gather, activation or combine:
// what is left out favours it.
class OneDnnLayer {
 public:
  OneDnnLayer(const Shape& shape, moec_dtype dtype, const Memory* const source[3], int64_t rows,
              int64_t max_rows);
  ~OneDnnLayer();
  void forward(const std::vector<int64_t>& rows_of_expert, const Memory& x);

 private:
  struct Matrix;
  struct Engine;
  std::unique_ptr<Engine> engine_;
  Memory gate_, up_, y_;
};
#endif

class LayerCase {
 public:
  // Frozen, packed weights; as many copies as fill 1.2 GiB, so that rotating finds them cold.
  LayerCase(const Shape& shape, moec_dtype dtype, int32_t threads, int64_t max_tokens);
  ~LayerCase();

  struct Work {
    double flops = 0, weight_bytes = 0, rows_per_expert = 0;  // of active experts
  };
  Work forward(int64_t tokens);     // the next tokens through the next copy
  Work not_packed(int64_t tokens);  // the same with the weights where they were made
  Work naive(int64_t tokens);  // the same as plain loops over experts, rows, outputs; one thread
#if MOEC_HAVE_ONEDNN
  Work onednn(int64_t tokens);  // the three products of each expert, one oneDNN call each
#endif
  std::string describe(int64_t tokens) const;
  int64_t copies() const { return int64_t(weights_.size()); }

 private:
  Work forward(int64_t tokens, moec_weights* weights);
  Work work_of(int64_t tokens) const;
  void draw_ids(int64_t tokens);  // other experts each time, so that their weights are cold

  Shape shape_;
  moec_dtype dtype_;
  int64_t max_tokens_, value_bytes_, next_token_ = 0;
  size_t next_copy_ = 0;
  moec_context* context_ = nullptr;
  moec_layer* layer_ = nullptr;
  moec_weights* bound_ = nullptr;  // not packed; experts of other tokens are cold
  std::vector<moec_weights*> weights_;
  std::unique_ptr<Memory> x_, y_, gate_, source_[3];
  std::vector<int32_t> ids_;
  std::mt19937 random_{1};
#if MOEC_HAVE_ONEDNN
  std::unique_ptr<OneDnnLayer> onednn_;
  int64_t onednn_tokens_ = 0;
#endif
};

}  // namespace moec::bench
