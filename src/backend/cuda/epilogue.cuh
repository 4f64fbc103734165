// SPDX-License-Identifier: Apache-2.0
// What happens to the accumulators of a row tile. They are transposed (features x rows), so every
// block of 64 features goes through a staging buffer [rows][64] to leave as full 128-byte lines.
// Rows past the tile's end are computed from zeros or from a neighbour and never stored.
#pragma once

#include "backend/cuda/element.cuh"
#include "backend/cuda/row_gemm.h"
#include "backend/cuda/tile_mma.cuh"

namespace moec::cuda {

constexpr int kStagingBytes = kMaxTileN * 128;  // one block of one warpgroup
constexpr int kGroupThreads = 128;

// The part of one consumer warpgroup.
struct Group {
  int index;         // 0 or 1
  int thread;        // 0..127
  uint32_t staging;  // of this group
  bool first_warp;   // known to be uniform

  __device__ void sync() const { ptx::named_barrier(1 + index, kGroupThreads); }
  // The thread that issues bulk copies. All lanes call it.
  __device__ bool leads() const { return first_warp && ptx::elect_one(); }
  // Where this lane's row of the 8x8 matrices of 16-row slice `slice` lies.
  __device__ uint32_t matrix_row(uint32_t buffer, int slice) const {
    const int lane = thread & 31, warp = thread >> 5;
    return buffer + swizzled(16 * slice + (lane >> 4) * 8 + (lane & 7), 2 * warp + (lane >> 3 & 1));
  }
};

// The 8 accumulators of slice s are (rows 0..7, features 0..7), (rows 0..7, features 8..15), then
// rows 8..15: four 8x8 matrices of two registers each.
template <typename Element>
__device__ __forceinline__ void pack_slice(const float (&acc)[kMaxTileN / 2], int s,
                                           uint32_t (&packed)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) packed[i] = pack<Element>(acc[8 * s + 2 * i], acc[8 * s + 2 * i + 1]);
}

// A [P, parts, features] result in memory.
struct RowOutput {
  const RowMaps& maps;
  void* base;
  int64_t stride_bytes, part_bytes;
  int features;
};

// Fill a staging buffer; slice(s, packed) gives the 16 rows of slice s.
template <typename Slice>
__device__ __forceinline__ void stage(const Group& group, uint32_t buffer, int rows, Slice slice) {
#pragma unroll
  for (int s = 0; s < kMaxTileN / 16; ++s) {
    if (16 * s < rows) {
      uint32_t packed[4];
      slice(s, packed);
      ptx::store_matrix_transposed(group.matrix_row(buffer, s), packed[0], packed[1], packed[2],
                                   packed[3]);
    }
  }
}
template <typename Element>
__device__ __forceinline__ void stage(const Group& group, uint32_t buffer, int rows,
                                      const float (&acc)[kMaxTileN / 2]) {
  stage(group, buffer, rows,
        [&](int s, uint32_t (&packed)[4]) { pack_slice<Element>(acc, s, packed); });
}

// All earlier sends but the last kPending have read their buffers.
template <int kPending>
__device__ __forceinline__ void wait_sent(const Group& group) {
  if (group.leads()) ptx::bulk_wait_read<kPending>();
  group.sync();
}
__device__ __forceinline__ void staged(const Group& group) {
  ptx::fence_proxy_async();
  group.sync();
}

// Staged block -> memory. Whole units of 16 rows go by bulk copies, which are still reading the
// buffer when this returns (and queue behind the loads, so waiting for them is dear: only the next
// tile's epilogue does); the rows of a last, partial unit go by ordinary stores. All threads of the
// group call it, after staged().
__device__ __forceinline__ void send(const Group& group, uint32_t buffer, const RowOutput& out,
                                     int part, int feature, const RowTile& tile) {
  const int whole = tile.rows / kRowUnit;
  if (group.leads()) {
    if (feature < out.features && whole > 0) {
      ptx::tensor_store(&out.maps.of_units[whole - 1], buffer, {feature, part, tile.row_begin});
    }
    ptx::bulk_commit();
  }
  const int chunk = group.thread & 7, row = whole * kRowUnit + (group.thread >> 3);
  if (row < tile.rows && feature + chunk * 8 < out.features) {
    char* const to = static_cast<char*>(out.base) + (tile.row_begin + row) * out.stride_bytes +
                     part * out.part_bytes + (feature + chunk * 8) * 2;
    *reinterpret_cast<uint4*>(to) = ptx::shared_load(buffer + swizzled(row, chunk));
  }
}

