// SPDX-License-Identifier: Apache-2.0
// A training step on a GPU through moec.h, with all its memory: queued on a stream, captured, run
// again on other data, its outputs compared byte for byte. Four kinds: the layer with losses, the
// experts from given ids, these with an adapter, and these of coded weights.
#pragma once

#include <moec/moec.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "gpu/device_memory.h"
#include "gpu/harness.h"
#include "support/handles.h"

namespace moec::test {

inline moec_buffer buffer_of(const DeviceBytes& array) {
  return {array.data(), array.bytes()};
}

class GpuStream {
 public:
  GpuStream() { CHECK_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~GpuStream() { cudaStreamDestroy(stream_); }
  GpuStream(const GpuStream&) = delete;
  GpuStream& operator=(const GpuStream&) = delete;
  operator cudaStream_t() const { return stream_; }
  void wait() const { CHECK_CUDA(cudaStreamSynchronize(stream_)); }

 private:
  cudaStream_t stream_ = nullptr;
};

inline Context gpu_context(uint32_t flags = 0, const moec_allocator* allocator = nullptr,
                           int32_t device = 0) {
  auto desc = sized<moec_context_desc>();
  desc.device_type = MOEC_CUDA;
  desc.device_id = device;
  desc.flags = flags;
  desc.allocator = allocator;
  return make<Context>(moec_context_create, static_cast<const moec_context_desc*>(&desc));
}
inline moec_stats stats_of(const moec_context* context) {
  auto stats = sized<moec_stats>();
  check(moec_context_stats(context, &stats));
  return stats;
}

enum class Routing { kRandom, kOneExpert };  // kOneExpert: each token's first choice is expert 5

class Step {
 public:
  static constexpr int64_t kTokens = 200, kHidden = 136, kInter = 72;
  static constexpr int32_t kExperts = 8, kOne = 5;
  static constexpr size_t kWeightBytes = size_t(kExperts) * 3 * kInter * kHidden * 2;

  // experts: whose weights it has. coded: gate and up of NF4, down of INT8, which are frozen.
  Step(const moec_context* context, int32_t top_k, int32_t device, int32_t experts = kExperts,
       bool coded = false);
  virtual ~Step() = default;

  void fill(uint64_t seed, Routing routing);          // new inputs in place; waits
  virtual void take_workspace() = 0;                  // instead of the context's
  void poison();                                      // outputs and memory: NaN; waits
  virtual void queue(cudaStream_t stream) const = 0;  // the whole step; only moec and memset
  std::vector<uint8_t> outputs() const;
  std::vector<uint8_t> saved() const { return memory_.front()->host(); }

 protected:
  DeviceBytes& input(moec_dtype dtype, std::vector<int64_t> shape, double scale);
  DeviceBytes& output(moec_dtype dtype, std::vector<int64_t> shape);
  moec_tensor tensor(const DeviceBytes& array) const;
  moec_buffer memory(const moec_size& size);
  moec_experts_desc experts_desc() const;
  virtual void steer(uint64_t seed, Routing routing) = 0;  // what decides the routing
  void bind_plain(int32_t experts);
  void bind_codes(int32_t experts);

  const moec_context* context_;
  const int64_t hidden_, inter_;  // of codes: lines of whole blocks and of 16 bytes
  int32_t top_k_, device_;
  Weights weights_;
  moec_weight_set d_weights_ = sized<moec_weight_set>();
  DeviceBytes *x_, *d_y_, *y_, *d_x_, *d_routing_;

 private:
  struct Held {
    std::unique_ptr<DeviceBytes> array;
    moec_dtype dtype;
    std::vector<int64_t> shape;
    double scale;  // of an input; 0: an output
  };
  DeviceBytes& hold(moec_dtype dtype, std::vector<int64_t> shape, double scale);
  std::vector<Held> held_;
  std::vector<std::unique_ptr<DeviceBytes>> memory_;
};

// gate, routing with a selection bias, plan, experts; a switch loss and a z-loss with their
// gradients; backward of everything; the update of the selection bias.
std::unique_ptr<Step> layer_step(const moec_context* context, int32_t top_k, int32_t device = 0);
// The same as one rank of an ep, which has kHidden, kTokens, kExperts and bf16.
std::unique_ptr<Step> ep_layer_step(const moec_context* context, int32_t top_k, moec_ep* ep,
                                    int32_t device = 0);
// plan from ids, experts forward with pre-activations kept, backward. The gradients of the weights
// are its last outputs, kWeightBytes.
std::unique_ptr<Step> experts_step(const moec_context* context, int32_t top_k, int32_t device = 0);
// The same with an adapter on every matrix, whose gradients it has.
std::unique_ptr<Step> adapted_step(const moec_context* context, int32_t top_k, int32_t device = 0);
// The same of coded weights, which are frozen: of many rows an expert, and of few.
std::unique_ptr<Step> coded_step(const moec_context* context, int32_t top_k, int32_t device = 0);
std::unique_ptr<Step> coded_step_of_few_rows(const moec_context* context, int32_t top_k,
                                             int32_t device = 0);
std::unique_ptr<Step> experts_step_of_no_tokens(const moec_context* context);

}  // namespace moec::test
