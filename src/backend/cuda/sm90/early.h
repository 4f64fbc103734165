// SPDX-License-Identifier: Apache-2.0
// What a GEMM may read before the kernel queued before it is complete. Launches are programmatic
// (launch.cuh): CTAs come up as those of the predecessor leave. A kNothing kernel lets its
// successor come up once it has waited, the others at once; so when a kernel comes up, all that the
// last kNothing kernel before it waited for is complete.
//
//   kNothing  wait first
//   kWeights  weights and plan are older than the predecessor: wait before the rows
//   kAll      every input is older, and the predecessor uses nothing that this kernel writes: wait
//             before the end, so that who waits for this kernel waits for those before it, too
#pragma once

namespace moec::cuda {

enum class Early : int { kNothing, kWeights, kAll };

}  // namespace moec::cuda
