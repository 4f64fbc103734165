// SPDX-License-Identifier: Apache-2.0
// What the kernel of one token (one_token_codes.cu) is given, and what it has in shared memory.
#pragma once

#include "backend/cuda/rows/combine.h"
#include "backend/cuda/sm80/few_rows.h"

namespace moec::cuda {

constexpr int kOneTokenWarps = 16, kOneTokenThreads = 32 * kOneTokenWarps;
constexpr int kOneTokenSlots = 32;                                // at most: a lane each
constexpr int kOneTokenFeatures = 8, kOneTokenLines = 16;         // of a set
constexpr int kOneTokenSets = kOneTokenThreads / kOneTokenLines;  // of a CTA, at most
// Of a step a lane has so many pieces of 16 bytes of codes of a line, a quad so many bytes of each.
constexpr int kOneTokenPieces = 2, kQuadCodes = 64, kOneTokenStep = kOneTokenPieces * kQuadCodes;
constexpr int kOneTokenStageBytes = kOneTokenPieces * 2 * 32 * 16;  // of a warp; it has two

// Lines of codes of a part: where an expert's begin, and how their scales go on along k.
struct OneTokenPart {
  const char *codes, *scales;
  int64_t codes_expert, scales_expert;  // bytes, as the next three
  int codes_line, scales_line, scale_step;
  int first_row, row_step, rows_shift, k_shift;  // from features and k to blocks of scales
  moec_dtype dtype;                              // of scales
  const float* codebook;                         // null: integers
  Operand bias;
};

struct OneTokenParams {
  OneTokenPart parts[2];  // gate and up, or down twice
  bool up, nibbles;
  int features, units;  // of a matrix, bytes of codes of a line
  int most_sets;        // of a CTA
  int expert_begin;
  const void* operand;     // rows
  int64_t operand_stride;  // of eight elements
  // up
  void *pre, *act;
  moec_dtype pre_dtype;
  int64_t pre_stride, pre_part, act_stride;
  moec_activation activation;
  CombineParams combine;  // the plan, and where y goes
};

struct OneTokenSlot {
  int expert, row;
  float weight;
};
struct OneTokenPlace {  // of a set
  int turn;             // the slot of up, two slots of down
  int feature;          // its first one
};
struct OneTokenShared {
  alignas(128) float book[2][32];              // each inside 256 bytes
  OneTokenSlot slots[kOneTokenSlots];          // those with a row, then identities
  alignas(16) char zeros[kOneTokenStep << 2];  // the operand of columns that have none
};

// How long lines are.
struct OneTokenExtent {
  int steps;
  int operand;  // bytes of a row, with zeros up to whole steps
  MOEC_HD explicit OneTokenExtent(const OneTokenParams& p)
      : steps((p.units + kOneTokenStep - 1) / kOneTokenStep),
        operand(steps * kOneTokenStep << (p.nibbles ? 2 : 1)) {}
};
// Shared memory: what OneTokenShared has, rows of the operand, stages, places of sets, sums of
// sets.
struct OneTokenLayout {
  int ring, places, sums, bytes;
  MOEC_HD explicit OneTokenLayout(const OneTokenParams& p) {
    ring = int(sizeof(OneTokenShared)) + OneTokenExtent(p).operand * (p.up ? 1 : p.combine.top_k);
    places = ring + kOneTokenWarps * 2 * kOneTokenStageBytes;
    sums = places + (p.most_sets + 1) / 2 * 2 * int(sizeof(OneTokenPlace));
    bytes = sums + (kOneTokenWarps + 3 * p.most_sets) * kOneTokenLines * int(sizeof(float));
  }
};

// bytes: of shared memory; most: that a CTA of the device may have.
void launch_one_token_codes(const Op& op, const OneTokenParams& params, uint32_t scheme, int bytes,
                            int most);

}  // namespace moec::cuda
