// SPDX-License-Identifier: Apache-2.0
// A routing plan: memory for max_tokens, rebuilt in place for each batch.
#pragma once

#include "layer/plan_layout.h"
#include "layer/router.h"

namespace moec {

class Plan final : public Object {
 public:
  static constexpr Kind kKind = Kind::kPlan;
  // memory null: allocated from the context.
  Plan(const Context& context, const moec_plan_desc& desc, const moec_buffer* memory);
  ~Plan() override;

  static uint64_t memory_bytes(const moec_plan_desc& checked);

  const Context& context() const { return *context_; }
  const moec_plan_desc& desc() const { return desc_; }
  const PlanView& view() const;  // throws E_INVALID_STATE before the first build
  int64_t num_tokens() const { return view().num_tokens; }

  void from_topk(const moec_tensor& ids, const moec_tensor* routing_weights, moec_stream stream);
  void from_logits(const Router& router, const moec_route_args& args, moec_stream stream);
  void from_map(const moec_tensor& map, const moec_tensor* probs, moec_stream stream);
  void from_rule(uint32_t rule, int64_t num_tokens, const moec_tensor* routing_weights,
                 moec_stream stream);
  void from_scores(const moec_tensor& scores, const moec_tensor* token_mask, moec_stream stream);
  void attach(int64_t num_tokens);

  moec_tensor field(int32_t field) const;
  void export_field(int32_t field, const moec_tensor& to, moec_stream stream) const;
  void totals_sync(int32_t totals[4], moec_stream stream) const;

  // plan_file.cpp
  uint64_t saved_bytes() const;
  void save_sync(void* buffer, moec_stream stream) const;
  void restore_sync(const void* buffer, uint64_t bytes, moec_stream stream);

  // The plan's memory, for a check of overlaps.
  void check_memory(TensorCheck& check) const { check.memory_in("plan", memory_, bytes_); }
  // Host memory that a call writes: E_ALIAS where it is the plan's own.
  void check_copy(const char* name, const void* to, uint64_t bytes) const;

 private:
  PlanView view_for(int64_t num_tokens) const;
  IdRule checked_rule(uint32_t rule, int64_t num_tokens) const;
  void require_kind(uint32_t kind, const char* instead) const;
  void build(const PlanSource& source, const PlanView& plan, moec_stream stream);
  void adopt(const PlanView& plan);

  Ref<const Context> context_;
  moec_plan_desc desc_;
  uint64_t bytes_;
  void* memory_ = nullptr;
  bool owned_ = false, built_ = false;
  PlanView view_;
};

}  // namespace moec
