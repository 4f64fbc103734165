// SPDX-License-Identifier: Apache-2.0
// XLA FFI handlers: moec_jax_forward and moec_jax_backward for the CPU, the same with _cuda.
//
// Attributes   router, experts, weights, shared   the structs in hexadecimal, or empty
//              inputs, outputs                    names of the arrays, comma-separated, in order
// Names are those of the structs' fields. A backward's outputs are called like the inputs that they
// are gradients of.
#include <xla/ffi/api/ffi.h>

#include <optional>
#include <string_view>
#include <vector>

#include "objects.h"
#include "tables.h"

namespace moec::xla {
namespace {

namespace ffi = ::xla::ffi;

struct Attributes {
  std::string_view router, experts, weights, shared, inputs, outputs;
};

struct Named {
  std::string_view name;
  moec_tensor tensor;
};

moec_dtype dtype_of(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F32:
      return MOEC_F32;
    case ffi::DataType::F16:
      return MOEC_F16;
    case ffi::DataType::BF16:
      return MOEC_BF16;
    case ffi::DataType::S32:
      return MOEC_I32;
    case ffi::DataType::S64:
      return MOEC_I64;
    case ffi::DataType::U8:
      return MOEC_U8;
    case ffi::DataType::PRED:
      return MOEC_BOOL;
    default:
      throw Failure{MOEC_E_DTYPE, "an array's element type is none of moec's"};
  }
}

moec_tensor tensor_of(ffi::AnyBuffer buffer, const Device& device) {
  moec_tensor made;
  const auto shape = buffer.dimensions();
  check(moec_tensor_make(&made, buffer.untyped_data(), dtype_of(buffer.element_type()), device.type,
                         device.id, int32_t(shape.size()), shape.begin()));
  return made;
}

std::string_view next_name(std::string_view& names) {
  const size_t end = names.find(',');
  const std::string_view name = names.substr(0, end);
  names.remove_prefix(end == std::string_view::npos ? names.size() : end + 1);
  return name;
}

moec_buffer bytes_of(const moec_tensor& tensor) {
  return {tensor.data, uint64_t(moec_tensor_bytes(&tensor))};
}

uint64_t bytes_for(const moec_size& size, int64_t tokens) {
  return size.base + size.per_token * uint64_t(tokens);
}

// One call: the arrays by name, and scratch of the framework's on a device.
class Call {
 public:
  Call(const Device& device, ffi::ScratchAllocator& scratch, const Attributes& given,
       ffi::RemainingArgs args, ffi::RemainingRets rets)
      : device_(device), scratch_(scratch), given_(given) {
    std::string_view names = given.inputs;
    for (size_t i = 0; i < args.size(); ++i)
      inputs_.push_back({next_name(names), tensor_of(*args.get<ffi::AnyBuffer>(i), device)});
    names = given.outputs;
    for (size_t i = 0; i < rets.size(); ++i)
      outputs_.push_back({next_name(names), tensor_of(**rets.get<ffi::AnyBuffer>(i), device)});
    if (device.type == MOEC_CUDA) device_.id = device_of(find(inputs_, "x")->data);
    for (auto* list : {&inputs_, &outputs_})
      for (Named& named : *list) named.tensor.device_id = device_.id;
    objects_ = &objects_for(device_, given.router, given.experts);
    tokens_ = find(inputs_, "x")->shape[0];
    moec_weight_set routed = sized<moec_weight_set>(), shared = sized<moec_weight_set>();
    for (const Named& named : inputs_) put(kMatrices, named.name, named.tensor, routed, shared);
    weights_.emplace(objects_->context, given.weights, routed);
    if (!given.shared.empty()) shared_.emplace(objects_->context, given.shared, shared);
  }
  ~Call() { moec_plan_free(plan_); }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  void forward() {
    if (objects_->layer) {
      auto args = layer_inputs();
      fill(kLayerOutputs, outputs_, args);
      args.workspace = workspace(objects_->sizes.forward_workspace);
      check(moec_layer_forward(objects_->layer, &args, device_.stream));
      return;
    }
    auto args = sized<moec_experts_args>();
    set_weights(args);
    fill(kExpertsInputs, inputs_, args);
    args.plan = plan();
    args.saved = saved();
    fill(kExpertsOutputs, outputs_, args);
    args.workspace = workspace(objects_->sizes.forward_workspace);
    check(moec_experts_forward(objects_->experts, &args, device_.stream));
  }

