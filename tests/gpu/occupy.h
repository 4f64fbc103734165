// SPDX-License-Identifier: Apache-2.0
// A kernel that keeps multiprocessors to itself.
#pragma once

#include <cuda_runtime_api.h>

namespace moec::test {

// `blocks` multiprocessors spin, each with all of its shared memory taken, until *stop (mapped host
// memory) is not zero, and for `milliseconds` at most.
cudaError_t occupy(int blocks, const int* stop, int milliseconds, cudaStream_t stream);

}  // namespace moec::test
