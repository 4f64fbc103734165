// SPDX-License-Identifier: Apache-2.0
// The experts of a layer, forward and backward, above every backend: memory is laid out, the call
// becomes a Program, and the first path of the backend that takes it runs it.
#pragma once

#include <string>

#include "backend/backend.h"
#include "backend/program.h"

namespace moec::experts {

struct Sizes {
  moec_size forward, backward, saved;
};
Sizes sizes(ExpertsPaths paths, const moec_experts_desc& desc,
            const AdaptersView* adapters = nullptr);
// E_UNSUPPORTED where no path takes such a description.
void check(ExpertsPaths paths, const moec_experts_desc& desc);

// Both queue the whole call, or throw E_UNSUPPORTED before anything is queued.
Taken forward(ExpertsPaths paths, const ExpertsArgs& args, moec_stream stream);
Taken backward(ExpertsPaths paths, const ExpertsGradArgs& args, moec_stream stream);
// Members of a JSON object: for num_tokens tokens the path and its kernels, forward and backward.
std::string describe(const Backend& backend, const moec_experts_desc& desc,
                     const WeightsView& weights, int64_t num_tokens);

// ---- forward.cpp, backward.cpp: the call on a path with these intermediates
void record_forward(const Between& between, const ExpertsArgs& args, Program& program);
void record_backward(const Between& between, const ExpertsGradArgs& args, Program& program);

}  // namespace moec::experts
