// SPDX-License-Identifier: Apache-2.0
// Codes and scales of weights: a thread works on tiles one after the other.
#include <algorithm>

#include "backend/cpu/ops.h"
#include "backend/quantise_args.h"

namespace moec::cpu {
namespace {

constexpr int64_t kPieceElements = 1 << 14;  // least work of a parallel piece
constexpr quant::DynamicMap kMap;

struct OneThread {
  static constexpr int64_t rank = 0, size = 1;
  static const quant::Spread& all(const quant::Spread& spread) { return spread; }
};

// body(i) for i in [0, items), in pieces of at least kPieceElements.
template <class Body>
void for_each(const Device& device, int64_t items, int64_t item_elements, const Body& body) {
  const int64_t each = std::max<int64_t>(1, kPieceElements / std::max<int64_t>(item_elements, 1));
  device.pool.parallel_for((items + each - 1) / each, [&](int32_t, int64_t piece) {
    const int64_t end = std::min(items, (piece + 1) * each);
    for (int64_t i = piece * each; i < end; ++i) body(i);
  });
}

void nested(const Device& device, const quant::NestedView& view) {
  for_each(device, view.groups(), quant::kNestedGroup,
           [&](int64_t group) { quant::sum_group(view, group); });
  double sums[Chunks::kMax];
  for (int64_t chunk = 0; chunk < view.chunks.count; ++chunk)
    sums[chunk] = quant::sum_chunk(view, chunk);
  quant::store_mean(view, sums);
  for_each(device, view.groups(), quant::kNestedGroup,
           [&](int64_t group) { quant::nested_group(view, kMap, group, OneThread{}); });
}

}  // namespace

void quantise(const Device& device, const QuantiseArgs& args) {
  const quant::QuantiseView& view = args.view;
  if (args.expert_bits)
    for_each(
        device, view.num_experts * view.expert_chunks.count, view.expert_chunks.length,
        [&](int64_t chunk) { quant::expert_chunk(view, args.expert_bits, chunk, OneThread{}); });
  quant::with_rule(args.rule, [&](const auto& rule) {
    for_each(device, view.tiles(), view.block_n * view.block_k,
             [&](int64_t tile) { quant::quantise_tile(rule, view, tile, OneThread{}); });
  });
  if (args.nested.codes) nested(device, args.nested);
  if (args.packed_zeros.words)
    for_each(device, args.packed_zeros.count(), 8,
             [&](int64_t word) { quant::pack_zeros(args.packed_zeros, word); });
}

}  // namespace moec::cpu
