// SPDX-License-Identifier: Apache-2.0
// The coded matrices of a set of experts in its packed copy: their tensors byte for byte as they
// were bound, so that a copy costs what the format costs and gives back every bit. The runs of
// tile.h read codes in that order.
//
//   packed copy   [record of gate, up, down][tensors of gate_up, or of gate and up][of down][...]
//                 each tensor of all experts one after the other, padded to a line; gate and up of
//                 one bound matrix share its tensors
#pragma once

#include "backend/cpu/expert_weights.h"

namespace moec::cpu {

class CodedCopy {
 public:
  explicit CodedCopy(const WeightsView& weights);
  int64_t bytes() const { return bytes_; }  // 0: no matrix is coded

  // Experts [first, first + count), and all of what experts share.
  void write(char* packed, int32_t first, int32_t count) const;
  // Where the tensors of `to`, bound like these, get them back. Throws E_MISMATCH for others,
  // before anything is written.
  void check_like(const WeightsView& to) const;
  void read(const WeightsView& to) const;

 private:
  static constexpr int kArrays = 8;
  struct Array {
    ExpertArray from;
    int64_t bytes = 0;    // of an expert; shared: of all
    bool shared = false;  // one of all experts
    int64_t offset = -1;  // in the packed copy
    const char* expert(int64_t e) const;
  };
  struct Matrix {
    const ExpertMatrix* matrix = nullptr;  // null: absent or plain
    bool owns = true;                      // else the tensors are those of gate
    Array arrays[kArrays];
  };
  static void find_arrays(const ExpertMatrix& m, int64_t n, int64_t k, int64_t experts,
                          Array (&arrays)[kArrays]);
  template <class Body>
  void for_each(Body body) const;  // body(array) of those that are present, each once

  Matrix parts_[3];
  int64_t experts_ = 0, bytes_ = 0;
};

// The coded matrices of `weights` as they lie in a packed copy of `bytes` bytes. Throws E_CORRUPT
// where its records point elsewhere.
WeightsView coded_view(WeightsView weights, const void* packed, uint64_t bytes);

}  // namespace moec::cpu
