// SPDX-License-Identifier: Apache-2.0
// Advanced SIMD of every aarch64: fp32 products of 6 rows; 16-bit values are widened to fp32 first.
#include "backend/cpu/tile_ops_neon.h"

namespace moec::cpu {

constinit const TileKernels kTileNeon =
    make_tile_kernels<NeonOps>("neon", "neon f32 6x32", kNeonProducts);

}  // namespace moec::cpu
