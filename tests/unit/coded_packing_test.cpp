// SPDX-License-Identifier: Apache-2.0
// How a device without a layout of its own packs codes, on the CPU's backend: the same bytes as the
// CPU's copy, views that give every value and bias, and each tensor back bit for bit.
// Mutation noted: with the biases' padding not cleared, the copies differ.
#include "backend/coded_packing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "backend/cpu/packing.h"
#include "backend/packed_layout.h"
#include "core/workspace.h"

namespace moec::test {
namespace {

constexpr int64_t E = 3, H = 21, I = 10;

// INT8 by channels: up one tensor an expert with biases of bf16, down a stack whose biases, of f32,
// are every second of an array.
struct Codes {
  std::vector<int8_t> up = std::vector<int8_t>(E * I * H), down = std::vector<int8_t>(E * H * I);
  std::vector<float> up_scales = std::vector<float>(E * I), down_scales = std::vector<float>(E * H),
                     down_bias = std::vector<float>(2 * E * H);
  std::vector<uint16_t> up_bias = std::vector<uint16_t>(E * I);
  std::vector<void*> pointers;
  WeightsView view;

  explicit Codes(int seed) {
    const auto fill = [&](auto& values, auto of) {
      for (size_t i = 0; i < values.size(); ++i) values[i] = of(int(i) * 37 + seed);
    };
    const auto code = [](int i) { return int8_t(i % 251); };
    const auto real = [](int i) { return float(i % 97) / 64; };
    fill(up, code), fill(down, code);
    fill(up_scales, real), fill(down_scales, real), fill(down_bias, real);
    fill(up_bias, [](int i) { return uint16_t(0x3f80 + i % 64); });
    for (int64_t e = E; e-- > 0;) pointers.push_back(&up[size_t(e * I * H)]);
    for (int64_t e = 0; e < E; ++e) pointers.push_back(&up_bias[size_t(e * I)]);
    view.hidden = H, view.inter = I, view.num_experts = E;
    view.up = matrix(I, H, up_scales);
    view.up.values = {nullptr, pointers.data(), 0, 0, MOEC_I8};
    view.up.values.expert_stride = I * H;
    view.up.bias = {nullptr, pointers.data() + E, 0, 0, MOEC_BF16};
    view.down = matrix(H, I, down_scales);
    view.down.values = {down.data(), nullptr, H * I, 0, MOEC_I8};
    view.down.bias = {down_bias.data(), nullptr, 2 * H, 0, MOEC_F32};
    view.down.bias_stride = 2;
  }
  static ExpertMatrix matrix(int64_t n, int64_t k, std::vector<float>& scales) {
    ExpertMatrix m;
    m.scheme = MOEC_SCHEME_INT8;
    m.dtype = MOEC_BF16;
    m.row_stride = k;
    m.col_stride = 1;
    m.scales = {{scales.data(), nullptr, n, 0, MOEC_F32},
                1,
                1,
                quant::BlockSize(1),
                quant::BlockSize::all_of(k)};
    return m;
  }
};

class CodedPackingTest : public testing::Test {
 protected:
  char* begin() { return reinterpret_cast<char*>(round_up(uint64_t(memory.data()), kCacheLine)); }
  WeightsView packed() {
    memory.assign(packing.bytes(codes.view) + kCacheLine, 0x5a);
    packing.pack(codes.view, begin(), 0, E, nullptr);
    return packing.view(codes.view, nullptr, begin(), packing.bytes(codes.view));
  }
  // All values of up, its biases, and those of down, as `weights` has them.
  std::vector<float> values(const WeightsView& weights) const {
    std::vector<float> all;
    for (const Part part : {Part::kUp, Part::kDown}) {
      const ExpertMatrix& m = matrix_of(weights, part);
      const auto [n, k] = shape_of(weights, part);
      for (int64_t e = 0; e < E; ++e) {
        std::vector<float> matrix(size_t(n * k));
        backend->run(ValuesArgs{&m, e, n, k, {matrix.data(), k, 1, MOEC_F32}}, nullptr);
        all.insert(all.end(), matrix.begin(), matrix.end());
      }
      for (int64_t e = 0; e < E; ++e)
        for (int64_t i = 0; i < n; ++i) {
          const MatrixView bias = m.bias_of(e);
          all.push_back(load_real(bias.data, bias.dtype, i * bias.row_stride));
        }
    }
    return all;
  }

