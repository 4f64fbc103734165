// SPDX-License-Identifier: Apache-2.0
// moec_weights_dequantise: values of quantised matrices bit for bit as the libraries that define
// the formats give them, and as the oracle computes them from the same bytes, for every format,
// option, orientation and way to bind. Shown once to fail, planted in the oracle: a scale of the
// block before, nibbles exchanged, zero points of GPTQ less 1, nested scales rounded once.
#include <gtest/gtest.h>

#include <cmath>

#include "golden/golden_case.h"
#include "support/handles.h"
#include "support/layer_runner.h"
#include "support/quantised.h"
#include "support/skip.h"

namespace moec::test {
namespace {

using oracle::Rounding;
using oracle::Vec;

moec_weights_desc desc_of(const QuantisedMatrix& matrix, moec_dtype dtype) {
  auto desc = sized<moec_weights_desc>();
  desc.num_experts = int32_t(matrix.size() > 1 ? int64_t(matrix.size()) : matrix[0].experts);
  desc.gate_layout = MOEC_GATE_NONE;
  desc.hidden = matrix[0].K;
  desc.inter = matrix[0].N;
  desc.gate_up_orientation = matrix[0].in_out ? MOEC_IN_OUT : MOEC_OUT_IN;
  desc.dtype = dtype;
  desc.gate_up_scheme = uint32_t(matrix[0].scheme);
  return desc;
}

// [E,N,K] of a matrix that is bound as `up`, in a type of the output.
Vec values_of(const QuantisedMatrix& matrix, moec_dtype out, bool whole_shape = false) {
  Tensors tensors;
  QuantBinder binder(tensors);
  const moec_weights_desc desc = desc_of(matrix, MOEC_BF16);
  const int64_t E = desc.num_experts, N = desc.inter, K = desc.hidden;
  auto set = sized<moec_weight_set>();
  set.up = binder.matrix(matrix, whole_shape);
  set.down.data = tensors.input(Vec(size_t(E * N * K), 0.5), MOEC_BF16, {E, K, N});
  const auto weights = make<Weights>(moec_weights_create, test_context(), &desc);
  check(moec_weights_bind(weights.get(), &set));
  const bool in_out = matrix[0].in_out;
  Vec stored;
  for (int32_t e = 0; e < E; ++e) {
    const moec_tensor to = tensors.output(out, {in_out ? K : N, in_out ? N : K});
    check(moec_weights_dequantise(weights.get(), MOEC_MATRIX_UP, e, &to, nullptr));
    check(moec_context_sync(test_context(), nullptr));
    const Vec one = tensors.read(to);
    stored.insert(stored.end(), one.begin(), one.end());
  }
  EXPECT_TRUE(tensors.neighbours_untouched());
  return golden::to_out_in({int(E), int(N), int(K), in_out}, stored);
}

void expect_same_bits(const Vec& got, const Vec& want) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    if (std::isnan(want[i]) && std::isnan(got[i])) continue;
    ASSERT_EQ(got[i], want[i]) << "at " << i;
    ASSERT_EQ(std::signbit(got[i]), std::signbit(want[i])) << "at " << i;
  }
}

// ---- the libraries' files
const char* const kLibraryFiles[] = {
    "bnb_fp4_b128",      "bnb_fp4_b128_nested",      "bnb_fp4_b64",      "bnb_fp4_b64_nested",
    "bnb_nf4_b128",      "bnb_nf4_b128_nested",      "bnb_nf4_b64",      "bnb_nf4_b64_nested",
    "bnb_nf4_b64_stack", "bnb_nf4_b64_nested_stack", "ct_fp8_block128",  "ct_fp8_channel",
    "ct_fp8_tensor",     "ct_int4_channel",          "ct_int4_g128_sym", "ct_int4_g32_asym",
    "ct_int4_g32_sym",   "ct_int8_channel",          "ct_mxfp4",         "ct_mxfp8",
    "ct_nvfp4",          "ct_int8_channel_asym"};

