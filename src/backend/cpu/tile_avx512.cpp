// SPDX-License-Identifier: Apache-2.0
// AVX-512 F, BW, DQ, VL: fp32 products of 12 rows; 16-bit values are widened to fp32 first.
#include "backend/cpu/tile_ops_avx512.h"

namespace moec::cpu {
namespace {
constexpr ProductTable<Avx512Ops, 12> kProducts;
}

constinit const TileKernels kTileAvx512 =
    make_tile_kernels<Avx512Ops>("avx512", "avx512 f32 12x32", kProducts);

}  // namespace moec::cpu
