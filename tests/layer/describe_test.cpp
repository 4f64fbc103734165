// SPDX-License-Identifier: Apache-2.0
// moec_experts_describe of coded matrices on the CPU. Where experts have few rows in bf16, codes
// that lie along the summed axis are multiplied as they lie; everything else is made values first,
// and has the kernels of plain matrices. Shown once to fail: kernels by the types of rows and
// values alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <string>

#include "support/describe.h"
#include "support/quantised.h"
#include "support/skip.h"

namespace moec::test {
namespace {

constexpr int kExperts = 2, kHidden = 128, kInter = 64;

struct Case {
  const char* format;  // of kQuantCases; null: plain
  bool in_out;
  bool forward, backward;  // whether few rows in bf16 are multiplied with codes there
};
void PrintTo(const Case& c, std::ostream* out) {
  *out << (c.format ? c.format : "plain") << (c.in_out ? " in_out" : " out_in");
}

class Described {
 public:
  Described(const char* format, bool in_out, moec_dtype dtype) {
    auto desc = sized<moec_weights_desc>();
    desc.num_experts = kExperts;
    desc.hidden = kHidden;
    desc.inter = kInter;
    desc.gate_layout = MOEC_GATE_SPLIT;
    desc.gate_up_orientation = desc.down_orientation = in_out ? MOEC_IN_OUT : MOEC_OUT_IN;
    desc.dtype = dtype;
    auto set = sized<moec_weight_set>();
    for (moec_matrix* m : {&set.gate, &set.up, &set.down}) {
      const int64_t N = m == &set.down ? kHidden : kInter, K = kHidden + kInter - N;
      if (format) {
        const auto found = std::find_if(kQuantCases.begin(), kQuantCases.end(),
                                        [&](auto& one) { return one.name == std::string(format); });
        matrices_.push_back({random_quantised(*found, kExperts, N, K, in_out, 1, &random_)});
        *m = binder_.matrix(matrices_.back());
        desc.gate_up_scheme = desc.down_scheme = uint32_t(found->scheme);
      } else {
        m->data = tensors_.output(dtype, {kExperts, in_out ? K : N, in_out ? N : K});
      }
    }
    weights_ = make<Weights>(moec_weights_create, test_context(), &desc);
    check(moec_weights_bind(weights_.get(), &set));
    auto experts = sized<moec_experts_desc>();
    experts.hidden = kHidden;
    experts.inter = kInter;
    experts.num_experts = kExperts;
    experts.top_k = 1;
    experts.dtype = dtype;
    experts.save = MOEC_SAVE_PREACT;
    experts_ = make<Experts>(moec_experts_create, test_context(), &experts);
  }

  // "amx bf16 32x32" and its like of each step, forward and backward.
  std::map<std::string, std::string> operator()(int64_t tokens) const {
    const Json json = describe_experts(experts_.get(), weights_.get(), tokens);
    std::map<std::string, std::string> kernels;
    for (const char* direction : {"forward", "backward"})
      for (const Json& entry : json.at(direction).at("kernels").array)
        kernels[entry.at("step").string] =
            entry.at("kernel").string + ' ' + entry.at("tile").string;
    return kernels;
  }

 private:
  Random random_;
  Tensors tensors_;
  QuantBinder binder_{tensors_};
  std::deque<QuantisedMatrix> matrices_;
  Weights weights_;
  Experts experts_;
};

class Describe : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(
    Formats, Describe,
    testing::Values(Case{"int8", false, true, false}, Case{"int8", true, false, false},
                    Case{"codebook4_64", false, true, false},
                    Case{"codebook4_64", true, false, true}, Case{"mxfp4", false, true, false},
                    Case{"mxfp4", true, false, true}, Case{"nvfp4", false, false, false}));

TEST_P(Describe, names_the_kernels_of_codes_where_experts_have_few_rows) {
  const Case& c = GetParam();
  const Described coded(c.format, c.in_out, MOEC_BF16), plain(nullptr, c.in_out, MOEC_BF16);
  auto few = coded(kExperts), of_values = plain(kExperts);
  for (const char* gradient : {"d_down", "d_gate_up"}) of_values.erase(gradient);  // none of codes
  ASSERT_EQ(few.size(), 4u);
  const std::string isa = few.at("d_x").substr(0, few.at("d_x").find(' '));
  for (const auto& [step, kernel] : few) {
    const bool takes_codes = step.starts_with("d_") ? c.backward : c.forward;
    EXPECT_EQ(kernel, takes_codes ? isa + " codes 1x16" : of_values.at(step)) << step;
  }
}

// Where instruction sets multiply lines of decoded values, along k in bf16.
const std::map<std::string, std::string> kOfLines = {{"avx512bf16", "avx512bf16 values 6x4"},
                                                     {"amx", "amx values 32x32"}};

TEST_P(Describe, names_the_kernels_of_values_elsewhere) {
  const Case& c = GetParam();
  for (const moec_dtype dtype : {MOEC_BF16, MOEC_F16, MOEC_F32}) {
    const Described coded(c.format, c.in_out, dtype), plain(nullptr, c.in_out, dtype);
    for (const int rows : {1, 4, 5, 100}) {
      if (dtype == MOEC_BF16 && rows <= 4) continue;
      const auto kernels = coded(rows * kExperts), of_values = plain(rows * kExperts);
      for (const auto& [step, kernel] : kernels) {
        const auto lines =
            kOfLines.find(of_values.at(step).substr(0, of_values.at(step).find(' ')));
        const bool along_k = step.starts_with("d_") ? c.backward : c.forward;
        const bool decoded = dtype == MOEC_BF16 && along_k && lines != kOfLines.end();
        EXPECT_EQ(kernel, decoded ? lines->second : of_values.at(step)) << step;
      }
    }
  }
}

}  // namespace
}  // namespace moec::test
