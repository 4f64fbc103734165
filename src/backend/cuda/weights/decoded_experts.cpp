// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/weights/decoded_experts.h"

#include <algorithm>

#include "core/workspace.h"

namespace moec::cuda {
namespace {

constexpr int64_t kRun = 8;
constexpr int64_t kLoad = 16;  // bytes

// aligned: of every expert's pointer.
bool begins_at_loads(const ExpertArray& array, bool aligned) {
  return aligned && (array.pointers || array.expert_stride * dtype_bytes(array.dtype) % kLoad == 0);
}

}  // namespace

int64_t decoded_bytes(int64_t expert_bytes, int64_t num_experts) {
  return std::min(kDecodedBytes, expert_bytes * num_experts);
}

int64_t decoded_bytes(const moec_experts_desc& desc) {
  if (desc.flags & MOEC_EXPERTS_PLAIN_WEIGHTS || desc.dtype == MOEC_F32 || desc.hidden % kRun ||
      desc.inter % kRun)
    return 0;
  return decoded_bytes(2 * desc.hidden * desc.inter * dtype_bytes(MOEC_BF16),
                       desc.expert_end - desc.expert_begin);
}

int experts_at_once(int64_t choice_rows, int64_t num_experts, int64_t expert_bytes, int64_t bytes,
                    Otherwise otherwise) {
  if (choice_rows < once_rows(otherwise, expert_bytes) * num_experts || expert_bytes > bytes)
    return 0;
  const int64_t turns = div_up(num_experts, bytes / expert_bytes);
  return int(div_up(num_experts, turns));
}

bool may_be_decoded(const ExpertMatrix& first, const ExpertMatrix* second) {
  if (!first.is_coded()) return false;
  return !second ||
         (second->scheme == first.scheme && (second->col_stride == 1) == (first.col_stride == 1));
}

DecodedExperts decoded_experts(int64_t n, int64_t k, const ExpertMatrix& first,
                               const ExpertMatrix* second, bool joined, moec_dtype dtype) {
  DecodedExperts to = {};
  to.from[0] = &first;
  to.from[1] = second;
  to.joined = joined;
  to.parts = second && !joined ? 2 : 1;
  to.n = joined ? 2 * n : n;
  to.k = k;
  to.along_k = first.col_stride == 1;
  to.dtype = dtype;
  return to;
}

ExpertMatrix DecodedExperts::source(int part) const {
  ExpertMatrix source = *from[part];
  if (!joined) return source;
  source.rows.step /= 2;
  if (quant::is_bytes(*quant::find_format(source.scheme))) source.row_stride /= 2;
  return source;
}

ExpertMatrix DecodedExperts::values_of(int i) const {
  const ExpertMatrix& m = *from[i];
  ExpertMatrix to;
  to.values = {values, nullptr, expert_values(), 0, dtype};
  to.values = to.values.from(joined ? i : i * n * k);
  to.dtype = dtype;
  const int64_t step = joined ? 2 : 1;
  to.row_stride = along_k ? k : step;
  to.col_stride = along_k ? 1 : n;
  to.bias = m.bias;
  to.bias_stride = m.bias_stride;
  to.aligned = true;
  return to;
}

JsonObject decoding_kernel(const std::string& step, const DecodedExperts& experts) {
  JsonObject kernel;
  kernel.add("step", step)
      .add("kernel", "decode_experts")
      .add("weights", quant::find_format(experts.from[0]->scheme)->name)
      .add("experts_at_once", int64_t(experts.at_once));
  return kernel;
}

bool begins_in_words(const ExpertArray& array, int num_experts) {
  for (int e = 0; e < (array.pointers ? num_experts : 1); ++e)
    if (reinterpret_cast<uintptr_t>(array.expert(e)) % kRun) return false;
  return array.pointers || array.expert_stride * dtype_bytes(array.dtype) % kRun == 0;
}

bool begins_in_words(const ExpertMatrix& m) {
  return m.values.pointers ? m.aligned : begins_in_words(m.values, 1);
}

CodePlaces code_places(const ExpertMatrix& m, bool along_k) {
  if (quant::is_bytes(*quant::find_format(m.scheme)))
    return {0, along_k ? m.row_stride : m.col_stride};
  return {m.rows.first * m.row_stride, along_k ? m.rows.step * m.row_stride : m.col_stride};
}

bool has_groups_of_runs(const ExpertMatrix& m) {
  const quant::BlockSize& group = m.scales.block_k;
  return !m.group_index.present() && (group.is_all() || group.size() % kRun == 0);
}

bool has_columns(const ExpertMatrix& m, bool along_k) {
  const ExpertBlocks& scales = m.scales;
  const bool of_lines = quant::find_format(m.scheme)->storage != quant::Storage::kAlongK;
  return ColumnFormats::index(m.scheme) >= 0 && !along_k && (!of_lines || has_groups_of_runs(m)) &&
         m.rows.step == 1 && m.rows.first % kRun == 0 && m.col_stride % kRun == 0 &&
         scales.block_n.size() == 1 && !scales.block_n.is_all() && scales.row_stride == 1 &&
         scales.col_stride * dtype_bytes(scales.array.dtype) % kLoad == 0 &&
         begins_at_loads(scales.array, m.scales_aligned) && begins_at_loads(m.values, m.aligned);
}

CodeRuns code_runs(const ExpertMatrix& m, bool along_k, bool in_words) {
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
                 m.expert_codes % kRun == 0 && in_words;
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

}  // namespace moec::cuda
