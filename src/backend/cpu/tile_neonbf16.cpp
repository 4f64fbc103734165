// SPDX-License-Identifier: Apache-2.0
// Advanced SIMD with BF16 (Armv8.6; Neoverse V1 and N2 on): products of bf16 pairs with bfdot, and
// of two pairs of two rows with bfmmla. Both add a pair's two products, then the sum, rounding to
// odd, with subnormal values read as zero; bfmmla adds its first pair first, so that the bits are
// those of bfdot.
#include "backend/cpu/tile_ops_neon.h"

// Offsets within a block are small:
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)
namespace moec::cpu {
namespace {

inline bfloat16x8_t pairs_of(float32x4_t v) {
  return vreinterpretq_bf16_f32(v);
}

struct PairOps : NeonOps {
  static constexpr bool kInParts = false;  // as AMX tiles: bf16 inputs lose more than that
  static Vec fma(Vec a, Vec b, Vec sum) { return vbfdotq_f32(sum, pairs_of(b), pairs_of(a)); }
};

struct PairStep {
  static constexpr bool kInParts = PairOps::kInParts;
  template <int kLane>
  static float32x4_t by_lane(float32x4_t a, float32x4_t b, float32x4_t sum) {
    return vbfdotq_laneq_f32(sum, pairs_of(b), pairs_of(a), kLane);
  }
};

// 2 kPairs rows times 32 columns, 8 of them at a time. A block of sums is two rows of two columns.
// Its operands are two steps of two rows, which lie in both halves of vectors, and two steps of two
// columns, which are zipped from the lines of B.
template <int kPairs>
void matrix_product(const PanelProduct& p) {
  using Vec = float32x4_t;
  constexpr int kColumns = 8, kBlocks = kColumns / 2;
  const auto whole = [](float64x2_t v) { return vreinterpretq_f32_f64(v); };
  const auto twice = [](Vec v) { return vreinterpretq_f64_f32(v); };
  for (int pass = 0; pass < kPanelColumns / kColumns; ++pass) {
    const int column = pass * kColumns;
    float* const c = p.c + column;
    Vec sum[kPairs][kBlocks];
    for (int r = 0; r < kPairs; ++r)
      for (int j = 0; j < kBlocks; ++j) {
        const float* const from = c + 2 * r * p.ld + 2 * j;
        sum[r][j] =
            p.accumulate ? vcombine_f32(vld1_f32(from), vld1_f32(from + p.ld)) : vdupq_n_f32(0.0f);
      }
    const char* a = static_cast<const char*>(p.a);
    const char* b =
        static_cast<const char*>(p.b) + column / kLanes * (kBlockBytes / 2) + column % kLanes * 4;
    const char* prefetch = p.prefetch;
    const int lines = pass == 0 ? p.prefetch_lines : 0;
    for (int block = 0; block < p.blocks; ++block) {
      for (int line = 0; line < lines; ++line) prefetch_line(prefetch + line * kLineBytes);
      for (int s = 0; s < kSteps; s += 2) {
        Vec right[kBlocks];
        for (int j = 0; j < kBlocks; j += 2) {
          const char* const step = b + s * kLineBytes + j * 8;
          const Vec first = NeonOps::load(step), second = NeonOps::load(step + kLineBytes);
          right[j] = vzip1q_f32(first, second);
          right[j + 1] = vzip2q_f32(first, second);
        }
        for (int r = 0; r < kPairs; ++r) {
          const auto* const rows = reinterpret_cast<const float*>(a + 2 * r * kLineBytes + s * 4);
          const Vec left = vcombine_f32(vld1_f32(rows), vld1_f32(rows + kSteps));
          for (int j = 0; j < kBlocks; ++j)
            sum[r][j] = vbfmmlaq_f32(sum[r][j], pairs_of(left), pairs_of(right[j]));
        }
      }
      prefetch += lines * kLineBytes;
      a += 2 * kPairs * kLineBytes;
      b += kBlockBytes;
    }
    for (int r = 0; r < kPairs; ++r)
      for (int j = 0; j < kBlocks; j += 2) {
        float* const to = c + 2 * r * p.ld + 2 * j;
        vst1q_f32(to, whole(vzip1q_f64(twice(sum[r][j]), twice(sum[r][j + 1]))));
        vst1q_f32(to + p.ld, whole(vzip2q_f64(twice(sum[r][j]), twice(sum[r][j + 1]))));
      }
  }
}

constexpr PanelProductFn kFewRows[] = {lane_product<PairStep, 1>, lane_product<PairStep, 2>,
                                       lane_product<PairStep, 3>, lane_product<PairStep, 4>};
constexpr PanelProductFn kMatrices[] = {matrix_product<1>, matrix_product<2>, matrix_product<3>,
                                        matrix_product<4>, matrix_product<5>, matrix_product<6>};

constexpr TileKernels make() {
  TileKernels t = make_tile_kernels<NeonOps>("neonbf16", "neon f32 6x32", kNeonProducts);
  fill_lines_products<PairOps, Load::kPairs>(t);
  fill_lines_products<PairOps, Load::kF32ToPairs>(t);
  t.bf16_few = {"neon bf16 4x32", 4, 1, kFewRows};
  t.bf16_few_rows = 4;
  t.bf16 = {"neon bf16 12x32", 12, 2, kMatrices};
  return t;
}

}  // namespace

constinit const TileKernels kTileNeonBf16 = make();

}  // namespace moec::cpu
// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
