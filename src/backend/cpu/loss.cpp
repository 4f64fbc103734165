// SPDX-License-Identifier: Apache-2.0
// Balance losses. Tokens go in chunks that depend on their number only; what chunks sum (p and n
// per expert, squares) is added in their order. Scratch: O(E) per chunk and thread, whatever T.
#include "math/loss.h"

#include <algorithm>

#include "backend/cpu/loss.h"
#include "backend/cpu/ops.h"
#include "backend/cpu/score_row.h"
#include "backend/cpu/vectorised.h"
#include "core/portable.h"

namespace moec::cpu {
namespace {

struct LossRow {       // scratch of one thread; lanes = E rounded up to 32
  float *z, *p, *sum;  // [lanes]
  int64_t* keys;       // [lanes]
  int64_t* best;       // [key_blocks(lanes)]
  int32_t* ids;        // [K]
};

struct Sums {  // of one chunk
  float* p;    // [lanes]
  int32_t* n;  // [lanes]
};

struct Total {       // of a stretch, and of all ranks if it is theirs
  float* p;          // [lanes]
  double* selected;  // [lanes]
};

class Losses {
 public:
  Losses(const Device& device, const LossArgs& args)
      : device_(device),
        args_(args),
        lanes_(padded_columns(args.num_experts)),
        row_bytes_(lanes_ * 20 + key_blocks(lanes_) * 8 +
                   int64_t(round_up(uint64_t(args.top_k) * 4, kCacheLine))),
        sum_bytes_((Chunks::kMax + 1) * lanes_ * 8),
        scratch_(device, uint64_t(sum_bytes_ + row_bytes_ * device.pool.size())),
        score_(args.kind == MOEC_LOSS_BALANCE_MIXTRAL ? uint32_t(MOEC_SCORE_SOFTMAX) : args.score) {
  }

  double forward() const {
    double loss = 0.0;
    for_stretches([&](int64_t first, int64_t last, double factor) {
      const Total total = sum_stretch(first, last);
      double dot = 0.0;
      for (int64_t e = 0; e < args_.num_experts; ++e) dot += total.selected[e] * double(total.p[e]);
      loss += factor * dot;
    });
    if (args_.ranks && by_sequence()) args_.ranks->add(&loss, 1);
    return loss;
  }

  void backward(double d_loss) const {
    for_stretches([&](int64_t first, int64_t last, double factor) {
      const Total total = sum_stretch(first, last);
      // d_p[e] = factor * n_e, the same for every token; it takes the place of the sums of p
      for (int64_t e = 0; e < lanes_; ++e) total.p[e] = float(factor * d_loss * total.selected[e]);
      for_chunks(first, last, [&](int32_t slot, int64_t, int64_t begin, int64_t end) {
        const LossRow row = row_of(slot);
        for (int64_t layer = 0; layer < args_.num_layers; ++layer)
          vectorised<balance_backward>(this, &row, &args_.layers[layer],
                                       static_cast<const float*>(total.p), begin, end);
      });
    });
  }

 private:
  LossRow row_of(int32_t slot) const {
    char* const memory = static_cast<char*>(scratch_.data()) + sum_bytes_ + slot * row_bytes_;
    LossRow row;
    row.keys = reinterpret_cast<int64_t*>(memory);
    row.best = row.keys + lanes_;
    row.z = reinterpret_cast<float*>(row.best + key_blocks(lanes_));
    row.p = row.z + lanes_;
    row.sum = row.p + lanes_;
    row.ids = reinterpret_cast<int32_t*>(row.sum + lanes_);
    return row;
  }
  Sums sums_of(int64_t chunk) const {
    float* const p = static_cast<float*>(scratch_.data()) + chunk * 2 * lanes_;
    return {p, reinterpret_cast<int32_t*>(p + lanes_)};
  }
  void clear(const Sums& sums) const {
    std::fill_n(sums.p, lanes_, 0.0f);
    std::fill_n(sums.n, lanes_, 0);
  }

  // body(slot, chunk, begin, end) over tokens [first, last).
  template <class Body>
  void for_chunks(int64_t first, int64_t last, Body&& body) const {
    const Chunks chunks(last - first, kLossTokens);
    device_.pool.parallel_for(chunks.count, [&](int32_t slot, int64_t chunk) {
      body(slot, chunk, first + chunks.begin(chunk), first + chunks.end(chunk));
    });
  }
  bool by_sequence() const { return args_.kind == MOEC_LOSS_BALANCE_SEQUENCE; }
  // The same on every rank: all of them meet in it.
  int64_t of_all_ranks(int64_t value) const {
    if (args_.ranks) args_.ranks->add(&value, 1);
    return value;
  }
  // body(first, last, factor) over what is balanced by itself: all tokens, or each sequence. The
  // tokens of all ranks are one stretch, even where there are none.
  template <class Body>
  void for_stretches(Body&& body) const {
    const auto factor = [&](int64_t tokens, int64_t stretches) {
      return math::balance_factor(args_.kind, double(args_.coefficient), args_.num_experts,
                                  args_.top_k, tokens * args_.num_layers, stretches);
    };
    const int64_t T = args_.num_tokens;
    if (!by_sequence()) {
      const int64_t tokens = of_all_ranks(counted_tokens(args_, 0, T));
      if (T || args_.ranks) body(0, T, factor(tokens, 1));
      return;
    }
    const int64_t length = args_.seq_len, stretches = of_all_ranks(T / length);
    for (int64_t first = 0; first < T; first += length)
      body(first, first + length, factor(counted_tokens(args_, first, first + length), stretches));
  }

