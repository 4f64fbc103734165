// SPDX-License-Identifier: Apache-2.0
// The coded matrices of a set of experts in its packed copy: their tensors byte for byte as they
// were bound, so that a copy costs what the format costs and gives back every bit.
//
//   packed copy   [record of gate, up, down][tensors of gate_up, or of gate and up][of down][...]
//                 each tensor of all experts one after the other, padded to a line; gate and up of
//                 one bound matrix share its tensors
#pragma once

#include <string>

#include "backend/packed_layout.h"

namespace moec {

// How the bytes of a copy move: at once, or queued on a device.
class ByteMover {
 public:
  virtual void copy(void* to, const void* from, uint64_t bytes) const = 0;
  virtual void zero(void* to, uint64_t bytes) const = 0;
  // From the host, which may change `from` when the call returns.
  virtual void put(void* to, const void* from, uint64_t bytes) const = 0;

 protected:
  ~ByteMover() = default;
};

class CodedCopy {
 public:
  explicit CodedCopy(const WeightsView& weights);
  int64_t bytes() const { return bytes_; }  // 0: no matrix is coded

  // Experts [first, first + count), and all of what experts share.
  void write(const ByteMover& mover, char* packed, int32_t first, int32_t count) const;
  // Where the tensors of `to`, bound like these, get them back. Throws E_MISMATCH for others,
  // before anything is written.
  void check_like(const WeightsView& to) const;
  void read(const ByteMover& mover, const WeightsView& to) const;
  void write_records(char* head) const;  // the first bytes of the copy, in the host's memory

 private:
  static constexpr int kArrays = 8;
  struct Array {
    ExpertArray from;
    int64_t bytes = 0;    // of an expert; shared: of all
    bool shared = false;  // one of all experts
    int64_t offset = -1;  // in the packed copy
    const char* expert(int64_t e) const;
    // body(e, experts that lie one after the other from e on), until `last`
    template <class Body>
    void for_runs(int64_t first, int64_t last, Body body) const;
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

// The coded matrices of `weights` as they lie in a packed copy of `bytes` bytes. head: its first
// bytes as the host reads them; null: as write() makes them of `weights`. Throws E_CORRUPT where
// its records point elsewhere.
WeightsView coded_view(WeightsView weights, const void* head, const void* packed, uint64_t bytes);

// Names the form of a copy of codes alone, which is the same on every device.
std::string coded_format(const WeightsView& weights);

}  // namespace moec
