// SPDX-License-Identifier: Apache-2.0
// Ops of tile_kernels.h on the 16-byte vectors of aarch64; shared by its translation units.
#pragma once

#include <arm_neon.h>

#include "backend/cpu/tile_kernels.h"

// Offsets within a block are small:
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)
namespace moec::cpu {
namespace {

struct NeonOps {
  using Vec = float32x4_t;
  static constexpr int kBytes = 16;
  static constexpr bool kInParts = true;
  static Vec load(const void* from) { return vld1q_f32(static_cast<const float*>(from)); }
  static void store(void* to, Vec v) { vst1q_f32(static_cast<float*>(to), v); }
  static Vec zero() { return vdupq_n_f32(0.0f); }
  static Vec broadcast(const void* from) { return vld1q_dup_f32(static_cast<const float*>(from)); }
  static Vec add(Vec a, Vec b) { return vaddq_f32(a, b); }
  static Vec sub(Vec a, Vec b) { return vsubq_f32(a, b); }
  static Vec mul(Vec a, Vec b) { return vmulq_f32(a, b); }
  static Vec fma(Vec a, Vec b, Vec sum) { return vfmaq_f32(sum, a, b); }

  static constexpr int kParts = 4;
  struct Line {
    uint32x4_t part[kParts];  // dwords 0..3, 4..7, ...
  };
  template <class Part>
  static Line each(const Part& part) {
    return {{part(0), part(1), part(2), part(3)}};
  }
  static uint32x4_t bits(float32x4_t v) { return vreinterpretq_u32_f32(v); }
  static float32x4_t reals(uint32x4_t v) { return vreinterpretq_f32_u32(v); }
  static float16x4_t halves(uint16x4_t v) { return vreinterpret_f16_u16(v); }
  // `bytes` valid ones of a line, through memory of our own when it is not whole.
  static Line partial(const void* from, int bytes) {
    alignas(kLineBytes) uint32_t copy[kLanes];
    if (bytes < kLineBytes) {
      __builtin_memset(copy, 0, sizeof copy);
      if (bytes > 0) __builtin_memcpy(copy, from, unsigned(bytes));
      from = copy;
    }
    const auto* const bytes_of = static_cast<const uint8_t*>(from);
    return each([&](int i) { return vreinterpretq_u32_u8(vld1q_u8(bytes_of + i * kBytes)); });
  }
  static void put_partial(void* to, const Line& line, int bytes) {
    if (bytes >= kLineBytes) return put(to, line);
    alignas(kLineBytes) uint32_t copy[kLanes];
    put(copy, line);
    if (bytes > 0) __builtin_memcpy(to, copy, unsigned(bytes));
  }
  static uint16x4_t quarter(const Line& words, int i) {  // of its first 16 words
    const uint16x8_t half = vreinterpretq_u16_u32(words.part[i / 2]);
    return i % 2 ? vget_high_u16(half) : vget_low_u16(half);
  }
  static Line zero_extend(const Line& words) {
    return each([&](int i) { return vmovl_u16(quarter(words, i)); });
  }

