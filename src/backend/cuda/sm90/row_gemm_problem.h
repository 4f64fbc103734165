// SPDX-License-Identifier: Apache-2.0
// Grouped GEMMs whose rows vary from expert to expert: up, down, and the two data gradients. All
// four are one kernel. RowGemmProblem is what a caller says; row_gemm_choice.h makes the choices of
// a launch from it, row_gemm.h launches. Nothing here needs the headers of CUDA.
#pragma once

#include <cstdint>

#include "backend/cuda/sm90/early.h"
#include "backend/weights.h"
#include "quant/format.h"

namespace moec::cuda {

enum class RowGemm {
  kUp,      // out[r,f] = act(x[token(r)] . gate[f], x[token(r)] . up[f]), pre-activations optional
  kDown,    // out[r,f] = rows[r] . weight[f]
  kGradUp,  // out[r,f] = sum over both parts of d_pre[r] . weight: gradient of the gathered row
  kGradDown,  // d_act = d_y[token(r)] . weight[f]; writes d_pre, out = row_weight * act, d_weight
              // parts
};
// The operation multiplies by the transposed matrices [K,N].
constexpr bool is_gradient(RowGemm op) {
  return op == RowGemm::kGradUp || op == RowGemm::kGradDown;
}

// Element f of expert e at base + e * expert_stride + f * stride; without a base there is none.
struct ExpertBias {
  const void* base;
  int64_t expert_stride, stride;  // elements
  bool f32;                       // else the type of the matrices
};

// One entry for each row n of a coded matrix [N,K], likewise; symmetric codes have no zero points.
struct ChannelArray {
  const void* base;
  int64_t expert_stride, stride;  // elements
  moec_dtype dtype;
};
struct ExpertChannels {
  ChannelArray scales, zeros;
};

// Formats whose codes lie in lines along the matrix's contiguous axis, in blocks of at least
// kLineRun positions: a lane makes elements of so many codes with one scale.
using LineFormats = quant::FormatList<quant::Codebook4, quant::Mxfp4, quant::Int4, quant::Fp8>;
constexpr int kLineRun = 32;

// How these elements are made (line_words.h); kSigned: those of a format of channels.
enum class LineDecode { kTable, kPowers, kIntegers, kBytes, kSigned };

// Scales of blocks: that of position i of line l is at
// (first_line + l * line_step >> line_shift) * line_stride + (first + i >> shift) of its expert's.
struct ExpertScales {
  const void* base;
  int64_t expert_stride;  // entries
  int first_line, line_step, line_shift, line_stride, first, shift;
  moec_dtype dtype;
};
// Scales that are themselves codes: scale i of the stream is book[code] * scales2[i >> shift] +
// *offset, rounded twice.
struct NestedScales {
  const float *book, *scales2, *offset;  // book null: scales are numbers
  int shift;
};
struct CodedLines {
  LineDecode decode;
  bool high_first;            // of two codes of a byte the first is the high nibble
  float numbers[16];          // that nibbles stand for, without a codebook
  const float* codebooks[2];  // of each part, or null
  ExpertScales scales[2];
  NestedScales nested[2];
};

// Whether a line of 64 codes has one scale, of four bytes, or of integers of the weights' type.
inline bool has_whole_lines(const CodedLines& lines) {
  const ExpertScales& scales = lines.scales[0];
  return 64 >> scales.shift <= 1 &&
         (lines.decode == LineDecode::kIntegers || scales.dtype == MOEC_F32);
}
// Whether scales are numbers of fp32, of each part.
inline bool has_f32_scales(const CodedLines& lines) {
  return lines.scales[0].dtype == MOEC_F32 && !lines.nested[0].book;
}

struct RowGemmProblem {
  RowGemm op;
  moec_dtype dtype;          // MOEC_BF16 or MOEC_F16
  int64_t features, k_size;  // k_size of one part
  int parts;                 // kGradUp: 2 (gate and up follow each other on k), else 1

