// SPDX-License-Identifier: Apache-2.0
// What the programs of this folder share: the C API from C++, and the median of samples.
#pragma once

#include <moec/moec.h>

#include <algorithm>
#include <stdexcept>
#include <vector>

namespace moec::bench {

template <class Struct>
Struct sized() {
  Struct s;
  moec_struct_init(&s, sizeof s);
  return s;
}

inline void check(moec_status status) {
  if (status == MOEC_OK) return;
  auto info = sized<moec_error_info>();
  throw std::runtime_error(moec_last_error(&info) == MOEC_OK ? info.message
                                                             : moec_status_name(status));
}

inline moec_tensor tensor(void* data, moec_dtype dtype, std::vector<int64_t> dims) {
  moec_tensor out;
  check(moec_tensor_make(&out, data, dtype, MOEC_CPU, 0, int32_t(dims.size()), dims.data()));
  return out;
}

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace moec::bench