class Library : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Values, Library, testing::ValuesIn(kLibraryFiles),
                         [](const auto& one) { return std::string(one.param); });

TEST_P(Library, gives_the_same_values) {
  const std::string name = GetParam();
  const SafeTensors file =
      load_safetensors(golden::golden_path("formats/" + name + ".safetensors"));
  const bool bnb = name.starts_with("bnb");
  for (const bool bf16 : {false, true}) {
    SCOPED_TRACE(bf16 ? "bf16" : "f32");
    const std::string expected = bnb    ? bf16 ? "dequant_bf16" : "dequant_fp32"
                                 : bf16 ? "bf16.dequant"
                                        : "dequant_fp32";
    const StoredTensor& stack = file.at(expected);
    const int64_t E = stack.shape[0], N = stack.shape[1], K = stack.shape[2];
    QuantisedMatrix matrix;
    if (file.has("weight")) {
      matrix = {stored_matrix(file, "", N, K)};
      matrix[0].experts = E;
    } else {
      for (int64_t e = 0; e < E; ++e)
        matrix.push_back(
            stored_matrix(file, (bf16 && !bnb ? "bf16." : "") + std::to_string(e) + ".", N, K));
    }
    const bool in_bf16 = stack.dtype == "BF16";  // some give no other
    const Rounding rounding = in_bf16 ? Rounding::kBf16 : Rounding::kFp32;
    expect_same_bits(dequantise(matrix, rounding), stack.as_double());
    expect_same_bits(values_of(matrix, in_bf16 ? MOEC_BF16 : MOEC_F32), stack.as_double());
  }
}

const char* const kLayerFiles[] = {
    "awq_gemm_g32",          "bnb_fp4_stack_nested",      "bnb_nf4_gptoss_nested",
    "bnb_nf4_gptoss_square", "bnb_nf4_per_expert_nested", "bnb_nf4_stack",
    "bnb_nf4_stack_nested",  "bnb_nf4_straddle",          "ct_int4_g32_asym",
    "ct_int4_g32_sym",       "ct_int8_channel",           "ct_nvfp4",
    "fp8_block128_partial",  "gptq_v1_asym_actorder",     "gptq_v1_sym",
    "gptq_v2_asym",          "gptq_v2_sym_actorder",      "modelopt_nvfp4",
    "mxfp4_gptoss"};
class LayerFile : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Values, LayerFile, testing::ValuesIn(kLayerFiles),
                         [](const auto& one) { return std::string(one.param); });

// 256 samples of the stack as transformers holds it, in fp32 and in the library's own type.
TEST_P(LayerFile, gives_the_same_values) {
  const SafeTensors file =
      load_safetensors(golden::golden_path(std::string("quant/") + GetParam() + ".safetensors"));
  const bool in_out = file.metadata.at("stack_orientation") == "in_out";
  const moec_dtype own = file.metadata.at("lib_dtype") == "float16" ? MOEC_F16 : MOEC_BF16;
  for (const std::string matrix : {"gate_up_proj", "down_proj"})
    for (const moec_dtype dtype : {moec_dtype(MOEC_F32), own}) {
      SCOPED_TRACE(matrix);
      const std::string base = "dequant." + matrix + ".";
      Vec values;
      int64_t experts = 0, N = 0, K = 0;
      const auto append = [&](const std::string& name) {
        const QuantisedMatrix one = golden_matrix(file, name);
        experts = one.size() > 1 ? int64_t(one.size()) : one[0].experts;
        N += one[0].N;
        K = one[0].K;
        return values_of(one, dtype, one[0].scheme == oracle::Scheme::kMxfp4);
      };
      const bool stacked = matrix == "down_proj" || file.has("ckpt.experts.gate_up_proj") ||
                           file.has("ckpt.experts.gate_up_proj_blocks");
      if (stacked) {
        values = append(matrix);
      } else {
        const Vec gate = append("gate_proj"), up = append("up_proj");
        values = golden::join_gate_up({int(experts), int(N), int(K), false},
                                      golden::GateLayout::kGateThenUp, gate, up);
      }
      values = golden::from_out_in({int(experts), int(N), int(K), in_out}, values);
      const Vec index = file.at(base + "index").as_double();
      const Vec want = file.at(base + (dtype == MOEC_F32 ? "value" : "value_lib")).as_double();
      Vec got;
      for (const double i : index) got.push_back(values[size_t(i)]);
      for (size_t i = 0; i < got.size(); ++i) ASSERT_EQ(got[i], want[i]) << index[i];
    }
}

