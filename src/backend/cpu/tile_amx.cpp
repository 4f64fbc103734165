// SPDX-License-Identifier: Apache-2.0
// AMX-BF16: products on tile registers; the other jobs on AVX-512. A tile is up to 16 lines: of A
// 16 rows, of B 16 steps, of c 16 rows of 16 fp32. Few rows use tiles of their own height: on a
// Xeon (one core, weights from DRAM) tiles read 19.2 GB/s where vdpbf16ps reads 18.0.
#include "backend/cpu/tile_ops_avx512.h"

// Offsets within a block are small:
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)
namespace moec::cpu {
namespace {

// Tiles: c 0 1 / 2 3, A 4 5, B 6 7. Tiles of c and A may be shorter than 16 lines.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t line_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t lines[16] = {};
  constexpr explicit TileConfig(uint8_t rows = 16) {
    for (int tile = 0; tile < 8; ++tile) lines[tile] = tile < 6 ? rows : 16;
  }
};
static_assert(sizeof(TileConfig) == 64);

constexpr TileConfig kWholeTiles;

// The intrinsic of gcc 12 names 8 of the 64 bytes as its input.
inline void load_config(const TileConfig& config) {
  __asm__ volatile("ldtilecfg %0" ::"m"(config));
}

void begin() {
  load_config(kWholeTiles);
}
void end() {
  _tile_release();
}

void prefetch_lines(const char*& next, int lines) {
  for (int i = 0; i < lines; ++i) __builtin_prefetch(next + i * kLineBytes, 0, 2);
  next += lines * kLineBytes;
}

constexpr int kTileBytes = kLanes * kLineBytes;

void product_32(const PanelProduct& p) {
  float* const low = p.c + kLanes * p.ld;
  const int64_t stride = p.ld * 4;
  if (p.accumulate) {
    _tile_loadd(0, p.c, stride);
    _tile_loadd(1, p.c + kLanes, stride);
    _tile_loadd(2, low, stride);
    _tile_loadd(3, low + kLanes, stride);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  const char *a = static_cast<const char*>(p.a), *b = static_cast<const char*>(p.b);
  const char* next = p.prefetch;
  for (int block = 0; block < p.blocks; ++block) {
    _tile_loadd(4, a, kLineBytes);
    _tile_loadd(6, b, kLineBytes);
    _tile_loadd(7, b + kTileBytes, kLineBytes);
    prefetch_lines(next, p.prefetch_lines);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a + kTileBytes, kLineBytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    a += 2 * kTileBytes;
    b += kBlockBytes;
  }
  _tile_stored(0, p.c, stride);
  _tile_stored(1, p.c + kLanes, stride);
  _tile_stored(2, low, stride);
  _tile_stored(3, low + kLanes, stride);
}

// Up to 16 rows: one row of tiles, of that height.
void product_one(const PanelProduct& p, int64_t a_bytes) {
  const int64_t stride = p.ld * 4;
  if (p.accumulate) {
    _tile_loadd(0, p.c, stride);
    _tile_loadd(1, p.c + kLanes, stride);
  } else {
    _tile_zero(0);
    _tile_zero(1);
  }
  const char *a = static_cast<const char*>(p.a), *b = static_cast<const char*>(p.b);
  const char* next = p.prefetch;
  for (int block = 0; block < p.blocks; ++block) {
    _tile_loadd(4, a, kLineBytes);
    _tile_loadd(6, b, kLineBytes);
    _tile_loadd(7, b + kTileBytes, kLineBytes);
    prefetch_lines(next, p.prefetch_lines);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    a += a_bytes;
    b += kBlockBytes;
  }
  _tile_stored(0, p.c, stride);
  _tile_stored(1, p.c + kLanes, stride);
}

void product_16(const PanelProduct& p) {
  product_one(p, kTileBytes);
}

template <int kRows>
void product_few(const PanelProduct& p) {
  static constexpr TileConfig kConfig(kRows);
  load_config(kConfig);
  product_one(p, kRows * kLineBytes);
}

struct FewTable {
  PanelProductFn by_rows[kLanes];
  template <int kRows = kLanes>
  constexpr void fill() {
    by_rows[kRows - 1] = product_few<kRows>;
    if constexpr (kRows > 1) fill<kRows - 1>();
  }
  constexpr FewTable() : by_rows{} { fill(); }
};

constexpr FewTable kFewRows;
constexpr ProductTable<Avx512Ops, 12> kProducts;
constexpr PanelProductFn kTiles[] = {product_16, product_32};

constexpr TileKernels make() {
  TileKernels t = make_tile_kernels<Avx512Ops>("amx", "avx512 f32 12x32", kProducts);
  t.bf16_few = {"amx bf16 16x32", kLanes, 1, kFewRows.by_rows};
  t.bf16_few_rows = kLanes;
  t.bf16 = {"amx bf16 32x32", 32, 16, kTiles};
  t.begin = begin;
  t.end = end;
  return t;
}

}  // namespace

constinit const TileKernels kTileAmx = make();

}  // namespace moec::cpu
// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
