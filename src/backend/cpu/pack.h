// SPDX-License-Identifier: Apache-2.0
// From matrices in memory to the panels of tile.h, and the packed form of weights.
#pragma once

#include "backend/args.h"
#include "backend/cpu/tile.h"

namespace moec::cpu {

// Values (lane, k): lanes are rows of A or columns of the result, k is summed over.
struct PanelSource {
  const void* data = nullptr;  // element (lane, k) at data + lane * lane_stride + k * k_stride
  moec_dtype dtype = 0;
  int64_t lane_stride = 0, k_stride = 0;
  const int32_t* lane_gather = nullptr;  // lane is lane_gather[lane]; negative: zeros
  const int32_t* k_gather = nullptr;     // k is k_gather[k], likewise
  int64_t lanes = 0, k = 0;              // extents; beyond them are zeros
};

// B: a source, or packed weights of `packed_n` x `packed_k`, perhaps read transposed.
struct WeightSource {
  PanelSource source;
  const void* packed = nullptr;
  moec_dtype packed_dtype = 0;
  int64_t packed_n = 0, packed_k = 0;
  bool transposed = false;
};

// k values in one block.
int64_t block_k(Compute compute);
int64_t packed_block_k(moec_dtype dtype);

// A panel of `rows` lines per block (zeros beyond the extent), `blocks` blocks from k = block0 * block_k.
void load_rows(const TileKernels& tile, const PanelSource& source, Compute compute, int64_t lane0,
               int rows, int64_t block0, int blocks, void* to);

// Columns [32 * panel, + 32) as B blocks: the packed memory itself where that fits, else built in
// `scratch`, which holds `blocks` rounded up to even.
const void* weight_panel(const TileKernels& tile, const WeightSource& weight, Compute compute,
                         int64_t panel, int64_t block0, int blocks, void* scratch);

// `panels` panels from `panel` on of a matrix that is not packed, one after the other; cheaper than one by
// one where neighbouring columns are neighbours in memory.
bool wants_many_panels(const WeightSource& weight);
void load_panels(const TileKernels& tile, const WeightSource& weight, Compute compute, int64_t panel,
                 int panels, int64_t block0, int blocks, void* to);

// Ask for the start of a panel that is read along k; each panel asks for its successor itself.
void prefetch_panel(const WeightSource& weight, int64_t panel);

// One block of packed weights.
const char* packed_block(const WeightSource& weight, int64_t panel, int64_t block);

// Whether weight_panel returns packed memory.
bool is_direct(const WeightSource& weight, Compute compute);

}  // namespace moec::cpu
