// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/sm90/row_gemm_choice.h"

#include <algorithm>

#include "backend/cuda/weights/decoded_experts.h"
#include "core/workspace.h"

namespace moec::cuda {
namespace {

constexpr int kTileFeatures = 256, kGatedTile = kTileFeatures / 2, kTileDepth = 64;
constexpr int kTwoRowTiles = 256;         // rows
constexpr int64_t kBandBytes = 16 << 20;  // of rows, for all feature tiles to find them in L2
constexpr int64_t kLeastBand = 8;

// Whether those who multiply may decode.
bool is_decoded_in_registers(const RowGemmProblem& p) {
  return is_coded(p) && !is_gradient(p.op) && !p.weights_mn_major;
}

// Whether wide tiles have a kernel for a problem's codes: of a gradient along the features.
bool has_wide_kernel(const RowGemmProblem& p) {
  if (!is_coded(p) || p.dtype != MOEC_BF16 || p.weights_mn_major != is_gradient(p.op)) return false;
  const bool is_bytes = p.lines.decode == LineDecode::kBytes;
  if (!p.weights_mn_major) return !is_bytes || has_whole_lines(p.lines);
  if (p.lines.decode == LineDecode::kSigned)
    return p.channels[0].scales.dtype == MOEC_F32 && !p.channels[0].zeros.base;
  return !is_bytes || has_f32_scales(p.lines);
}

}  // namespace

bool takes_wide_tiles(const RowGemmProblem& p, int64_t choice_rows) {
  const bool gradient = is_gradient(p.op);
  const int matrices = form_of(p.op).gated ? 2 : p.parts;
  const bool small = 2 * p.features * p.k_size * matrices <= kSmallExpert;
  const bool is_table = p.lines.decode == LineDecode::kTable;
  if (gradient && small && is_table) return false;
  const int64_t from = small && !gradient ? kWideFromOfSmall : kWideFrom;
  const int64_t below = small || is_table ? kWideBelowOfSmall : kWideBelow;
  return has_wide_kernel(p) && choice_rows >= from * p.num_experts &&
         choice_rows < below * p.num_experts;
}

// A tile of one block of features takes more than half as long as one of four. So 45 blocks are
// nine tiles of four and three of three.
RowGemmChoice choose(const RowGemmProblem& p, const RowGemmDevice& device) {
  const int64_t depth = p.k_size * p.parts;
  const int blocks = int(div_up(p.features, kBlockFeatures));
  RowGemmChoice choice = {};
  RowGemmTiles& tiles = choice.tiles;
  const int tile = (form_of(p.op).gated ? kGatedTile : kTileFeatures) >> p.wide;
  tiles.feature_tiles = int(div_up(p.features, tile));
  tiles.tile_blocks = blocks / tiles.feature_tiles;
  tiles.wider_tiles = blocks % tiles.feature_tiles;
  tiles.k_blocks_of_part = int(div_up(p.k_size, kTileDepth));
  tiles.narrow_from = tiles.k_blocks_of_part * p.parts;
  tiles.k_blocks = tiles.narrow_from + int(div_up(p.rank, kTileDepth));
  const int64_t two_row_tiles = kTwoRowTiles << p.wide;
  tiles.band_length = int(std::max(kBandBytes / (two_row_tiles * depth * 2), kLeastBand >> p.wide));
  tiles.done_tiles = int(div_up(p.k_size, kGatedTile >> p.after_wide));  // of features of up
  // rows * hidden * inter; the k of kGradUp are gate's and up's.
  const double products = double(p.max_rows) * double(p.features) * double(depth);
  tiles.shares = !p.wide && products / (p.op == RowGemm::kGradUp ? 2 : 1) >= kSharedProducts;
  choice.few_rows = !p.wide && p.max_rows <= kFewOnAverage * p.num_experts && p.rank == 0 &&
                    is_decoded_in_registers(p);
  choice.in_pace = depth >= kLongTile && !choice.few_rows && !p.wide;
  choice.ctas = std::max(device.multiprocessors / 2, 1) * 2;  // pairs, one CTA a multiprocessor
  if (choice.few_rows) choice.ctas *= kFewRowsCtas;
  return choice;
}

}  // namespace moec::cuda
