// SPDX-License-Identifier: Apache-2.0
#include "layer/quantise.h"

#include <algorithm>
#include <array>

#include "core/dtype.h"
#include "core/workspace.h"
#include "layer/context.h"
#include "layer/quant_check.h"

namespace moec {
namespace {

using ll = long long;
constexpr int64_t kChunkElements = 1 << 14;  // least part of an expert whose spread is one entry

// block_k 0: the description's, or what 0 stands for.
struct KindRow {
  const char* name;
  uint32_t scheme, flags;
  int code_bits;
  moec_dtype code_dtype, scale_dtype;  // scale 0: the description's
  int64_t block_k, multiple;           // of K
};
constexpr KindRow kKinds[] = {
    {"int8", MOEC_SCHEME_INT8, MOEC_QUANTISE_ASYMMETRIC, 8, MOEC_I8, 0, 0, 1},
    {"int4", MOEC_SCHEME_INT4, MOEC_QUANTISE_ASYMMETRIC, 4, MOEC_I32, 0, 0, 1},
    {"fp8", MOEC_SCHEME_FP8, 0, 8, MOEC_F8_E4M3, 0, 0, 1},
    {"mxfp8", MOEC_SCHEME_FP8, 0, 8, MOEC_F8_E4M3, MOEC_U8, 32, 1},
    {"mxfp4", MOEC_SCHEME_MXFP4, 0, 4, MOEC_U8, MOEC_U8, 32, 32},
    {"nvfp4", MOEC_SCHEME_NVFP4, MOEC_QUANTISE_SCALES2_DIVIDES, 4, MOEC_U8, MOEC_F8_E4M3, 16, 16},
    {"nf4", MOEC_SCHEME_CODEBOOK4, MOEC_QUANTISE_NESTED, 4, MOEC_U8, MOEC_F32, 0, 1},
    {"fp4", MOEC_SCHEME_CODEBOOK4, MOEC_QUANTISE_NESTED, 4, MOEC_U8, MOEC_F32, 0, 1}};
constexpr int kInt4WordCodes = 8;

moec_tensor shaped(moec_dtype dtype, Shape shape) {
  moec_tensor tensor = {};
  tensor.dtype = dtype;
  for (const int64_t extent : shape) tensor.shape[tensor.ndim++] = extent;
  return tensor;
}

// The memory of an output that is as `expected` says; absent where that is.
Array output(TensorCheck& check, const char* name, const moec_tensor& given,
             const moec_tensor& expected) {
  const int64_t* const s = expected.shape;
  // Powers of two are bytes or of their own type.
  const bool powers = expected.dtype == MOEC_U8 && given.dtype == MOEC_F8_E8M0;
  const moec_dtype dtype = powers ? moec_dtype(MOEC_F8_E8M0) : expected.dtype;
  switch (expected.ndim) {
    case 1:
      return check.out(name, given, {s[0]}, {dtype});
    case 2:
      return check.out(name, given, {s[0], s[1]}, {dtype});
    case 3:
      return check.out(name, given, {s[0], s[1], s[2]}, {dtype});
  }
  MOEC_REQUIRE(is_absent(given), MOEC_E_INVALID_ARG, "%s is given; this kind writes none", name);
  return {};
}

}  // namespace

bool Quantisation::is_stream() const {
  return scheme_ == MOEC_SCHEME_CODEBOOK4;
}

Quantisation::Quantisation(const moec_quantise_desc& desc) : desc_(desc) {
  check_enum("desc.kind", desc.kind, std::size(kKinds) - 1);
  const KindRow& kind = kKinds[desc.kind];
  scheme_ = kind.scheme;
  check_flags("desc.flags", desc.flags, kind.flags);
  check_enum("desc.orientation", desc.orientation, MOEC_IN_OUT);
  MOEC_REQUIRE(is_real(desc.dtype), MOEC_E_DTYPE, "desc.dtype is %s; expected f32, f16 or bf16",
               dtype_name(desc.dtype));
  const bool chooses = !kind.scale_dtype;
  MOEC_REQUIRE(!desc.scale_dtype ||
                   (chooses && (desc.scale_dtype == desc.dtype || desc.scale_dtype == MOEC_F32)),
               MOEC_E_DTYPE, "desc.scale_dtype is %s; %s of %s has %s",
               dtype_name(desc.scale_dtype), kind.name, dtype_name(desc.dtype),
               chooses ? "scales of that type or f32" : "scales of a type of its own: 0");
  check_at_least("desc.num_experts", desc.num_experts, 1);
  check_at_least("desc.out_features", desc.out_features, 1);
  check_at_least("desc.in_features", desc.in_features, 1);
  MOEC_REQUIRE(desc.in_features % kind.multiple == 0, MOEC_E_SHAPE,
               "desc.in_features is %lld; %s needs a multiple of %lld", ll(desc.in_features),
               kind.name, ll(kind.multiple));
  // Four bytes for each value and for each row of words: no count below passes 63 bits.
  const int64_t rows = checked_product("num_experts * out_features", desc.num_experts,
                                       checked_product("4 * out_features", 4, desc.out_features));
  checked_product("values", rows, checked_product("2 * in_features", 2, desc.in_features));
  check_blocks(kind.name);
  lay_out();
  shape_outputs();
}

void Quantisation::check_blocks(const char* name) const {
  const bool in_out = desc_.orientation == MOEC_IN_OUT;
  const int64_t n = desc_.block_n, k = desc_.block_k;
  check_at_least("desc.block_n", n, 0);
  check_at_least("desc.block_k", k, 0);
  if (desc_.kind == MOEC_QUANTISE_FP8) return;
  const bool int4 = desc_.kind == MOEC_QUANTISE_INT4;
  // Of the two, the one that means something here.
  const bool uses_n = is_stream() && in_out, uses_k = int4 || (is_stream() && !in_out);
  const int64_t unused = uses_n ? k : uses_k ? n : n ? n : k;
  MOEC_REQUIRE(unused == 0, MOEC_E_INVALID_ARG, "desc.%s is %lld; expected 0 for %s",
               unused == n && !uses_n ? "block_n" : "block_k", ll(unused), name);
  if (int4)
    MOEC_REQUIRE(k % kInt4WordCodes == 0 || k == desc_.in_features, MOEC_E_INVALID_ARG,
                 "desc.block_k is %lld; expected a multiple of %d, or in_features, %lld", ll(k),
                 kInt4WordCodes, ll(desc_.in_features));
  const int64_t block = uses_n ? n : k;
  MOEC_REQUIRE(!is_stream() || !block || (block >= 32 && block <= 4096 && !(block & (block - 1))),
               MOEC_E_INVALID_ARG, "desc.%s is %lld; expected a power of two, 32 to 4096",
               uses_n ? "block_n" : "block_k", ll(block));
}

// How the work is cut.
void Quantisation::lay_out() {
  const KindRow& kind = kKinds[desc_.kind];
  const int64_t E = desc_.num_experts, N = desc_.out_features, K = desc_.in_features;
  const bool out_in = desc_.orientation == MOEC_OUT_IN;
  const int64_t given = desc_.block_n && is_stream() ? desc_.block_n : desc_.block_k;
  block_n_ = desc_.kind == MOEC_QUANTISE_FP8 && desc_.block_n ? desc_.block_n : 1;
  block_k_ = kind.block_k ? kind.block_k : given ? given : is_stream() ? 64 : K;
  quant::QuantiseView& view = args_.view;
  view.dtype = desc_.dtype;
  view.num_experts = is_stream() ? 1 : E;
  view.rows = is_stream() ? 1 : N;
  view.cols = is_stream() ? E * N * K : K;
  view.row_stride = is_stream() || out_in ? view.cols : 1;
  view.col_stride = is_stream() || out_in ? 1 : N;
  view.block_n = std::min(block_n_, view.rows);
  view.block_k = std::min(block_k_, view.cols);
  view.expert_scale = view.rows > 1 && view.block_n == view.rows && view.block_k == view.cols;
  if (view.expert_scale) view.block_n = 1;
  view.code_row_bytes = scheme_ == MOEC_SCHEME_INT4 ? div_up(K, kInt4WordCodes) * 4
                                                    : div_up(view.cols * kind.code_bits, 8);
  const moec_dtype scale = desc_.scale_dtype ? desc_.scale_dtype : desc_.dtype;
  const bool is_nested = desc_.flags & MOEC_QUANTISE_NESTED;
  view.scale_dtype = kind.scale_dtype ? kind.scale_dtype : scale;
  args_.rule = {desc_.kind, desc_.flags, scale};
  view.expert_chunks = Chunks(view.rows * view.cols, kChunkElements);
  if (is_nested) {
    args_.nested.count = view.tiles();
    args_.nested.chunks = Chunks(args_.nested.groups(), 1);
  }
  if (scheme_ == MOEC_SCHEME_INT4 && (desc_.flags & MOEC_QUANTISE_ASYMMETRIC)) {
    args_.packed_zeros.num_experts = E;
    args_.packed_zeros.rows = N;
    args_.packed_zeros.groups = view.tiles_k();
  }
}

void Quantisation::shape_outputs() {
  const int64_t E = desc_.num_experts, N = desc_.out_features, K = desc_.in_features;
  const KindRow& kind = kKinds[desc_.kind];
  const quant::QuantiseView& view = args_.view;
  const bool out_in = desc_.orientation == MOEC_OUT_IN;
  shapes_.source = shaped(desc_.dtype, {E, out_in ? N : K, out_in ? K : N});
  quant_.struct_size = sizeof quant_;
  if (is_stream()) {
    shapes_.codes = shaped(MOEC_U8, {view.code_row_bytes, 1});
    shapes_.scales = shaped(MOEC_F32, {view.tiles()});
    shapes_.codebook = shaped(MOEC_F32, {16});
    (out_in ? quant_.block_k : quant_.block_n) = block_k_;
    if (!args_.nested.count) return;
    shapes_.scales.dtype = MOEC_U8;
    shapes_.scales2 = shaped(MOEC_F32, {args_.nested.groups()});
    shapes_.scale_book = shaped(MOEC_F32, {256});
    shapes_.scale_offset = shaped(MOEC_F32, {1});
    quant_.scale_block = quant::kNestedGroup;
    return;
  }
  const int64_t unit = dtype_bytes(kind.code_dtype), groups = div_up(K, block_k_);
  shapes_.codes = shaped(kind.code_dtype, {E, N, view.code_row_bytes / unit});
  shapes_.scales = shaped(view.scale_dtype, {E, div_up(N, block_n_), groups});
  if (scheme_ == MOEC_SCHEME_NVFP4) {
    shapes_.scales2 = shaped(MOEC_F32, {E});
    if (desc_.flags & MOEC_QUANTISE_SCALES2_DIVIDES) quant_.flags = MOEC_QUANT_SCALES2_DIVIDES;
  }
  if (desc_.flags & MOEC_QUANTISE_ASYMMETRIC)
    shapes_.zeros = args_.packed_zeros.rows
                        ? shaped(MOEC_I32, {E, args_.packed_zeros.word_rows(), groups})
                        : shaped(MOEC_I8, {E, N, groups});
  if (scheme_ != MOEC_SCHEME_FP8 && scheme_ != MOEC_SCHEME_INT4) return;  // others say it all
  quant_.block_n = block_n_;
  quant_.block_k = block_k_;
}

void Quantisation::take_scratch(void* memory, QuantiseArgs& args, uint64_t* bytes) const {
  Arena arena = memory ? Arena(memory, 0) : Arena();
  quant::QuantiseView& view = args.view;
  if (view.expert_scale || scheme_ == MOEC_SCHEME_NVFP4)
    view.expert_bits = args.expert_bits =
        arena.take_array<uint32_t>(uint64_t(view.num_experts * view.expert_chunks.count), 0);
  if (args.nested.count) {
    args.nested.scales = arena.take_array<float>(uint64_t(args.nested.count), 0);
    args.nested.sums = arena.take_array<double>(uint64_t(args.nested.groups()), 0);
  }
  if (args.packed_zeros.rows)
    args.packed_zeros.zeros = arena.take_array<int8_t>(uint64_t(view.tiles()), 0);
  if (bytes) *bytes = arena.size().base ? arena.size().base + kAlignSlack : 0;
}

uint64_t Quantisation::workspace() const {
  QuantiseArgs args = args_;
  uint64_t bytes = 0;
  take_scratch(nullptr, args, &bytes);
  return bytes;
}

void Quantisation::describe(moec_quantise_info& info, moec_quant& quant) const {
  info.codes = shapes_.codes;
  info.workspace = workspace();
  info.scheme = scheme_;
  const uint32_t size = quant.struct_size;
  quant = quant_;
  quant.struct_size = size;
  quant.scales = shapes_.scales;
  quant.scales2 = shapes_.scales2;
  quant.zeros = shapes_.zeros;
  quant.codebook = shapes_.codebook;
  quant.scale_book = shapes_.scale_book;
  quant.scale_offset = shapes_.scale_offset;
}

Quantisation::Memory Quantisation::checked(const Context& context,
                                           const moec_quantise_args& args) const {
  check_flags("args.flags", args.flags, 0);
  const moec_quant& quant = *args.quant;
  MOEC_REQUIRE(quant.flags == quant_.flags, MOEC_E_INVALID_ARG,
               "quant.flags is 0x%x; the query says 0x%x", quant.flags, quant_.flags);
  const struct {
    const char* name;
    int64_t given, expected;
  } blocks[] = {{"block_n", quant.block_n, quant_.block_n},
                {"block_k", quant.block_k, quant_.block_k},
                {"scale_block", quant.scale_block, quant_.scale_block}};
  for (const auto& block : blocks)
    MOEC_REQUIRE(block.given == block.expected, MOEC_E_INVALID_ARG,
                 "quant.%s is %lld; the query says %lld", block.name, ll(block.given),
                 ll(block.expected));
  MOEC_REQUIRE(!has_arrays(quant), MOEC_E_INVALID_ARG,
               "quant has arrays of one tensor an expert; expected stacked tensors");
  TensorCheck check(context);
  const int64_t* const from = shapes_.source.shape;
  const auto written = [&](const char* name, const moec_tensor& given,
                           const moec_tensor& expected) {
    return output(check, name, given, expected).data;
  };
  Memory memory;
  memory.source = check.in("source", args.source, {from[0], from[1], from[2]}, {desc_.dtype}).data;
  memory.codes = written("codes", args.codes, shapes_.codes);
  memory.scales = written("quant.scales", quant.scales, shapes_.scales);
  memory.scales2 = written("quant.scales2", quant.scales2, shapes_.scales2);
  memory.zeros = written("quant.zeros", quant.zeros, shapes_.zeros);
  memory.codebook = written("quant.codebook", quant.codebook, shapes_.codebook);
  memory.scale_book = written("quant.scale_book", quant.scale_book, shapes_.scale_book);
  memory.scale_offset = written("quant.scale_offset", quant.scale_offset, shapes_.scale_offset);
  written("quant.group_index", quant.group_index, {});
  memory.workspace = args.workspace;
  check.memory_out("workspace", args.workspace.ptr, args.workspace.bytes ? workspace() : 0);
  check.finish();
  return memory;
}

void Quantisation::run(const Context& context, const Memory& memory, moec_stream stream) const {
  QuantiseArgs own = args_;
  quant::QuantiseView& view = own.view;
  const Workspace scratch(context, memory.workspace, workspace(), stream);
  take_scratch(scratch.data(), own, nullptr);
  view.source = memory.source;
  view.codes = static_cast<uint8_t*>(memory.codes);
  view.scales = memory.scales;
  view.scales2 = static_cast<float*>(memory.scales2);
  view.zeros = static_cast<int8_t*>(memory.zeros);
  if (own.nested.count) {
    view.scales = const_cast<float*>(own.nested.scales);
    own.nested.scales2 = static_cast<float*>(memory.scales2);
    own.nested.codes = static_cast<uint8_t*>(memory.scales);
    own.nested.map = static_cast<float*>(memory.scale_book);
    own.nested.offset = static_cast<float*>(memory.scale_offset);
  }
  if (own.packed_zeros.rows) {
    view.zeros = const_cast<int8_t*>(own.packed_zeros.zeros);
    own.packed_zeros.words = static_cast<int32_t*>(memory.zeros);
  }
  context.backend().run(own, stream);
  if (!memory.codebook) return;
  std::array<float, 16> values;
  for (int code = 0; code < 16; ++code)
    values[size_t(code)] =
        quant::code_value(desc_.kind == MOEC_QUANTISE_NF4 ? quant::kNf4 : quant::kFp4, code);
  context.backend().store(memory.codebook, values.data(), sizeof values, stream);
}

}  // namespace moec
