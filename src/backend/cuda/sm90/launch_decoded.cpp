// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "backend/cuda/device/check.h"
#include "backend/cuda/device/pointer_table.h"
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

void launch_decoded(const Op& op, const DecodedProduct& product) {
  const RowGemmProblem& all = product.problem;
  if (all.max_rows == 0) return;
  const int num_experts = all.num_experts;
  const DecodedExperts& experts = product.experts;
  DecodeArgs args = decode_args(experts);
  PointerTable table(op, product.scratch.pointers);
  for (int i = 0; i < experts.parts; ++i) {
    const ExpertMatrix source = experts.source(i);
    args.runs[i] = code_runs(source, experts.along_k, begins_in_words(source.values, num_experts));
    args.from[i] = table.device(source, num_experts);
  }
  table.flush();
  args.counters = &product.scratch.counters->decoded;
  for (int first = 0; first < num_experts; first += experts.at_once) {
    const int count = std::min(experts.at_once, num_experts - first);
    RowGemmProblem problem = problem_of_turn(product, first, count);
    args.first = first;
    args.count = count;
    args.group_offsets = problem.group_offsets;
    check(launch_decode_experts(args, op.multiprocessors, op.stream), "decoding experts");
    problem.work_counter = &args.counters->work;
    problem.steps = &args.counters->steps;
    const RowGemmChoice choice = choose(problem, {op.multiprocessors});
    check(launch_row_gemm(problem, choice, op.stream), "row GEMM of decoded experts");
    op.count(2);
  }
}

}  // namespace moec::cuda
