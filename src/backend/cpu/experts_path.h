// SPDX-License-Identifier: Apache-2.0
// The experts on the CPU: one way for every description. Pre-activations are kept in fp32, whatever
// the data type: where a slope is a difference of them (a clamp, up + 1) or a routing weight's
// gradient is a small sum, their rounding would be the largest error of the backward pass.
#pragma once

#include "backend/cpu/ops.h"
#include "backend/program.h"

namespace moec::cpu {

class CpuExperts final : public ExpertsPath {
 public:
  // Both live as long as the path.
  CpuExperts(const ThreadPool& pool, const HostServices& host)
      : ExpertsPath(PathCounter::kCpu), pool_(pool), host_(host) {}

  const char* name() const override { return "cpu"; }
  const char* refuses(const moec_experts_desc&) const override { return nullptr; }
  Between between(const moec_experts_desc& desc) const override;
  const char* run(const Program& program, moec_stream stream) const override;
  const char* describe(const Program& program, std::string& text) const override;

 private:
  const ThreadPool& pool_;
  const HostServices& host_;
};

}  // namespace moec::cpu