  static Line f32(const float* from, int n) { return partial(from, n * 4); }
  static Line pairs(const uint16_t* from, int n) { return partial(from, n * 2); }
  static Line i8(const int8_t* from) {
    const int8x16_t codes = vld1q_s8(from);
    const int16x8_t low = vmovl_s8(vget_low_s8(codes)), high = vmovl_high_s8(codes);
    const int32x4_t wide[] = {vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low),
                              vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high)};
    return each([&](int i) { return bits(vcvtq_f32_s32(wide[i])); });
  }
  static Line even_bf16(const Line& p) {
    return each([&](int i) { return vshlq_n_u32(p.part[i], 16); });
  }
  static Line odd_bf16(const Line& p) {
    return each([&](int i) { return vandq_u32(p.part[i], vdupq_n_u32(0xffff0000u)); });
  }
  static Line bf16(const uint16_t* from, int n) { return even_bf16(zero_extend(pairs(from, n))); }
  static Line f16(const uint16_t* from, int n) {
    const Line words = pairs(from, n);
    return each([&](int i) { return bits(vcvt_f32_f16(halves(quarter(words, i)))); });
  }
  static Line even_f16(const Line& p) {
    return each([&](int i) { return bits(vcvt_f32_f16(halves(vmovn_u32(p.part[i])))); });
  }
  static Line odd_f16(const Line& p) {
    return each([&](int i) { return bits(vcvt_f32_f16(halves(vshrn_n_u32(p.part[i], 16)))); });
  }
  static Line interleave(const uint16_t* even, const uint16_t* odd, int n) {
    const Line a = zero_extend(pairs(even, even ? n : 0));
    const Line b = even_bf16(zero_extend(pairs(odd, odd ? n : 0)));
    return each([&](int i) { return vorrq_u32(a.part[i], b.part[i]); });
  }
  static void put(void* to, const Line& line) {
    for (int i = 0; i < kParts; ++i) vst1q_u32(static_cast<uint32_t*>(to) + i * 4, line.part[i]);
  }
  static void put_f32(float* to, const Line& line, int n) { put_partial(to, line, n * 4); }
  static void put_words(uint16_t* to, const uint16x4_t (&words)[kParts], int n) {
    const Line line = {{vreinterpretq_u32_u16(vcombine_u16(words[0], words[1])),
                        vreinterpretq_u32_u16(vcombine_u16(words[2], words[3])),
                        {},
                        {}}};
    alignas(kLineBytes) uint32_t copy[kLanes];
    if (n < kLanes) {
      put(copy, line);
      if (n > 0) __builtin_memcpy(to, copy, unsigned(n) * 2);
      return;
    }
    vst1q_u16(to, vreinterpretq_u16_u32(line.part[0]));
    vst1q_u16(to + 8, vreinterpretq_u16_u32(line.part[1]));
  }
  static uint32x4_t to_nearest(uint32x4_t v) {  // ties to even; the value is in the high halves
    const uint32x4_t one = vandq_u32(vshrq_n_u32(v, 16), vdupq_n_u32(1));
    return vaddq_u32(v, vaddq_u32(one, vdupq_n_u32(0x7fff)));
  }
  static uint32x4_t rounded_bf16(uint32x4_t v) {  // likewise, of NaN too
    const uint32x4_t number = vceqq_f32(reals(v), reals(v));
    return vbslq_u32(number, to_nearest(v), vorrq_u32(v, vdupq_n_u32(0x400000)));
  }
  static uint16x4_t rounded_f16(uint32x4_t v) {
    return vreinterpret_u16_f16(vcvt_f16_f32(reals(v)));
  }
  static void put_bf16(uint16_t* to, const Line& line, int n) {
    uint16x4_t words[kParts];
    for (int i = 0; i < kParts; ++i) words[i] = vshrn_n_u32(rounded_bf16(line.part[i]), 16);
    put_words(to, words, n);
  }
  static void put_f16(uint16_t* to, const Line& line, int n) {
    uint16x4_t words[kParts];
    for (int i = 0; i < kParts; ++i) words[i] = rounded_f16(line.part[i]);
    put_words(to, words, n);
  }
  static Line as_bf16(const Line& line) {
    return odd_bf16(each([&](int i) { return rounded_bf16(line.part[i]); }));
  }
  static Line as_f16(const Line& line) {
    return each([&](int i) { return bits(vcvt_f32_f16(halves(rounded_f16(line.part[i])))); });
  }

