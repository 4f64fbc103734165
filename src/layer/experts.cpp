// SPDX-License-Identifier: Apache-2.0
#include "layer/experts.h"

#include <cstring>

#include "core/checksum.h"
#include "core/dtype.h"
#include "experts/memory.h"
#include "layer/experts_desc.h"
#include "quant/format.h"

namespace moec {
namespace {

using ll = long long;

constexpr char kSaveMagic[8] = {'M', 'O', 'E', 'C', 'S', 'A', 'V', 'E'};

moec_size plus(moec_size size, uint64_t bytes) {
  return size.base || size.per_token ? moec_size{size.base + bytes, size.per_token} : size;
}

void check_fit(const char* name, const Weights& weights, int32_t num_experts, int64_t hidden,
               int64_t inter, bool gated) {
  const WeightsView& view = weights.view();
  MOEC_REQUIRE(view.num_experts == num_experts && view.hidden == hidden && view.inter == inter,
               MOEC_E_MISMATCH, "%s are %d experts of H, I = %lld, %lld; expected %d of %lld, %lld",
               name, view.num_experts, ll(view.hidden), ll(view.inter), num_experts, ll(hidden),
               ll(inter));
  MOEC_REQUIRE(view.gated == gated, MOEC_E_MISMATCH, "%s are %s; the activation needs %s ones",
               name, view.gated ? "gated" : "plain", gated ? "gated" : "plain");
}

void check_codes(const moec_experts_desc& desc, const WeightsView& weights) {
  if (!(desc.flags & MOEC_EXPERTS_PLAIN_WEIGHTS)) return;
  for (const ExpertMatrix* m : {&weights.gate, &weights.up, &weights.down})
    MOEC_REQUIRE(!m->is_coded(), MOEC_E_MISMATCH,
                 "weights are codes of %s; desc.flags has MOEC_EXPERTS_PLAIN_WEIGHTS, which is for "
                 "plain weights: leave it out",
                 quant::find_format(m->scheme)->name);
}

int64_t gradient_entries(const Weights* weights, const moec_weight_set* set) {
  return set && weights ? binding_entries(*set, weights->desc().num_experts, true) : 0;
}

}  // namespace

GradientBinding::GradientBinding(const Context& context, const Weights* weights,
                                 const moec_weight_set* set, const char* name, TensorCheck& check)
    : pointers_(context, gradient_entries(weights, set)),
      blocks_(context, gradient_entries(weights, set)),
      given_(set != nullptr) {
  if (!set) return;
  MOEC_REQUIRE(weights, MOEC_E_INVALID_ARG, "%s is given; there are no such weights", name);
  bound_ = bind_gradients(context, weights->desc(), *set, weights->view(), name, pointers_.data(),
                          blocks_.data());
  check.set_out(bound_.memory);
}

Experts::Experts(const Context& context, const moec_experts_desc& desc)
    : Object(kKind), context_(context), desc_(checked_experts_desc(desc)) {
  experts::check(context.backend().experts_paths(), desc_);
  sizes_ = experts::sizes(context.backend().experts_paths(), desc_);
  caller_sizes_ = caller_sizes(sizes_);
}

moec_experts_sizes Experts::caller_sizes(const experts::Sizes& sizes) const {
  moec_experts_sizes to = {};
  to.forward_workspace = plus(sizes.forward, kAlignSlack);
  if (!saves()) return to;
  to.backward_workspace = plus(sizes.backward, kAlignSlack);
  to.saved = {sizes.saved.base + sizeof(SavedHeader), sizes.saved.per_token};
  return to;
}

experts::Sizes Experts::backend_sizes(const Adapters* adapters) const {
  if (!adapters) return sizes_;
  check_adapters_fit(*adapters);
  return experts::sizes(context_->backend().experts_paths(), desc_, &adapters->view());
}
moec_experts_sizes Experts::sizes(const Adapters* adapters) const {
  return adapters ? caller_sizes(backend_sizes(adapters)) : caller_sizes_;
}

void Experts::check_adapters_fit(const Adapters& adapters) const {
  check_same_device("adapters", adapters.context(), *context_);
  const moec_adapters_desc& desc = adapters.desc();
  const int32_t local = desc_.expert_end - desc_.expert_begin;
  MOEC_REQUIRE(
      desc.num_experts == local && desc.hidden == desc_.hidden && desc.inter == desc_.inter,
      MOEC_E_MISMATCH, "adapters are of %d experts of H, I = %lld, %lld; expected %d of %lld, %lld",
      desc.num_experts, ll(desc.hidden), ll(desc.inter), local, ll(desc_.hidden), ll(desc_.inter));
  const bool gated = desc_.gate_layout != MOEC_GATE_NONE;
  MOEC_REQUIRE((desc.gate_layout != MOEC_GATE_NONE) == gated, MOEC_E_MISMATCH,
               "adapters have gate_layout %u; %s experts need %s", desc.gate_layout,
               gated ? "gated" : "plain", gated ? "another than NONE" : "MOEC_GATE_NONE");
}

void Experts::check_adapters(const Adapters* adapters, const moec_tensor& ids, TensorCheck& check,
                             ExpertsArgs& experts) const {
  if (!adapters) return check.absent("adapter_ids", ids, "adapters");
  check_adapters_fit(*adapters);
  experts.adapters = &adapters->view();
  adapters->check_memory(check);
  experts.adapter_ids = static_cast<const int32_t*>(
      check.optional_in("adapter_ids", ids, {experts.num_tokens}, kInt).data);
}

ExpertsArgs Experts::checked_plan(const Plan& built) const {
  check_same_device("plan", built.context(), *context_);
  const PlanView& plan = built.view();
  MOEC_REQUIRE(plan.num_experts == desc_.num_experts && plan.num_zero == desc_.num_zero_experts &&
                   plan.top_k == desc_.top_k,
               MOEC_E_MISMATCH, "plan has E, Z, K = %d, %d, %d; the experts have %d, %d, %d",
               plan.num_experts, plan.num_zero, plan.top_k, desc_.num_experts,
               desc_.num_zero_experts, desc_.top_k);
  const int32_t end = plan.expert_begin + plan.num_local;
  MOEC_REQUIRE(plan.expert_begin == desc_.expert_begin && end == desc_.expert_end, MOEC_E_MISMATCH,
               "plan has the local experts [%d,%d); the experts have [%d,%d)", plan.expert_begin,
               end, desc_.expert_begin, desc_.expert_end);
  MOEC_REQUIRE(plan.align == desc_.align, MOEC_E_MISMATCH, "plan has align %d; the experts have %d",
               plan.align, desc_.align);
  const int64_t choices = plan.kind == MOEC_PLAN_EXPERT_CHOICE ? plan.num_local * plan.capacity : 0;
  MOEC_REQUIRE(choices == desc_.max_rows_base, MOEC_E_MISMATCH,
               "plan has El * capacity = %lld; the experts' max_rows_base is %lld", ll(choices),
               ll(desc_.max_rows_base));
  ExpertsArgs experts = {};
  experts.num_tokens = plan.num_tokens;
  experts.plan = &plan;
  return experts;
}

void Experts::check_weights(const Weights& weights, const Weights* shared_weights,
                            TensorCheck& check, ExpertsArgs& experts) const {
  const int32_t local = desc_.expert_end - desc_.expert_begin;
  check_same_device("weights", weights.context(), *context_);
  check_fit("weights", weights, local, desc_.hidden, desc_.inter,
            desc_.gate_layout != MOEC_GATE_NONE);
  check_codes(desc_, weights.view());
  weights.check_memory(check);
  experts.weights = &weights.view();
  MOEC_REQUIRE(has_shared() == (shared_weights != nullptr), MOEC_E_INVALID_ARG,
               "shared_weights are %s; desc.shared is %u", has_shared() ? "absent" : "given",
               desc_.shared);
  if (!has_shared()) return;
  check_same_device("shared_weights", shared_weights->context(), *context_);
  check_fit("shared_weights", *shared_weights, 1, desc_.hidden, desc_.shared_inter,
            experts::is_shared_gated(desc_));
  shared_weights->check_memory(check);
  experts.shared_weights = &shared_weights->view();
}

void Experts::check_inputs(const moec_tensor& x, const moec_tensor& shared_gate,
                           const moec_tensor& shared_gate_bias, TensorCheck& check,
                           ExpertsArgs& experts) const {
  const int64_t T = experts.num_tokens, H = desc_.hidden;
  const Dtypes parameter = {desc_.dtype, MOEC_F32};
  experts.desc = &desc_;
  experts.x = check.in("x", x, {T, H}, {desc_.dtype});
  experts.shared_gate =
      check.in_if(desc_.shared >= MOEC_SHARED_SIGMOID_GATE, "a gated shared expert", "shared_gate",
                  shared_gate, {gate_rows(), H}, parameter);
  if (desc_.shared != MOEC_SHARED_SOFTMAX2)
    check.absent("shared_gate_bias", shared_gate_bias, "SHARED_SOFTMAX2");
  experts.shared_gate_bias =
      check.optional_in("shared_gate_bias", shared_gate_bias, {2}, parameter);
}

ExpertsGradArgs Experts::gradients_of(const ExpertsArgs& forward) {
  ExpertsGradArgs experts = {};
  experts.desc = forward.desc;
  experts.num_tokens = forward.num_tokens;
  experts.plan = forward.plan;
  experts.weights = forward.weights;
  experts.shared_weights = forward.shared_weights;
  experts.x = forward.x;
  experts.shared_gate = forward.shared_gate;
  experts.shared_gate_bias = forward.shared_gate_bias;
  experts.adapters = forward.adapters;
  experts.adapter_ids = forward.adapter_ids;
  return experts;
}

// With MOEC_EXPERTS_SKIP_ABSENT y is the sum of rows and nothing else.
void Experts::check_rows_alone(const ExpertsArgs& experts) const {
  const struct {
    bool given;
    const char* name;
  } parts[] = {{experts.residual != nullptr, "a residual"},
               {bool(experts.output_bias), "an output_bias"},
               {has_shared(), "a shared expert"},
               {desc_.num_zero_experts > 0, "identity experts"}};
  for (const auto& part : parts)
    MOEC_REQUIRE(
        !part.given, MOEC_E_INVALID_ARG,
        "args.flags has MOEC_EXPERTS_SKIP_ABSENT with %s; the rows of y that it leaves out "
        "would miss them; add that part elsewhere",
        part.name);
}

void Experts::check_gradients(const ExpertsGradients& gradients, TensorCheck& check,
                              ExpertsGradArgs& experts) const {
  const int64_t T = experts.num_tokens, H = desc_.hidden;
  const Dtypes parameter = {desc_.dtype, MOEC_F32};
  if (!experts.shared_gate) check.absent("d_shared_gate", gradients.shared_gate, "shared_gate");
  experts.d_shared_gate =
      check.optional_out("d_shared_gate", gradients.shared_gate, {gate_rows(), H}, parameter);
  if (!experts.shared_gate_bias)
    check.absent("d_shared_gate_bias", gradients.shared_gate_bias, "shared_gate_bias");
  experts.d_shared_gate_bias =
      check.optional_out("d_shared_gate_bias", gradients.shared_gate_bias, {2}, parameter);
  experts.d_output_bias =
      check.optional_out("d_output_bias", gradients.output_bias, {H}, parameter);
  experts.d_residual =
      check.optional_out("d_residual", gradients.residual, {T, H}, {desc_.dtype}).data;
}

SavedHeader Experts::saved_header(int64_t num_tokens, int64_t max_rows,
                                  const Adapters* adapters) const {
  SavedHeader header = {};
  std::memcpy(header.magic, kSaveMagic, sizeof kSaveMagic);
  header.desc_hash = checksum(&desc_, sizeof desc_);
  if (adapters) header.desc_hash = adapters->checksum(header.desc_hash);
  header.num_tokens = num_tokens;
  header.max_rows = max_rows;
  return header;
}

SavedBuffer::SavedBuffer(const Context& context, const moec_buffer& saved, uint64_t bytes,
                         void* copy, moec_stream stream)
    : context_(context),
      stream_(stream),
      caller_(saved.ptr),
      copy_(copy_bytes(saved, bytes) ? copy : nullptr),
      bytes_(bytes) {}
uint64_t SavedBuffer::copy_bytes(const moec_buffer& saved, uint64_t bytes) {
  return reinterpret_cast<uintptr_t>(saved.ptr) % sizeof(float) == 0 ? 0 : bytes;
}
void SavedBuffer::load() const {
  if (copy_) context_.backend().copy(copy_, caller_, bytes_, stream_);
}
void SavedBuffer::store() const {
  if (copy_) context_.backend().copy(caller_, copy_, bytes_, stream_);
}

void write_saved_header(const Context& context, void* saved, const SavedHeader& header,
                        moec_stream stream) {
  static_assert(sizeof header <= Backend::kMostStored);
  context.backend().store(saved, &header, sizeof header, stream);
}

void check_saved_header(const Context& context, const void* saved, const SavedHeader& expected) {
  if (!context.on_host()) return;  // reading it would wait for the device
  SavedHeader found;
  std::memcpy(&found, saved, sizeof found);
  MOEC_REQUIRE(std::memcmp(found.magic, kSaveMagic, sizeof kSaveMagic) == 0, MOEC_E_MISMATCH,
               "saved was not written by a forward call; expected the buffer that forward filled");
  MOEC_REQUIRE(
      found.num_tokens == expected.num_tokens && found.max_rows == expected.max_rows,
      MOEC_E_MISMATCH, "saved is of %lld tokens and %lld rows; this call has %lld and %lld",
      ll(found.num_tokens), ll(found.max_rows), ll(expected.num_tokens), ll(expected.max_rows));
  MOEC_REQUIRE(found.desc_hash == expected.desc_hash, MOEC_E_MISMATCH,
               "saved has the description %016llx; expected %016llx, of these experts",
               static_cast<unsigned long long>(found.desc_hash),
               static_cast<unsigned long long>(expected.desc_hash));
}

void Experts::forward(const moec_experts_args& args, const Plan& plan, const Weights& weights,
                      const Weights* shared_weights, const Adapters* adapters,
                      moec_stream stream) const {
  check_flags("args.flags", args.flags, MOEC_EXPERTS_SKIP_ABSENT);
  ExpertsArgs experts = checked_plan(plan);
  const int64_t T = experts.num_tokens, H = desc_.hidden;
  TensorCheck check(*context_);
  check_weights(weights, shared_weights, check, experts);
  check_inputs(args.x, args.shared_gate, args.shared_gate_bias, check, experts);
  check_adapters(adapters, args.adapter_ids, check, experts);
  experts.output_bias =
      check.optional_in("output_bias", args.output_bias, {H}, {desc_.dtype, MOEC_F32});
  experts.residual = check.optional_in("residual", args.residual, {T, H}, {desc_.dtype}).data;
  experts.y = check.out("y", args.y, {T, H}, {desc_.dtype}).data;
  experts.skip_absent = args.flags & MOEC_EXPERTS_SKIP_ABSENT;
  if (experts.skip_absent) check_rows_alone(experts);
  const moec_experts_sizes own = sizes(adapters);
  const uint64_t need = checked_bytes("workspace", own.forward_workspace, T);
  const uint64_t saved_bytes = checked_bytes("saved", own.saved, T);
  check.saved_out(args.saved, saved_bytes);
  check.memory_out("workspace", args.workspace.ptr, need);
  plan.check_memory(check);
  check.may_be_same("y", "residual");
  check.finish();
  const Workspace workspace(*context_, args.workspace, need, stream,
                            SavedBuffer::copy_bytes(args.saved, saved_bytes));
  experts.workspace = workspace.data();
  const SavedBuffer saved(*context_, args.saved, saved_bytes, workspace.extra(), stream);
  if (saves()) {
    write_saved_header(*context_, saved.data(), saved_header(T, plan.view().max_rows, adapters),
                       stream);
    experts.saved = saved.data() + sizeof(SavedHeader);
  }
  const Context::Timer timer(*context_, Phase::kExperts);
  context_->count_path(experts::forward(context_->backend().experts_paths(), experts, stream));
  saved.store();
}

void Experts::backward(const moec_experts_grad_args& args, const Plan& plan, const Weights& weights,
                       const Weights* shared_weights, const Adapters* adapters,
                       const moec_weight_set* d_expert_weights,
                       const moec_weight_set* d_shared_weights, moec_stream stream) const {
  check_flags("args.flags", args.flags, kGradFlags);
  MOEC_REQUIRE(saves(), MOEC_E_INVALID_STATE,
               "desc.save is MOEC_SAVE_NONE; create the experts with another to call backward");
  ExpertsArgs forward = checked_plan(plan);
  const PlanView& view = plan.view();
  const int64_t T = view.num_tokens, H = desc_.hidden, K = desc_.top_k;
  TensorCheck check(*context_);
  check_weights(weights, shared_weights, check, forward);
  const GradientBinding d_experts(*context_, &weights, d_expert_weights, "d_expert_weights", check);
  const GradientBinding d_shared(*context_, shared_weights, d_shared_weights, "d_shared_weights",
                                 check);
  const AdapterGradients d_adapters(*context_, adapters, args.d_adapters, check);
  check_inputs(args.x, args.shared_gate, args.shared_gate_bias, check, forward);
  check_adapters(adapters, args.adapter_ids, check, forward);
  ExpertsGradArgs experts = gradients_of(forward);
  experts.accumulate = args.flags & MOEC_GRAD_ACCUMULATE;
  experts.accumulate_x = args.flags & MOEC_GRAD_ACCUMULATE_X;
  experts.d_y = check.in("d_y", args.d_y, {T, H}, {desc_.dtype}).data;
  experts.d_x = check.optional_out("d_x", args.d_x, {T, H}, {desc_.dtype}).data;
  const moec_tensor& d_routing_weights = args.d_routing_weights;
  experts.d_routing_weights = static_cast<float*>(
      (K ? check.optional_out("d_routing_weights", d_routing_weights, {T, K}, kFloat)
         : check.optional_out("d_routing_weights", d_routing_weights, {view.max_rows}, kFloat))
          .data);
  experts.d_expert_weights = d_experts.view();
  experts.d_shared_weights = d_shared.view();
  experts.d_adapters = d_adapters.view();
  check_gradients(
      {args.d_shared_gate, args.d_shared_gate_bias, args.d_output_bias, args.d_residual}, check,
      experts);
  const moec_experts_sizes own = sizes(adapters);
  const uint64_t need = checked_bytes("workspace", own.backward_workspace, T);
  const uint64_t saved_bytes = checked_bytes("saved", own.saved, T);
  check.saved_in(args.saved, saved_bytes);
  check.memory_out("workspace", args.workspace.ptr, need);
  plan.check_memory(check);
  check.finish();
  check_saved_header(*context_, args.saved.ptr, saved_header(T, view.max_rows, adapters));
  const Workspace workspace(*context_, args.workspace, need, stream,
                            SavedBuffer::copy_bytes(args.saved, saved_bytes));
  experts.workspace = workspace.data();
  const SavedBuffer saved(*context_, args.saved, saved_bytes, workspace.extra(), stream);
  saved.load();
  experts.saved = saved.data() + sizeof(SavedHeader);
  const Context::Timer timer(*context_, Phase::kExperts);
  context_->count_path(experts::backward(context_->backend().experts_paths(), experts, stream));
}

std::string Experts::describe(const Weights& weights, int64_t num_tokens) const {
  check_at_least("num_tokens", num_tokens, 0);
  checked_rows("num_tokens", num_tokens);
  check_same_device("weights", weights.context(), *context_);
  check_fit("weights", weights, desc_.expert_end - desc_.expert_begin, desc_.hidden, desc_.inter,
            desc_.gate_layout != MOEC_GATE_NONE);
  check_codes(desc_, weights.view());
  moec_weights_info info = {};
  weights.query(info);
  return '{' + experts::describe(context_->backend(), desc_, weights.view(), num_tokens) +
         ", \"packed_bytes\": " + std::to_string(info.packed_bytes) +
         bytes_members(caller_sizes_, num_tokens) + '}';
}

std::string bytes_members(const moec_experts_sizes& sizes, int64_t num_tokens) {
  const struct {
    const char* name;
    uint64_t bytes;
  } rows[] = {
      {"forward_workspace_bytes", checked_bytes("workspace", sizes.forward_workspace, num_tokens)},
      {"backward_workspace_bytes",
       checked_bytes("workspace", sizes.backward_workspace, num_tokens)},
      {"saved_bytes", checked_bytes("saved", sizes.saved, num_tokens)}};
  std::string text;
  for (const auto& row : rows)
    text += std::string(", \"") + row.name + "\": " + std::to_string(row.bytes);
  return text;
}

}  // namespace moec
