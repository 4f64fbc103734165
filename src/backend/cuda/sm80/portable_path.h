// SPDX-License-Identifier: Apache-2.0
// The experts by products and row kernels, one after the other.
#pragma once

#include "backend/cuda/experts/cuda_path.h"

namespace moec::cuda {

class PortablePath : public CudaPath {
 public:
  using CudaPath::CudaPath;
  const char* name() const override { return "portable"; }
  const char* refuses(const moec_experts_desc&) const override { return nullptr; }
  Between between(const moec_experts_desc& desc) const override;
  const char* run(const Program& program, moec_stream stream) const override;
  const char* describe(const Program& program, std::string& text) const override;

 protected:
  // Whether a program multiplies, and by kernels of few rows alone.
  bool has_only_few_rows(const Program& program) const;
};

}  // namespace moec::cuda
