// SPDX-License-Identifier: Apache-2.0
// How a matrix W [n,k] lies in its packed copy: panels of 32 of its n one after the other, in a
// form of each type of elements. Tails are zero. One form serves B(n, k) =
// W(n, k) and B(n, k) = W(k, n).
//
//   f32         [k / 16] B blocks of tile.h
//   bf16, f16   [k / 32] B blocks of pairs
#pragma once

#include "backend/cpu/pack.h"

namespace moec::cpu {

class PackedForm {
 public:
  virtual int64_t panel_bytes(int64_t k) const = 0;
  // Panels are multiplied where they lie; else load() builds them.
  virtual bool is_direct(const PackedMatrix& m, Compute compute) const = 0;
  // Where the memory of a chunk is; of a direct one that is the chunk.
  virtual Region region(const PackedMatrix& m, Compute compute, const Chunk& chunk) const = 0;
  virtual void load(const TileKernels& tile, const PackedMatrix& m, Compute compute,
                    const Chunk& chunk, char* to, const Region& next) const = 0;
  // Panels [first, last) of expert e, to where they lie in its copy `to`.
  virtual void pack(const ExpertMatrix& matrix, int64_t e, int64_t n, int64_t k, int64_t first,
                    int64_t last, char* to) const = 0;
  // All elements of a copy, where they were.
  virtual void unpack(const char* from, int64_t n, int64_t k, const MatrixView& to) const = 0;

 protected:
  ~PackedForm() = default;
};

const PackedForm& packed_form(const ExpertMatrix& matrix);  // of a plain one, by what it stores

}  // namespace moec::cpu
