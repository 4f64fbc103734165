// SPDX-License-Identifier: Apache-2.0
// Quantised matrices in every format: random ones, those of checkpoints, and how moec.h takes them.
#pragma once

#include <moec/moec.h>

#include <deque>
#include <ostream>
#include <string>
#include <vector>

#include "oracle/quant.h"
#include "random.h"
#include "safetensors.h"
#include "tensors.h"

namespace moec::test {

using oracle::Quantised;

// One matrix of all experts: a stack, or a tensor of each expert.
using QuantisedMatrix = std::vector<Quantised>;
oracle::Vec dequantise(const QuantisedMatrix& matrix, oracle::Rounding rounding);  // [E,N,K]

// A format with options: what the tests walk.
struct QuantCase {
  const char* name;
  oracle::Scheme scheme;
  int block_n = 1, block_k = 0;  // 0: all; of a stream: its block
  bool zeros = false, group_index = false, nested = false, divides = false;
  int scales2 = 0;  // entries an expert; 0: one for all
  bool spare_row = false;
  oracle::Number scale_type = oracle::Number::kF32, code_type = oracle::Number::kI8;
  int multiple_n = 1, multiple_k = 1;  // extents that the format allows
  bool only_in_out = false, only_out_in = false;
  bool whole_shape = false;  // MXFP4: codes as [E,R,C/32,16]
};
extern const std::vector<QuantCase> kQuantCases;
inline void PrintTo(const QuantCase& c, std::ostream* out) {
  *out << c.name;
}

// `parts`: 2 of a gate_up, whose rows alternate or follow each other.
Quantised random_quantised(const QuantCase& c, int64_t experts, int64_t N, int64_t K, bool in_out,
                           int parts, Random* random);

// The matrices as moec.h takes them. Tensors and arrays live as long as this object.
class QuantBinder {
 public:
  explicit QuantBinder(Tensors& tensors) : tensors_(tensors) {}
  moec_matrix matrix(const QuantisedMatrix& from, bool whole_shape = false);

 private:
  Tensors& tensors_;
  std::deque<std::vector<moec_tensor>> arrays_;
  std::deque<moec_quant> quants_;
};

// One expert's matrix [N,K] of a file: tensors whose names begin with `prefix`, in the names of the
// library that wrote them.
Quantised stored_matrix(const SafeTensors& file, const std::string& prefix, int64_t N, int64_t K);
// `matrix` ("gate_up_proj", "gate_proj", ...) of a quantised golden layer: a stack, or tensors of
// one expert each, as the checkpoint has it.
QuantisedMatrix golden_matrix(const SafeTensors& file, const std::string& matrix);

}  // namespace moec::test