// ---- plain: down, gradient of the up projection -------------------------------------------------
template <typename Element>
struct StoreRows {
  static constexpr bool kGated = false;
  static constexpr int kStages = 3, kStagingBuffers = 2;

  __device__ void begin(const RowGemmParams&, const RowTile&, const Group&) {}
  __device__ void finish(const RowGemmParams& p, const RowTile& tile, const Group& group,
                         const Accumulators& acc) {
    const int feature = tile.feature_tile * kTileM + group.index * 64;
    const RowOutput out{p.out_maps, p.out, p.out_stride * 2, 0, p.features};
    const uint32_t second = group.staging + kStagingBytes;
    wait_sent<0>(group);
    stage<Element>(group, group.staging, tile.rows, acc.first);
    stage<Element>(group, second, tile.rows, acc.second);
    staged(group);
    send(group, group.staging, out, 0, feature, tile);
    send(group, second, out, 0, feature + 128, tile);
  }
};

// ---- gated: up ----------------------------------------------------------------------------------
// Without pre-activations to keep, one staging buffer is enough and a fourth stage fits.
template <typename Element, typename Activation, bool kKeepsPre>
struct StoreActivated {
  static constexpr bool kGated = true;
  static constexpr int kStages = kKeepsPre ? 3 : 4, kStagingBuffers = kKeepsPre ? 2 : 1;

  __device__ void begin(const RowGemmParams&, const RowTile&, const Group&) {}
  __device__ void finish(const RowGemmParams& p, const RowTile& tile, const Group& group,
                         const Accumulators& acc) {
    const int feature = tile.feature_tile * (kTileM / 2) + group.index * 64;
    const bool keeps_pre = kKeepsPre && p.pre;  // a branch keeps the activations behind the copies
    if (keeps_pre) {
      const RowOutput pre{p.pre_maps, p.pre, p.features * 4LL, p.features * 2LL, p.features};
      const uint32_t second = group.staging + kStagingBytes;
      wait_sent<0>(group);
      stage<Element>(group, group.staging, tile.rows, acc.first);
      stage<Element>(group, second, tile.rows, acc.second);
      staged(group);
      send(group, group.staging, pre, 0, feature, tile);
      send(group, second, pre, 1, feature, tile);
    }
    const Activation activation{p.activation};
    uint32_t value[kMaxTileN / 4];  // before the wait: the copies read while this is computed
#pragma unroll
    for (int i = 0; i < kMaxTileN / 4; ++i) {
      value[i] = pack<Element>(activation.value(acc.first[2 * i], acc.second[2 * i]),
                               activation.value(acc.first[2 * i + 1], acc.second[2 * i + 1]));
    }
    if (keeps_pre) {
      wait_sent<1>(group);
    } else {
      wait_sent<0>(group);
    }
    stage(group, group.staging, tile.rows, [&](int s, uint32_t (&packed)[4]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) packed[i] = value[4 * s + i];
    });
    staged(group);
    const RowOutput out{p.out_maps, p.out, p.out_stride * 2, 0, p.features};
    send(group, group.staging, out, 0, feature, tile);
  }
};