  void backward() {
    auto routed = sized<moec_weight_set>(), shared = sized<moec_weight_set>();
    bool has_routed = false, has_shared = false;
    for (const Named& named : outputs_) {
      if (!put(kMatrices, named.name, named.tensor, routed, shared)) continue;
      const bool is_shared = named.name.substr(0, kSharedPrefix.size()) == kSharedPrefix;
      (is_shared ? has_shared : has_routed) = true;
    }
    const auto finish = [&](auto& args, const auto& inputs, const auto& gradients) {
      fill(inputs, inputs_, args);
      args.d_expert_weights = has_routed ? &routed : nullptr;
      args.d_shared_weights = has_shared ? &shared : nullptr;
      fill(gradients, outputs_, args);
      args.workspace = workspace(objects_->sizes.backward_workspace);
    };
    if (objects_->layer) {
      const auto forward = layer_inputs();
      auto args = sized<moec_layer_grad_args>();
      args.forward = &forward;
      finish(args, kLayerGradInputs, kLayerGradients);
      check(moec_layer_backward(objects_->layer, &args, device_.stream));
      return;
    }
    auto args = sized<moec_experts_grad_args>();
    set_weights(args);
    args.plan = plan();
    args.saved = saved();
    finish(args, kExpertsGradInputs, kExpertsGradients);
    check(moec_experts_backward(objects_->experts, &args, device_.stream));
  }

 private:
  static const moec_tensor* find(const std::vector<Named>& all, std::string_view name) {
    for (const Named& named : all)
      if (named.name == name) return &named.tensor;
    return nullptr;
  }

  template <class Args, class Table>
  static void fill(const Table& table, const std::vector<Named>& arrays, Args& args) {
    for (const Named& named : arrays) put(table, named.name, named.tensor, args);
  }

  template <class Args>
  void set_weights(Args& args) const {
    args.weights = weights_->get();
    args.shared_weights = shared_ ? shared_->get() : nullptr;
  }

  moec_layer_args layer_inputs() const {
    auto args = sized<moec_layer_args>();
    set_weights(args);
    fill(kLayerInputs, inputs_, args);
    args.saved = saved();
    return args;
  }

  moec_buffer saved() const {  // written by forward, read by backward
    if (objects_->desc.save == MOEC_SAVE_NONE) return {};
    const moec_tensor* in = find(inputs_, "saved");
    return bytes_of(in ? *in : *find(outputs_, "saved"));
  }

  // Device scratch comes from the framework; on the CPU the context's own is warm.
  moec_buffer device_memory(uint64_t bytes) {
    if (device_.type != MOEC_CUDA || !bytes) return {};
    constexpr size_t kAlignment = 16;  // XLA grants no more
    const std::optional<void*> memory = scratch_.Allocate(bytes, kAlignment);
    if (!memory) throw Failure{MOEC_E_OUT_OF_MEMORY, "the framework has no memory for scratch"};
    return {*memory, bytes};
  }
  moec_buffer workspace(const moec_size& size) { return device_memory(bytes_for(size, tokens_)); }

  const moec_plan* plan() {
    auto desc = sized<moec_plan_desc>();
    const moec_experts_desc& experts = objects_->desc;
    desc.max_tokens = tokens_;
    desc.num_experts = experts.num_experts;
    desc.num_zero_experts = experts.num_zero_experts;
    desc.top_k = experts.top_k;
    desc.align = experts.align;
    uint64_t bytes = 0;
    int64_t rows = 0;
    check(moec_plan_size(&desc, &bytes, &rows));
    const moec_buffer memory = device_memory(bytes);
    check(moec_plan_create(objects_->context, &desc, memory.ptr ? &memory : nullptr, &plan_));
    check(moec_plan_from_topk(plan_, find(inputs_, "expert_ids"), find(inputs_, "routing_weights"),
                              device_.stream));
    return plan_;
  }

