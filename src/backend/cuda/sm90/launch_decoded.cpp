// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "backend/cuda/device/check.h"
#include "backend/cuda/device/pointer_table.h"
#include "backend/cuda/sm90/decode_lines.h"
#include "backend/cuda/sm90/launch_list.h"

namespace moec::cuda {

DecodedScratch lay_out_scratch(const moec_experts_desc& desc, Arena& arena) {
  DecodedScratch scratch;
  scratch.counters = static_cast<WorkCounters*>(arena.take(sizeof(WorkCounters), 0));
  scratch.bytes = decoded_bytes(desc);
  const int num_experts = scratch.bytes ? desc.expert_end - desc.expert_begin : 0;
  scratch.pointers = arena.take(PointerTable::bytes(num_experts), 0);
  scratch.values = arena.take(uint64_t(scratch.bytes), 0);
  return scratch;
}

const Array* LaunchList::rows_of_later(RowGemm op) const {
  if (op != RowGemm::kUp && op != RowGemm::kGradDown) return nullptr;
  for (int i = 0; i < program_.num_steps; ++i) {
    const Step& step = program_.steps[size_t(i)];
    const auto* const down = std::get_if<Down>(&step);
    const auto* const grad = std::get_if<InputGrad>(&step);
    if (down && op == RowGemm::kUp && is_routed(*down->mlp)) return &down->rows;
    if (grad && is_routed(*grad->mlp)) return &grad->rows;
  }
  return nullptr;
}

// The rows of a later product may have room for more experts than the path's own scratch.
DecodedScratch LaunchList::scratch_of(RowGemm op) const {
  DecodedScratch scratch = scratch_;
  const Array* const rows = scratch.bytes ? rows_of_later(op) : nullptr;
  if (!rows) return scratch;
  const Mlp& routed = program_.routed;
  const int64_t row_bytes = routed.hidden * dtype_bytes(routed.dtype);
  const int64_t bytes = std::min(routed.num_rows * row_bytes, kMostRowBytes);
  if (bytes <= scratch.bytes) return scratch;
  scratch.values = rows->data;
  scratch.bytes = bytes;
  return scratch;
}

void launch_decoded(const Op& op, const DecodedProduct& product) {
  const RowGemmProblem& all = product.problem;
  if (all.max_rows == 0) return;
  const int num_experts = all.num_experts;
  const DecodedExperts& experts = product.experts;
  DecodeArgs args = decode_args(experts);
  PointerTable table(op, product.scratch.pointers);
  for (int i = 0; i < experts.parts; ++i)
    args.from[i] = table.device(experts.source(i), num_experts);
  table.flush();
  set_sources(args);
  args.max_rows = all.max_rows;
  CodedLines lines;
  const bool in_lines = set_decoded_lines(lines, product);
  args.counters = &product.scratch.counters->decoded;
  for (int first = 0; first < num_experts; first += experts.at_once) {
    const int count = std::min(experts.at_once, num_experts - first);
    RowGemmProblem problem = problem_of_turn(product, first, count);
    args.first = first;
    args.count = count;
    args.group_offsets = problem.group_offsets;
    check(in_lines ? launch_decode_lines(args, lines, op.multiprocessors, op.stream)
                   : launch_decode(args, op.multiprocessors, op.stream),
          "decoding experts");
    problem.work_counter = &args.counters->work;
    problem.steps = &args.counters->steps;
    const RowGemmChoice choice = choose(problem, {op.multiprocessors});
    check(launch_row_gemm(problem, choice, op.stream), "row GEMM of decoded experts");
    op.count(2);
  }
}

}  // namespace moec::cuda
