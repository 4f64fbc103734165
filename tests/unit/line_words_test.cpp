// SPDX-License-Identifier: Apache-2.0
// Hopper's elements of words of codes beside the values of the formats, rounded once: all codes,
// scales from subnormal to infinity and NaN, bit for bit as values. Mutations seen to fail: the two
// selectors of pairs exchanged; a scale of 0 bits as 2^-126; E2M1 times 2^125; a base of one less;
// bits of a code beside it that are not cleared.
#include "backend/cuda/device/line_words.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "quant/format.h"
#include "support/random.h"

namespace moec::cuda {
namespace {

using test::Random;

template <bool kHalf>
float element(const FourPairs& v, int i) {
  return element_of<kHalf>(v.pair[i / 2] >> i % 2 * 16);
}
template <bool kHalf>
float rounded(float value) {
  return element_of<kHalf>(rounded_pair<kHalf>(value, value));
}
bool same(float a, float b) {
  return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b) || (a != a && b != b);
}

// Each nibble at each place.
std::vector<uint32_t> words(Random& random) {
  std::vector<uint32_t> words;
  for (int i = 0; i < 64; ++i) words.push_back(uint32_t(random.bits()));
  for (uint32_t code = 0; code < 16; ++code) words.push_back(code * 0x11111111u);
  return words;
}
// As a type of 16 bits has them, or all.
std::vector<float> scales(Random& random) {
  std::vector<float> scales = {0,         1,        -1,        1e-40f,   0x1p-133f,
                               0x1p-126f, 65504.0f, 3.38e+38f, INFINITY, NAN};
  for (int i = 0; i < 100; ++i)
    scales.push_back(float(std::ldexp(random.normal(), int(random.below(240)) - 120)));
  return scales;
}
template <class Number>
void fill(ValueTable& table, float scale, Number number, bool half) {
  for (int q = 0; q < 4; ++q) {
    const auto of = [&](uint32_t code) { return number(code) * scale; };
    const uint32_t code = uint32_t(4 * q);
    if (half)
      table.set(q, rounded_pair<true>(of(code), of(code + 1)),
                rounded_pair<true>(of(code + 2), of(code + 3)));
    else
      table.set(q, rounded_pair<false>(of(code), of(code + 1)),
                rounded_pair<false>(of(code + 2), of(code + 3)));
  }
}

template <bool kHalf>
void check_tables(Random& random) {
  float book[16];
  for (float& number : book) number = float(random.normal());
  book[3] = -0.0f;
  for (const bool high_first : {false, true})
    for (const float scale : scales(random)) {
      ValueTable table;
      fill(table, scale, [&](uint32_t code) { return book[code]; }, kHalf);
      for (const uint32_t word : words(random)) {
        const FourPairs got = table.look_up(word, high_first);
        for (int i = 0; i < 8; ++i) {
          const uint32_t code = word >> (high_first ? i ^ 1 : i) * 4 & 15u;
          ASSERT_TRUE(same(element<kHalf>(got, i), rounded<kHalf>(book[code] * scale)))
              << "place " << i << " of " << word << ", scale " << scale;
        }
      }
    }
}
TEST(LineWords, TablesOfAnyNumbers) {
  SCOPED_TRACE(test::seed_note());
  Random random(1);
  check_tables<false>(random);
  check_tables<true>(random);
}

TEST(LineWords, PowersTimesE2m1) {
  SCOPED_TRACE(test::seed_note());
  Random random(2);
  for (uint32_t scale = 0; scale < 256; ++scale)
    for (const uint32_t word : words(random)) {
      const FourPairs got = powers(word, power_pair(scale));
      const FourPairs looked_up = powers_of(power_pair(scale)).look_up(word);
      for (int i = 0; i < 8; ++i) {
        const float want = quant::e2m1(word >> 4 * i & 15u) * quant::e8m0(scale);
        for (const FourPairs& v : {got, looked_up})
          ASSERT_TRUE(same(element<false>(v, i), rounded<false>(want)))
              << "place " << i << " of " << word << ", scale " << scale;
      }
    }
}

template <bool kHalf>
void check_integers(Random& random) {
  for (int turn = 0; turn < 2000; ++turn) {
    const auto scale = uint32_t(turn < 1000 ? random.below(65536) : turn - 1000);
    for (const uint32_t word : {0x76543210u, 0xfedcba98u, uint32_t(random.bits())}) {
      const FourPairs got = integers<kHalf>(word, scale | scale << 16);
      for (int i = 0; i < 8; ++i) {
        const float number = float(int32_t(word >> 4 * i & 15u)) - 8;
        const float want = number * element_of<kHalf>(scale);
        ASSERT_TRUE(same(element<kHalf>(got, i), rounded<kHalf>(want)))
            << "place " << i << " of " << word << ", scale " << scale;
      }
    }
  }
}
TEST(LineWords, IntegersTimesAScaleOfTheirType) {
  SCOPED_TRACE(test::seed_note());
  Random random(3);
  check_integers<false>(random);
  check_integers<true>(random);
}

template <bool kHalf>
void check_bytes(Random& random) {
  for (const float scale : scales(random))
    for (uint32_t first = 0; first < 256; first += 8) {
      const auto word = [](uint32_t at) {
        return at | (at + 1) << 8 | (at + 2) << 16 | (at + 3) << 24;
      };
      const FourPairs got = bytes<kHalf>(word(first), word(first + 4), scale);
      for (int i = 0; i < 8; ++i) {
        const float want = quant::e4m3(first + uint32_t(i)) * scale;
        ASSERT_TRUE(same(element<kHalf>(got, i), rounded<kHalf>(want))) << first + uint32_t(i);
      }
    }
}
TEST(LineWords, BytesTimesAnyScale) {
  SCOPED_TRACE(test::seed_note());
  Random random(4);
  check_bytes<false>(random);
  check_bytes<true>(random);
}

template <bool kHalf>
void check_signed_bytes(Random& random) {
  for (const float scale : scales(random))
    for (const int zero : {0, -128, 127, int(random.below(256)) - 128})
      for (int turn = 0; turn < 32; ++turn) {
        const auto first = uint32_t(random.bits()), second = uint32_t(random.bits());
        const FourPairs got = signed_bytes<kHalf>(first, second, scale, signed_base(float(zero)));
        for (int i = 0; i < 8; ++i) {
          const auto code = int8_t((i < 4 ? first : second) >> i % 4 * 8);
          const float want = quant::Int8::decode<float>(float(code), {scale, float(zero)});
          ASSERT_TRUE(same(element<kHalf>(got, i), rounded<kHalf>(want)))
              << int(code) << " of zero point " << zero << ", scale " << scale;
        }
      }
}
TEST(LineWords, SignedBytesOfAnyZeroPoint) {
  SCOPED_TRACE(test::seed_note());
  Random random(5);
  check_signed_bytes<false>(random);
  check_signed_bytes<true>(random);
}

// What a lane has of two lines: a code of each, in either half of a word, beside other codes, and
// scales of their own.
TEST(LineWords, CodesOfTwoLines) {
  SCOPED_TRACE(test::seed_note());
  Random random(6);
  for (int turn = 0; turn < 20000; ++turn) {
    const auto word = uint32_t(random.bits()), scales = uint32_t(random.bits());
    const uint32_t of_powers = permute(power_pair(scales & 255u), power_pair(scales >> 24), 0x5410);
    const uint32_t powers = power_elements(word, of_powers);
    const uint32_t integers = integer_elements<false>(word, scales);
    const FourFloats numbers = signed_numbers(word, signed_base(0));
    for (int line = 0; line < 2; ++line) {
      const uint32_t half = word >> 16 * line & 0xffffu;
      const float power = quant::e2m1(half >> 12) * element_of<false>(of_powers >> 16 * line);
      ASSERT_TRUE(same(element_of<false>(powers >> 16 * line), rounded<false>(power)))
          << "line " << line << " of " << word << ", scales " << scales;
      const float integer = float(half & 15u) - 8, scale = element_of<false>(scales >> 16 * line);
      ASSERT_TRUE(same(element_of<false>(integers >> 16 * line), rounded<false>(integer * scale)))
          << "line " << line << " of " << word << ", scales " << scales;
    }
    for (int i = 0; i < 4; ++i) ASSERT_EQ(numbers.v[i], float(int8_t(word >> 8 * i))) << word;
  }
}

TEST(LineWords, ScalesAsTheyAreStored) {
  EXPECT_EQ(quant::scale_of(0x3fc00000u, MOEC_F32), 1.5f);
  EXPECT_EQ(quant::scale_of(0x3fc0u, MOEC_BF16), 1.5f);
  EXPECT_EQ(quant::scale_of(0x3e00u, MOEC_F16), 1.5f);
  for (const moec_dtype power : {moec_dtype(MOEC_F8_E8M0), moec_dtype(MOEC_U8)})
    for (uint32_t code = 0; code < 255; ++code)
      EXPECT_EQ(quant::scale_of(code, power), element_of<false>(power_pair(code)));
}

}  // namespace
}  // namespace moec::cuda
