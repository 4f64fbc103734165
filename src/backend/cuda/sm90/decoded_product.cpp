// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/sm90/decoded_product.h"

#include "backend/cuda/sm90/code_lines.h"

namespace moec::cuda {
namespace {

// Whether the portable path reads eight codes at once, and one block for them.
bool has_quick_chunks(const ExpertMatrix& m, bool along_k) {
  bool chunks = false;
  quant::Formats::with(m.scheme, [&]<class Format>() {
    chunks = quant::is_bytes(Format::kInfo) || requires { Format::nibble_of(0); };
  });
  return chunks && code_runs(m, along_k, begins_in_words(m.values, 1)).one_block;
}

}  // namespace

bool set_decoded_lines(CodedLines& to, const DecodedProduct& product) {
  const DecodedExperts& experts = product.experts;
  if (!row_gemm_decodes(*quant::find_format(experts.from[0]->scheme))) return false;
  set_decode(to, experts.source(0));
  for (int part = 0; part < experts.parts; ++part) {
    const ExpertMatrix source = experts.source(part);
    const bool in_words = begins_in_words(source.values, product.problem.num_experts);
    if (set_lines(to, part, source, false) || to.nested[part].book ||
        !code_runs(source, experts.along_k, in_words).whole)
      return false;
  }
  return true;
}

const char* set_decoded(DecodedProduct& to, const RowGemmProblem& problem, int64_t choice_rows,
                        int64_t n, int64_t k, const ExpertMatrix& first, const ExpertMatrix* second,
                        const DecodedScratch& scratch, const char* refused) {
  to = {};
  if (!may_be_decoded(first, second)) return nullptr;
  to.problem = problem;
  to.scratch = scratch;
  DecodedExperts& experts = to.experts;
  const bool joined = second && columns_alternate(first, *second);
  experts = decoded_experts(n, k, first, second, joined, problem.dtype);
  experts.values = scratch.values;
  Otherwise otherwise = Otherwise::kRowGemm;
  if (refused)
    otherwise =
        has_quick_chunks(first, experts.along_k) ? Otherwise::kPortable : Otherwise::kSlowly;
  experts.at_once = experts_at_once(choice_rows, problem.num_experts, experts.expert_bytes(),
                                    scratch.bytes, otherwise);
  if (!to.is_used()) return nullptr;
  const ExpertMatrix values = experts.values_of(0);
  const ExpertMatrix others = second ? experts.values_of(1) : ExpertMatrix();
  const char* const why = set_matrices(to.problem, n, k, values, second ? &others : nullptr);
  to.problem.out_stride = to.problem.features;
  return why;
}

RowGemmProblem problem_of_turn(const DecodedProduct& product, int first, int count) {
  RowGemmProblem p = product.problem;
  const int64_t bytes = dtype_bytes(p.dtype);
  const auto shift = [](const void*& at, int64_t by) {
    if (at) at = static_cast<const char*>(at) + by;
  };
  for (ExpertBias& bias : p.bias)
    shift(bias.base, first * bias.expert_stride * (bias.f32 ? 4 : bytes));
  for (const void*& factor : p.factors) shift(factor, first * p.factor_expert_stride * bytes);
  p.group_offsets += first;
  p.num_experts = count;
  return p;
}

}  // namespace moec::cuda
