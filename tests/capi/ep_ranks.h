// SPDX-License-Identifier: Apache-2.0
// Small eps of ranks as threads, and what each rank got.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "support/rank_threads.h"

namespace moec::test {

inline constexpr int64_t kHidden = 4;
inline constexpr int kTopK = 2;

inline moec_ep_desc ep_desc() {
  auto desc = sized<moec_ep_desc>();
  desc.hidden = kHidden;
  desc.max_tokens = 8;
  desc.num_experts = 6;
  desc.top_k = kTopK;
  desc.dtype = MOEC_F32;
  return desc;
}

inline moec_tensor view(void* data, moec_dtype dtype, int64_t rows, int64_t columns) {
  moec_tensor tensor = {};
  const int64_t shape[] = {rows, columns};
  check(moec_tensor_make(&tensor, data, dtype, MOEC_CPU, 0, 2, shape));
  return tensor;
}

// Two tokens of one rank.
struct Tokens {
  static inline constexpr int64_t kCount = 2;
  float x[kCount * kHidden] = {1, 2, 3, 4, 5, 6, 7, 8};
  int32_t ids[kCount * kTopK] = {0, 5, 2, 3};
  float y[kCount * kHidden] = {};
  moec_ep_args args = sized<moec_ep_args>();
  Tokens() {
    args.x = view(x, MOEC_F32, kCount, kHidden);
    args.expert_ids = view(ids, MOEC_I32, kCount, kTopK);
    args.y = view(y, MOEC_F32, kCount, kHidden);
  }
};

// Runs on every rank: the status and the message of what it returns.
struct Outcome {
  moec_status status;
  std::string message;
};
inline std::vector<Outcome> outcomes(int ranks, const std::function<moec_status(int)>& body) {
  std::vector<Outcome> all(static_cast<size_t>(ranks));
  for (const std::string& error : run_ranks(ranks, [&](int rank) {
         const moec_status status = body(rank);
         all[static_cast<size_t>(rank)] = {status, status ? last_error() : ""};
       }))
    EXPECT_EQ(error, "");
  return all;
}
inline void expect_all(const std::vector<Outcome>& all, moec_status status,
                       const std::string& part) {
  for (const Outcome& one : all) {
    EXPECT_EQ(one.status, status) << one.message;
    EXPECT_NE(one.message.find(part), std::string::npos) << one.message << " lacks " << part;
  }
}

}  // namespace moec::test