  const std::unique_ptr<Backend> backend = make_cpu_backend({});
  const CodedPacking packing{*backend};
  Codes codes{1};
  std::vector<char> memory;
};

TEST_F(CodedPackingTest, has_the_bytes_of_the_cpu) {
  packed();
  const ThreadPool pool(1);
  const cpu::CpuPacking own(pool);
  ASSERT_EQ(own.bytes(codes.view), packing.bytes(codes.view));
  EXPECT_EQ(own.format(codes.view), packing.format(codes.view));
  EXPECT_EQ(packing.format(codes.view), "codes-bf16-int8-int8-v1");
  std::vector<char> expected(packing.bytes(codes.view), 0x77);
  own.pack(codes.view, expected.data(), 0, E, nullptr);
  EXPECT_EQ(std::memcmp(begin(), expected.data(), expected.size()), 0);
}

TEST_F(CodedPackingTest, is_read_without_the_source) {
  const std::vector<float> expected = values(codes.view);
  const WeightsView view = packed();
  EXPECT_FALSE(view.up.values.pointers);
  EXPECT_FALSE(view.up.bias.pointers);
  codes = Codes(2);
  EXPECT_EQ(values(view), expected);
  EXPECT_NE(values(codes.view), expected);
  // As a file has it: the bytes say how codes lie.
  WeightsView unbound = codes.view;
  unbound.up.row_stride = unbound.down.row_stride = 1;
  unbound.source_present = false;
  const std::vector<char> head(begin(), begin() + packing.bytes(view));
  EXPECT_EQ(values(packing.view(unbound, head.data(), begin(), head.size())), expected);
  EXPECT_THROW(packing.view(unbound, head.data(), begin(), head.size() - 1), Error);
}

TEST_F(CodedPackingTest, is_unpacked_bit_for_bit) {
  const WeightsView view = packed();
  Codes other(2);
  std::vector<float> expected = other.down_bias;
  for (size_t i = 0; i < expected.size(); i += 2) expected[i] = codes.down_bias[i];
  packing.unpack(view, other.view, nullptr);
  EXPECT_EQ(other.up, codes.up);
  EXPECT_EQ(other.down, codes.down);
  EXPECT_EQ(other.up_scales, codes.up_scales);
  EXPECT_EQ(other.down_scales, codes.down_scales);
  EXPECT_EQ(other.up_bias, codes.up_bias);
  EXPECT_EQ(other.down_bias, expected) << "what lies between biases stays";
  other.view.up.values.dtype = MOEC_U8;
  EXPECT_THROW(packing.unpack(view, other.view, nullptr), Error);
}

TEST_F(CodedPackingTest, is_refreshed_by_experts) {
  const WeightsView view = packed();
  Codes before(1);
  for (auto* bytes : {&codes.up, &codes.down}) std::fill(bytes->begin(), bytes->end(), int8_t(9));
  std::fill(codes.up_bias.begin(), codes.up_bias.end(), uint16_t(0x4000));
  packing.pack(codes.view, begin(), 1, 1, nullptr);
  const std::vector<float> got = values(view), old = values(before.view), now = values(codes.view);
  for (size_t i = 0; i < got.size(); ++i) {
    const size_t up = size_t(E * I * H + E * I);  // values of up, and its biases
    const size_t in = i < up ? i : i - up, all = i < up ? size_t(I * H) : size_t(H * I);
    const bool is_value = in < size_t(E) * all;
    const size_t e = is_value ? in / all : (in - size_t(E) * all) / size_t(i < up ? I : H);
    EXPECT_EQ(got[i], e == 1 ? now[i] : old[i]) << i;
  }
}

TEST_F(CodedPackingTest, takes_no_plain_matrix) {
  EXPECT_TRUE(packing.takes(codes.view));
  codes.view.down.scheme = MOEC_SCHEME_NONE;
  EXPECT_FALSE(packing.takes(codes.view));
  EXPECT_EQ(packing.bytes(codes.view), 0u);
}

}  // namespace
}  // namespace moec::test
