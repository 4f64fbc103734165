// SPDX-License-Identifier: Apache-2.0
// What a moec_quant may say, by the format that reads it.
#pragma once

#include <string>

#include "layer/check.h"
#include "quant/format.h"

namespace moec {

std::string scheme_names();  // "0 (none), 1 (int8)"
// Whether it has arrays of one tensor an expert.
bool has_arrays(const moec_quant& quant);

// A matrix [N,K] of codes that is bound under a name.
struct CodedShape {
  const char* name;
  const quant::FormatInfo& format;
  int64_t N, K;
  bool out_in;
};
// The orientation and the extents are those that the format can have.
void check_extents(const CodedShape& matrix);
// What the format does not read is absent, and what it needs is present.
void check_fields(const CodedShape& matrix, const moec_quant& quant);
// The blocks of the matrix; of a stream all of them lie along k.
struct Blocks {
  quant::BlockSize n, k;
};
Blocks checked_blocks(const CodedShape& matrix, const moec_quant& quant);

}  // namespace moec
