// SPDX-License-Identifier: Apache-2.0
// Runs of codes of every instruction set that this machine has, beside their values one by one: bit
// for bit as values, but for the sign of zeros, and their products with a few rows in doubles.
// Scales reach from subnormal to infinity, and NaN, so that both ways of rounding are met. A
// planted fault that was seen to fail: scales out of range rounded the quick way.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "core/dtype.h"
#include "quant/format.h"
#include "support/random.h"
#include "unit/isas.h"

namespace moec::cpu {
namespace {

using test::on_each_isa;
using test::Random;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr int kMostPositions = 704;

struct Line {  // one, with what its runs point to
  LineCodes codes;
  std::vector<uint8_t> bytes;
  std::vector<float> numbers, scales, zeros;
  CodedRun run;

  float number(int64_t at) const {  // at a position of the line
    const uint8_t byte = bytes[size_t(are_nibbles(codes) ? at / 2 : at)];
    if (codes == LineCodes::kI8) return float(int8_t(byte));
    if (codes == LineCodes::kE4m3) return quant::e4m3(byte);
    const bool high = (at % 2 != 0) != (codes == LineCodes::kHighNibble);
    return numbers[high ? byte >> 4 : byte & 15];
  }
  float value(int64_t i) const {  // of the run
    const int64_t at = run.first + i;
    const auto block = size_t(run.block.of(at) - run.block.of(run.first));
    return (zeros.empty() ? number(at) : number(at) - zeros[block]) * scales[block];
  }
};

float range_of(int kind, Random& random) {
  const float magnitude = float(0.5 + random.uniform());
  switch (kind) {
    case 1:
      return std::ldexp(magnitude, -140 + int(random.below(30)));  // up from subnormal
    case 2:
      return std::ldexp(magnitude, 100 + int(random.below(27)));
    case 3:
      return random.below(2) ? kInf : std::numeric_limits<float>::quiet_NaN();
    case 4:
      return std::bit_cast<float>(uint32_t(0x7fffffff));  // NaN that rounds to -0
    case 5:
      return 0;
    default:
      return std::ldexp(random.below(2) ? magnitude : -magnitude, int(random.below(9)) - 8);
  }
}

Line line_of(LineCodes codes, int64_t block, int64_t first, int64_t count, int kind, bool zeros,
             Random& random) {
  Line line;
  line.codes = codes;
  line.bytes.resize(kMostPositions);
  for (uint8_t& byte : line.bytes) {
    byte = uint8_t(random.below(256));
    const bool nan = codes == LineCodes::kE4m3 && (byte & 0x7f) == 0x7f;
    if (nan && kind != 6) byte ^= 1;
  }
  line.numbers.resize(16);
  for (float& number : line.numbers) number = float(2 * random.uniform() - 1);
  line.numbers[7] = 0;
  const auto size = block ? quant::BlockSize(block) : quant::BlockSize::all_of(kMostPositions);
  const int64_t blocks = size.of(first + count - 1) - size.of(first) + 1;
  // Scales of 8 bits make products that lie half way.
  for (int64_t i = 0; i < blocks; ++i) {
    const float scale = range_of(random.below(3) ? kind : 0, random);
    const uint32_t cut = random.below(2) && scale == scale ? 0xffff0000u : 0xffffffffu;
    line.scales.push_back(std::bit_cast<float>(std::bit_cast<uint32_t>(scale) & cut));
    if (zeros) line.zeros.push_back(float(random.below(16)));
  }
  float least = 1, most = 1;
  if (codes == LineCodes::kI8) most = 128;
  if (codes == LineCodes::kE4m3) {
    least = 0x1p-9f;
    most = 448;
  }
  for (const float number : line.numbers)
    if (number != 0) least = std::min(least, std::abs(number));
  line.run = {line.bytes.data(),
              first,
              count,
              line.numbers.data(),
              line.scales.data(),
              zeros ? line.zeros.data() : nullptr,
              size,
              false,
              0x1p-125f / least,
              0x1p109f / most};
  return line;
}

// Products that bf16 holds.
void make_exact(Line& line, Random& random) {
  for (float& number : line.numbers)
    number = std::bit_cast<float>(std::bit_cast<uint32_t>(number) & 0xfff00000u);
  for (float& scale : line.scales)
    scale = std::isfinite(scale) ? std::ldexp(1.0f, int(random.below(60)) - 30) : scale;
}

template <class T>
void check_values(const Line& line) {
  constexpr bool kHalf = std::is_same_v<T, f16>;
  std::vector<uint16_t> found(size_t(line.run.count) + 1, 0x1234);
  tile_kernels().decode_run[int(line.codes)][kHalf](line.run, found.data());
  for (int64_t i = 0; i < line.run.count; ++i) {
    const float want = to_float(from_float<T>(line.value(i)));
    const float got = to_float(T{found[size_t(i)]});
    ASSERT_TRUE(got == want || (got != got && want != want)) << i << ": " << got << ", " << want;
  }
  ASSERT_EQ(found.back(), 0x1234);
}

// Rows of bf16, and as the dots of codes read them.
struct Rows {
  static constexpr int64_t kStride = kMostPositions + kPairsChunk;
  std::vector<float> x, ordered;
  std::vector<uint16_t> in_pairs;
  Rows(LineCodes codes, int64_t count, Random& random)
      : x(size_t(kStride) * kLinesRows), ordered(x.size()), in_pairs(x.size()) {
    const TileKernels& tile = tile_kernels();
    const int flip = codes == LineCodes::kHighNibble;
    for (int64_t r = 0; r < kLinesRows; ++r) {
      float* const row = &x[size_t(r * kStride)];
      for (int64_t i = 0; i < count; ++i)
        row[i] = to_float(from_float<bf16>(float(2 * random.uniform() - 1)));
      for (int64_t i = 0; i < kStride; ++i) {
        const int64_t from = i / kCodesChunk * kCodesChunk + (tile.nibble_order[i % 64] ^ flip);
        ordered[size_t(r * kStride + i)] = row[are_nibbles(codes) ? from : i];
      }
      if (tile.pairs)
        tile.pairs->arrange({row, kLanes, count, codes, &in_pairs[size_t(r * kStride)]});
    }
  }
};

// Some lines in one call: what each is alone, whatever lies beside it.
void check_dots(std::vector<Line> lines, bool pairs, Random& random) {
  const TileKernels& tile = tile_kernels();
  const CodedRun& run = lines[0].run;
  const LineCodes codes = lines[0].codes;
  const int64_t count = run.count, stride = Rows::kStride;
  const Rows rows_of(codes, count, random);
  const std::vector<float>& x = rows_of.x;
  const void* const found_x =
      pairs ? static_cast<const void*>(rows_of.in_pairs.data()) : rows_of.ordered.data();
  // Scales apart as they are many, further, or the same for all lines.
  const auto blocks = int64_t(lines[0].scales.size());
  const int64_t apart = std::vector<int64_t>{blocks, blocks + 3, 0}[random.below(3)];
  std::vector<uint8_t> bytes;
  std::vector<float> scales, zeros;
  for (size_t i = 0; i < lines.size(); ++i) {
    if (i > 0 && apart == 0) {
      lines[i].scales = lines[0].scales;
      lines[i].zeros = lines[0].zeros;
    }
    lines[i].numbers = lines[0].numbers;
    bytes.insert(bytes.end(), lines[i].bytes.begin(), lines[i].bytes.end());
    scales.resize(i * size_t(apart));
    scales.insert(scales.end(), lines[i].scales.begin(), lines[i].scales.end());
    zeros.resize(i * size_t(apart));
    zeros.insert(zeros.end(), lines[i].zeros.begin(), lines[i].zeros.end());
  }
  CodedRun first = run;
  first.codes = bytes.data();
  first.numbers = lines[0].numbers.data();
  first.scales = scales.data();
  if (run.zeros) first.zeros = zeros.data();
  // Pairs read subnormal values as zeros, and sums that are become zero.
  const double least = pairs ? 0x1p-126 : 1e-44;
  std::vector<float> alone(lines.size());
  for (int rows = 1; rows <= kLinesRows; ++rows) {
    const DotRunFn dot = (pairs ? tile.pairs->dot : tile.dot_run)[int(codes)][rows - 1];
    float sums[kLinesRows * kDotLines];
    dot({first, int(lines.size()), kMostPositions, apart, found_x, stride, sums});
    for (size_t i = 0; i < lines.size(); ++i) {
      const Line& line = lines[i];
      for (int64_t r = 0; r < rows; ++r) {
        double sum = 0, size = 0;
        for (int64_t j = 0; j < count; ++j) {
          const double value = to_float(from_float<bf16>(line.value(j)));
          sum += value * double(x[size_t(r * stride + j)]);
          size += std::abs(value * double(x[size_t(r * stride + j)]));
        }
        const auto found = double(sums[size_t(r) * kDotLines + i]);
        if (!std::isfinite(size)) {
          ASSERT_FALSE(std::isfinite(found)) << rows << " rows, row " << r << ", line " << i;
        } else if (size < 1e38) {  // else sums on the way may leave the range
          ASSERT_NEAR(found, sum, 1e-6 * size + least * double(count))
              << rows << " rows, row " << r << ", line " << i;
        }
      }
      if (rows == 1) {
        float own[kLinesRows * kDotLines];
        CodedRun one = line.run;
        one.numbers = first.numbers;
        one.scales = line.scales.data();
        one.least_scale = first.least_scale;
        if (one.zeros) one.zeros = line.zeros.data();
        dot({one, 1, 0, 0, found_x, stride, own});
        alone[i] = own[0];
      }
      ASSERT_TRUE(sums[i] == alone[i] || (sums[i] != sums[i] && alone[i] != alone[i]))
          << rows << " rows, line " << i << ": " << sums[i] << " beside " << alone[i];
    }
  }
}

// Values of some lines in one call: zeros beyond the run up to a chunk, and nothing else.
void check_decoded(const std::vector<Line>& lines, Random& random) {
  const CodedRun& run = lines[0].run;
  const DecodePairsFn decode = tile_kernels().pairs->decode[int(lines[0].codes)];
  const bool same = random.below(2);
  const auto blocks = int64_t(lines[0].scales.size());
  std::vector<uint8_t> bytes;
  std::vector<float> scales, zeros;
  for (const Line& line : lines) {
    bytes.insert(bytes.end(), line.bytes.begin(), line.bytes.end());
    scales.insert(scales.end(), line.scales.begin(), line.scales.end());
    zeros.insert(zeros.end(), line.zeros.begin(), line.zeros.end());
  }
  CodedRun first = run;
  first.codes = bytes.data();
  first.scales = scales.data();
  if (run.zeros) first.zeros = zeros.data();
  constexpr int64_t kStride = kMostPositions + kPairsChunk;
  std::vector<uint16_t> found(size_t(kStride) * lines.size(), 0x1234);
  decode({first, int(lines.size()), kMostPositions, same ? 0 : blocks, found.data(), kStride});
  const int64_t whole = (run.count + kPairsChunk - 1) / kPairsChunk * kPairsChunk;
  for (size_t i = 0; i < lines.size(); ++i)
    for (int64_t j = 0; j < kStride; ++j) {
      const uint16_t got = found[i * size_t(kStride) + size_t(j)];
      if (j >= run.count) {
        ASSERT_EQ(got, j < whole ? 0 : 0x1234) << "line " << i << ", " << j;
        continue;
      }
      Line line = lines[i];
      line.numbers = lines[0].numbers;
      if (same) {
        line.scales = lines[0].scales;
        line.zeros = lines[0].zeros;
      }
      const float value = line.value(j), want = to_float(from_float<bf16>(value));
      const float is = to_float(bf16{got});
      const bool subnormal = std::abs(value) < 0x1p-126f && is == 0;
      ASSERT_TRUE(is == want || (is != is && want != want) || subnormal)
          << "line " << i << ", " << j << ": " << is << ", " << want;
    }
}

// Some lines as the columns of a tile: every value, zeros beyond the columns, and nothing else. A
// kernel may refuse scales and codes that the quick way does not round, and no others.
void check_columns(LineCodes codes, int64_t block, int kind, Random& random) {
  const DecodeColumnsFn decode = tile_kernels().decode_columns[int(codes)];
  if (!decode) return;
  const int64_t first = 32 * int64_t(random.below(5)), count = 32 * (1 + int64_t(random.below(8)));
  const auto columns = size_t(random.below(4) ? kLanes : 1 + random.below(kLanes));
  std::vector<Line> lines;
  for (size_t i = 0; i < columns; ++i)
    lines.push_back(line_of(codes, block, first, count, kind, false, random));
  const bool exact = are_nibbles(codes) && random.below(4) == 0;
  for (Line& line : lines) {
    line.numbers = lines[0].numbers;
    line.run.least_scale = lines[0].run.least_scale;
    if (exact) make_exact(line, random);
  }
  const CodedRun& run = lines[0].run;
  const int64_t stride = kMostPositions;
  std::vector<uint8_t> bytes(size_t(stride) * columns);
  std::vector<float> scales[kLanes];
  const void* at[kLanes];
  for (size_t i = 0; i < columns; ++i) {
    std::copy(lines[i].bytes.begin(), lines[i].bytes.end(), bytes.begin() + int64_t(i) * stride);
    at[i] = lines[i].scales.data();
  }
  constexpr int64_t kGap = 2 * kLineBytes * kSteps;
  std::vector<float> found(size_t(kGap / 4) * kSteps, 77.0f);
  const int64_t ends =
      run.block.is_all() ? count : (run.block.of(first) + 1) * run.block.size() - first;
  const bool done =
      decode({bytes.data() + (are_nibbles(codes) ? first / 2 : first), stride, int(columns), count,
              lines[0].numbers.data(), at, ScaleType::kF32, ends, run.block.size(), exact,
              run.least_scale, run.most_scale, reinterpret_cast<char*>(found.data()), kGap});
  const bool may_refuse = (kind > 0 && kind < 5) || (kind == 6 && codes == LineCodes::kE4m3);
  ASSERT_TRUE(done || (may_refuse && !exact));
  for (int64_t k = 0; k < kMostColumnRun; ++k)
    for (int64_t i = 0; i < kLanes; ++i) {
      const float* const got = &found[size_t(k / kSteps * (kGap / 4) + k % kSteps * kLanes + i)];
      ASSERT_EQ(got[kGap / 8], 77.0f) << "column " << i << ", " << k;
      if (k >= count) {
        ASSERT_EQ(*got, 77.0f) << "column " << i << ", " << k;
        continue;
      }
      if (!done) continue;
      const float value = size_t(i) < columns ? lines[size_t(i)].value(k) : 0.0f;
      const float want = to_float(from_float<bf16>(value));
      ASSERT_TRUE(*got == want || (*got != *got && want != want))
          << "column " << i << ", " << k << ": " << *got << ", " << want;
    }
}

TEST(Codes, ColumnsAreTheirValues) {
  SCOPED_TRACE(test::seed_note());
  on_each_isa([] {
    Random random(8);
    for (const LineCodes codes :
         {LineCodes::kLowNibble, LineCodes::kHighNibble, LineCodes::kI8, LineCodes::kE4m3})
      for (const int64_t block : {0, 32, 64, 96, 128})
        for (int kind = 0; kind <= 6; ++kind) {
          SCOPED_TRACE(testing::Message()
                       << "codes " << int(codes) << ", blocks of " << block << ", scales " << kind);
          check_columns(codes, block, kind, random);
        }
  });
}

TEST(Codes, RunsAreTheirValues) {
  SCOPED_TRACE(test::seed_note());
  on_each_isa([] {
    Random random(7);
    for (const LineCodes codes :
         {LineCodes::kLowNibble, LineCodes::kHighNibble, LineCodes::kI8, LineCodes::kE4m3})
      for (const int64_t block : {0, 32, 64, 96, 128, 256})
        for (int kind = 0; kind <= 6; ++kind)
          for (const bool zeros : {false, true}) {
            const int64_t first = 32 * int64_t(random.below(5));
            const int64_t count = 1 + int64_t(random.below(kMostPositions - first));
            const Line line = line_of(codes, block, first, count, kind, zeros, random);
            SCOPED_TRACE(testing::Message()
                         << "codes " << int(codes) << ", blocks of " << block << ", scales " << kind
                         << ", zeros " << zeros << ", from " << first << ", " << count);
            check_values<bf16>(line);
            check_values<f16>(line);
            std::vector<Line> lines = {line};
            while (lines.size() < kDotLines && random.below(8))
              lines.push_back(line_of(codes, block, first, count, kind, zeros, random));
            check_dots(lines, false, random);
            if (!tile_kernels().pairs || (zeros && codes == LineCodes::kE4m3) ||
                (block > 0 && block < least_pair_block(codes)))
              continue;
            check_dots(lines, true, random);
            check_decoded(lines, random);
            if (!are_nibbles(codes) || zeros || kind) continue;
            for (Line& own : lines) {
              make_exact(own, random);
              own.run.exact = true;
            }
            check_dots(lines, true, random);
          }
  });
}

}  // namespace
}  // namespace moec::cpu
