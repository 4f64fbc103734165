// SPDX-License-Identifier: Apache-2.0
// moec_quantise for sizes, types and layouts that no vector has: the scale that the format asks for
// and the nearest code under it. Shown once to fail: the last short block left out, scales of NVFP4
// that are a fifth too large.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "support/quantise_case.h"
#include "support/random.h"
#include "support/tensors.h"

namespace moec::test {
namespace {

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

// ---- any size
// Values with a few large ones, a block of zeros now and then, rounded to the type.
std::vector<double> draw(const QuantiseCase& c, Random* random) {
  std::vector<double> values = random->normals(c.count(), 0.05);
  for (double& v : values) {
    if (random->below(50) == 0) v *= 8;
    if (random->below(20) == 0) v = 0;
  }
  const size_t zeros = std::min<size_t>(values.size(), size_t(random->below(300)));
  std::fill_n(values.begin(), zeros, 0.0);
  return decode(encode(values, c.dtype), c.dtype);
}
double epsilon(moec_dtype dtype) {
  return dtype == MOEC_BF16 ? 0x1p-8 : dtype == MOEC_F16 ? 0x1p-11 : 0x1p-24;
}

// The element that decides a scale: blocks are told apart by a number.
struct BlockRange {
  double low = 0, high = 0;
  double amax() const { return std::max(-low, high); }
};
int64_t block_number(const QuantiseCase& c, int64_t e, int64_t n, int64_t k) {
  const int64_t N = c.out_features, K = c.in_features;
  if (c.is_stream()) {
    const int64_t given = c.orientation == MOEC_OUT_IN ? c.block_k : c.block_n;
    return int64_t(c.index(e, n, k)) / (given ? given : 64);
  }
  const int64_t fixed = c.kind == MOEC_QUANTISE_NVFP4                                    ? 16
                        : c.kind == MOEC_QUANTISE_MXFP4 || c.kind == MOEC_QUANTISE_MXFP8 ? 32
                                                                                         : 0;
  const int64_t bk = fixed ? fixed : c.block_k ? c.block_k : K;
  const int64_t bn = c.kind == MOEC_QUANTISE_FP8 && c.block_n ? c.block_n : 1;
  return (e * N + n / bn) * ((K + bk - 1) / bk) + k / bk;
}

// The u8 scales of nested statistics are as far from what they stand for, as a part of the largest:
// half of 0.9 / 64, the step of the map.
constexpr double kNestedStep = 0.0071;

// The scale that the range of a block asks for. largest: of all blocks.
void expect_scale(const QuantiseCase& c, const BlockRange& range, double scale, double largest) {
  const double amax = range.amax(), close = 4 * epsilon(c.scale_dtype ? c.scale_dtype : c.dtype);
  const double steps = c.flags & kAsymmetric ? range.high - range.low : 2 * amax;
  if (amax < 1e-4) return;                           // types have their least scales
  double want = 0, factor = close, least = 0x1p-25;  // half of fp16's least number
  switch (c.kind) {
    case MOEC_QUANTISE_INT8:
      want = steps / 255;
      break;
    case MOEC_QUANTISE_INT4:
      want = steps / 15;
      break;
    case MOEC_QUANTISE_FP8:
      want = amax / 448;
      break;
    case MOEC_QUANTISE_MXFP8:
      ASSERT_TRUE(amax / scale >= 224 && amax / scale < 448);
      return;
    case MOEC_QUANTISE_MXFP4:
      ASSERT_TRUE(amax / scale >= 3.5 && amax / scale < 7);
      return;
    case MOEC_QUANTISE_NVFP4:
      want = amax / 6, factor = 0x1p-4;
      least = 0x1p-10 * largest / 2688;  // half of E4M3's least number
      break;
    default:
      want = amax;
      factor = 0;
      least = c.flags & kNested ? kNestedStep * largest : 0;
  }
  ASSERT_LE(std::fabs(scale - want), want * factor + least);
}

void check_case(const QuantiseCase& c, const std::vector<double>& source) {
  SCOPED_TRACE(c.text() + ", " + seed_note());
  const QuantisedBytes bytes = quantise(test_context(), c, source);
  std::vector<BlockRange> ranges(source.size() + 1);
  const auto each = [&](const auto& body) {
    for (int64_t e = 0; e < c.num_experts; ++e)
      for (int64_t n = 0; n < c.out_features; ++n)
        for (int64_t k = 0; k < c.in_features; ++k)
          body(e, n, k, source[c.index(e, n, k)], ranges[size_t(block_number(c, e, n, k))]);
  };
  double largest = 0;
  each([&](int64_t, int64_t, int64_t, double x, BlockRange& range) {
    range.low = std::min(range.low, x);
    range.high = std::max(range.high, x);
    largest = std::max(largest, std::fabs(x));
  });
  const bool typed = c.kind <= MOEC_QUANTISE_FP8;  // computes in the type of the scales
  const double rounding = typed ? epsilon(c.scale_dtype ? c.scale_dtype : c.dtype) : 0x1p-22;
  each([&](int64_t e, int64_t n, int64_t k, double x, const BlockRange& range) {
    if (testing::Test::HasFatalFailure()) return;
    const Coded1 coded = coded_element(c, bytes, e, n, k);
    ASSERT_TRUE(std::isfinite(coded.value)) << x;
    expect_scale(c, range, coded.scale, largest);
    if (c.flags & kNested) {  // codes were chosen under the scale before it was quantised
      constexpr double kHalfGap = 0.17;  // of the values of NF4 and FP4
      ASSERT_LE(std::fabs(coded.value - x), kHalfGap * range.amax() + kNestedStep * largest) << x;
      return;
    }
    double best = INFINITY;
    for (const double level : *coded.levels)
      best = std::min(best, std::fabs((level - coded.zero) * coded.scale - x));
    const double slack = 3 * rounding * (std::fabs(x) + std::fabs(coded.zero * coded.scale));
    ASSERT_LE(std::fabs(coded.value - x), best + slack) << x << " at " << e << " " << n << " " << k;
  });
}

TEST(Quantise, CodesAreTheNearestOfAnySizeTypeAndLayout) {
  Random random(42);
  constexpr int64_t kStreamBlocks[] = {0, 32, 64, 128, 512, 4096}, kGroups[] = {0, 8, 24, 32, 128},
                    kTiles[] = {0, 1, 5, 32, 128, kWhole};
  const auto one_of = [&](const auto& list) { return list[random.below(std::ssize(list))]; };
  for (int turn = 0; turn < 120; ++turn) {
    QuantiseCase c;
    c.kind = uint32_t(turn % 8);
    c.orientation = uint32_t(random.below(2));
    constexpr moec_dtype kTypes[] = {MOEC_F32, MOEC_BF16, MOEC_F16};
    c.dtype = one_of(kTypes);
    c.num_experts = 1 + random.below(3);
    c.out_features = 1 + random.below(70);
    c.in_features = 1 + random.below(turn % 3 ? 90 : 300);
    switch (c.kind) {
      case MOEC_QUANTISE_INT4:
        c.block_k = one_of(kGroups);
        [[fallthrough]];
      case MOEC_QUANTISE_INT8:
        c.flags = random.below(2) ? kAsymmetric : 0;
        break;
      case MOEC_QUANTISE_FP8:
        c.block_n = one_of(kTiles);
        c.block_k = one_of(kTiles);
        break;
      case MOEC_QUANTISE_MXFP4:
        c.in_features = 32 * (1 + random.below(5));
        break;
      case MOEC_QUANTISE_NVFP4:
        c.in_features = 16 * (1 + random.below(9));
        c.flags = random.below(2) ? MOEC_QUANTISE_SCALES2_DIVIDES : 0;
        break;
      case MOEC_QUANTISE_NF4:
      case MOEC_QUANTISE_FP4:
        (c.orientation == MOEC_OUT_IN ? c.block_k : c.block_n) = one_of(kStreamBlocks);
        c.flags = random.below(2) ? kNested : 0;
    }
    if (c.kind <= MOEC_QUANTISE_FP8 && random.below(2)) c.scale_dtype = MOEC_F32;
    check_case(c, draw(c, &random));
    if (HasFatalFailure()) return;
  }
}

// ---- values that are not finite, zeros
// Each kind, its smallest sizes that have two blocks or more in an expert.
std::vector<QuantiseCase> small_cases() {
  std::vector<QuantiseCase> cases;
  for (uint32_t which = 0; which < 8; ++which)
    for (const uint32_t flags :
         {0u, kAsymmetric, kNested, uint32_t(MOEC_QUANTISE_SCALES2_DIVIDES)}) {
      QuantiseCase c = kind(which, flags, which == MOEC_QUANTISE_INT4 ? 32 : 0);
      c.num_experts = 2;
      c.out_features = 6;
      c.in_features = 96;
      const moec_quantise_desc desc = c.desc();
      auto info = sized<moec_quantise_info>();
      auto quant = sized<moec_quant>();
      if (moec_quantise_query(test_context(), &desc, &info, &quant) == MOEC_OK) cases.push_back(c);
    }
  QuantiseCase c = kind(MOEC_QUANTISE_FP8, 0, kWhole, kWhole);
  c.num_experts = 2;
  c.out_features = 6;
  c.in_features = 96;
  cases.push_back(c);
  return cases;
}

TEST(Quantise, ZerosStayZero) {
  for (const QuantiseCase& c : small_cases()) {
    SCOPED_TRACE(c.text());
    for (const double zero : {0.0, -0.0}) {
      const std::vector<double> source(c.count(), zero);
      const QuantisedBytes bytes = quantise(test_context(), c, source);
      for (int64_t e = 0; e < c.num_experts; ++e)
        for (int64_t n = 0; n < c.out_features; ++n)
          for (int64_t k = 0; k < c.in_features; ++k)
            ASSERT_EQ(coded_element(c, bytes, e, n, k).value, 0) << e << " " << n << " " << k;
    }
  }
}

// 65504 - (-65504), and 2688 / 0.01, are more than fp16 has.
TEST(Quantise, WhatTheTypeOfTheScalesCannotHoldIsNoLoss) {
  Random random(8);
  for (QuantiseCase c : small_cases())
    for (const double size : {6e4, 1e-2}) {
      c.dtype = MOEC_F16;
      std::vector<double> source(c.count());
      for (double& value : source) value = size * (2 * random.uniform() - 1);
      check_case(c, decode(encode(source, MOEC_F16), MOEC_F16));
    }
}

TEST(Quantise, SubnormalValuesAreCodedToo) {
  for (QuantiseCase c : small_cases()) {
    SCOPED_TRACE(c.text());
    Random random(3);
    const std::vector<double> source =
        decode(encode(random.normals(c.count(), 1e-39), MOEC_F32), MOEC_F32);
    const QuantisedBytes bytes = quantise(test_context(), c, source);
    for (int64_t n = 0; n < c.out_features; ++n)
      for (int64_t k = 0; k < c.in_features; ++k)
        ASSERT_LE(std::fabs(coded_element(c, bytes, 0, n, k).value - source[c.index(0, n, k)]),
                  6e-39);
  }
}

TEST(Quantise, WhatIsNotFiniteSpoilsItsScaleAndNoOther) {
  const double kBad[] = {NAN, INFINITY, -INFINITY};
  for (const QuantiseCase& c : small_cases())
    for (const double bad : kBad) {
      SCOPED_TRACE(c.text());
      Random random(9);
      std::vector<double> source = random.normals(c.count(), 1);
      // Row 2 of expert 1, beside its first value.
      const size_t at = c.index(1, 2, 1);
      const int64_t block = block_number(c, 1, 2, 1);
      source[at] = bad;
      const QuantisedBytes spoilt = quantise(test_context(), c, source);
      source[at] = 0;
      const QuantisedBytes clean = quantise(test_context(), c, source);
      const bool of_all = c.flags & kNested;  // the mean
      const bool of_expert = c.kind == MOEC_QUANTISE_NVFP4 || c.block_n == kWhole;
      for (int64_t e = 0; e < c.num_experts; ++e)
        for (int64_t n = 0; n < c.out_features; ++n)
          for (int64_t k = 0; k < c.in_features; ++k) {
            const Coded1 got = coded_element(c, spoilt, e, n, k);
            if (of_all || (of_expert && e == 1) || block_number(c, e, n, k) == block)
              ASSERT_TRUE(std::isnan(got.value)) << e << " " << n << " " << k;
            else
              ASSERT_EQ(got.value, coded_element(c, clean, e, n, k).value);
          }
    }
}

TEST(Quantise, CodesUnderAScaleThatIsNaNAreThoseOfZeros) {
  for (const QuantiseCase& c : small_cases()) {
    SCOPED_TRACE(c.text());
    const auto codes_of = [&](double value) {
      return quantise(test_context(), c, std::vector<double>(c.count(), value)).codes;
    };
    EXPECT_EQ(codes_of(NAN), codes_of(0));
    EXPECT_EQ(codes_of(-INFINITY), codes_of(0));
  }
}

// ---- layouts, threads, memory
// Largest error of a value beside the largest magnitude of its block.
double error_bound(const QuantiseCase& c) {
  constexpr double kBounds[] = {0.51 / 127.5, 0.51 / 7.5, 0x1p-4, 0x1p-4,
                                1.0 / 4,      0.19,       0.16,   0.17};
  return kBounds[c.kind] * (c.flags & kAsymmetric ? 2 : 1);
}

TEST(Quantise, BoundAsTheQuerySaysTheyAreNearTheSource) {
  const moec_context* const context = test_context();
  Random random(11);
  for (QuantiseCase c : small_cases()) {
    SCOPED_TRACE(c.text() + ", " + seed_note());
    const std::vector<double> source =
        decode(encode(random.normals(c.count(), 0.1), c.dtype), c.dtype);
    Tensors tensors;
    const moec_quantise_desc desc = c.desc();
    auto info = sized<moec_quantise_info>();
    auto quant = sized<moec_quant>();
    check(moec_quantise_query(context, &desc, &info, &quant));
    const auto give = [&](moec_tensor* tensor) {
      *tensor = tensors.output(tensor->dtype, {tensor->shape, tensor->shape + tensor->ndim});
    };
    auto args = sized<moec_quantise_args>();
    args.desc = &desc;
    args.source = tensors.input(source, c.dtype, c.source_shape());
    args.codes = info.codes;
    args.quant = &quant;
    give(&args.codes);
    for (const auto& [name, tensor] : tensors_of(&quant)) give(tensor);
    check(moec_quantise(context, &args, nullptr));

    const int64_t E = c.num_experts, N = c.out_features, K = c.in_features;
    auto weights_desc = sized<moec_weights_desc>();
    weights_desc.num_experts = int32_t(E);
    weights_desc.gate_layout = MOEC_GATE_NONE;
    weights_desc.hidden = N;
    weights_desc.inter = K;
    weights_desc.dtype = MOEC_F32;
    weights_desc.down_scheme = info.scheme;
    const auto weights = make<Weights>(moec_weights_create, context, &weights_desc);
    auto set = sized<moec_weight_set>();
    set.up.data = tensors.output(MOEC_F32, {E, K, N});
    set.down.data = args.codes;
    set.down.quant = &quant;
    check(moec_weights_bind(weights.get(), &set));
    std::vector<double> amax(c.count() + 1, 0);
    double largest = 0;
    for (size_t i = 0; i < source.size(); ++i) {
      const int64_t e = int64_t(i) / (N * K), n = int64_t(i) / K % N, k = int64_t(i) % K;
      double& most = amax[size_t(block_number(c, e, n, k))];
      most = std::max(most, std::fabs(source[i]));
      largest = std::max(largest, std::fabs(source[i]));
    }
    for (int64_t e = 0; e < E; ++e) {
      const moec_tensor to = tensors.output(MOEC_F32, {N, K});
      check(moec_weights_dequantise(weights.get(), MOEC_MATRIX_DOWN, int32_t(e), &to, nullptr));
      const std::vector<double> got = tensors.read(to);
      for (int64_t n = 0; n < N; ++n)
        for (int64_t k = 0; k < K; ++k) {
          const double most = amax[size_t(block_number(c, e, n, k))];
          const double of_scale = c.flags & kNested ? kNestedStep * largest : 0;
          ASSERT_LE(std::fabs(got[size_t(n * K + k)] - source[c.index(e, n, k)]),
                    error_bound(c) * most + of_scale)
              << e << " " << n << " " << k;
        }
    }
  }
}

TEST(Quantise, OrientationMovesNoByteOfMatrices) {
  Random random(5);
  for (QuantiseCase c : small_cases()) {
    if (c.is_stream()) continue;
    SCOPED_TRACE(c.text());
    const std::vector<double> source = random.normals(c.count(), 1);
    QuantiseCase turned = c;
    turned.orientation = MOEC_IN_OUT;
    std::vector<double> other(source.size());
    for (int64_t e = 0; e < c.num_experts; ++e)
      for (int64_t n = 0; n < c.out_features; ++n)
        for (int64_t k = 0; k < c.in_features; ++k)
          other[turned.index(e, n, k)] = source[c.index(e, n, k)];
    EXPECT_TRUE(quantise(test_context(), c, source) == quantise(test_context(), turned, other));
  }
}

TEST(Quantise, ThreadsAndWorkspaceMoveNoByte) {
  Random random(6);
  for (QuantiseCase c : small_cases()) {
    SCOPED_TRACE(c.text());
    c.out_features = 300;  // several pieces of work
    c.in_features = 480;
    const std::vector<double> source = random.normals(c.count(), 1);
    const QuantisedBytes one = quantise(test_context(1), c, source);
    EXPECT_TRUE(one == quantise(test_context(3), c, source));
    EXPECT_TRUE(one == quantise(test_context(), c, source, true));
  }
}

}  // namespace
}  // namespace moec::test
