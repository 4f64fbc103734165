// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/experts/cuda_path.h"

#include <cstdlib>
#include <cstring>

#include "core/error.h"

namespace moec::cuda {
namespace {

const char* pinned_name() {
  const char* const name = std::getenv("MOEC_CUDA_KERNELS");
  return name && *name ? name : nullptr;
}

std::string pinned_hint() {
  const char* const name = pinned_name();
  return name ? std::string("; MOEC_CUDA_KERNELS is \"") + name + "\": unset it" : std::string();
}

}  // namespace

CudaPath::CudaPath(PathCounter counts_as, const CudaBackend& backend, bool wide)
    : ExpertsPath(counts_as), backend_(backend), wide_(wide), hint_(pinned_hint()) {}

Between CudaPath::types(const moec_experts_desc& desc) const {
  Between between;
  const moec_dtype f32 = MOEC_F32;
  const bool is_sm90 = !sm90_refuses(desc);
  between.pre = between.d_act = is_sm90 && !wide_ ? desc.dtype : f32;
  between.rows = is_sm90 ? desc.dtype : f32;
  return between;
}

const char* whole_forward_refuses(const moec_experts_desc& desc) {
  const Lack rules[] = {
      {desc.gate_layout == MOEC_GATE_NONE, "plain MLPs"},
      {desc.weight_position != MOEC_WEIGHT_ON_OUTPUT, "weights that are not on the output"},
      {desc.combine != MOEC_COMBINE_FP32_SLOT, "combines other than FP32_SLOT"},
      {desc.act_rounding != MOEC_ACT_FP32_ONCE, "act_rounding other than FP32_ONCE"},
      {desc.shared != MOEC_SHARED_NONE, "shared experts"},
      {desc.max_rows_base != 0, "expert choice"},
  };
  return first_lack(rules);
}

PathList make_paths(const CudaBackend& backend, int major, int minor) {
  const char* const pinned = pinned_name();
  const bool is_hopper = major == 9 && minor == 0;
  const bool wide = !is_hopper || (pinned && std::strcmp(pinned, "portable") == 0);
  PathList all, paths;
  if (is_hopper) {
    all.push_back(make_few_tokens_path(backend));
    all.push_back(make_few_rows_path(backend, pinned != nullptr));
    all.push_back(make_sm90_path(backend));
  }
  all.push_back(make_portable_path(backend, wide));
  std::string available;
  for (auto& path : all) {
    available.append(available.empty() ? "" : " ").append(path->name());
    if (!pinned || std::strcmp(pinned, path->name()) == 0) paths.push_back(std::move(path));
  }
  MOEC_REQUIRE(!paths.empty(), MOEC_E_UNSUPPORTED,
               "MOEC_CUDA_KERNELS is \"%s\", a device of compute capability %d.%d has: %s", pinned,
               major, minor, available.c_str());
  return paths;
}

}  // namespace moec::cuda
