// SPDX-License-Identifier: Apache-2.0
// Forward of the experts. Rows are (token, expert) pairs sorted by expert, as the plan lists them.
//   1  x of each row times its weight                    weight on the input only
//   2  act = activation(x Wg^T, x Wu^T)                  x gathered while it is read; saved as
//   wanted 3  out = act Wd^T + bias                             fp32 4  the shared expert: 2 and 3
//   with all tokens as one group 5  y = residual + c0 scale sum(w out) + output bias + c1 shared at
//   the end of 4's products
#include <cstring>

#include "backend/cpu/combine.h"
#include "backend/cpu/mlp.h"
#include "backend/cpu/ops.h"
#include "backend/cpu/shared_gate.h"
#include "core/dtype.h"

namespace moec::cpu {
namespace {

struct DownContext {
  const Mlp& mlp;
  const float* weight;  // of the bias, null = 1
  float* out;
};

void store_down(void* context, const FinishedTile& tile) {
  const auto& c = *static_cast<const DownContext*>(context);
  const bool biased = has_bias(*c.mlp.weights, Part::kDown);
  float bias[kColumns];
  for (int64_t col = 0; col < tile.cols; col += kColumns) {
    const int64_t n = std::min(kColumns, tile.cols - col);
    if (biased) load_bias(*c.mlp.weights, Part::kDown, tile.expert, tile.col0 + col, n, bias);
    for (int64_t i = 0; i < tile.rows; ++i) {
      const int64_t row = tile.row0 + i;
      float* const out = c.out + row * c.mlp.hidden + tile.col0 + col;
      std::memcpy(out, tile.c0 + i * tile.ld + col, size_t(n) * sizeof(float));
      if (biased) add_scaled(out, c.weight ? c.weight[row] : 1.0f, bias, n);
    }
  }
}

struct LastContext {
  const Mlp& shared;
  const OutputSum& sum;
};

void finish_output(void* context, const FinishedTile& tile) {
  const auto& c = *static_cast<const LastContext*>(context);
  const bool biased = has_bias(*c.shared.weights, Part::kDown);
  float bias[kColumns];
  for (int64_t col = 0; col < tile.cols; col += kColumns) {
    const int64_t n = std::min(kColumns, tile.cols - col), at = tile.col0 + col;
    if (biased) load_bias(*c.shared.weights, Part::kDown, 0, at, n, bias);
    for (int64_t i = 0; i < tile.rows; ++i) {
      float* const values = tile.c0 + i * tile.ld + col;
      if (biased) add(values, bias, n);
      combine_columns(c.sum, tile.row0 + i, at, n, values);
    }
  }
}

class Forward {
 public:
  Forward(const Device& device, const ExpertsArgs& args)
      : pool_(device.pool), args_(args), desc_(*args.desc), group_{0, int32_t(args.num_tokens)} {
    Arena workspace(args.workspace, args.num_tokens), saved(args.saved, args.num_tokens);
    memory_ = lay_out_forward(desc_, pool_.size(), workspace);
    if (args.saved) saved_ = lay_out_saved(desc_, saved);
    routed_ = routed_mlp(desc_, *args.weights, *args.plan, args.x.data, memory_.scaled_x);
    if (args.shared_weights) shared_ = shared_mlp(desc_, *args.shared_weights, group_, args.x.data);
  }

  void scale_inputs() const {
    if (memory_.scaled_x)
      scale_rows(pool_, routed_, args_.x.data, args_.plan->row_weight, memory_.scaled_x);
  }

  void run_routed() const {
    const bool on_activation = desc_.weight_position == MOEC_WEIGHT_ON_ACTIVATION;
    const float* const weight = on_activation ? args_.plan->row_weight : nullptr;
    run_up(pool_, routed_, {saved_.routed, memory_.act, weight}, memory_.products);
    DownContext context{routed_, weight, memory_.out};
    run_down(pool_, routed_, memory_.act, store_down, &context, memory_.products);
  }

  void run_shared_and_sum() const {
    const OutputSum sum{&desc_,         args_.plan,   memory_.out,
                        memory_.mix,    args_.x.data, args_.output_bias,
                        args_.residual, args_.y,      args_.skip_absent};
    if (!shared_.weights) return combine_all(pool_, sum);
    if (memory_.mix)
      shared_gate_forward(
          pool_,
          {&desc_, args_.num_tokens, args_.x.data, args_.shared_gate, args_.shared_gate_bias},
          memory_.mix);
    run_up(pool_, shared_, {saved_.shared, memory_.shared_act, nullptr}, memory_.products);
    LastContext context{shared_, sum};
    run_down(pool_, shared_, memory_.shared_act, finish_output, &context, memory_.products);
  }

  // Every byte of `saved` that holds no row is zero.
  void clear_padding() const {
    if (!args_.saved) return;
    Arena measure;
    lay_out_saved(desc_, measure);
    struct Region {
      void* begin;
      const Mlp* mlp;
    } const regions[] = {{saved_.routed.gate, &routed_},
                         {saved_.routed.up, &routed_},
                         {saved_.shared.gate, &shared_},
                         {saved_.shared.up, &shared_}};
    char* end = static_cast<char*>(args_.saved) + bytes_for(measure.size(), args_.num_tokens);
    for (int i = int(std::size(regions)) - 1; i >= 0; --i) {
      char* const begin = static_cast<char*>(regions[i].begin);
      if (!begin) continue;
      clear_rows(*regions[i].mlp, begin, end);
      end = begin;
    }
  }

  uint64_t flops() const {
    const uint64_t shared = shared_.weights ? shared_.flops(shared_.inner_products() + 1) : 0;
    return routed_.flops(routed_.inner_products() + 1) + shared;
  }

 private:
  static void clear_rows(const Mlp& mlp, char* begin, char* end) {
    const int64_t bytes = mlp.inter * int64_t(sizeof(float));
    const auto clear = [&](int64_t row, int64_t last) {
      if (last > row) std::memset(begin + row * bytes, 0, size_t((last - row) * bytes));
    };
    for (int64_t e = 0; e < mlp.num_experts; ++e)
      clear(mlp.group_offsets[e] + mlp.count(e), mlp.group_offsets[e + 1]);
    char* const rest = begin + mlp.rows() * bytes;
    std::memset(rest, 0, size_t(end - rest));
  }

  const ThreadPool& pool_;
  const ExpertsArgs& args_;
  const moec_experts_desc& desc_;
  const int32_t group_[2];
  ForwardMemory memory_;
  SavedMemory saved_;
  Mlp routed_, shared_;
};

}  // namespace

void experts_forward(const Device& device, const ExpertsArgs& args) {
  const Forward forward(device, args);
  forward.scale_inputs();
  forward.run_routed();
  forward.run_shared_and_sum();
  forward.clear_padding();
  if (device.host) device.host->count_launch(device.host->self, 1, forward.flops());
}

}  // namespace moec::cpu
