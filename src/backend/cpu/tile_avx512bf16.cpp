// SPDX-License-Identifier: Apache-2.0
// AVX512-BF16 and VBMI: products of bf16 pairs with vdpbf16ps. It adds each pair's products, high
// half first, with subnormal inputs read as zero.
#include "backend/cpu/tile_pair_lines.h"
#include "backend/cpu/tile_pairs.h"

namespace moec::cpu {
namespace {

struct PairOps : Avx512Ops {
  static constexpr bool kInParts = false;  // as AMX tiles: bf16 inputs lose more than that
  static Vec fma(Vec a, Vec b, Vec sum) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
};

constexpr ProductTable<Avx512Ops, 12> kProducts;
constexpr ProductTable<PairOps, 12> kPairProducts;

constexpr TileKernels make() {
  TileKernels t = make_tile_kernels<Avx512Ops>("avx512bf16", "avx512 f32 12x32", kProducts);
  fill_lines_products<PairOps, Load::kPairs>(t);
  fill_lines_products<PairOps, Load::kF32ToPairs>(t);
  t.pairs = &kPairKernels;
  for (bool& faster : t.pair_dots) faster = true;
  t.pair_name = "avx512bf16 values 6x4";
  t.pair_lines = pair_lines;
  t.pair_columns = kColumns;
  t.bf16 = t.bf16_few = kPairProducts.kernel("avx512bf16 bf16 12x32");
  return t;
}

}  // namespace

constinit const PairKernels kPairKernels = make_pair_kernels();
constinit const TileKernels kTileAvx512Bf16 = make();

}  // namespace moec::cpu
