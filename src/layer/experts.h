// SPDX-License-Identifier: Apache-2.0
// A validated experts description and its two calls. What the layer shares with it is public:
// checks of the arguments, and the calls on arguments already checked.
#pragma once

#include "experts/experts.h"
#include "layer/adapters.h"
#include "layer/plan.h"
#include "layer/weights.h"

namespace moec {

// First bytes of a saved buffer: what it belongs to.
struct SavedHeader {
  char magic[8];
  uint64_t desc_hash;
  int64_t num_tokens, max_rows;
  uint64_t reserved[4];
};
static_assert(sizeof(SavedHeader) == kCacheLine);

// Gradients besides those of x, of the routing weights and of the weight matrices.
struct ExpertsGradients {
  const moec_tensor &shared_gate, &shared_gate_bias, &output_bias, &residual;
};

// Gradients of weight matrices, bound for one call.
class GradientBinding {
 public:
  GradientBinding(const Context& context, const Weights* weights, const moec_weight_set* set,
                  const char* name, TensorCheck& check);
  const WeightsView* view() const { return given_ ? &bound_.view : nullptr; }

 private:
  HostArray<void*> pointers_;
  HostArray<MemoryBlock> blocks_;
  bool given_;
  BoundWeights bound_;
};

class Experts final : public Object {
 public:
  static constexpr Kind kKind = Kind::kExperts;
  Experts(const Context& context, const moec_experts_desc& desc);

  const Context& context() const { return *context_; }
  const moec_experts_desc& desc() const { return desc_; }  // defaults filled in
  bool has_shared() const { return desc_.shared != MOEC_SHARED_NONE; }
  bool saves() const { return desc_.save != MOEC_SAVE_NONE; }

  // What the caller provides: aligning and the header are included. The backend's own sizes are
  // not.
  const moec_experts_sizes& sizes() const { return caller_sizes_; }
  const experts::Sizes& backend_sizes() const { return sizes_; }
  // Of calls with adapters; null: the same as above.
  moec_experts_sizes sizes(const Adapters* adapters) const;
  experts::Sizes backend_sizes(const Adapters* adapters) const;

  void forward(const moec_experts_args& args, const Plan& plan, const Weights& weights,
               const Weights* shared_weights, const Adapters* adapters, moec_stream stream) const;
  void backward(const moec_experts_grad_args& args, const Plan& plan, const Weights& weights,
                const Weights* shared_weights, const Adapters* adapters,
                const moec_weight_set* d_expert_weights, const moec_weight_set* d_shared_weights,
                moec_stream stream) const;
  std::string describe(const Weights& weights, int64_t num_tokens) const;

  // Weights that fit, into `experts`; their memory is remembered in `check`.
  void check_weights(const Weights& weights, const Weights* shared_weights, TensorCheck& check,
                     ExpertsArgs& experts) const;
  // What forward and backward read besides weights and plan, checked into `experts`.
  void check_inputs(const moec_tensor& x, const moec_tensor& shared_gate,
                    const moec_tensor& shared_gate_bias, TensorCheck& check,
                    ExpertsArgs& experts) const;
  // Adapters that fit, likewise; null: there are none.
  void check_adapters(const Adapters* adapters, const moec_tensor& ids, TensorCheck& check,
                      ExpertsArgs& experts) const;
  void check_adapters_fit(const Adapters& adapters) const;
  static ExpertsGradArgs gradients_of(const ExpertsArgs& forward);
  void check_rows_alone(const ExpertsArgs& experts) const;
  void check_gradients(const ExpertsGradients& gradients, TensorCheck& check,
                       ExpertsGradArgs& experts) const;

  SavedHeader saved_header(int64_t num_tokens, int64_t max_rows, const Adapters* adapters) const;

 private:
  ExpertsArgs checked_plan(const Plan& plan) const;
  moec_experts_sizes caller_sizes(const experts::Sizes& sizes) const;
  int64_t gate_rows() const { return desc_.shared == MOEC_SHARED_SOFTMAX2 ? 2 : 1; }

  Ref<const Context> context_;
  moec_experts_desc desc_;
  experts::Sizes sizes_;
  moec_experts_sizes caller_sizes_ = {};
};

// The caller's saved buffer where its values can be read: in place, or, when its address is no
// multiple of their 4 bytes, as a copy in the context's scratch.
class SavedBuffer {
 public:
  // copy: copy_bytes(saved, bytes) of scratch.
  SavedBuffer(const Context& context, const moec_buffer& saved, uint64_t bytes, void* copy,
              moec_stream stream);
  static uint64_t copy_bytes(const moec_buffer& saved, uint64_t bytes);
  char* data() const { return static_cast<char*>(copy_ ? copy_ : caller_); }
  void load() const;   // before it is read
  void store() const;  // after it was written

 private:
  const Context& context_;
  moec_stream stream_;
  void *caller_, *copy_;
  uint64_t bytes_;
};

// The header of a saved buffer. check: E_MISMATCH unless it is the expected one.
void write_saved_header(const Context& context, void* saved, const SavedHeader& header,
                        moec_stream stream);
void check_saved_header(const Context& context, const void* saved, const SavedHeader& expected);

// Members of a JSON object behind others: what a caller provides for num_tokens tokens.
std::string bytes_members(const moec_experts_sizes& sizes, int64_t num_tokens);

}  // namespace moec