// ---- every format beside the oracle

class Formats : public testing::TestWithParam<QuantCase> {};
INSTANTIATE_TEST_SUITE_P(Values, Formats, testing::ValuesIn(kQuantCases),
                         [](const auto& one) { return std::string(one.param.name); });

TEST_P(Formats, have_the_values_of_the_oracle) {
  SCOPED_TRACE(seed_note());
  const QuantCase& c = GetParam();
  Random random(21);
  constexpr int kExperts = 3, kSizes[][2] = {{1, 1}, {5, 3}, {31, 45}, {72, 40}, {130, 150}};
  for (const bool in_out : {false, true})
    for (const auto& size : kSizes) {
      if (in_out ? c.only_out_in : c.only_in_out) continue;
      // Rows and columns change places where a format packs along the contiguous axis.
      const bool turned = in_out && !c.only_in_out;
      const int n = turned ? c.multiple_k : c.multiple_n, k = turned ? c.multiple_n : c.multiple_k;
      const int N = (size[0] + n - 1) / n * n, K = (size[1] + k - 1) / k * k;
      SCOPED_TRACE(std::to_string(N) + " x " + std::to_string(K) + (in_out ? " in_out" : ""));
      QuantisedMatrix stack = {random_quantised(c, kExperts, N, K, in_out, 1, &random)}, each;
      for (int e = 0; e < kExperts; ++e)
        each.push_back(random_quantised(c, 1, N, K, in_out, 1, &random));
      for (QuantisedMatrix* matrix : {&stack, &each}) {
        SCOPED_TRACE(matrix == &each ? "per expert" : "stacked");
        // One codebook serves all experts.
        for (Quantised& q : *matrix) {
          q.codebook = (*matrix)[0].codebook;
          q.scale_book = (*matrix)[0].scale_book;
        }
        const moec_dtype other = matrix == &each ? MOEC_BF16 : MOEC_F16;
        for (const moec_dtype dtype : {moec_dtype(MOEC_F32), other})
          expect_same_bits(values_of(*matrix, dtype, c.whole_shape),
                           dequantise(*matrix, rounding_of(dtype)));
      }
    }
}

// ---- every scale that is a power of two
TEST(Powers, OfTwo) {
  SCOPED_TRACE(seed_note());
  Random random(22);
  constexpr int N = 256, K = 32;  // row n has the scale 2^(n - 127); 255 is NaN
  int schemes = 0;
  for (const QuantCase& c : kQuantCases) {
    const bool own = c.scheme == oracle::Scheme::kGgufMxfp4;
    if (!own && (c.scale_type != oracle::Number::kE8m0 || c.whole_shape)) continue;
    SCOPED_TRACE(c.name);
    ++schemes;
    QuantisedMatrix matrix = {random_quantised(c, 1, N, K, false, 1, &random)};
    Quantised& q = matrix[0];
    for (size_t n = 0; n < N; ++n) (own ? q.codes[n * 17] : q.scales[n]) = uint8_t(n);
    for (const moec_dtype dtype : {MOEC_F32, MOEC_BF16, MOEC_F16}) {
      const Vec got = values_of(matrix, dtype);
      expect_same_bits(got, dequantise(matrix, rounding_of(dtype)));
      for (size_t i = 0; i < got.size(); ++i)
        ASSERT_EQ(std::isnan(got[i]), i / K == 255) << "row " << i / K;
    }
  }
  EXPECT_EQ(schemes, 3);  // MXFP4, MXFP8, GGUF's MXFP4
}

}  // namespace
}  // namespace moec::test
