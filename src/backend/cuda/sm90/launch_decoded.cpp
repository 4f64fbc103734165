// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "backend/cuda/device/check.h"
#include "backend/cuda/device/pointer_table.h"
#include "backend/cuda/sm90/launch_list.h"

namespace moec::cuda {

DecodedScratch lay_out_scratch(int64_t hidden, int64_t inter, int64_t num_experts, Arena& arena) {
  DecodedScratch scratch;
  scratch.counters = static_cast<WorkCounters*>(arena.take(sizeof(WorkCounters), 0));
  scratch.pointers = arena.take(PointerTable::bytes(num_experts), 0);
  scratch.bytes = decoded_bytes(2 * hidden * inter * dtype_bytes(MOEC_BF16), num_experts);
  scratch.values = arena.take(uint64_t(scratch.bytes), 0);
  return scratch;
}

void launch_decoded(const Op& op, const DecodedProduct& product) {
  const RowGemmProblem& all = product.problem;
  if (all.max_rows == 0) return;
  const int num_experts = all.num_experts;
  DecodeArgs args = {};
  PointerTable table(op, product.scratch.pointers);
  for (int i = 0; i < product.parts; ++i) {
    const ExpertMatrix source = decoded_source(product, i);
    args.runs[i] = code_runs(source, product.along_k, num_experts);
    args.from[i] = table.device(source, num_experts);
  }
  table.flush();
  args.parts = product.parts;
  args.n = product.n;
  args.k = product.k;
  args.along_k = product.along_k;
  args.dtype = all.dtype;
  args.to = product.scratch.values;
  args.counters = &product.scratch.counters->decoded;
  for (int first = 0; first < num_experts; first += product.at_once) {
    const int count = std::min(product.at_once, num_experts - first);
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
