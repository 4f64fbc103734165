// SPDX-License-Identifier: Apache-2.0
// Balance losses. A CTA a chunk of tokens: its warps work on as many tokens at once, and what they
// found is added in the order of the tokens. Chunks are those of the CPU backend, and are added in
// their order.
// A stretch is what is balanced by itself: all tokens, or one sequence. Stretches go in batches, so
// that scratch does not grow with their number. The tokens of all ranks are one stretch, even where
// this one has none: its sums are added over the ranks before anything is made of them.
#include "backend/cuda/routing/loss.h"

#include "backend/cuda/routing/route_row.cuh"
#include "core/chunks.h"
#include "math/loss.h"

namespace moec::cuda {
namespace {

constexpr int64_t kBatchChunks = 512;  // of all stretches of a batch
constexpr int kMaxLayers = 512;        // as the layer checks

struct LossParams {
  uint32_t kind, score;
  float coefficient;
  int32_t num_experts, lanes, top_k;
  int64_t num_tokens, stretch_tokens, stretches, num_layers;
  int64_t chunk_tokens, chunks;        // of one stretch
  int64_t first_stretch, end_stretch;  // of the batch
  const uint8_t* token_mask;
  Array counts;
  const float* d_loss;
  float* loss;
  RowPlaces places;
  // scratch, one entry (or row of lanes) for each chunk of the batch; the first chunk of a stretch
  // takes its sums; block_p: of at most kSummedTogether tokens that are not in sum_p yet
  float *sum_p, *block_p;
  int32_t *sum_n, *counted;
  double *part, *total;  // part: loss of a chunk or stretch; total [1]: of all before the batch
  // of all ranks: counted tokens, or sequences [1]; n of each lane. Null: of this one
  int64_t* of_all;
  double* selected_of_all;
  LossLayer layers[kMaxLayers];