  // Columns of gate and up alternate: kUp in the weights, kGradDown in d_pre.
  bool alternating;
  bool weights_mn_major;       // the feature axis of the weights is the contiguous one
  const void* weights[2];      // first element (or code) of gate and up for kUp and kGradUp; else,
                               // or where their columns alternate, one
  int64_t weight_stride;       // elements between neighbours on the axis that is not contiguous
  int64_t expert_stride;       // elements
  uint32_t scheme;             // moec_scheme of the weights
  ExpertChannels channels[2];  // of each part, where it has one
  CodedLines lines;            // of LineFormats; of others how codes are decoded
  ExpertBias bias[2];          // kUp: gate, up; kDown: the first
  // Of adapters: out (kGradDown: d_act) gets narrow[r] . factor[f] besides, in k-blocks of their
  // own behind the others. Factors are contiguous along the axis along which the weights are.
  int64_t rank;                                 // 0: none
  const void* narrow;                           // [P, rank]
  const void* factors[2];                       // first element, of the parts of `weights`
  int64_t factor_stride, factor_expert_stride;  // elements; 0: one for all experts
  moec_activation activation;                   // kUp, kGradDown

  // Rows r of expert e are [group_offsets[e], group_offsets[e+1]).
  const int32_t* group_offsets;
  int num_experts;
  int64_t max_rows;
  const int32_t* row_token;  // [P], -1 = padding, read as zeros
  const void* x;             // [T, k_size] gathered operand: kUp, kGradDown
  int64_t x_stride;          // elements
  const void* rows;          // [P, parts, k_size] operand of the others
  bool in_order;             // kUp: `rows` is x in the order of experts (ordered_rows.h)

  void* out;  // [P, features]
  int64_t out_stride;
  void* pre;                // kUp: out, or null; kGradDown: in. [P, 2, features]: gate, up
  void* d_pre;              // kGradDown: out, as pre
  const float* row_weight;  // kGradDown: [P]
  float* d_weight_parts;    // kGradDown: out [grad_down_dot_parts(features), max_rows], for combine
  bool keeps_act;           // kGradDown: of codes `out` need not be written where it is not set

  Early early;  // kWeights: kDown and kGradUp alone
  // Device memory for what CTAs count together, 0 before the kernel; null: they do not.
  unsigned *work_counter, *steps;
  // kUp, kDown: null, or [num_experts], 0 before kUp, which adds its rows for each tile in memory;
  // kDown waits until all rows of an expert have all tiles instead of for the whole predecessor.
  unsigned* done;
  bool wide;        // tiles of up to 256 rows of codes along k (row_gemm_wide.cuh)
  bool after_wide;  // kDown: those of kUp were
};

inline bool is_coded(const RowGemmProblem& p) {
  return p.scheme != MOEC_SCHEME_NONE;
}
// Whether the kernels decode a format: signed bytes where each row has one scale, or lines.
constexpr bool has_lines(uint32_t scheme) {
  return LineFormats::index(scheme) >= 0;
}
constexpr bool row_gemm_decodes(const quant::FormatInfo& format) {
  return quant::ChannelFormats::index(format.scheme) >= 0 || has_lines(format.scheme);
}
// Codes of a byte.
constexpr int codes_in_byte(uint32_t scheme) {
  const quant::FormatInfo* const format = quant::find_format(scheme);
  return format && format->code_bits == 4 ? 2 : 1;
}

// Whether two matrices are the even and the odd columns of one whose n axis is contiguous.
bool columns_alternate(const ExpertMatrix& gate, const ExpertMatrix& up);

// Sizes, layout, codes and biases of the matrices [n,k]: gate and up of kUp and kGradUp, else down
// alone. Returns why this form of the weights has no kernel, or null. Before it, op and dtype are
// set.
const char* set_matrices(RowGemmProblem& problem, int64_t n, int64_t k, const ExpertMatrix& first,
                         const ExpertMatrix* second = nullptr);
// The term of an adapter, after set_matrices: narrow rows [P, rank] and a factor for each matrix of
// kUp and kDown, [n, rank], or one of a gradient, [rank, k]. Returns as set_matrices does.
const char* set_factors(RowGemmProblem& problem, int64_t rank, const void* narrow,
                        const ExpertMatrix& first, const ExpertMatrix* second = nullptr);

}  // namespace moec::cuda
