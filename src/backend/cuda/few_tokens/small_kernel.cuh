// SPDX-License-Identifier: Apache-2.0
// The small-token kernel: every warp streams weights from memory straight into the fragments of
// mma.sync, features on the m side, rows (tokens) on the n side, and waits for nothing but its own
// loads; once in eight items the warps add up their parts of k.
//
//   up       m: eight gate and eight up features, n: eight tokens
//   down     m: eight features twice, over two stretches of k; n: four tokens twice, likewise. Half
//            of the product is of no use, but a CTA can own any eight columns of y
//   grid     one CTA on a multiprocessor, never two: the second would make a slow one
//   flight   kDepth chunks of 4 KiB of weights a warp, refilled as they are used
//   chain    up waits for its predecessor before it reads the plan. down is let in once every CTA
//            of up has passed that wait, so it may read the plan and weights while up still runs
//   order    each output is a sum over the warps' parts of k, in warp order: deterministic
#pragma once

#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/few_tokens/small_epilogue.cuh"

namespace moec::cuda {

constexpr int kDepth = 2;            // chunks of 4 KiB of weights
constexpr int kBatch = kSmallWarps;  // items between two sums over warps
constexpr int kNotes = 64;           // items that warps may be apart, and more

struct SmallShared {
  float4 parts[2][kBatch][kSmallWarps][32];  // two batches, so that one barrier a batch is enough
  SmallItem notes[kNotes];                   // the items in flight, by the warp that begins them
  HitExpert hits[1];                         // [experts + 1]
};

template <bool kGated>
struct SmallTile {
  static constexpr int kRows = kGated ? 8 : 4;
  static constexpr int kSteps = 4, kStepK = 32;      // a step: two products of 16 k
  static constexpr int kSecondK = kGated ? 0 : 128;  // from the k of rows g to those of g + 8
  static constexpr int kChunkK = kSteps * kStepK + kSecondK;
};

struct Chunk {
  uint4 weights[4][2], operand[4];
};

// Place of a warp in the row of all chunks of all items, of which it has one in kSmallWarps.
struct ChunkPlace {
  int item = 0, chunk, chunks;  // of chunks of each item
  __device__ ChunkPlace(int64_t k_size, int chunk_k)
      : chunk(threadIdx.x / 32), chunks(int((k_size + chunk_k - 1) / chunk_k)) {
    wrap();
  }
  __device__ void advance() {
    chunk += kSmallWarps;
    wrap();
  }
  __device__ bool last_of_item() const { return chunk + kSmallWarps >= chunks; }

 private:
  __device__ void wrap() {
    for (; chunk >= chunks; chunk -= chunks) ++item;
  }
};

// Loads the chunks of one warp: the weights, the operand, or both.
template <bool kGated>
class ChunkLoader {
  using Tile = SmallTile<kGated>;
  using Walk = ItemWalk<Tile::kRows>;

 public:
  __device__ ChunkLoader(const SmallArgs& p, const Walk& walk, const OwnFeatures& own,
                         SmallItem* notes)
      : p_(p), own_(own), walk_(walk), notes_(notes), place_(p.k_size, Tile::kChunkK) {
    find_item(-1);
  }

  template <bool kWeights, bool kOperand>
  __device__ __forceinline__ void load(Chunk& chunk) {
    if (!more_) return;
    const int first = place_.chunk * Tile::kChunkK, k = first + int(threadIdx.x) % 4 * 8;
    const int mine = k + (threadIdx.x & 16 ? Tile::kSecondK : 0);  // of the operand
    const bool whole = first + Tile::kChunkK <= p_.k_size;
#pragma unroll
    for (int i = 0; i < Tile::kSteps; ++i) {
      const int step = i * Tile::kStepK;
      // Beyond the end of k the operand is zero, and the weights are any of the row.
      const auto at = [&](int from) { return whole || from < p_.k_size ? from * 2 : 0; };
      if constexpr (kWeights) {
        chunk.weights[i][0] = load_once(weights_[0] + at(k + step));
        chunk.weights[i][1] = load_once(weights_[1] + at(k + step + Tile::kSecondK));
      }
      if constexpr (kOperand) {
        chunk.operand[i] =
            load_operand<kGated>(operand_ + (mine + step) * 2, whole || mine + step < p_.k_size);
      }
    }
    const int before = place_.item;
    place_.advance();
    if (place_.item != before) find_item(before);
  }

 private:
  // Rows past the item's end are copies of its last one: every row has its own column of sums.
  __device__ __forceinline__ void find_item(int before) {
    SmallItem item;
    for (; before < place_.item; ++before) more_ = walk_.next(item);
    if (!more_) return;
    if (place_.chunk == 0 && threadIdx.x % 32 == 0) notes_[place_.item % kNotes] = item;
    const int g = int(threadIdx.x) % 32 / 4;
    const int64_t feature = (kGated ? 0 : own_.begin) + item.block * 8 + g;
    const int64_t from = (item.expert * p_.expert_stride + feature * p_.weight_stride) * 2;
    weights_[0] = static_cast<const char*>(p_.weights[0]) + from;
    weights_[1] = kGated ? static_cast<const char*>(p_.weights[1]) + from : weights_[0];
    const int row = item.row_begin + min(g % Tile::kRows, item.rows - 1);
    if (row == row_) return;
    row_ = row;
    const int source = kGated ? max(__ldg(p_.row_token + row), 0) : row;
    operand_ = static_cast<const char*>(p_.operand) + source * p_.operand_stride * 2;
  }

