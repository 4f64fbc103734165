// SPDX-License-Identifier: Apache-2.0
// Routing on a CPU context and on a CUDA one through the public API, over random descriptions and
// inputs: everything that is made of integers, and every weight and score, must be equal bit for
// bit; what goes through a product within the rounding of its type, per row. Exit 77 without a GPU.
// Shown to fail: weights one bit off (9 of 30 routers agree), rows of a warp in reverse order (7 of
// 20 plans), a residual that token 0 does not get (with that, 4 of 15 permutes).
//
// Usage: routing_agrees [SEED [SCALE]]: SCALE times as many cases.
#include "gpu/agree.h"

using namespace moec::test;

int main(int argc, char** argv) {
#ifdef MOEC_AGREE_CPU  // both sides on the CPU: what a fault of this program looks like
  constexpr int32_t kDevice = MOEC_CPU;
#else
  constexpr int32_t kDevice = MOEC_CUDA;
#endif
  int32_t devices = 0;
  MOEC_CHECK_CALL(moec_device_count(kDevice, &devices));
  if (devices == 0) {
    std::printf("no GPU, or no plug-in beside the library\n");
    return 77;
  }
  const uint64_t seed =
      argc > 1 ? std::strtoull(argv[1], nullptr, 10) : uint64_t(std::random_device{}()) << 12;
  const int scale = argc > 2 ? std::atoi(argv[2]) : 1;
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // a run that is cut off has said something
  const int share = std::getenv("MOEC_CHECK_SMALL") ? 10 : 1;
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  Side cpu(MOEC_CPU), gpu(kDevice);
  const struct {
    const char* name;
    int (*check)(Side&, Side&, uint64_t, int);
    int cases;
  } sets[] = {{"routers", check_routers, 300}, {"gates", check_gates, 60},
              {"plans", check_plans, 200},     {"expert choice", check_choice_plans, 60},
              {"permute", check_rows, 150},    {"losses", check_losses, 150}};
  // Gates run cuBLASLt's own kernels. racecheck reports them, and initcheck does not follow the
  // bulk tensor stores that some of them have.
  const char* const tool = std::getenv("MOEC_CHECK_TOOL");
  const bool misread = tool && std::strcmp(tool, "memcheck") != 0;
  int bad = check_wrong_ids(kDevice);
  for (const auto& set : sets) {
    if (misread && set.check == check_gates) continue;
    const int cases = set.cases * scale / share;
    const int failed = set.check(cpu, gpu, seed, cases);
    std::printf("%-4s %s: %d of %d cases agree\n", failed ? "FAIL" : "ok", set.name, cases - failed,
                cases);
    bad += failed;
  }
  return bad ? 1 : 0;
}
