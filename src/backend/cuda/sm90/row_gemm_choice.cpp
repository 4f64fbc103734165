// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/sm90/row_gemm_choice.h"

#include <algorithm>

#include "core/workspace.h"

namespace moec::cuda {
namespace {

constexpr int kTileFeatures = 256, kGatedTile = kTileFeatures / 2, kTileDepth = 64;
constexpr int kTwoRowTiles = 256;         // rows
constexpr int64_t kBandBytes = 16 << 20;  // of rows, for all feature tiles to find them in L2
constexpr int64_t kLeastBand = 8;

// Of a forward, codes along k and nothing beside them.
bool has_few_rows_kernel(const RowGemmProblem& p) {
  return is_coded(p) && !is_gradient(p.op) && !p.weights_mn_major && p.rank == 0;
}

}  // namespace

// A tile of one block of features takes more than half as long as one of four. So 45 blocks are
// nine tiles of four and three of three.
RowGemmChoice choose(const RowGemmProblem& p, const RowGemmDevice& device) {
  const int64_t depth = p.k_size * p.parts;
  const int blocks = int(div_up(p.features, kBlockFeatures));
  RowGemmChoice choice = {};
  RowGemmTiles& tiles = choice.tiles;
  tiles.feature_tiles = int(div_up(p.features, form_of(p.op).gated ? kGatedTile : kTileFeatures));
  tiles.tile_blocks = blocks / tiles.feature_tiles;
  tiles.wider_tiles = blocks % tiles.feature_tiles;
  tiles.k_blocks_of_part = int(div_up(p.k_size, kTileDepth));
  tiles.narrow_from = tiles.k_blocks_of_part * p.parts;
  tiles.k_blocks = tiles.narrow_from + int(div_up(p.rank, kTileDepth));
  tiles.band_length = int(std::max(kBandBytes / (kTwoRowTiles * depth * 2), kLeastBand));
  tiles.done_tiles = int(div_up(p.k_size, kGatedTile));  // the features of up are the k of down
  // rows * hidden * inter; the k of kGradUp are gate's and up's.
  const double products = double(p.max_rows) * double(p.features) * double(depth);
  tiles.shares = products / (p.op == RowGemm::kGradUp ? 2 : 1) >= kSharedProducts;
  choice.few_rows = p.max_rows <= kFewOnAverage * p.num_experts && has_few_rows_kernel(p);
  choice.in_pace = depth >= kLongTile && !choice.few_rows;
  choice.ctas = std::max(device.multiprocessors / 2, 1) * 2;  // pairs, one CTA a multiprocessor
  if (choice.few_rows) choice.ctas *= kFewRowsCtas;
  return choice;
}

}  // namespace moec::cuda
