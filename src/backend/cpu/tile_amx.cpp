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

// ---- with lines of B. A tile takes 16 of them where they lie, columns by k, times pairs of one
// row of A, a column of 16 dwords. The factors change places, the sums do not. A row's sums are a
// column as well, which is a line of c. Tiles: sums 0 .. 3, A 4 5, B 6.
struct LinesConfig : TileConfig {
  constexpr LinesConfig() {
    for (int tile = 0; tile < 6; ++tile) line_bytes[tile] = sizeof(float);
  }
};
constexpr LinesConfig kLinesTiles;

template <int kRows>
void load_sums(const LinesProduct& p) {
  constexpr int64_t kNext = sizeof(float);
  _tile_loadd(0, p.c, kNext);
  if constexpr (kRows > 1) _tile_loadd(1, p.c + p.ld, kNext);
  if constexpr (kRows > 2) _tile_loadd(2, p.c + 2 * p.ld, kNext);
  if constexpr (kRows > 3) _tile_loadd(3, p.c + 3 * p.ld, kNext);
}

template <int kRows>
void add_lines(const char* lines, int64_t stride, const char* a) {
  constexpr int64_t kNext = sizeof(float);
  _tile_loadd(6, lines, stride);
  _tile_loadd(4, a, kNext);
  _tile_dpbf16ps(0, 6, 4);
  if constexpr (kRows > 1) {
    _tile_loadd(5, a + kLineBytes, kNext);
    _tile_dpbf16ps(1, 6, 5);
  }
  if constexpr (kRows > 2) {
    _tile_loadd(4, a + 2 * kLineBytes, kNext);
    _tile_dpbf16ps(2, 6, 4);
  }
  if constexpr (kRows > 3) {
    _tile_loadd(5, a + 3 * kLineBytes, kNext);
    _tile_dpbf16ps(3, 6, 5);
  }
}

template <int kRows>
void store_sums(const LinesProduct& p) {
  constexpr int64_t kNext = sizeof(float);
  _tile_stored(0, p.c, kNext);
  if constexpr (kRows > 1) _tile_stored(1, p.c + p.ld, kNext);
  if constexpr (kRows > 2) _tile_stored(2, p.c + 2 * p.ld, kNext);
  if constexpr (kRows > 3) _tile_stored(3, p.c + 3 * p.ld, kNext);
}

// From line to line; 0: not the same for all, or not all are there.
int64_t stride_of(const void* const* lines) {
  const auto at = [&](int i) { return static_cast<const char*>(lines[i]); };
  const int64_t stride = at(1) - at(0);
  for (int i = 0; i < kLanes; ++i)
    if (!at(i) || (i > 0 && at(i) - at(i - 1) != stride)) return 0;
  return stride;
}

template <int kRows>
void lines_product_tiles(const LinesProduct& p) {
  constexpr int kBlockK = 2 * kSteps;
  alignas(kLineBytes) char copy[kTileBytes];
  const int64_t stride = stride_of(p.lines);
  const LineStarts lines(p);
  load_config(kLinesTiles);  // zeros in all tiles
  if (p.accumulate) load_sums<kRows>(p);
  const char* a = static_cast<const char*>(p.a);
  for (int block = 0; block < p.blocks; ++block, a += kRows * kLineBytes) {
    prefetch_given(p, block);
    if (stride && !p.prefetch) ask_ahead<kSpanBlocks>(p, lines, block);
    const int64_t k = int64_t(block) * kBlockK, left = p.count - k;
    if (stride && left >= kBlockK) {
      const auto* const line = static_cast<const uint16_t*>(p.lines[0]) + p.offset + k;
      add_lines<kRows>(reinterpret_cast<const char*>(line), stride, a);
      continue;
    }
    for (int i = 0; i < kLanes; ++i)
      Avx512Ops::put(copy + i * kLineBytes, load_line<Avx512Ops, Load::kPairs>(
                                                p.lines[i], p.offset + k, smaller(left, kBlockK)));
    __asm__ volatile("" ::: "memory");  // the load of a tile does not say what it reads
    add_lines<kRows>(copy, kLineBytes, a);
  }
  store_sums<kRows>(p);
}

template <int kRows = kLinesRows>
constexpr void fill_lines_tiles(TileKernels& t) {
  static_assert(kLinesRows == 4);
  t.by_lines[int(Load::kPairs)][kRows - 1] = lines_product_tiles<kRows>;
  if constexpr (kRows > 1) fill_lines_tiles<kRows - 1>(t);
}

// ---- with lines of values. 32 of them are the rows of tiles, two of A, and turned rows of pairs
// are tiles of B, so that sums come turned. Tiles: sums 0 1 / 2 3, A 4 5, B 6 7.
constexpr int kTileColumns = 2 * kLanes;
static_assert(kTileColumns == kMostPairColumns);