// ---- gradient of the down projection ------------------------------------------------------------
// The accumulators are d_act before the routing weight. With g, u the saved pre-activations:
//   d_weight[r] += d_act . act(g, u);  out = weight * act(g, u);  d_pre = weight * d_act * act'(g,
//   u)
// Two staging buffers: g and u of the next block are fetched into them, and d_gate and d_up leave
// from the same places.
// Copy a staged block [rows][64 features] to `out`, the address of its first element.
__device__ __forceinline__ void copy_out(const Group& group, uint32_t buffer, void* out,
                                         int64_t stride_bytes, int rows, int features) {
  const int chunk = group.thread & 7;
  char* to = static_cast<char*>(out) + chunk * 16;
  if (chunk * 8 >= features) return;
#pragma unroll
  for (int i = 0; i < kMaxTileN / 16; ++i) {
    const int row = i * 16 + (group.thread >> 3);
    if (row < rows) {
      *reinterpret_cast<uint4*>(to + row * stride_bytes) =
          ptx::shared_load(buffer + swizzled(row, chunk));
    }
  }
}

template <typename Element, typename Activation>
struct StoreGradient {
  static constexpr bool kGated = false;
  static constexpr int kStages = 3, kStagingBuffers = 2;

  __device__ void begin(const RowGemmParams& p, const RowTile& tile, const Group& group) {
    group.sync();
    fetch(p, tile, group, 0, 0);
    fetch(p, tile, group, 0, 1);
    ptx::copy_async_commit();
  }

  __device__ void finish(const RowGemmParams& p, const RowTile& tile, const Group& group,
                         Accumulators& acc) {
    float d_weight[kMaxTileN / 4] = {};
    block(p, tile, group, acc.first, 0, d_weight);
    fetch(p, tile, group, 1, 0);
    ptx::copy_async_commit();
    block(p, tile, group, acc.second, 1, d_weight);
    store_d_weight(p, tile, group, d_weight);
  }

 private:
  static __device__ int feature_of(const RowTile& tile, const Group& group, int block) {
    return tile.feature_tile * kTileM + group.index * 64 + block * 128;
  }

  // part 0 = gate, 1 = up, each into its own staging buffer.
  static __device__ void fetch(const RowGemmParams& p, const RowTile& tile, const Group& group,
                               int block, int part) {
    const int chunk = group.thread & 7, feature = feature_of(tile, group, block) + chunk * 8;
    const Element* from = static_cast<const Element*>(p.pre) +
                          (int64_t(tile.row_begin) * 2 + part) * p.features + feature;
#pragma unroll
    for (int i = 0; i < kMaxTileN / 16; ++i) {
      const int row = i * 16 + (group.thread >> 3);
      const bool inside = row < tile.rows && feature < p.features;
      ptx::copy_async(group.staging + part * kStagingBytes + swizzled(row, chunk),
                      inside ? from + row * 2LL * p.features : p.pre, inside ? 16 : 0);
    }
  }

  static __device__ void block(const RowGemmParams& p, const RowTile& tile, const Group& group,
                               const float (&d_act)[kMaxTileN / 2], int block,
                               float (&d_weight)[kMaxTileN / 4]) {
    const uint32_t gate_buffer = group.staging, up_buffer = group.staging + kStagingBytes;
    uint32_t scaled[kMaxTileN / 4];  // weight * act
    ptx::copy_async_wait<0>();
    group.sync();
#pragma unroll
    for (int s = 0; s < kMaxTileN / 16; ++s) {
      if (16 * s < tile.rows) {
        slice(p, tile, group, s, d_act + 8 * s, scaled + 4 * s, d_weight + 4 * s);
      }
    }
    group.sync();
    const int feature = feature_of(tile, group, block), left = p.features - feature;
    const int64_t pre_bytes = 2LL * p.features * sizeof(Element);
    Element* d_pre =
        static_cast<Element*>(p.d_pre) + int64_t(tile.row_begin) * 2 * p.features + feature;
    copy_out(group, gate_buffer, d_pre, pre_bytes, tile.rows, left);
    copy_out(group, up_buffer, d_pre + p.features, pre_bytes, tile.rows, left);
    group.sync();
    if (block == 0) fetch(p, tile, group, 1, 1);
#pragma unroll
    for (int s = 0; s < kMaxTileN / 16; ++s) {
      if (16 * s < tile.rows) {
        ptx::store_matrix_transposed(group.matrix_row(gate_buffer, s), scaled[4 * s],
                                     scaled[4 * s + 1], scaled[4 * s + 2], scaled[4 * s + 3]);
      }
    }
    group.sync();
    Element* out = static_cast<Element*>(p.out) + tile.row_begin * p.out_stride + feature;
    copy_out(group, gate_buffer, out, p.out_stride * int64_t(sizeof(Element)), tile.rows, left);
    group.sync();
  }

