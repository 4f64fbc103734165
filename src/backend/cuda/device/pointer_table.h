// SPDX-License-Identifier: Apache-2.0
// What the host gives, on the device: arrays of pointers to experts' matrices, and a few words.
// They travel as parameters of a kernel: a copy from host memory would be read again when a
// captured graph is replayed.
#pragma once

#include "backend/cuda/device/rows.h"

namespace moec::cuda {

// Whether every expert's array begins at 16 bytes.
bool all_aligned(const ExpertArray& array, int num_experts);

class PointerTable {
 public:
  static constexpr int kChunk = 448;
  struct Chunk {
    void* pointers[kChunk];
  };

  // memory: bytes(num_experts of all matrices)
  PointerTable(const Op& op, void* memory) : op_(op), memory_(static_cast<void**>(memory)) {}
  // Of weights and their gradients: three matrices each, of up to seven arrays and of two.
  static uint64_t bytes(int64_t num_experts) { return uint64_t(num_experts) * 27 * sizeof(void*); }
  // The matrix with its arrays of pointers on the device, and what is aligned.
  ExpertMatrix device(const ExpertMatrix& matrix, int num_experts);
  void flush();  // before the first use of what device() returned

 private:
  void** place(void* const* pointers, int count);

  const Op& op_;
  void** memory_;
  int64_t written_ = 0;  // on the device, or queued to be
  int waiting_ = 0;
  Chunk chunk_;
};

// At most Backend::kMostStored bytes, a multiple of 4; `to` is aligned to 4.
void store_words(const Op& op, void* to, const void* from, uint64_t bytes);

}  // namespace moec::cuda
