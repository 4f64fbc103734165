// SPDX-License-Identifier: Apache-2.0
// From matrices in memory, plain or coded, to the panels of tile.h.
#pragma once

#include "backend/args.h"
#include "backend/cpu/tile.h"
#include "quant/format.h"

namespace moec::cpu {

// Values (lane, k): lanes are rows of A or columns of the result, k is summed over.
struct PanelSource {
  const void* data = nullptr;  // element (lane, k) at data + lane * lane_stride + k * k_stride
  moec_dtype dtype = 0;
  int64_t lane_stride = 0, k_stride = 0;
  const int32_t* lane_gather = nullptr;  // lane is lane_gather[lane]; negative: zeros
  const int32_t* k_gather = nullptr;     // k is k_gather[k], likewise
  int64_t lanes = 0, k = 0;              // extents; beyond them are zeros
  // With codes, `data` is those and `dtype` the type that they stand for; nothing is gathered.
  quant::CodedView coded = {};
  bool transposed = false;  // lanes are k of the coded matrix, and k is its n
  bool rounds = false;      // `data` is fp32, which is rounded to `dtype`

  bool is_coded() const { return coded.codes != nullptr; }
  // Of an element; codes that lie as elements do are bytes.
  moec_dtype stored() const {
    return is_coded() ? moec_dtype(MOEC_U8) : rounds ? moec_dtype(MOEC_F32) : dtype;
  }
};

class PackedForm;

// The packed copy of a matrix [n,k] (packed_form.h).
struct PackedMatrix {
  const char* data = nullptr;
  const PackedForm* form = nullptr;
  moec_dtype dtype = 0;  // of values; fp32 in the copy is rounded to it
  int64_t n = 0, k = 0;
  bool transposed = false;  // B(n, k) is W(k, n)
  bool rounds = false;
};

// B: a source, or a packed copy.
struct WeightSource {
  PanelSource source;
  PackedMatrix packed;

  moec_dtype dtype() const { return packed.data ? packed.dtype : source.dtype; }
  bool rounds() const { return packed.data ? packed.rounds : source.rounds; }
};

// k values in one block.
inline int64_t block_k(Compute compute) {
  return compute == Compute::kBf16 ? 32 : 16;
}

inline Load plain_load(moec_dtype dtype) {
  return dtype == MOEC_F32 ? Load::kF32 : dtype == MOEC_BF16 ? Load::kBf16ToF32 : Load::kF16ToF32;
}

// A panel of `rows` lines per block (zeros beyond the extent), `blocks` blocks from k = block0 *
// block_k.
void load_rows(const TileKernels& tile, const PanelSource& source, Compute compute, int64_t lane0,
               int rows, int64_t block0, int blocks, void* to);

// Memory that will be read: `rows` runs of `bytes` bytes.
struct Region {
  const char* base = nullptr;
  int64_t rows = 0, stride = 0, bytes = 0;
  void prefetch(int64_t part, int64_t parts) const;  // part of parts, in order of rows
};

// Some panels of a weight, and some of their blocks.
struct Chunk {
  int64_t panel, block0;
  int panels, blocks;
};
Region chunk_region(const WeightSource& weight, Compute compute, const Chunk& chunk);

// The chunk as B panels, one after the other: the packed memory itself where that fits (is_direct,
// one panel), else built in `scratch`, which holds `blocks` rounded up to even. `next` is asked for
// on the way.
const void* load_chunk(const TileKernels& tile, const WeightSource& weight, Compute compute,
                       const Chunk& chunk, void* scratch, const Region& next);

bool is_direct(const WeightSource& weight, Compute compute);
// Where neighbouring columns are neighbours in memory, many panels at once are cheaper than one by
// one.
bool wants_many_panels(const WeightSource& weight);

}  // namespace moec::cpu
