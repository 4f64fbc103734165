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
// What the format does not read is absent, and blocks of the [N,K] matrix are as it has them.
void check_quant(const char* name, const moec_quant& quant, const quant::FormatInfo& format,
                 int64_t N, int64_t K);

}  // namespace moec
