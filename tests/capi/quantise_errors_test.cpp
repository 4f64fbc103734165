// SPDX-License-Identifier: Apache-2.0
// moec_quantise_query and moec_quantise at the boundary: each mistake has its code and a text with
// both values, and nothing is written.
#include <gtest/gtest.h>

#include <functional>
#include <ostream>
#include <string>

#include "problem.h"
#include "support/quantise_case.h"

namespace moec::test {
namespace {

// A call that succeeds, to be spoilt in one place.
struct Call {
  static constexpr int64_t E = 2, N = 6, K = 32;
  Context context = make<Context>(moec_context_create, static_cast<moec_context_desc*>(nullptr));
  moec_quantise_desc desc;
  moec_quantise_info info = sized<moec_quantise_info>();
  moec_quant quant = sized<moec_quant>();
  moec_quantise_args args = sized<moec_quantise_args>();
  std::vector<uint8_t> source = std::vector<uint8_t>(size_t(4 * E * N * K));
  std::vector<uint8_t> outputs = std::vector<uint8_t>(1 << 14, Problem::kFill);

  explicit Call(uint32_t kind = MOEC_QUANTISE_NF4) {
    QuantiseCase c;
    c.kind = kind;
    c.num_experts = E;
    c.out_features = N;
    c.in_features = K;
    desc = c.desc();
  }
  moec_status query() { return moec_quantise_query(context.get(), &desc, &info, &quant); }
  // As the query says.
  void take_memory() {
    check(query());
    size_t used = 0;
    const auto give = [&](moec_tensor* tensor) {
      tensor->data = outputs.data() + used;
      tensor->device_type = MOEC_CPU;
      used += 4096;
    };
    args.desc = &desc;
    args.source = tensor_of(source.data(), desc.dtype, {E, N, K});
    args.codes = info.codes;
    args.quant = &quant;
    give(&args.codes);
    for (const auto& [name, tensor] : tensors_of(&quant)) give(tensor);
  }
  moec_status run() { return moec_quantise(context.get(), &args, nullptr); }
};

struct Row {
  const char* name;
  uint32_t kind;
  moec_status expected;
  const char* text;  // part of the message
  std::function<void(Call&)> spoil;
  bool of_query = true;  // else of the call, with memory
};
void PrintTo(const Row& row, std::ostream* out) {
  *out << row.name;
}
constexpr uint32_t kNf4 = MOEC_QUANTISE_NF4, kInt4 = MOEC_QUANTISE_INT4, kFp8 = MOEC_QUANTISE_FP8;
const Row kRows[] = {
    {"kind", 8, MOEC_E_INVALID_ARG, "desc.kind is 8; expected 0 to 7", [](Call&) {}},
    {"flags", kFp8, MOEC_E_INVALID_ARG, "desc.flags is 0x1; the known bits are 0x0",
     [](Call& c) { c.desc.flags = MOEC_QUANTISE_ASYMMETRIC; }},
    {"orientation", kNf4, MOEC_E_INVALID_ARG, "desc.orientation is 2; expected 0 to 1",
     [](Call& c) { c.desc.orientation = 2; }},
    {"dtype", kNf4, MOEC_E_DTYPE, "desc.dtype is i8; expected f32, f16 or bf16",
     [](Call& c) { c.desc.dtype = MOEC_I8; }},
    {"scale_dtype", kInt4, MOEC_E_DTYPE, "desc.scale_dtype is f16; int4 of f32 has scales of that",
     [](Call& c) { c.desc.scale_dtype = MOEC_F16; }},
    {"scale_dtype_of_its_own", kNf4, MOEC_E_DTYPE,
     "desc.scale_dtype is f32; nf4 of f32 has scales of a type of its own: 0",
     [](Call& c) { c.desc.scale_dtype = MOEC_F32; }},
    {"experts", kNf4, MOEC_E_INVALID_ARG, "desc.num_experts is 0; expected at least 1",
     [](Call& c) { c.desc.num_experts = 0; }},
    {"mxfp4_columns", MOEC_QUANTISE_MXFP4, MOEC_E_SHAPE,
     "desc.in_features is 48; mxfp4 needs a multiple of 32",
     [](Call& c) { c.desc.in_features = 48; }},
    {"overflow", kNf4, MOEC_E_OVERFLOW, "expected less than 2^63",
     [](Call& c) { c.desc.out_features = c.desc.in_features = int64_t(1) << 31; }},
    {"stream_block", kNf4, MOEC_E_INVALID_ARG,
     "desc.block_k is 48; expected a power of two, 32 to 4096",
     [](Call& c) { c.desc.block_k = 48; }},
    {"stream_block_of_the_other", kNf4, MOEC_E_INVALID_ARG,
     "desc.block_n is 64; expected 0 for nf4", [](Call& c) { c.desc.block_n = 64; }},
    {"group", kInt4, MOEC_E_INVALID_ARG,
     "desc.block_k is 12; expected a multiple of 8, or in_features, 32",
     [](Call& c) { c.desc.block_k = 12; }},
    {"negative_block", kFp8, MOEC_E_INVALID_ARG, "desc.block_n is -1; expected at least 0",
     [](Call& c) { c.desc.block_n = -1; }},
    {"source_shape", kFp8, MOEC_E_SHAPE, "source has shape [2,32,6]; expected [2,6,32]",
     [](Call& c) { c.args.source = tensor_of(c.source.data(), MOEC_F32, {2, 32, 6}); }, false},
    {"source_dtype", kFp8, MOEC_E_DTYPE, "source has dtype f16; expected f32",
     [](Call& c) { c.args.source = tensor_of(c.source.data(), MOEC_F16, {2, 6, 32}); }, false},
    {"codes_dtype", kFp8, MOEC_E_DTYPE, "codes has dtype u8; expected e4m3",
     [](Call& c) { c.args.codes.dtype = MOEC_U8; }, false},
    {"no_codebook", kNf4, MOEC_E_INVALID_ARG, "quant.codebook is absent; it is required",
     [](Call& c) { c.quant.codebook = {}; }, false},
    {"zeros", kInt4, MOEC_E_INVALID_ARG, "quant.zeros is given; this kind writes none",
     [](Call& c) { c.quant.zeros = c.quant.scales; }, false},
    {"scales_shape", kInt4, MOEC_E_SHAPE, "quant.scales has shape [2,6]; expected [2,6,1]",
     [](Call& c) { c.quant.scales.ndim = 2; }, false},
    {"block_of_quant", kNf4, MOEC_E_INVALID_ARG, "quant.block_k is 128; the query says 64",
     [](Call& c) { c.quant.block_k = 128; }, false},
    {"flags_of_quant", MOEC_QUANTISE_NVFP4, MOEC_E_INVALID_ARG,
     "quant.flags is 0x1; the query says 0x0", [](Call& c) { c.quant.flags = 1; }, false},
    {"arrays", kInt4, MOEC_E_INVALID_ARG, "quant has arrays of one tensor an expert",
     [](Call& c) { c.quant.per_expert_scales = &c.quant.scales; }, false},
    {"overlap", kFp8, MOEC_E_ALIAS, "codes [",
     [](Call& c) { c.args.codes.data = c.quant.scales.data; }, false},
    {"over_the_source", kFp8, MOEC_E_ALIAS, "overlaps source",
     [](Call& c) { c.args.codes.data = c.source.data(); }, false},
    {"no_desc", kFp8, MOEC_E_INVALID_ARG, "args.desc is NULL",
     [](Call& c) { c.args.desc = nullptr; }, false},
    {"no_quant", kFp8, MOEC_E_INVALID_ARG, "args.quant is NULL",
     [](Call& c) { c.args.quant = nullptr; }, false},
    {"workspace", MOEC_QUANTISE_NVFP4, MOEC_E_WORKSPACE, "workspace",
     [](Call& c) { c.args.workspace = {c.outputs.data() + 12288, 8}; }, false}};

class Errors : public testing::TestWithParam<Row> {};
INSTANTIATE_TEST_SUITE_P(Quantise, Errors, testing::ValuesIn(kRows),
                         [](const auto& one) { return std::string(one.param.name); });

TEST_P(Errors, has_its_code_and_writes_nothing) {
  const Row& row = GetParam();
  Call call(row.kind);
  if (!row.of_query) call.take_memory();
  row.spoil(call);
  EXPECT_EQ(row.of_query ? call.query() : call.run(), row.expected);
  const moec_error_info error = error_info();
  EXPECT_NE(std::string(error.message).find(row.text), std::string::npos) << error.message;
  EXPECT_LT(std::string(error.message).size(), 250u);
  EXPECT_EQ(call.outputs, std::vector<uint8_t>(call.outputs.size(), Problem::kFill));
  EXPECT_EQ(call.source, std::vector<uint8_t>(call.source.size()));
}

TEST(Quantise, TheUnspoiltCallsSucceed) {
  for (uint32_t kind = 0; kind < 8; ++kind) {
    Call call(kind);
    call.take_memory();
    EXPECT_EQ(call.run(), MOEC_OK) << error_info().message;
  }
}

TEST(Quantise, QuerySaysWhatCheckpointsHave) {
  Call call(MOEC_QUANTISE_NF4);
  call.desc.flags = MOEC_QUANTISE_NESTED;
  call.desc.orientation = MOEC_IN_OUT;
  check(call.query());
  EXPECT_EQ(call.info.scheme, uint32_t(MOEC_SCHEME_CODEBOOK4));
  EXPECT_EQ(call.info.codes.shape[0], Call::E * Call::N * Call::K / 2);
  EXPECT_EQ(call.quant.scales.dtype, moec_dtype(MOEC_U8));
  EXPECT_EQ(call.quant.scales.shape[0], 6);
  EXPECT_EQ(call.quant.block_n, 64);
  EXPECT_EQ(call.quant.block_k, 0);
  EXPECT_EQ(call.quant.scale_block, 256);
  EXPECT_EQ(call.quant.struct_size, sizeof(moec_quant));
}

}  // namespace
}  // namespace moec::test
