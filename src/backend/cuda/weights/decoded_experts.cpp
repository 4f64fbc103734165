// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/sm90/decoded_experts.h"

#include <algorithm>

#include "core/workspace.h"

namespace moec::cuda {
namespace {

constexpr int64_t kRun = 8;

// Values in scratch: part `part` of each expert's.
ExpertMatrix values_of(const DecodedProduct& product, const ExpertMatrix& m, int part) {
  ExpertMatrix values;
  values.values = {product.scratch.values, nullptr, product.expert_values(), 0, m.dtype};
  values.values = values.values.from(product.joined ? part : part * product.n * product.k);
  values.dtype = m.dtype;
  const int64_t step = product.joined ? 2 : 1;
  values.row_stride = product.along_k ? product.k : step;
  values.col_stride = product.along_k ? 1 : product.n;
  values.bias = m.bias;
  values.bias_stride = m.bias_stride;
  return values;
}

bool begins_at(const ExpertArray& array, int num_experts, int64_t bytes) {
  for (int e = 0; e < (array.pointers ? num_experts : 1); ++e)
    if (reinterpret_cast<uintptr_t>(array.expert(e)) % uint64_t(bytes)) return false;
  return array.pointers || array.expert_stride * dtype_bytes(array.dtype) % bytes == 0;
}

}  // namespace

int64_t decoded_bytes(int64_t expert_bytes, int64_t num_experts) {
  return std::min(kDecodedBytes, expert_bytes * num_experts);
}

int experts_at_once(int64_t choice_rows, int64_t num_experts, int64_t expert_bytes, int64_t bytes,
                    Otherwise otherwise) {
  if (choice_rows < once_rows(otherwise) * num_experts || expert_bytes > bytes) return 0;
  const int64_t turns = div_up(num_experts, bytes / expert_bytes);
  return int(div_up(num_experts, turns));
}

const char* set_decoded(DecodedProduct& to, const RowGemmProblem& problem, int64_t choice_rows,
                        int64_t n, int64_t k, const ExpertMatrix& first, const ExpertMatrix* second,
                        const DecodedScratch& scratch, const char* refused) {
  to = {};
  const bool along_k = first.col_stride == 1;
  if (second && (second->scheme != first.scheme || (second->col_stride == 1) != along_k))
    return nullptr;
  to.problem = problem;
  to.scratch = scratch;
  to.from[0] = &first;
  to.from[1] = second;
  to.joined = second && columns_alternate(first, *second);
  to.parts = second && !to.joined ? 2 : 1;
  to.n = to.joined ? 2 * n : n;
  to.k = k;
  to.along_k = along_k;
  Otherwise otherwise = Otherwise::kRowGemm;
  if (refused)
    otherwise = has_quick_chunks(first, along_k) ? Otherwise::kPortable : Otherwise::kSlowly;
  const int64_t expert_bytes = to.expert_values() * dtype_bytes(problem.dtype);
  to.at_once =
      experts_at_once(choice_rows, problem.num_experts, expert_bytes, scratch.bytes, otherwise);
  if (!to.is_used()) return nullptr;
  const ExpertMatrix values = values_of(to, first, 0);
  const ExpertMatrix others = second ? values_of(to, *second, 1) : ExpertMatrix();
  const char* const why = set_matrices(to.problem, n, k, values, second ? &others : nullptr);
  to.problem.out_stride = to.problem.features;
  return why;
}

ExpertMatrix decoded_source(const DecodedProduct& product, int part) {
  ExpertMatrix source = *product.from[part];
  if (!product.joined) return source;
  source.rows.step /= 2;
  if (quant::is_bytes(*quant::find_format(source.scheme))) source.row_stride /= 2;
  return source;
}

CodeRuns code_runs(const ExpertMatrix& m, bool along_k, int num_experts) {
  const quant::FormatInfo& format = *quant::find_format(m.scheme);
  const bool has_blocks = format.scale_dtypes.size() == 0;  // in their codes, along k
  if (has_blocks) return {along_k, along_k};
  const bool stream = format.storage == quant::Storage::kStream;
  const bool whole_rows = m.rows.step == 1 && m.rows.first % kRun == 0;
  CodeRuns runs = {};
  if (format.storage == quant::Storage::kAlongK) {  // words lie side by side along n
    runs.whole = !along_k;
  } else {
    const int64_t along = along_k ? m.col_stride : m.row_stride;
    const int64_t across = along_k ? m.row_stride : m.col_stride;
    const bool nibbles = format.code_bits == 4;
    runs.whole = along == 1 && across % kRun == 0 && (along_k || !nibbles || whole_rows) &&
                 m.expert_codes % kRun == 0 && begins_at(m.values, num_experts, kRun);
  }
  const quant::BlockSize& block = stream || along_k ? m.scales.block_k : m.scales.block_n;
  const bool whole_blocks = block.is_all() ? !stream : block.size() % kRun == 0;
  if (stream)
    runs.one_block = runs.whole && whole_blocks;
  else
    runs.one_block =
        (whole_blocks && (along_k ? !m.group_index.present() : block.is_all() || whole_rows));
  return runs;
}

bool has_quick_chunks(const ExpertMatrix& m, bool along_k) {
  bool chunks = false;
  quant::Formats::with(m.scheme, [&]<class Format>() {
    chunks = quant::is_bytes(Format::kInfo) || requires { Format::nibble_of(0); };
  });
  return chunks && code_runs(m, along_k, 1).one_block;
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
