// SPDX-License-Identifier: Apache-2.0
// 64-bit checksum of saved plans and packed files: four lanes of multiply and rotate over
// little-endian words. Each step is a bijection of its lane, so a change confined to one word
// never goes unnoticed.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

namespace moec {

inline uint64_t checksum(const void* data, uint64_t bytes, uint64_t seed = 0) {
  constexpr uint64_t kMultiplier = 0x9e3779b97f4a7c15u;  // 2^64 / golden ratio; odd
  const char* const begin = static_cast<const char*>(data);
  uint64_t lanes[4] = {seed + 1, seed + 2, seed + 3, seed + 4};
  const auto step = [](uint64_t lane, uint64_t word) {
    return std::rotl((lane ^ word) * kMultiplier, 29);
  };
  const uint64_t whole = bytes / 32 * 32;
  for (uint64_t i = 0; i < whole; i += 32) {
    uint64_t words[4];
    std::memcpy(words, begin + i, 32);
    for (int j = 0; j < 4; ++j) lanes[j] = step(lanes[j], words[j]);
  }
  uint64_t tail[4] = {};
  if (bytes > whole) std::memcpy(tail, begin + whole, bytes - whole);
  uint64_t hash = bytes;
  for (int j = 0; j < 4; ++j) hash = step(hash, step(lanes[j], tail[j]));
  return hash ^ (hash >> 32);
}

}  // namespace moec
