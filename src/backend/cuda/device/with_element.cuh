// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backend/cuda/device/element.cuh"
#include "core/dtype.h"

namespace moec::cuda {

// body<Element>() of an element known at run time.
template <class Body>
__device__ __forceinline__ void with_element(moec_dtype dtype, const Body& body) {
  if (dtype == MOEC_BF16)
    body.template operator()<__nv_bfloat16>();
  else
    body.template operator()<__half>();
}

}  // namespace moec::cuda
