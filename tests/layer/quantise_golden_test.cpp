// SPDX-License-Identifier: Apache-2.0
// moec_quantise: the bytes of the libraries that define the formats. Shown once to fail: 0.75 of
// E2M1 as a tie that goes down, a mean of nested scales over one more.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <ostream>
#include <string>

#include "golden/golden_case.h"
#include "support/quantise_case.h"

namespace moec::test {
namespace {

using golden::golden_path;

struct Golden {
  const char *file, *codes;  // the stored name of the codes
  QuantiseCase c;
  bool stack;  // one stream
  const char* prefix = "";
};
void PrintTo(const Golden& g, std::ostream* out) {
  *out << g.file;
}
QuantiseCase kind(uint32_t which, uint32_t flags = 0, int64_t block_k = 0, int64_t block_n = 0) {
  QuantiseCase c;
  c.kind = which;
  c.flags = flags;
  c.block_k = block_k;
  c.block_n = block_n;
  return c;
}
constexpr uint32_t kNested = MOEC_QUANTISE_NESTED, kAsymmetric = MOEC_QUANTISE_ASYMMETRIC;
constexpr int64_t kWhole = 1 << 20;  // more than any extent
const Golden kGoldens[] = {
    {"bnb_nf4_b64", "weight", kind(MOEC_QUANTISE_NF4), false},
    {"bnb_nf4_b128", "weight", kind(MOEC_QUANTISE_NF4, 0, 128), false},
    {"bnb_nf4_b64_stack", "weight", kind(MOEC_QUANTISE_NF4), true},
    {"bnb_nf4_b64_nested", "weight", kind(MOEC_QUANTISE_NF4, kNested), false},
    {"bnb_nf4_b128_nested", "weight", kind(MOEC_QUANTISE_NF4, kNested, 128), false},
    {"bnb_nf4_b64_nested_stack", "weight", kind(MOEC_QUANTISE_NF4, kNested), true},
    {"bnb_fp4_b64", "weight", kind(MOEC_QUANTISE_FP4), false},
    {"bnb_fp4_b128", "weight", kind(MOEC_QUANTISE_FP4, 0, 128), false},
    {"bnb_fp4_b64_nested", "weight", kind(MOEC_QUANTISE_FP4, kNested), false},
    {"bnb_fp4_b128_nested", "weight", kind(MOEC_QUANTISE_FP4, kNested, 128), false},
    {"ct_int8_channel", "weight", kind(MOEC_QUANTISE_INT8), false},
    {"ct_int8_channel", "weight", kind(MOEC_QUANTISE_INT8), false, "bf16."},
    {"ct_int8_channel_asym", "weight", kind(MOEC_QUANTISE_INT8, kAsymmetric), false},
    {"ct_int8_channel_asym", "weight", kind(MOEC_QUANTISE_INT8, kAsymmetric), false, "bf16."},
    {"ct_int4_channel", "weight_packed", kind(MOEC_QUANTISE_INT4), false},
    {"ct_int4_channel", "weight_packed", kind(MOEC_QUANTISE_INT4), false, "bf16."},
    {"ct_int4_g32_sym", "weight_packed", kind(MOEC_QUANTISE_INT4, 0, 32), false},
    {"ct_int4_g32_sym", "weight_packed", kind(MOEC_QUANTISE_INT4, 0, 32), false, "bf16."},
    {"ct_int4_g128_sym", "weight_packed", kind(MOEC_QUANTISE_INT4, 0, 128), false},
    {"ct_int4_g128_sym", "weight_packed", kind(MOEC_QUANTISE_INT4, 0, 128), false, "bf16."},
    {"ct_int4_g32_asym", "weight_packed", kind(MOEC_QUANTISE_INT4, kAsymmetric, 32), false},
    {"ct_int4_g32_asym", "weight_packed", kind(MOEC_QUANTISE_INT4, kAsymmetric, 32), false,
     "bf16."},
    {"ct_fp8_tensor", "weight", kind(MOEC_QUANTISE_FP8, 0, kWhole, kWhole), false},
    {"ct_fp8_tensor", "weight", kind(MOEC_QUANTISE_FP8, 0, kWhole, kWhole), false, "bf16."},
    {"ct_fp8_channel", "weight", kind(MOEC_QUANTISE_FP8), false},
    {"ct_fp8_channel", "weight", kind(MOEC_QUANTISE_FP8), false, "bf16."},
    {"ct_fp8_block128", "weight", kind(MOEC_QUANTISE_FP8, 0, 128, 128), false},
    {"ct_fp8_block128", "weight", kind(MOEC_QUANTISE_FP8, 0, 128, 128), false, "bf16."},
    {"ct_mxfp8", "weight", kind(MOEC_QUANTISE_MXFP8), false},
    {"ct_mxfp8", "weight", kind(MOEC_QUANTISE_MXFP8), false, "bf16."},
    {"ct_mxfp4", "weight_packed", kind(MOEC_QUANTISE_MXFP4), false},
    {"ct_mxfp4", "weight_packed", kind(MOEC_QUANTISE_MXFP4), false, "bf16."},
    {"ct_nvfp4", "weight_packed", kind(MOEC_QUANTISE_NVFP4, MOEC_QUANTISE_SCALES2_DIVIDES), false},
    {"ct_nvfp4", "weight_packed", kind(MOEC_QUANTISE_NVFP4, MOEC_QUANTISE_SCALES2_DIVIDES), false,
     "bf16."}};

class Goldens : public testing::TestWithParam<Golden> {};
INSTANTIATE_TEST_SUITE_P(Quantise, Goldens, testing::ValuesIn(kGoldens), [](const auto& one) {
  const Golden& g = one.param;
  return g.file + std::string(*g.prefix ? "_bf16" : "_f32");
});

// u8 scales of nested statistics may be the neighbour where they lie between two: bitsandbytes'
// CPU kernel has an approximate reciprocal (1 of 144 to 576 in these files).
void expect_nested_scales(const std::vector<uint8_t>& got, const std::vector<uint8_t>& want) {
  ASSERT_EQ(got.size(), want.size());
  int others = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    if (got[i] == want[i]) continue;
    ++others;
    EXPECT_LE(std::abs(int(got[i]) - int(want[i])), 1) << "scale " << i;
  }
  std::printf("  %d of %zu nested scales are the neighbour\n", others, got.size());
  EXPECT_LE(others, 1);
}

TEST_P(Goldens, bytes_are_those_of_the_library) {
  const Golden& g = GetParam();
  const auto file =
      load_safetensors(golden_path("formats/" + std::string(g.file) + ".safetensors"));
  const StoredTensor& w = file.at("w");
  const std::vector<double> values = w.as_double();
  QuantiseCase c = g.c;
  const bool bnb = c.is_stream();
  // bitsandbytes was given bf16; compressed-tensors f32 and bf16.
  if (bnb || *g.prefix) c.dtype = MOEC_BF16;
  c.num_experts = g.stack ? w.shape[0] : 1;
  c.out_features = w.shape[1];
  c.in_features = w.shape[2];
  const int64_t count = int64_t(c.count());
  for (int64_t e = 0; e < int64_t(values.size()) / count; ++e) {
    SCOPED_TRACE("expert " + std::to_string(e));
    const QuantisedBytes got =
        quantise(test_context(), c, {values.begin() + e * count, values.begin() + (e + 1) * count});
    const std::string prefix = g.stack ? "" : g.prefix + std::to_string(e) + ".";
    EXPECT_EQ(got.codes, file.at(prefix + g.codes).bytes);
    if (!bnb) {
      EXPECT_EQ(got.scales, file.at(prefix + "weight_scale").bytes);
      const auto stored = [&](const char* name) {
        return file.has(prefix + name) ? file.at(prefix + name).bytes : std::vector<uint8_t>();
      };
      EXPECT_EQ(got.zeros, stored("weight_zero_point"));
      EXPECT_EQ(got.scales2, stored("weight_global_scale"));
      continue;
    }
    EXPECT_EQ(got.codebook, file.at(prefix + "quant_map").bytes);
    const std::vector<uint8_t>& scales = file.at(prefix + "absmax").bytes;
    if (!(c.flags & kNested)) {
      EXPECT_EQ(got.scales, scales);
      continue;
    }
    expect_nested_scales(got.scales, scales);
    EXPECT_EQ(got.scales2, file.at(prefix + "nested_absmax").bytes);
    EXPECT_EQ(got.scale_book, file.at(prefix + "nested_quant_map").bytes);
    EXPECT_EQ(got.scale_offset, file.at(prefix + "nested_offset").bytes);
  }
}

}  // namespace
}  // namespace moec::test
