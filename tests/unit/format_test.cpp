// SPDX-License-Identifier: Apache-2.0
// Values of quantised matrices bit for bit as the libraries that define the formats give them, by
// the engine's definition and by the oracle. Shown once to fail: zero points left out, a scale of
// the channel before.
#include <gtest/gtest.h>

#include <ostream>
#include <string>

#include "core/dtype.h"
#include "golden/golden_case.h"
#include "quant/format.h"

namespace moec::quant {
namespace {

using golden::golden_path;
using oracle::Rounding;
using test::SafeTensors;
using test::StoredTensor;

struct Case {
  const char *name, *file;
  uint32_t scheme;
  const char *prefix, *expected;  // of the tensors of a type
  moec_dtype dtype;
};
void PrintTo(const Case& c, std::ostream* out) {
  *out << c.name;
}
const Case kCases[] = {
    {"int8_f32", "formats/ct_int8_channel", MOEC_SCHEME_INT8, "", "dequant_fp32", MOEC_F32},
    {"int8_bf16", "formats/ct_int8_channel", MOEC_SCHEME_INT8, "bf16.", "bf16.dequant", MOEC_BF16},
    {"int8_asym_f32", "formats/ct_int8_channel_asym", MOEC_SCHEME_INT8, "", "dequant_fp32",
     MOEC_F32},
    {"int8_asym_bf16", "formats/ct_int8_channel_asym", MOEC_SCHEME_INT8, "bf16.", "bf16.dequant",
     MOEC_BF16},
};

class Values : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Formats, Values, testing::ValuesIn(kCases),
                         [](const auto& one) { return std::string(one.param.name); });

TEST_P(Values, are_those_of_the_library) {
  const Case& c = GetParam();
  const SafeTensors file =
      test::load_safetensors(golden_path(std::string(c.file) + ".safetensors"));
  const StoredTensor& stack = file.at(c.expected);
  const oracle::Vec expected = stack.as_double();
  const int64_t N = stack.shape[1], K = stack.shape[2];
  for (int64_t e = 0; e < stack.shape[0]; ++e) {
    const std::string prefix = c.prefix + std::to_string(e) + ".weight";
    const StoredTensor &codes = file.at(prefix), &scales = file.at(prefix + "_scale");
    const std::string zeros = prefix + "_zero_point";
    CodedView m;
    m.codes = codes.bytes.data();
    m.row_stride = K;
    m.col_stride = 1;
    m.scheme = c.scheme;
    m.scales = {scales.bytes.data(), 1, 0, BlockSize(), BlockSize::all_of(K), c.dtype};
    oracle::Coded coded{codes.as_double(), scales.as_double(), {}};
    if (file.has(zeros)) {
      m.zeros = {file.at(zeros).bytes.data(), 1, 0, BlockSize(), BlockSize::all_of(K), MOEC_I8};
      coded.zeros = file.at(zeros).as_double();
    }
    const bool bf16 = c.dtype == MOEC_BF16;
    const oracle::Vec oracle =
        oracle::dequantise_int8(coded, bf16 ? Rounding::kBf16 : Rounding::kFp32);
    for (int64_t i = 0; i < N * K; ++i) {
      const double value = expected[size_t(e * N * K + i)];
      ASSERT_EQ(round_real(c.dtype, value_at(m, i / K, i % K)), value) << e << " " << i;
      ASSERT_EQ(oracle[size_t(i)], value) << e << " " << i;
    }
  }
}

TEST(Formats, are_found_by_their_scheme) {
  Formats::for_each([]<class Format>() {
    const FormatInfo* const found = find_format(Format::kInfo.scheme);
    ASSERT_NE(found, nullptr);
    EXPECT_STREQ(found->name, Format::kInfo.name);
  });
  EXPECT_EQ(find_format(MOEC_SCHEME_NONE), nullptr);
}

TEST(Formats, have_the_order_of_moec_h) {  // docs/_ext/tables.py takes both lists side by side
  for (int i = 0; i < Formats::kCount; ++i)
    EXPECT_EQ(Formats::kInfos[i].scheme, MOEC_SCHEME_NONE + 1u + uint32_t(i));
}

TEST(BlockSizes, divide_as_integers_do) {
  for (const int64_t size : {1, 2, 3, 24, 32, 100, 4096}) {
    const BlockSize block(size);
    for (const int64_t extent : {1, 2, 31, 32, 33, 99, 4095, 4096, 4097, 100000}) {
      EXPECT_EQ(block.of(extent), extent / size);
      EXPECT_EQ(block.count(extent), (extent + size - 1) / size);
    }
  }
  EXPECT_EQ(BlockSize::all_of(100).of(99), 0);
  EXPECT_EQ(BlockSize::all_of(100).count(100), 1);
}

}  // namespace
}  // namespace moec::quant
