// SPDX-License-Identifier: Apache-2.0
// Steps of a rank between the collectives of an ep.
#pragma once

#include "backend/cuda/device/op.h"
#include "backend/rank_steps.h"

namespace moec::cuda {

void between_ranks(const Op& op, const RankStep& step);

}  // namespace moec::cuda