  // p of one row; returns what the scores were divided by.
  float load_shares(const LossLayer& layer, int64_t t, const LossRow& row) const {
    load_row(layer.logits, t, args_.num_experts, row.z);
    score_row(score_, row.z, lanes_, row.p);
    if (math::score_is_over_row(score_)) return 1.0f;
    std::fill(row.p + args_.num_experts, row.p + lanes_, 0.0f);
    const float divisor = math::share_divisor(row_sum(row.p, lanes_));
    for (int64_t e = 0; e < lanes_; ++e) row.p[e] /= divisor;
    return divisor;
  }

  static void add_tokens(const Losses* self, const LossRow* row, const LossLayer* layer,
                         const Sums* sums, int64_t begin, int64_t end) {
    const LossArgs& args = self->args_;
    const auto add_block = [&] {
      for (int64_t e = 0; e < self->lanes_; ++e) sums->p[e] += row->sum[e];
      std::fill_n(row->sum, self->lanes_, 0.0f);
    };
    std::fill_n(row->sum, self->lanes_, 0.0f);
    for (int64_t t = begin; t < end; ++t) {
      if ((t - begin) % kSummedTogether == 0) add_block();
      if (!is_counted(args, t)) continue;
      self->load_shares(*layer, t, *row);
      for (int64_t e = 0; e < self->lanes_; ++e) row->sum[e] += row->p[e];
      if (args.counts) continue;
      rank_row(row->p, nullptr, args.num_experts, row->keys);
      take_best(row->keys, self->lanes_, args.top_k, row->best, row->ids);
      for (int32_t k = 0; k < args.top_k; ++k)
        if (row->ids[k] >= 0) ++sums->n[row->ids[k]];
    }
    add_block();
  }

  // n and sum of p over tokens [first, last) of every layer; p in the sums of chunk 0.
  Total sum_stretch(int64_t first, int64_t last) const {
    const Chunks chunks(last - first, kLossTokens);
    if (chunks.count == 0) clear(sums_of(0));
    for_chunks(first, last, [&](int32_t slot, int64_t chunk, int64_t begin, int64_t end) {
      const LossRow row = row_of(slot);
      const Sums sums = sums_of(chunk);
      clear(sums);
      for (int64_t layer = 0; layer < args_.num_layers; ++layer)
        vectorised<add_tokens>(this, &row, &args_.layers[layer], &sums, begin, end);
    });
    const Sums sum = sums_of(0);
    for (int64_t chunk = 1; chunk < chunks.count; ++chunk)
      for (int64_t e = 0; e < lanes_; ++e) {
        sum.p[e] += sums_of(chunk).p[e];
        sum.n[e] += sums_of(chunk).n[e];
      }
    const Total total = {sum.p, reinterpret_cast<double*>(sums_of(Chunks::kMax).p)};
    for (int64_t e = 0; e < lanes_; ++e) {
      const bool given = args_.counts && e < args_.num_experts;
      total.selected[e] = given ? double(load_id(args_.counts, e)) : double(sum.n[e]);
    }
    if (!args_.ranks || by_sequence()) return total;
    args_.ranks->add(total.p, lanes_);
    args_.ranks->add(total.selected, lanes_);
    return total;
  }

  static void balance_backward(const Losses* self, const LossRow* row, const LossLayer* layer,
                               const float* d_p, int64_t begin, int64_t end) {
    const int64_t experts = self->args_.num_experts;
    const bool over_row = math::score_is_over_row(self->score_);
    for (int64_t t = begin; t < end; ++t) {
      if (!is_counted(self->args_, t)) continue;
      const float divisor = self->load_shares(*layer, t, *row);
      float *const z = row->z, *const p = row->p, *const d = layer->d_logits + t * experts;
      float partial[kRowLanes] = {};
      for (int64_t i = 0; i < self->lanes_; i += kRowLanes)
        for (int64_t l = 0; l < kRowLanes; ++l) partial[l] += d_p[i + l] * p[i + l];
      const float dot = sum_lanes(partial);
      for (int64_t e = 0; e < experts; ++e)
        d[e] += over_row ? math::softmax_gradient(p[e], d_p[e], dot)
                         : math::share_gradient(d_p[e], dot, divisor) *
                               math::score_slope(self->score_, z[e], p[e] * divisor);
    }
  }

  const Device& device_;
  const LossArgs& args_;
  const int64_t lanes_, row_bytes_, sum_bytes_;
  const Scratch scratch_;  // one block: the sums, then a row of each thread
  const uint32_t score_;
};

}  // namespace

int64_t counted_tokens(const LossArgs& args, int64_t first, int64_t last) {
  if (!args.token_mask) return last - first;
  return std::count_if(args.token_mask + first, args.token_mask + last,
                       [](uint8_t mask) { return mask != 0; });
}

void loss_forward(const Device& device, const LossArgs& args) {
  const bool is_z = args.kind == MOEC_LOSS_Z;
  *args.loss = float(is_z ? z_loss(device, args) : Losses(device, args).forward());
}

void loss_backward(const Device& device, const LossArgs& args) {
  const double d_loss = args.d_loss ? double(*args.d_loss) : 1.0;
  if (args.kind == MOEC_LOSS_Z) return z_loss_backward(device, args, d_loss);
  Losses(device, args).backward(d_loss);
}

}  // namespace moec::cpu