  __device__ bool counts_token(int64_t t) const { return !token_mask || token_mask[t]; }
  __device__ double loss_gradient() const { return d_loss ? double(*d_loss) : 1.0; }
  // Tokens [begin, end) of chunk `slot` of the batch.
  __device__ int64_t chunk_begin(int64_t slot) const {
    return (first_stretch + slot / chunks) * stretch_tokens + slot % chunks * chunk_tokens;
  }
  __device__ int64_t chunk_end(int64_t slot) const {
    const int64_t stretch_end = (first_stretch + slot / chunks + 1) * stretch_tokens;
    return min(chunk_begin(slot) + chunk_tokens, stretch_end);
  }
};

// row.s = shares of one row; returns what the scores were divided by.
__device__ float load_shares(const LossParams& p, const LossLayer& layer, int64_t t,
                             const RouteRow& row) {
  load_row(layer.logits, t, row);
  score_row(p.score, row);
  if (math::score_is_over_row(p.score)) return 1.0f;
  for_columns(row.lanes, [&](int i) {
    if (i >= row.columns) row.s[i] = 0.0f;
  });
  const float divisor = math::share_divisor(row_sum(row.s, row.lanes));
  for_columns(row.lanes, [&](int i) { row.s[i] /= divisor; });
  return divisor;
}

__device__ void clear_chunk(const LossParams& p, int64_t slot) {
  for (int e = threadIdx.x; e < p.lanes; e += blockDim.x) {
    p.sum_p[slot * p.lanes + e] = p.block_p[slot * p.lanes + e] = 0.0f;
    p.sum_n[slot * p.lanes + e] = 0;
  }
  if (threadIdx.x == 0) p.counted[slot] = 0;
  __syncthreads();
}

// Adds the shares of expert e of tokens [first, end), a row each at shares; begin: of the chunk.
__device__ void add_shares(const LossParams& p, int64_t slot, int e, const float* shares,
                           int64_t begin, int64_t first, int64_t end) {
  float sum = p.sum_p[slot * p.lanes + e], block = p.block_p[slot * p.lanes + e];
  const auto add_block = [&] {
    sum += block;
    block = 0.0f;
  };
  for (int64_t t = first; t < end; ++t) {
    if ((t - begin) % kSummedTogether == 0) add_block();
    if (p.counts_token(t)) block += shares[(t - first) * (p.places.row_bytes / 4) + e];
  }
  if (end == p.chunk_end(slot)) add_block();
  p.sum_p[slot * p.lanes + e] = sum;
  p.block_p[slot * p.lanes + e] = block;
}

// n and sum of p of one chunk.
__global__ void sum_chunk_kernel(const __grid_constant__ LossParams p) {
  extern __shared__ __align__(16) char shared[];
  begin_kernel();
  const RouteRow row = p.places.row(shared);
  const int64_t slot = blockIdx.x, begin = p.chunk_begin(slot), end = p.chunk_end(slot);
  const int warp = threadIdx.x / 32, warps = p.places.warps;
  clear_chunk(p, slot);
  const float* const shares = row.s - warp * (p.places.row_bytes / int(sizeof(float)));
  for (int64_t layer = 0; layer < p.num_layers; ++layer) {
    for (int64_t first = begin; first < end; first += warps) {
      const int64_t t = first + warp;
      if (t < end && p.counts_token(t)) {
        load_shares(p, p.layers[layer], t, row);
        __syncwarp();
        if (!p.counts) {
          take_best(row.s, row.columns, row.top_k, row.ids);
          for_columns(row.top_k, [&](int k) {
            if (row.ids[k] >= 0) atomicAdd(p.sum_n + slot * p.lanes + row.ids[k], 1);
          });
        }
        if (layer == 0 && lane_id() == 0) atomicAdd(p.counted + slot, 1);
      }
      __syncthreads();
      for (int e = threadIdx.x; e < p.lanes; e += blockDim.x)
        add_shares(p, slot, e, shares, begin, first, min(first + warps, end));
      __syncthreads();
    }
  }
}

// n of one expert or lane.
__device__ double selected(const LossParams& p, int64_t slot, int e) {
  if (p.counts && e < p.num_experts) return double(load_integer(p.counts.data, p.counts.dtype, e));
  return double(p.sum_n[slot * p.lanes + e]);
}

// Sums of a stretch in place of those of its first chunk; returns its counted tokens.
__device__ int64_t add_chunks(const LossParams& p, int64_t slot) {
  int64_t counted = 0;
  for (int64_t chunk = 0; chunk < p.chunks; ++chunk) counted += p.counted[slot + chunk];
  for (int e = threadIdx.x; e < p.lanes; e += blockDim.x) {
    float* const sum_p = p.sum_p + slot * p.lanes + e;
    int32_t* const sum_n = p.sum_n + slot * p.lanes + e;
    for (int64_t chunk = 1; chunk < p.chunks; ++chunk) {
      *sum_p += sum_p[chunk * p.lanes];
      *sum_n += sum_n[chunk * p.lanes];
    }
  }
  return counted;
}

// The loss of a stretch, or, for the gradient, d_p[e] = factor * n_e in place of the sums of p.
// n(e): how often e was selected.
template <class Selected>
__device__ void finish_stretch(const LossParams& p, int64_t slot, double factor, bool backward,
                               const Selected& n) {
  if (backward)
    for (int e = threadIdx.x; e < p.lanes; e += blockDim.x)
      p.sum_p[slot * p.lanes + e] = float(factor * p.loss_gradient() * n(e));
  __syncthreads();
  if (backward || threadIdx.x != 0) return;
  double dot = 0.0;
  for (int e = 0; e < p.num_experts; ++e) dot += n(e) * double(p.sum_p[slot * p.lanes + e]);
  p.part[slot] = factor * dot;
}

__device__ double factor_of(const LossParams& p, int64_t tokens, int64_t stretches) {
  return math::balance_factor(p.kind, double(p.coefficient), p.num_experts, p.top_k,
                              tokens * p.num_layers, stretches);
}

// A CTA a stretch.
__global__ void sum_stretch_kernel(const __grid_constant__ LossParams p, bool backward) {
  begin_kernel();
  const int64_t slot = blockIdx.x * p.chunks, counted = add_chunks(p, slot);
  finish_stretch(p, slot, factor_of(p, counted, p.of_all ? *p.of_all : p.stretches), backward,
                 [&](int e) { return selected(p, slot, e); });
}

// The one stretch of all ranks: what this one adds to it, and what is made of the sums.
__global__ void own_sums_kernel(const __grid_constant__ LossParams p) {
  begin_kernel();
  if (p.chunks == 0) clear_chunk(p, 0);
  const int64_t counted = add_chunks(p, 0);
  for (int e = threadIdx.x; e < p.lanes; e += blockDim.x) p.selected_of_all[e] = selected(p, 0, e);
  if (threadIdx.x == 0) *p.of_all = counted;
}
__global__ void sums_of_all_kernel(const __grid_constant__ LossParams p, bool backward) {
  begin_kernel();
  finish_stretch(p, 0, factor_of(p, *p.of_all, 1), backward,
                 [&](int e) { return p.selected_of_all[e]; });
}

__global__ void set_sequences_kernel(const __grid_constant__ LossParams p) {
  begin_kernel();
  *p.of_all = p.stretches;
}
__global__ void store_total_kernel(const __grid_constant__ LossParams p) {
  begin_kernel();
  *p.loss = float(*p.total);
}

// Loss of the stretches of a batch after those before; the last batch stores it.
__global__ void add_stretches_kernel(const __grid_constant__ LossParams p) {
  begin_kernel();
  double loss = p.first_stretch == 0 ? 0.0 : *p.total;
  for (int64_t i = 0; i < p.end_stretch - p.first_stretch; ++i) loss += p.part[i * p.chunks];
  *p.total = loss;
  if (p.end_stretch == p.stretches) *p.loss = float(loss);
}

__device__ void balance_gradient(const LossParams& p, const LossLayer& layer, int64_t t,
                                 const RouteRow& row) {
  const int64_t stretch = t / p.stretch_tokens - p.first_stretch;
  const float* const d_p = p.sum_p + stretch * p.chunks * p.lanes;
  const float divisor = load_shares(p, layer, t, row);
  float partial = 0.0f;
  for_columns(row.lanes, [&](int i) { partial += d_p[i] * row.s[i]; });
  const float dot = warp_sum(partial);
  float* const d = layer.d_logits + t * row.columns;
  for_columns(row.columns, [&](int e) {
    d[e] += math::score_is_over_row(p.score)
                ? math::softmax_gradient(row.s[e], d_p[e], dot)
                : math::share_gradient(d_p[e], dot, divisor) *
                      math::score_slope(p.score, row.z[e], row.s[e] * divisor);
  });
}

// A warp a token of the batch.
__global__ void balance_gradient_kernel(const __grid_constant__ LossParams p) {
  extern __shared__ __align__(16) char shared[];
  begin_kernel();
  const RouteRow row = p.places.row(shared);
  const int64_t end = p.end_stretch * p.stretch_tokens;
  for (int64_t t = p.first_stretch * p.stretch_tokens + p.places.first_row(); t < end;
       t += p.places.row_step()) {
    if (!p.counts_token(t)) continue;
    for (int64_t layer = 0; layer < p.num_layers; ++layer) {
      balance_gradient(p, p.layers[layer], t, row);
      __syncwarp();
    }
  }
}

void allow_rows() {
  static std::atomic<uint64_t> allowed[2];
  check(allow_shared_memory(sum_chunk_kernel, RowPlaces::kSharedBytes, allowed[0]), "loss");
  check(allow_shared_memory(balance_gradient_kernel, RowPlaces::kSharedBytes, allowed[1]), "loss");
}

LossParams params_of(const LossArgs& args, char* rows) {
  const bool mixtral = args.kind == MOEC_LOSS_BALANCE_MIXTRAL;
  const bool by_sequence = args.kind == MOEC_LOSS_BALANCE_SEQUENCE;
  LossParams p = {};
  p.kind = args.kind;
  p.score = mixtral ? uint32_t(MOEC_SCORE_SOFTMAX) : args.score;
  p.coefficient = args.coefficient;
  p.num_experts = args.num_experts;
  p.lanes = padded_columns(args.num_experts);
  p.top_k = args.top_k;
  p.num_tokens = args.num_tokens;
  p.stretch_tokens = by_sequence ? args.seq_len : args.num_tokens;
  p.stretches = p.stretch_tokens ? args.num_tokens / p.stretch_tokens : 0;
  const Chunks chunks(p.stretch_tokens, kLossTokens);
  p.chunk_tokens = chunks.length;
  p.chunks = chunks.count;
  p.num_layers = args.num_layers;
  p.token_mask = args.token_mask;
  p.counts = args.counts;
  p.d_loss = args.d_loss;
  p.loss = args.loss;
  p.places = RowPlaces(args.num_experts, args.top_k, rows);
  std::copy_n(args.layers, args.num_layers, p.layers);
  return p;
}

class Losses {
 public:
  Losses(const Op& op, const LossArgs& args)
      : op_(op),
        ranks_(args.ranks),
        row_bytes_(RowPlaces::scratch_bytes(args.num_experts, args.top_k)),
        scratch_(op, row_bytes_ + sum_bytes(padded_columns(args.num_experts))),
        params_(params_of(args, scratch_.as<char>())) {
    LossParams& p = params_;
    p.total = reinterpret_cast<double*>(scratch_.as<char>() + row_bytes_);
    p.part = p.total + 1;
    double* next = p.part + batch_chunks();
    if (ranks_) {
      p.of_all = reinterpret_cast<int64_t*>(next);
      p.selected_of_all = next + 1;
      next += 1 + p.lanes;
    }
    p.counted = reinterpret_cast<int32_t*>(next);
    p.sum_n = p.counted + batch_chunks();
    p.sum_p = reinterpret_cast<float*>(p.sum_n + batch_chunks() * p.lanes);
    p.block_p = p.sum_p + batch_chunks() * p.lanes;
    allow_rows();
  }

