// SPDX-License-Identifier: Apache-2.0
// The ways to run the experts on a GPU. Each takes the programs that its kernels can do. All keep
// the same things in `saved`, so that forward and backward of one step may go different ways.
//
//   few_tokens   mma.sync, each weight read once   compute capability 9.0; forward of few tokens
//   few_rows     portable, its kernels of few rows compute capability 9.0; codes in bf16
//   sm90         wgmma, bulk copies                compute capability 9.0; aligned bf16 and f16,
//                                                  activations with a gate form
//   portable     mma.sync, fp32 tiles              compute capability 8.0 and later; everything
//
// MOEC_CUDA_KERNELS names the only one that may be used.
#pragma once

#include <memory>
#include <vector>

#include "backend/cuda/device/op.h"
#include "backend/program.h"

namespace moec::cuda {

class CudaBackend;

class CudaPath : public ExpertsPath {
 public:
  // wide: no kernel of compute capability 9.0 is used, so pre-activations stay in fp32.
  CudaPath(PathCounter counts_as, const CudaBackend& backend, bool wide);
  std::string hint() const override { return hint_; }

 protected:
  // Types of what lies between the products: 16 bits where the kernels of sm90 may run, else fp32,
  // as on the CPU. Those of pre and d_act decide how exact the routing weights' gradients are, so
  // every path of a context has the same ones.
  Between types(const moec_experts_desc& desc) const;

  const CudaBackend& backend_;
  const bool wide_;

 private:
  const std::string hint_;  // of the name that was pinned when the context was made
};

// Why the kernels of sm90 never take such a description, or null.
const char* sm90_refuses(const moec_experts_desc& desc);

// Why kernels that take up, down and combine of a forward together never take it, or null.
const char* whole_forward_refuses(const moec_experts_desc& desc);

using PathList = std::vector<std::unique_ptr<const ExpertsPath>>;
std::unique_ptr<const ExpertsPath> make_few_tokens_path(const CudaBackend& backend);
// alone: no other path is there to leave a call to.
std::unique_ptr<const ExpertsPath> make_few_rows_path(const CudaBackend& backend, bool alone);
std::unique_ptr<const ExpertsPath> make_sm90_path(const CudaBackend& backend);
std::unique_ptr<const ExpertsPath> make_portable_path(const CudaBackend& backend, bool wide);

// Best first: those that a device has and MOEC_CUDA_KERNELS allows. Throws when that leaves none.
PathList make_paths(const CudaBackend& backend, int major, int minor);

// A rule of refuses(): what a description asks for and kernels lack. first_lack() returns the first
// that holds, or null.
struct Lack {
  bool lacks;
  const char* what;
};
template <size_t N>
const char* first_lack(const Lack (&rules)[N]) {
  for (const Lack& rule : rules)
    if (rule.lacks) return rule.what;
  return nullptr;
}

}  // namespace moec::cuda