  // ---- codes
  // An e4m3 code is the f16 of 2^-8 times its value, but for NaN.
  static Line e4m3(const uint8_t* from) {
    const uint8x16_t codes = vld1q_u8(from);
    const auto half = [](uint8x8_t code) {
      const int16x8_t high = vreinterpretq_s16_u16(vshll_n_u8(code, 8));
      const uint16x8_t value =
          vbicq_u16(vreinterpretq_u16_s16(vshrq_n_s16(high, 1)), vdupq_n_u16(0x4000));
      const uint16x8_t most = vdupq_n_u16(0x3f80);
      const uint16x8_t nan = vceqq_u16(vandq_u16(value, most), most);
      return vorrq_u16(value, vandq_u16(nan, vdupq_n_u16(0x7e00)));
    };
    const Line words = {{vreinterpretq_u32_u16(half(vget_low_u8(codes))),
                         vreinterpretq_u32_u16(half(vget_high_u8(codes))),
                         {},
                         {}}};
    return each(
        [&](int i) { return bits(vmulq_n_f32(vcvt_f32_f16(halves(quarter(words, i))), 256.0f)); });
  }
  static Line round_bf16(const Line& line) {
    return odd_bf16(each([&](int i) { return to_nearest(line.part[i]); }));
  }
  static Vec power(Vec v) { return reals(vandq_u32(bits(v), vdupq_n_u32(0xff800000u))); }
  struct E4m3Seen {};
  static void e4m3_parts(const uint8_t* from, Line (&lines)[2], E4m3Seen&) {
    for (int i = 0; i < 2; ++i) {
      const Line line = e4m3(from + i * kLanes);
      lines[i] = each([&](int j) { return bits(vmulq_n_f32(reals(line.part[j]), 0x1p-8f)); });
    }
  }
  static bool any_nan(E4m3Seen) { return false; }  // quick_bf16 keeps it
  static void put_high_words(uint16_t* to, const Line (&lines)[2]) {
    for (int i = 0; i < 2; ++i) {
      uint16x4_t words[kParts];
      for (int j = 0; j < kParts; ++j) words[j] = vshrn_n_u32(lines[i].part[j], 16);
      put_words(to + i * kLanes, words, kLanes);
    }
  }
  struct Numbers {
    float32x4_t part[4];
  };
  static Numbers numbers(const float* from) {
    return {{vld1q_f32(from), vld1q_f32(from + 4), vld1q_f32(from + 8), vld1q_f32(from + 12)}};
  }
  struct Values {
    uint8x16_t low, high;  // bytes of the 16 values
  };
  template <Rounding kRounding, bool kZeros>
  static Values values(const Numbers& numbers, float scale, float zero) {
    uint16x4_t word[4];
    for (int i = 0; i < 4; ++i) {
      const float32x4_t number = numbers.part[i];
      const float32x4_t moved = kZeros ? vsubq_f32(number, vdupq_n_f32(zero)) : number;
      const uint32x4_t value = bits(vmulq_n_f32(moved, scale));
      if constexpr (kRounding == Rounding::kF16)
        word[i] = rounded_f16(value);
      else
        word[i] = vshrn_n_u32(kRounding == Rounding::kExact ? value : to_nearest(value), 16);
    }
    const uint8x16_t a = vreinterpretq_u8_u16(vcombine_u16(word[0], word[1]));
    const uint8x16_t b = vreinterpretq_u8_u16(vcombine_u16(word[2], word[3]));
    return {vuzp1q_u8(a, b), vuzp2q_u8(a, b)};
  }
  struct NibbleTable {
    Values half[2];  // of each half of the codes
  };
  static NibbleTable table(const Values& first, const Values& second) { return {{first, second}}; }
  static constexpr int byte_of_word(int i) { return i; }
  template <bool kHigh>
  static Line look_up(const uint8_t* from, const NibbleTable& table) {
    Line line;
    for (int i = 0; i < 2; ++i) {
      const uint8x16_t codes = vld1q_u8(from + i * kBytes);
      const uint8x16_t at = kHigh ? vshrq_n_u8(codes, 4) : vandq_u8(codes, vdupq_n_u8(15));
      const uint8x16_t low = vqtbl1q_u8(table.half[i].low, at);
      const uint8x16_t high = vqtbl1q_u8(table.half[i].high, at);
      line.part[2 * i] = vreinterpretq_u32_u8(vzip1q_u8(low, high));
      line.part[2 * i + 1] = vreinterpretq_u32_u8(vzip2q_u8(low, high));
    }
    return line;
  }
  static Line low_nibbles(const uint8_t* from, const NibbleTable& table) {
    return look_up<false>(from, table);
  }
  static Line high_nibbles(const uint8_t* from, const NibbleTable& table) {
    return look_up<true>(from, table);
  }
  using DotNibbles = WordNibbles<NeonOps>;
  static void put_nibbles(uint16_t* to, const Line& first, const Line& second) {
    for (int i = 0; i < kParts; ++i)
      vst2q_u16(to + i * kLanes,
                {{vreinterpretq_u16_u32(first.part[i]), vreinterpretq_u16_u32(second.part[i])}});
  }