  void run_all(bool backward) {
    if (ranks_ && params_.kind != MOEC_LOSS_BALANCE_SEQUENCE) return run_one_of_all(backward);
    if (ranks_) {
      launch_one(set_sequences_kernel, 1, 1);
      ranks_->add(params_.of_all, 1);
    }
    const int64_t step = params_.chunks ? batch_chunks() / params_.chunks : 1;
    if (params_.stretches == 0 && !backward) launch_one(add_stretches_kernel, 1, 1);
    for (int64_t first = 0; first < params_.stretches; first += step) {
      params_.first_stretch = first;
      params_.end_stretch = std::min(first + step, params_.stretches);
      run_batch(backward);
    }
    if (!ranks_ || backward) return;
    ranks_->add(params_.total, 1);
    launch_one(store_total_kernel, 1, 1);
  }

 private:
  // Rows in scratch are one CTA each.
  int64_t batch_chunks() const {
    return row_bytes_ ? int64_t(RowPlaces::kScratchRows) : kBatchChunks;
  }
  uint64_t sum_bytes(int64_t lanes) const {
    const uint64_t chunks = uint64_t(batch_chunks());
    return (1 + chunks) * sizeof(double) + chunks * sizeof(int32_t) +
           chunks * uint64_t(lanes) * (sizeof(int32_t) + 2 * sizeof(float)) +
           (ranks_ ? uint64_t(lanes + 1) * sizeof(double) : 0);
  }
  template <class... Args>
  void launch_one(void (*kernel)(Args...), int64_t grid, int threads, auto... more) {
    run(op_, "loss", kernel, dim3(unsigned(grid)), threads, 0, params_, more...);
  }
  int64_t chunks() const { return (params_.end_stretch - params_.first_stretch) * params_.chunks; }
  void sum_chunks() {
    if (chunks())
      run(op_, "loss", sum_chunk_kernel, dim3(unsigned(chunks())), params_.places.threads(),
          params_.places.shared_bytes(), params_);
  }
  void finish(bool backward) {
    if (!backward) return launch_one(add_stretches_kernel, 1, 1);
    const RowPlaces& places = params_.places;
    const int64_t stretches = params_.end_stretch - params_.first_stretch;
    if (const int64_t tokens = stretches * params_.stretch_tokens)
      run(op_, "gradient of a loss", balance_gradient_kernel,
          places.grid(tokens, op_.multiprocessors), places.threads(), places.shared_bytes(),
          params_);
  }
  void run_batch(bool backward) {
    sum_chunks();
    launch_one(sum_stretch_kernel, params_.end_stretch - params_.first_stretch, 256, backward);
    finish(backward);
  }
  void run_one_of_all(bool backward) {
    params_.stretches = params_.end_stretch = 1;
    sum_chunks();
    launch_one(own_sums_kernel, 1, 256);
    ranks_->add(params_.sum_p, params_.lanes);
    ranks_->add(params_.selected_of_all, params_.lanes);
    ranks_->add(params_.of_all, 1);
    launch_one(sums_of_all_kernel, 1, 256, backward);
    finish(backward);
  }

  const Op& op_;
  const RankSums* const ranks_;
  const uint64_t row_bytes_;  // of rows that shared memory does not hold
  const Scratch scratch_;     // these rows, then the sums: one block
  LossParams params_;
};

}  // namespace

void loss_forward(const Op& op, const LossArgs& args) {
  args.kind == MOEC_LOSS_Z ? z_loss(op, args, false) : Losses(op, args).run_all(false);
}

void loss_backward(const Op& op, const LossArgs& args) {
  args.kind == MOEC_LOSS_Z ? z_loss(op, args, true) : Losses(op, args).run_all(true);
}

}  // namespace moec::cuda