// Up to 16 rows: what has one dword a row is so wide.
struct TurnedConfig : TileConfig {
  constexpr explicit TurnedConfig(int rows) {
    for (int tile = 0; tile < 8; ++tile)
      if (tile != 4 && tile != 5) line_bytes[tile] = uint16_t(rows * int(sizeof(float)));
  }
};

// A tile's sums are those of 16 columns, a line each: rows of c.
void put_turned(const float (&sums)[kLanes][kLanes], int rows, bool accumulate, float* c,
                int64_t ld) {
  Avx512Ops::Line lines[kLanes], turned[kLanes];
  for (int i = 0; i < kLanes; ++i) lines[i] = _mm512_load_si512(sums[i]);
  Avx512Ops::transpose(lines, turned);
  for (int i = 0; i < rows; ++i) {
    const __m512 all = _mm512_castsi512_ps(turned[i]);
    float* const to = c + i * ld;
    _mm512_storeu_ps(to, accumulate ? _mm512_add_ps(_mm512_loadu_ps(to), all) : all);
  }
}

// Two tiles of 16 rows where kTwo.
template <bool kTwo>
void lines_times_rows(const PairLines& p) {
  const int rows = kTwo ? kLanes : p.rows;
  const int64_t bytes = p.stride * 2, row_bytes = rows * int64_t(sizeof(float));
  load_config(TurnedConfig(rows));  // zeros in all tiles
  const char *a = reinterpret_cast<const char*>(p.lines), *b = static_cast<const char*>(p.a);
  for (int block = 0; block < p.blocks; ++block) {
    _tile_loadd(4, a, bytes);
    _tile_loadd(6, b, row_bytes);
    _tile_loadd(5, a + kLanes * bytes, bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(2, 5, 6);
    if constexpr (kTwo) {
      _tile_loadd(7, b + kTileBytes, row_bytes);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
    a += kLineBytes;
    b += p.rows * kLineBytes;
  }
  alignas(kLineBytes) float sums[4][kLanes][kLanes] = {};
  __asm__ volatile("" ::: "memory");  // the store of a tile does not say what it writes
  _tile_stored(0, sums[0], kLineBytes);
  _tile_stored(2, sums[2], kLineBytes);
  if constexpr (kTwo) {
    _tile_stored(1, sums[1], kLineBytes);
    _tile_stored(3, sums[3], kLineBytes);
  }
  __asm__ volatile("" ::: "memory");
  for (int i = 0; i < 2; ++i)
    for (int j = 0; j < (kTwo ? 2 : 1); ++j)
      put_turned(sums[2 * i + j], rows, p.accumulate, p.c + i * kLanes + j * kLanes * p.ld, p.ld);
  load_config(kWholeTiles);
}
void pair_tiles(const PairLines& p) {
  if (p.rows == 2 * kLanes) return lines_times_rows<true>(p);
  lines_times_rows<false>(p);
}

// Tiles of up to 16 rows of 16 pairs: 16 lines of so many pairs.
void turn_rows(void* a, int rows, int blocks) {
  char* at = static_cast<char*>(a);
  const int used = smaller(rows, kLanes);
  for (int left = rows * blocks; used > 0 && left > 0; left -= used) {
    Avx512Ops::Line lines[kLanes] = {}, turned[kLanes];
    for (int i = 0; i < used; ++i) lines[i] = _mm512_loadu_si512(at + i * kLineBytes);
    Avx512Ops::transpose(lines, turned);
    for (int i = 0; i < kSteps; ++i)
      Avx512Ops::put_f32(reinterpret_cast<float*>(at) + i * used, turned[i], used);
    at += used * kLineBytes;
  }
}

constexpr FewTable kFewRows;
constexpr ProductTable<Avx512Ops, 12> kProducts;
constexpr PanelProductFn kTiles[] = {product_16, product_32};

constexpr TileKernels make() {
  TileKernels t = make_tile_kernels<Avx512Ops>("amx", "avx512 f32 12x32", kProducts);
  t.bf16_few = {"amx bf16 16x32", kLanes, 1, kFewRows.by_rows};
  t.bf16_few_rows = kLanes;
  fill_lines_tiles(t);
  t.pairs = &kPairKernels;
  t.pair_dots[int(LineCodes::kHighNibble)] = t.pair_dots[int(LineCodes::kE4m3)] = true;
  t.pair_name = "amx values 32x32";
  t.pair_lines = pair_tiles;
  t.pair_columns = kTileColumns;
  t.turn_rows = turn_rows;
  t.bf16 = {"amx bf16 32x32", 32, 16, kTiles};
  t.begin = begin;
  t.end = end;
  return t;
}

}  // namespace

constinit const TileKernels kTileAmx = make();

}  // namespace moec::cpu
// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
