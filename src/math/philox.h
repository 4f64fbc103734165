// SPDX-License-Identifier: Apache-2.0
// Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy
// as 1, 2, 3", 2011). Element i of a tensor depends on (seed, offset + i) only, so forward and
// backward draw the same number in any order.
#pragma once

#include <math.h>
#include <stdint.h>

#include "core/portable.h"

namespace moec::math {

struct Philox4 {
  uint32_t word[4];
};

// counter: low 64 bits of the 128-bit counter, the rest is 0. key: low half first.
MOEC_HD Philox4 philox(uint64_t key, uint64_t counter) {
  constexpr uint32_t kMultiply0 = 0xD2511F53u, kMultiply1 = 0xCD9E8D57u;
  constexpr uint32_t kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;
  uint32_t c0 = uint32_t(counter), c1 = uint32_t(counter >> 32), c2 = 0, c3 = 0;
  uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t(kMultiply0) * c0, product1 = uint64_t(kMultiply1) * c2;
    c0 = uint32_t(product1 >> 32) ^ c1 ^ k0;
    c1 = uint32_t(product1);
    c2 = uint32_t(product0 >> 32) ^ c3 ^ k1;
    c3 = uint32_t(product0);
    k0 += kWeyl0;
    k1 += kWeyl1;
  }
  return {{c0, c1, c2, c3}};
}

// Factor of one element, uniform in [1 - jitter, 1 + jitter): 24 bits of the first word.
MOEC_HD float jitter_factor(float jitter, uint64_t seed, uint64_t counter) {
  const float unit = float(philox(seed, counter).word[0] >> 8) * 0x1p-24f;
  return fmaf(jitter, 2.0f * unit - 1.0f, 1.0f);
}

}  // namespace moec::math
