// SPDX-License-Identifier: Apache-2.0
// Parts of other sizes through staging, of more bytes than pass at once: what a rank sends arrives,
// whole and in its place, after as many calls on all ranks. It was seen to catch pieces that begin
// where the first one does.
#include "ep/staging.h"

#include <gtest/gtest.h>

#include <array>
#include <barrier>
#include <cstring>
#include <thread>

#include "support/draw.h"

namespace moec::test {
namespace {

constexpr size_t kRanks = 3;
using Sizes = std::array<std::array<uint64_t, kRanks>, kRanks>;  // [from][to] bytes

struct Part {  // of memory that has gaps
  std::vector<uint64_t> bytes, at;
  std::vector<uint8_t> memory;
  void add(uint64_t size) {
    bytes.push_back(size);
    at.push_back(memory.size() + 5);
    memory.resize(memory.size() + size + 9, 0xEE);
  }
  ep::Parts parts() const { return {bytes.data(), at.data()}; }
};
struct Sent {
  const char* memory;
  ep::Parts parts;
};

void expect_all_arrive(const Sizes& sizes, uint64_t longest) {
  const std::unique_ptr<Backend> backend = make_cpu_backend({});
  const ep::Wait nothing = [](moec_stream) {};
  Draw draw(longest);
  std::vector<Part> out(kRanks), in(kRanks);
  for (size_t r = 0; r < kRanks; ++r)
    for (size_t p = 0; p < kRanks; ++p) {
      out[r].add(sizes[r][p]);
      in[r].add(sizes[p][r]);
      for (uint64_t i = 0; i < sizes[r][p]; ++i)
        out[r].memory[out[r].at[p] + i] = static_cast<uint8_t>(draw.bits());
    }
  std::barrier everyone(kRanks);
  std::array<Sent, kRanks> sent = {};
  std::array<int, kRanks> calls = {};
  std::vector<std::thread> threads;
  for (size_t r = 0; r < kRanks; ++r)
    threads.emplace_back([&, r] {
      std::vector<char> memory(ep::Staging::kBytes);
      ep::Staging staging(*backend, nothing, kRanks, memory.data());
      staging.pass_parts(
          out[r].memory.data(), out[r].parts(), in[r].memory.data(), in[r].parts(), longest,
          nullptr, [&](const char* from, ep::Parts away, char* to, ep::Parts here) {
            ++calls[r];
            sent[r] = {from, away};
            everyone.arrive_and_wait();
            for (size_t p = 0; p < kRanks; ++p) {
              EXPECT_EQ(sent[p].parts.bytes[r], here.bytes[p]);
              std::memcpy(to + here.at[p], sent[p].memory + sent[p].parts.at[r], here.bytes[p]);
            }
            everyone.arrive_and_wait();
          });
    });
  for (std::thread& thread : threads) thread.join();
  for (size_t r = 0; r < kRanks; ++r) {
    EXPECT_EQ(calls[r], calls[0]);
    Part want;
    for (size_t p = 0; p < kRanks; ++p) {
      want.add(sizes[p][r]);
      if (sizes[p][r])
        std::memcpy(want.memory.data() + want.at[p], out[p].memory.data() + out[p].at[r],
                    sizes[p][r]);
    }
    EXPECT_TRUE(in[r].memory == want.memory) << "rank " << r;
  }
}

TEST(Staging, PartsOfAnySize) {
  SCOPED_TRACE(seed_note());
  constexpr uint64_t kPiece = ep::Staging::kBytes / 2 / kRanks / kCacheLine * kCacheLine;
  expect_all_arrive({{{0, 0, 0}, {0, 0, 0}, {0, 0, 0}}}, 0);
  expect_all_arrive({{{7, 0, 3}, {1, 64, 0}, {0, 0, 5}}}, 64);
  expect_all_arrive(
      {{{kPiece, 0, 2 * kPiece + 12}, {kPiece + 1, kPiece - 1, 0}, {3, 5 * kPiece / 2, 9}}},
      5 * kPiece / 2);
}

}  // namespace
}  // namespace moec::test