  const SmallArgs& p_;
  const OwnFeatures& own_;
  Walk walk_;
  SmallItem* notes_;
  ChunkPlace place_;
  const char *weights_[2] = {}, *operand_ = nullptr;
  int row_ = -1;
  bool more_ = true;
};

// The items of a batch are complete in all parts: warp w adds up and stores item first + w.
template <typename Element, bool kGated>
__device__ __forceinline__ void finish_batch(const SmallArgs& p, const OwnFeatures& own,
                                             const SmallShared& shared, int first, int items,
                                             int chunks) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  __syncthreads();
  if (first + warp >= items) return;
  float sums[4] = {};
#pragma unroll
  for (int w = 0; w < kSmallWarps; ++w) {
    if (w >= chunks) break;
    const float4 part = shared.parts[first / kBatch & 1][warp][w][lane];
    sums[0] += part.x, sums[1] += part.y, sums[2] += part.z, sums[3] += part.w;
  }
  const SmallItem item = shared.notes[(first + warp) % kNotes];
  if constexpr (kGated) {
    store_activated<Element>(p, item, sums);
  } else {
    store_rows<Element>(p, own, item, sums);
  }
}

template <typename Element, bool kGated>
__global__ __launch_bounds__(kSmallThreads,
                             1) void small_kernel(const __grid_constant__ SmallArgs p) {
  extern __shared__ __align__(16) unsigned char memory[];
  SmallShared& shared = *reinterpret_cast<SmallShared*>(memory);
  if constexpr (kGated) ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  using Tile = SmallTile<kGated>;
  const int hits = find_hits<Tile::kRows>(p.group_offsets, p.num_experts, shared.hits);
  const OwnFeatures own(p);
  const int blocks = kGated ? int(p.features / 8) : (own.end - own.begin) / 8;
  const ItemWalk<Tile::kRows> walk(shared.hits, hits, blocks, kGated);
  const int items = walk.items();
  ChunkLoader<kGated> loader(p, walk, own, shared.notes);
  Chunk ring[kDepth];
  ChunkLoader<kGated> operands = loader;
#pragma unroll
  for (Chunk& chunk : ring) loader.template load<true, false>(chunk);
  if constexpr (!kGated) ptx::grid_dependency_wait();
#pragma unroll
  for (Chunk& chunk : ring) operands.template load<false, true>(chunk);
  float sums[4] = {};
  const int lane = threadIdx.x & 31;
  ChunkPlace place(p.k_size, Tile::kChunkK);
  for (int batch = 0; batch < items;) {
#pragma unroll
    for (Chunk& chunk : ring) {
      while (batch < items && min(place.item, items) >= min(batch + kBatch, items)) {
        finish_batch<Element, kGated>(p, own, shared, batch, items, place.chunks);
        batch += kBatch;
      }
      if (batch >= items) break;
#pragma unroll
      for (int i = 0; i < Tile::kSteps; ++i) {
        multiply<Element>(sums, chunk.weights[i][0], chunk.weights[i][1], chunk.operand[i]);
      }
      loader.template load<true, true>(chunk);
      if (place.last_of_item()) {
        shared.parts[batch / kBatch & 1][place.item % kBatch][place.chunk % kSmallWarps][lane] = {
            sums[0], sums[1], sums[2], sums[3]};
        sums[0] = sums[1] = sums[2] = sums[3] = 0;
      }
      place.advance();
    }
  }
  if constexpr (!kGated) {
    __syncthreads();
    combine_columns<Element>(p, own);
  }
}

template <typename Element, bool kGated>
cudaError_t launch_element(const SmallArgs& p, int multiprocessors, cudaStream_t stream) {
  static std::atomic<uint64_t> allowed;  // one for each kernel
  const auto kernel = small_kernel<Element, kGated>;
  const auto bytes = [](int experts) {
    return int(sizeof(SmallShared)) + experts * int(sizeof(HitExpert));
  };
  if (cudaError_t e = allow_shared_memory(kernel, bytes(kMaxSmallExperts), allowed)) return e;
  return launch(kernel, dim3(multiprocessors), kSmallThreads, bytes(p.num_experts), stream, p);
}

template <bool kGated>
cudaError_t launch_small(const SmallArgs& p, int multiprocessors, cudaStream_t stream) {
  return p.dtype == MOEC_BF16 ? launch_element<__nv_bfloat16, kGated>(p, multiprocessors, stream)
                              : launch_element<__half, kGated>(p, multiprocessors, stream);
}

}  // namespace moec::cuda