  // 16 x 16 dwords: 4 x 4 at a time.
  static void transpose(const Line (&lines)[kLanes], Line (&turned)[kLanes]) {
    const auto twice = [](uint32x4_t v) { return vreinterpretq_u64_u32(v); };
    const auto dwords = [](uint64x2_t v) { return vreinterpretq_u32_u64(v); };
    for (int i = 0; i < kParts; ++i)
      for (int at = 0; at < kParts; ++at) {
        const Line* const from = lines + ptrdiff_t{4} * i;
        const uint32x4_t m[] = {from[0].part[at], from[1].part[at], from[2].part[at],
                                from[3].part[at]};
        const uint64x2_t a = twice(vtrn1q_u32(m[0], m[1])), b = twice(vtrn2q_u32(m[0], m[1]));
        const uint64x2_t c = twice(vtrn1q_u32(m[2], m[3])), d = twice(vtrn2q_u32(m[2], m[3]));
        Line* const to = turned + ptrdiff_t{4} * at;
        to[0].part[i] = dwords(vtrn1q_u64(a, c));
        to[1].part[i] = dwords(vtrn1q_u64(b, d));
        to[2].part[i] = dwords(vtrn2q_u64(a, c));
        to[3].part[i] = dwords(vtrn2q_u64(b, d));
      }
  }
};

// panel_product with the rows' values in lanes of vectors, four steps in one: 6 rows times 16
// columns are 24 sums, beside which 6 vectors of A and 2 of B fit the 32 registers. Up to 3 rows
// have their 32 columns in one pass. `Step` multiplies a step's lane with a vector of B.
template <class Step, int kRows>
void lane_product(const PanelProduct& p) {
  using Vec = float32x4_t;
  constexpr int kTiles = kRows <= 3 ? 2 : 1, kVecs = 4;  // of a pass; of a tile's line
  const bool chained = !Step::kInParts && p.accumulate;
  for (int pass = 0; pass < 2 / kTiles; ++pass) {
    float* const c = p.c + pass * kLanes;
    const auto place = [&](int r, int t, int v) { return c + r * p.ld + t * kLanes + v * 4; };
    Vec sum[kRows][kTiles][kVecs];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
      for (int t = 0; t < kTiles; ++t)
        for (int v = 0; v < kVecs; ++v)
          sum[r][t][v] = chained ? vld1q_f32(place(r, t, v)) : vdupq_n_f32(0.0f);
    const char* a = static_cast<const char*>(p.a);
    const char* b = static_cast<const char*>(p.b) + pass * (kBlockBytes / 2);
    const char* prefetch = p.prefetch;
    const int lines = pass == 0 ? p.prefetch_lines : 0;
    for (int block = 0; block < p.blocks; ++block) {
      for (int line = 0; line < lines; ++line) prefetch_line(prefetch + line * kLineBytes);
      for (int s = 0; s < kSteps; s += 4) {
        Vec left[kRows];
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) left[r] = NeonOps::load(a + r * kLineBytes + s * 4);
        const auto step = [&]<int kLane>() {
#pragma GCC unroll 2
          for (int t = 0; t < kTiles; ++t)
#pragma GCC unroll 4
            for (int v = 0; v < kVecs; ++v) {
              const Vec right = NeonOps::load(b + t * (kBlockBytes / 2) + (s + kLane) * kLineBytes +
                                              v * NeonOps::kBytes);
#pragma GCC unroll 8
              for (int r = 0; r < kRows; ++r)
                sum[r][t][v] = Step::template by_lane<kLane>(left[r], right, sum[r][t][v]);
            }
        };
        step.template operator()<0>();
        step.template operator()<1>();
        step.template operator()<2>();
        step.template operator()<3>();
      }
      prefetch += lines * kLineBytes;
      a += kRows * kLineBytes;
      b += kBlockBytes;
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
      for (int t = 0; t < kTiles; ++t)
        for (int v = 0; v < kVecs; ++v) {
          const bool adds = p.accumulate && !chained;
          float* const to = place(r, t, v);
          vst1q_f32(to, adds ? vaddq_f32(vld1q_f32(to), sum[r][t][v]) : sum[r][t][v]);
        }
  }
}

struct FloatStep {
  static constexpr bool kInParts = NeonOps::kInParts;
  template <int kLane>
  static float32x4_t by_lane(float32x4_t a, float32x4_t b, float32x4_t sum) {
    return vfmaq_laneq_f32(sum, b, a, kLane);
  }
};

template <int kRows>
constexpr PanelProductFn kPanelProduct<NeonOps, kRows> = lane_product<FloatStep, kRows>;

constexpr ProductTable<NeonOps, 6> kNeonProducts;

}  // namespace
}  // namespace moec::cpu
// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
