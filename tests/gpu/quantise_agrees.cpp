// SPDX-License-Identifier: Apache-2.0
// moec_quantise on the CPU and on a GPU: every byte of codes, scales and the rest is equal, of
// every kind, for tiles of a warp and of a CTA, one scale an expert, streams of many groups; with
// memory of the caller it neither allocates nor waits.
#include "gpu/agree.h"
#include "support/quantise_case.h"

namespace moec::test {
namespace {

constexpr int64_t kWhole = 1 << 20;  // more than any extent

std::vector<Result> run(Side& side, const QuantiseCase& c, const Values& source) {
  const moec_tensor from = side.in(source);
  const uint64_t need = quantise_workspace(side.context(), c);
  auto before = sized<moec_stats>(), after = sized<moec_stats>();
  check(moec_context_stats(side.context(), &before));
  quantise(side.context(), c, from, need ? side.buffer(need) : moec_buffer{},
           [&](const char* name, moec_dtype dtype, const std::vector<int64_t>& shape) {
             return side.out(name, dtype, shape);
           });
  check(moec_context_stats(side.context(), &after));
  EXPECT_EQ(after.allocs, before.allocs);
  EXPECT_EQ(after.host_syncs, before.host_syncs);
  return side.results();
}

class Quantise : public Agree {
 protected:
  static void expect_same_bytes(const QuantiseCase& c, const Values& source) {
    SCOPED_TRACE(c.text() + ", " + seed_note());
    const auto cpu = run(*cpu_, c, source), gpu = run(*gpu_, c, source);
    ASSERT_EQ(cpu.size(), gpu.size());
    for (size_t i = 0; i < cpu.size(); ++i) {
      ASSERT_EQ(cpu[i].bytes.size(), gpu[i].bytes.size()) << cpu[i].name;
      const int64_t at = first_difference(cpu[i].bytes, gpu[i].bytes);
      EXPECT_EQ(at, -1) << cpu[i].name << ": byte " << at << " is " << int(cpu[i].bytes[size_t(at)])
                        << " on the CPU, " << int(gpu[i].bytes[size_t(at)]) << " on the GPU";
    }
  }
  // A number of values of a few sizes, zeros, and sometimes one that is not finite.
  static Values draw(const QuantiseCase& c, TensorDraw* draw) {
    Values source = draw->normals(c.dtype, c.source_shape(), 0.05);
    for (double& value : source.of) {
      if (draw->below(50) == 0) value *= 8;
      if (draw->below(20) == 0) value = 0;
    }
    if (draw->below(6) == 0) source.of[size_t(draw->below(std::ssize(source.of)))] = INFINITY;
    if (draw->below(6) == 0) source.of[size_t(draw->below(std::ssize(source.of)))] = NAN;
    return source;
  }
};

TEST_P(Quantise, bytes_are_equal) {
  TensorDraw random(0x51 + number());
  constexpr int64_t kStreamBlocks[] = {0, 32, 64, 128, 512, 2048, 4096},
                    kGroups[] = {0, 8, 24, 32, 128}, kTiles[] = {0, 1, 32, 100, 128, kWhole};
  const auto one_of = [&](const auto& list) { return list[random.below(std::ssize(list))]; };
  QuantiseCase c;
  c.kind = uint32_t(number() % 8);
  c.orientation = uint32_t(random.below(2));
  c.dtype = random.real();
  c.num_experts = 1 + random.below(4);
  c.out_features = 1 + random.below(300);
  c.in_features = 1 + random.below(number() % 3 ? 300 : 3000);
  switch (c.kind) {
    case MOEC_QUANTISE_INT4:
      c.block_k = one_of(kGroups);
      [[fallthrough]];
    case MOEC_QUANTISE_INT8:
      c.flags = random.below(2) ? MOEC_QUANTISE_ASYMMETRIC : 0;
      break;
    case MOEC_QUANTISE_FP8:
      c.block_n = one_of(kTiles);
      c.block_k = one_of(kTiles);
      break;
    case MOEC_QUANTISE_MXFP4:
      c.in_features = 32 * (1 + random.below(40));
      break;
    case MOEC_QUANTISE_NVFP4:
      c.in_features = 16 * (1 + random.below(80));
      c.flags = random.below(2) ? MOEC_QUANTISE_SCALES2_DIVIDES : 0;
      break;
    case MOEC_QUANTISE_NF4:
    case MOEC_QUANTISE_FP4:
      (c.orientation == MOEC_OUT_IN ? c.block_k : c.block_n) = one_of(kStreamBlocks);
      c.flags = random.below(2) ? MOEC_QUANTISE_NESTED : 0;
  }
  if (c.kind <= MOEC_QUANTISE_FP8 && random.below(2)) c.scale_dtype = MOEC_F32;
  expect_same_bytes(c, draw(c, &random));
}
INSTANTIATE_TEST_SUITE_P(Agree, Quantise, testing::Range(0, agree_cases(160)));

TEST_F(Quantise, a_stream_of_many_groups) {  // sums of 64 chunks of more than one group each
  TensorDraw random(7);
  QuantiseCase c;
  c.kind = MOEC_QUANTISE_NF4;
  c.flags = MOEC_QUANTISE_NESTED;
  c.dtype = MOEC_BF16;
  c.num_experts = 3;
  c.out_features = is_small_run() ? 101 : 701;
  c.in_features = 1203;
  c.block_k = 32;
  expect_same_bytes(c, random.normals(c.dtype, c.source_shape(), 0.05));
}

}  // namespace
}  // namespace moec::test
