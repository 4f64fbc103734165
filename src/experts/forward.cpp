// SPDX-License-Identifier: Apache-2.0
// Forward of the experts. Rows are (token, expert) pairs sorted by expert, as the plan lists them.
//   1  x of each row times its weight             weight on the input only
//   2  act = activation(x Wg^T, x Wu^T)           x is gathered while it is read; saved as wanted
//   3  rows = act Wd^T + bias                     adapters: 2 and 3 have a term t B^T, t = s x A^T
//   4  the shared expert: 2 and 3 with all tokens as one group
//   5  y = residual + c0 scale sum(w rows) + output bias + c1 shared
//   6  zeros for the bytes of `saved` that hold no row
#include "core/dtype.h"
#include "experts/adapters.h"
#include "experts/experts.h"
#include "experts/memory.h"

namespace moec::experts {
namespace {

const Down* record_mlp(const Between& between, const Mlp& mlp, const MlpForward& memory,
                       const PartRows& saved, const float* weight, Program& program) {
  const void* const narrow_x = record_narrow_x(mlp, true, memory.narrow_x, program);
  program.add(Up{&mlp, saved ? saved : memory.pre, memory.act, weight, narrow_x});
  program.flops += mlp.flops(mlp.parts() + 1);
  const void* const narrow_act =
      record_narrow_act(mlp, memory.act, true, memory.narrow_act, program);
  return program.add(Down{&mlp, memory.act, weight, {memory.rows, between.rows}, narrow_act});
}

// Every byte of `saved` that holds no row is zero: from the last row of each region to the next.
void record_padding(const Between& between, const Saved& saved, void* end, Program& program) {
  const auto clear = [&](const Mlp& mlp, void* begin, int64_t stride) {
    program.add(ClearPadding{&mlp, stride * dtype_bytes(between.pre), begin, end});
    end = begin;
  };
  const auto clear_parts = [&](const Mlp& mlp, const PartRows& parts) {
    if (parts && (between.parts_apart || !parts.gate)) clear(mlp, parts.up, parts.stride);
    if (parts.gate) clear(mlp, parts.gate, parts.stride);
  };
  clear_parts(program.shared, saved.shared);
  clear_parts(program.routed, saved.routed);
}

}  // namespace

void record_forward(const Between& between, const ExpertsArgs& args, Program& program) {
  const moec_experts_desc& desc = *args.desc;
  const PlanView& plan = *args.plan;
  Arena work(args.workspace, args.num_tokens), kept(args.saved, args.num_tokens), measured;
  const ForwardMemory memory = lay_out_forward(desc, between, args.adapters, args.weights, work);
  Saved saved;
  if (args.saved) saved = lay_out_saved(desc, between, kept);
  program.desc = &desc;
  program.plan = &plan;
  program.num_tokens = args.num_tokens;
  program.scratch = memory.scratch;
  set_mlps(program, between, *args.weights, args.shared_weights,
           {args.x, memory.scaled_x, memory.list, memory.adapters, args.adapter_ids});
  const Mlp &routed = program.routed, &shared = program.shared;

  if (args.adapters) record_copies(*args.adapters, memory.adapters, program);
  if (memory.scaled_x) program.add(ScaleRows{&routed, args.x, plan.row_weight, memory.scaled_x});
  const bool on_activation = desc.weight_position == MOEC_WEIGHT_ON_ACTIVATION;
  const float* const weight = on_activation ? plan.row_weight : nullptr;
  record_mlp(between, routed, memory.routed, saved.routed, weight, program);
  const Down* shared_down = nullptr;
  if (shared) {
    if (memory.list.offsets)
      program.add(ListTokens{args.num_tokens, memory.list.offsets, memory.list.tokens});
    if (memory.mix)
      program.add(MixForward{
          {&desc, args.num_tokens, args.x, args.shared_gate, args.shared_gate_bias}, memory.mix});
    shared_down = record_mlp(between, shared, memory.shared, saved.shared, nullptr, program);
  }
  program.add(Combine{&desc,
                      &plan,
                      {memory.routed.rows, between.rows},
                      {memory.shared.rows, between.rows},
                      shared_down,
                      memory.mix,
                      args.x,
                      args.output_bias,
                      {const_cast<void*>(args.residual), desc.dtype},
                      {args.y, desc.dtype},
                      args.skip_absent});
  if (!args.saved) return;
  lay_out_saved(desc, between, measured);
  char* const end = static_cast<char*>(args.saved) + bytes_for(measured.size(), args.num_tokens);
  record_padding(between, saved, end, program);
}

}  // namespace moec::experts
