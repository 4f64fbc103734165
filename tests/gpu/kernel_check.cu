// SPDX-License-Identifier: Apache-2.0
// Every CUDA kernel against plain loops, from fresh random data. Errors are per row; outputs start
// as NaN, guard bytes surround them, and where rows of several experts lie side by side the
// neighbours are filled with NaN in turn. Usage: kernel_check [seed]
//
// Faults it has caught: a wgmma descriptor with the cluster's address bit in its leading offset
// (every weight gradient of the second CTA), parts of the routing weight gradient written past the
// last tile, copies wholly outside a tensor whose map begins in front of it (fenced_memory.cuh).
// Shown to fail: windows of rows off by one (12 checks of row GEMMs, 48 of weight gradients), a
// combine that does not wait for its copies, a gradient of up that is gate's, two rows that share
// the reciprocal of an activation (the rows that feel their neighbours: 12 checks of two seeds).
#include <cstdlib>

#include "gpu/experts_check.cuh"
#include "gpu/fenced_memory.cuh"
#include "gpu/plan_check.cuh"

namespace {

// top-1 ids so that expert e gets counts[e] tokens, in mixed order, with a few tokens left over.
std::vector<int32_t> ids_of(const std::vector<int>& counts) {
  std::vector<int32_t> ids(5, -1);
  for (size_t e = 0; e < counts.size(); ++e) ids.insert(ids.end(), counts[e], int32_t(e));
  std::shuffle(ids.begin(), ids.end(), std::mt19937_64(seed));
  return ids;
}

}  // namespace

int main(int argc, char** argv) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("no GPU here\n");
    return 77;  // skipped
  }
  if (argc > 1) seed = std::strtoull(argv[1], nullptr, 10);
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  const bool small = std::getenv("MOEC_CHECK_SMALL");  // under a sanitizer, which sees who strays
  if (!small) device_memory = {FencedMemory::take, FencedMemory::give};
  failures += check_plans(seed);
  failures += check_combine(seed);
  const std::vector<int> traps = {0, 1, 15, 16, 17, 0, 127, 128, 129, 257, 0, 3, 300, 64};
  for (const bool transposed : {false, true}) {
    const int e = int(traps.size());
    Check({{"traps 264x200", 264, 200, e, 1}, ids_of(traps)}, transposed).run();
    if (transposed) Check({{"traps 192x128", 192, 128, e, 1}, ids_of(traps)}, true).run();
    if (small) continue;
    Check({{"traps 512x384", 512, 384, e, 1}, ids_of(traps)}, transposed).run();
    Check({{"aligned to 32", 136, 72, e, 1}, ids_of(traps), 32}, transposed).run();
  }
  if (small) return failures ? 1 : 0;
  const Shape many = {"one expert of 40 holds all", 256, 320, 40, 1};
  Check({many, ids_of([] {
           std::vector<int> c(40, 0);
           c[37] = 3000;
           return c;
         }()),
         1, 7},
        false)
      .run();
  const Shape qwen = {"qwen3-30b T=1000", 2048, 768, 128, 8};
  Check({qwen, random_routing(qwen, 1000, seed), 1, 61}, false).run();
  const Shape oss = {"gpt-oss T=700, 8 experts", 2880, 2880, 8, 4};
  Check({oss, random_routing(oss, 700, seed), 1, 61}, true).run();
  std::printf(failures ? "%d checks FAILED\n" : "all checks passed\n", failures);
  return failures ? 1 : 0;
}
