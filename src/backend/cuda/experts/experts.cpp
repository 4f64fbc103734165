// SPDX-License-Identifier: Apache-2.0
// Which way the experts run: the first of the table that takes the call.
//
//   small      mma.sync on streams     compute capability 9.0; forward of few tokens, aligned
//   fast       wgmma and bulk copies   compute capability 9.0; SwiGLU on aligned bf16 and f16
//   portable   mma.sync, fp32 tiles    compute capability 8.0 and later; every description
//
// MOEC_CUDA_KERNELS names the only one that may be used.
#include <cstdlib>
#include <cstring>

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/experts/experts_memory.h"
#include "backend/cuda/experts/experts_path.h"

namespace moec::cuda {
namespace {

constexpr const ExpertsPath* kPaths[] = {&kSmallPath, &kFastPath, &kPortablePath};

moec_size larger(moec_size a, moec_size b) {
  return {std::max(a.base, b.base), std::max(a.per_token, b.per_token)};
}

bool is_wide(const std::vector<const ExpertsPath*>& paths) {
  return paths[0] == &kPortableWidePath;
}

[[noreturn]] void refuse(const char* path, const char* why) {
  MOEC_FAIL(MOEC_E_UNSUPPORTED, "MOEC_CUDA_KERNELS is \"%s\", which has no kernel for %s; unset it",
            path, why);
}

}  // namespace

std::vector<const ExpertsPath*> experts_paths(int major, int minor) {
  const char* const name = std::getenv("MOEC_CUDA_KERNELS");
  const bool pinned = name && *name, is_hopper = major == 9 && minor == 0;
  std::vector<const ExpertsPath*> paths;
  std::string available;
  for (const ExpertsPath* path : kPaths) {
    if (path->hopper && !is_hopper) continue;
    available.append(available.empty() ? "" : " ").append(path->name);
    if (!pinned || std::strcmp(name, path->name) == 0) paths.push_back(path);
  }
  if (paths.size() == 1 && paths[0] == &kPortablePath) paths[0] = &kPortableWidePath;
  MOEC_REQUIRE(!paths.empty(), MOEC_E_UNSUPPORTED,
               "MOEC_CUDA_KERNELS is \"%s\", a device of compute capability %d.%d has: %s", name,
               major, minor, available.c_str());
  return paths;
}

void CudaBackend::check_experts(const moec_experts_desc& desc) const {
  const char* why = nullptr;
  for (const ExpertsPath* path : paths_)
    if (!(why = path->refuses(desc))) return;
  refuse(paths_.back()->name, why);
}

void CudaBackend::check_weights(const moec_weights_desc& desc) const {
  MOEC_REQUIRE(desc.gate_up_scheme == MOEC_SCHEME_NONE && desc.down_scheme == MOEC_SCHEME_NONE,
               MOEC_E_UNSUPPORTED, "quantised weights have no kernels on CUDA");
}

Backend::Sizes CudaBackend::experts_sizes(const moec_experts_desc& desc) const {
  Sizes sizes = {};
  for (const ExpertsPath* path : paths_) {
    if (path->refuses(desc)) continue;
    moec_size forward = {}, backward = {};
    path->measure(desc, forward, backward);
    sizes.forward = larger(sizes.forward, forward);
    if (desc.save != MOEC_SAVE_NONE) sizes.backward = larger(sizes.backward, backward);
  }
  Arena saved;
  lay_out_saved(desc, saved, is_wide(paths_));
  sizes.saved = saved.size();
  return sizes;
}

void CudaBackend::experts_forward(const ExpertsArgs& args, moec_stream stream) const {
  const DeviceScope scope(device_);
  const Op queue = op(stream);
  const char* why = nullptr;
  for (const ExpertsPath* path : paths_) {
    if ((why = path->refuses(*args.desc)) || (why = path->forward(queue, args))) continue;
    return clear_saved(queue, args, is_wide(paths_));
  }
  refuse(paths_.back()->name, why);
}

void CudaBackend::experts_backward(const ExpertsGradArgs& args, moec_stream stream) const {
  const DeviceScope scope(device_);
  const Op queue = op(stream);
  const char* why = nullptr;
  for (const ExpertsPath* path : paths_)
    if (!(why = path->refuses(*args.desc)) && !(why = path->backward(queue, args))) return;
  refuse(paths_.back()->name, why);
}

std::string CudaBackend::describe(const moec_experts_desc& desc, const WeightsView&,
                                  int64_t num_tokens) const {
  std::string paths;
  for (const ExpertsPath* path : paths_) {
    if (path->refuses(desc)) continue;
    paths.append(paths.empty() ? "" : ", ").append("{\"name\": \"").append(path->name);
    paths.append("\", ").append(path->kernels).append("}");
  }
  return "\"backend\": \"cuda\", \"num_tokens\": " + std::to_string(num_tokens) +
         ", \"dtype\": \"" + dtype_name(desc.dtype) + "\", \"between_products\": \"" +
         dtype_name(intermediates(desc, is_wide(paths_)).pre) + "\", \"paths\": [" + paths + "]";
}

}  // namespace moec::cuda