  Device device_;
  ffi::ScratchAllocator& scratch_;
  const Attributes& given_;
  std::vector<Named> inputs_, outputs_;
  const Objects* objects_ = nullptr;
  int64_t tokens_ = 0;
  std::optional<Weights> weights_, shared_;
  moec_plan* plan_ = nullptr;
};

ffi::ErrorCode code_of(moec_status status) {
  switch (status) {
    case MOEC_E_UNSUPPORTED:
      return ffi::ErrorCode::kUnimplemented;
    case MOEC_E_OUT_OF_MEMORY:
      return ffi::ErrorCode::kResourceExhausted;
    case MOEC_E_CUDA:
    case MOEC_E_INTERNAL:
      return ffi::ErrorCode::kInternal;
    default:
      return ffi::ErrorCode::kInvalidArgument;
  }
}

template <int32_t kDevice, void (Call::*kRun)()>
ffi::Error run(moec_stream stream, ffi::ScratchAllocator scratch, const Attributes& given,
               ffi::RemainingArgs args, ffi::RemainingRets rets) {
  try {
    Call call({kDevice, 0, stream}, scratch, given, args, rets);
    (call.*kRun)();
    return ffi::Error::Success();
  } catch (const Failure& failure) {
    return ffi::Error(code_of(failure.status), failure.text);
  } catch (const std::exception& error) {
    return ffi::Error(ffi::ErrorCode::kInternal, error.what());
  }
}

template <void (Call::*kRun)()>
ffi::Error on_cpu(ffi::ScratchAllocator scratch, std::string_view router, std::string_view experts,
                  std::string_view weights, std::string_view shared, std::string_view inputs,
                  std::string_view outputs, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  const Attributes given = {router, experts, weights, shared, inputs, outputs};
  return run<MOEC_CPU, kRun>(nullptr, std::move(scratch), given, args, rets);
}

template <void (Call::*kRun)()>
ffi::Error on_cuda(moec_stream stream, ffi::ScratchAllocator scratch, std::string_view router,
                   std::string_view experts, std::string_view weights, std::string_view shared,
                   std::string_view inputs, std::string_view outputs, ffi::RemainingArgs args,
                   ffi::RemainingRets rets) {
  const Attributes given = {router, experts, weights, shared, inputs, outputs};
  return run<MOEC_CUDA, kRun>(stream, std::move(scratch), given, args, rets);
}

template <class Binding>
auto with_attributes(Binding&& binding) {
  return std::forward<Binding>(binding)
      .template Attr<std::string_view>("router")
      .template Attr<std::string_view>("experts")
      .template Attr<std::string_view>("weights")
      .template Attr<std::string_view>("shared")
      .template Attr<std::string_view>("inputs")
      .template Attr<std::string_view>("outputs")
      .RemainingArgs()
      .RemainingRets();
}
auto cpu_binding() {
  return with_attributes(ffi::Ffi::Bind().Ctx<ffi::ScratchAllocator>());
}
auto cuda_binding() {
  return with_attributes(
      ffi::Ffi::Bind().Ctx<ffi::PlatformStream<moec_stream>>().Ctx<ffi::ScratchAllocator>());
}

}  // namespace

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(moec_jax_forward, on_cpu<&Call::forward>, cpu_binding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(moec_jax_backward, on_cpu<&Call::backward>, cpu_binding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(moec_jax_forward_cuda, on_cuda<&Call::forward>, cuda_binding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(moec_jax_backward_cuda, on_cuda<&Call::backward>, cuda_binding());
#pragma GCC visibility pop

}  // namespace moec::xla