  // 16 rows x 16 features of one warp: d_act[8] as the fragment has them; scaled[4] packed;
  // d_weight[4]: rows 2c, 2c + 1, 8 + 2c, 9 + 2c with c = lane % 4.
  static __device__ void slice(const RowGemmParams& p, const RowTile& tile, const Group& group,
                               int s, const float* d_act, uint32_t* scaled, float* d_weight) {
    const Activation activation{p.activation};
    const uint32_t gate_row = group.matrix_row(group.staging, s);
    const uint32_t up_row = group.matrix_row(group.staging + kStagingBytes, s);
    uint32_t gate[4], up[4];
    ptx::load_matrix_transposed(gate_row, gate);
    ptx::load_matrix_transposed(up_row, up);
    float weight[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = 16 * s + (i / 2) * 8 + (group.thread & 3) * 2 + i % 2;
      weight[i] = row < tile.rows ? __ldg(p.row_weight + tile.row_begin + row) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // i = 2 * (upper rows) + (upper features)
      const float2 g = unpack<Element>(gate[i]), u = unpack<Element>(up[i]);
      const int r = i / 2 * 2;
      const auto low = activation.gradient(g.x, u.x, d_act[2 * i] * weight[r]);
      const auto high = activation.gradient(g.y, u.y, d_act[2 * i + 1] * weight[r + 1]);
      d_weight[r] += d_act[2 * i] * low.value;
      d_weight[r + 1] += d_act[2 * i + 1] * high.value;
      scaled[i] = pack<Element>(weight[r] * low.value, weight[r + 1] * high.value);
      gate[i] = pack<Element>(low.d_gate, high.d_gate);
      up[i] = pack<Element>(low.d_up, high.d_up);
    }
    ptx::store_matrix_transposed(gate_row, gate[0], gate[1], gate[2], gate[3]);
    ptx::store_matrix_transposed(up_row, up[0], up[1], up[2], up[3]);
  }

  // Sum over the 128 features of this warpgroup in a fixed order: lanes, then warps.
  static __device__ void store_d_weight(const RowGemmParams& p, const RowTile& tile,
                                        const Group& group,
                                        const float (&d_weight)[kMaxTileN / 4]) {
    const int lane = group.thread & 31, warp = group.thread >> 5;
    float* const sums = reinterpret_cast<float*>(__cvta_shared_to_generic(group.staging));
#pragma unroll
    for (int i = 0; i < kMaxTileN / 4; ++i) {
      float sum = d_weight[i];
      sum += __shfl_xor_sync(~0u, sum, 4);
      sum += __shfl_xor_sync(~0u, sum, 8);
      sum += __shfl_xor_sync(~0u, sum, 16);
      const int row = i / 4 * 16 + (i / 2 % 2) * 8 + lane * 2 + i % 2;
      if (lane < 4) sums[warp * kMaxTileN + row] = sum;
    }
    group.sync();
    if (group.thread < tile.rows && tile.feature_tile < p.feature_tiles) {
      const float* const column = sums + group.thread;
      p.d_weight_parts[(tile.feature_tile * 2 + group.index) * p.max_rows + tile.row_begin +
                       group.thread] =
          column[0] + column[kMaxTileN] + column[2 * kMaxTileN] + column[3 * kMaxTileN];
    }
  }
};

}  // namespace moec::cuda
