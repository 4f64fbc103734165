// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/sm80/one_token_codes.h"

#include <algorithm>
#include <bit>

#include "backend/cuda/device/check.h"
#include "backend/cuda/experts/cuda_path.h"
#include "backend/cuda/sm80/one_token_params.h"

namespace moec::cuda {
namespace {

constexpr int kMostShared = 99 << 10;  // of a CTA: every GPU from 8.0 on has as much

int attribute(cudaDeviceAttr which) {
  int device = 0, value = 0;
  check(cudaGetDevice(&device), "the current device");
  check(cudaDeviceGetAttribute(&value, which, device), "an attribute of the device");
  return value;
}

// Lines of a part, as few_codes and FewScales find them.
OneTokenPart part_of(const PortableGemm& p, int part) {
  const Operand& b = p.b[part];
  const ExpertQuant& of = p.codes[part].quant;
  const FewForm<false> form(p);
  const auto shift_of = [](const quant::BlockSize& size) {
    return size.is_all() ? 31 : int(std::countr_zero(uint64_t(size.size())));
  };
  const int64_t bytes = dtype_bytes(of.scales.array.dtype);
  OneTokenPart to = {};
  to.codes = few_codes(b, p.codes[part], 0, form);
  to.codes_expert = b.group_stride * dtype_bytes(b.dtype) + of.expert_codes / 2;
  to.codes_line = int(few_pitch(b, p.codes[part], form));
  to.scales = static_cast<const char*>(of.scales.array.base);
  to.dtype = of.scales.array.dtype;
  to.bias = p.bias[part];
  to.first_row = int(of.rows.first);
  to.row_step = int(of.rows.step);
  to.k_shift = shift_of(of.scales.block_k);
  to.scales_expert = of.scales.array.expert_stride * bytes;
  if (of.scheme == MOEC_SCHEME_CODEBOOK4) {  // a stream, in which blocks end with lines
    to.codebook = of.codebook;
    to.scales_expert += (of.expert_codes >> to.k_shift) * bytes;
    to.scales_line = int((b.i_stride >> to.k_shift) * bytes);
    to.scale_step = int(bytes);
  } else {
    to.scales_line = int(of.scales.row_stride * bytes);
    to.scale_step = int(of.scales.col_stride * bytes);
    to.rows_shift = shift_of(of.scales.block_n);
  }
  return to;
}

OneTokenParams params_of(const OneTokenSteps& steps, const PortableGemm& gemm, bool up) {
  OneTokenParams p = {};
  for (int i = 0; i < 2; ++i) p.parts[i] = part_of(gemm, up ? i : 0);
  p.up = up;
  p.nibbles = FewForm<false>(gemm).nibbles;
  p.features = int(gemm.n);
  p.units = FewForm<false>(gemm).units(int(gemm.k));
  p.expert_begin = steps.expert_begin;
  p.operand = gemm.a.base;
  p.operand_stride = gemm.a.i_stride / 8;
  p.pre = const_cast<void*>(gemm.c.base);
  p.pre_dtype = gemm.c.dtype;
  p.pre_stride = gemm.c.i_stride;
  p.pre_part = gemm.c_part;
  p.act = steps.act;
  p.act_stride = gemm.n;
  p.activation = steps.activation;
  p.combine = steps.combine;
  const int blocks = p.features / kOneTokenFeatures, slots = p.combine.top_k,
            ctas = steps.multiprocessors;
  p.most_sets =
      up ? (blocks * slots + ctas - 1) / ctas : (blocks + ctas - 1) / ctas * ((slots + 1) / 2);
  return p;
}

const char* refuses(const PortableGemm& p, bool aligned) {
  if (!few_rows_takes(p, aligned) || is_across(p)) return "matrices that few rows do not take";
  if (p.n % kOneTokenFeatures) return "features that are no multiple of eight";
  for (int i = 0; i < p.parts; ++i) {
    const ExpertQuant& of = p.codes[i].quant;
    const ExpertArray& scales = of.scales.array;
    if (of.scheme != p.codes[0].quant.scheme || p.b[i].dtype != p.b[0].dtype ||
        scales.dtype != p.codes[0].quant.scales.array.dtype)
      return "gate and up of two formats";
    const bool bytes = of.scheme == MOEC_SCHEME_INT8 || of.scheme == MOEC_SCHEME_FP8;
    if (of.scheme != MOEC_SCHEME_MXFP4 && dtype_bytes(scales.dtype) < (bytes ? 4 : 2))
      return "scales of this type";
    if (p.b[i].dtype == MOEC_F8_E5M2) return "e5m2";
    if (of.zeros.array.present() || of.scale_book) return "zero points or nested scales";
    if (p.b[i].pointers || scales.pointers || p.bias[i].pointers)
      return "experts that are separate tensors";
    if (p.bias[i].base && p.bias[i].dtype != MOEC_F32 && p.bias[i].dtype != MOEC_BF16)
      return "biases of another type than x";
  }
  return nullptr;
}

// Of up, then of down.
struct Both {
  OneTokenParams up, down;
  PortableGemm gemms[2];
  const char* refused = nullptr;
  explicit Both(const OneTokenSteps& steps) {
    bool aligned[2];
    gemms[0] = gemm_of(steps.up, steps.pre, aligned[0]);
    gemms[1] = gemm_of(steps.down, steps.rows, aligned[1]);
    for (int i = 0; i < 2 && !refused; ++i) refused = refuses(gemms[i], aligned[i]);
    if (refused) return;
    up = params_of(steps, gemms[0], true);
    down = params_of(steps, gemms[1], false);
    if (std::max(up.most_sets, down.most_sets) > kOneTokenSets)
      refused = "more features than multiprocessors have room for";
    else if (std::max(OneTokenLayout(up).bytes, OneTokenLayout(down).bytes) > kMostShared)
      refused = "rows that leave shared memory no room";
  }
};

}  // namespace

bool is_of_one_token(const Program& program) {
  const moec_experts_desc& desc = *program.desc;
  if (program.plan->choice_tokens != 1 || program.num_steps < 3 || program.has_adapters())
    return false;
  const auto* const up = std::get_if<Up>(&program.steps[0]);
  const auto* const down = std::get_if<Down>(&program.steps[1]);
  const auto* const last = std::get_if<Combine>(&program.steps[2]);
  return up && down && last && desc.dtype == MOEC_BF16 && up->act && !up->act_weight &&
         !down->bias_weight && !last->skip_absent && !last->mix && !whole_forward_refuses(desc) &&
         !combine_refuses(combine_params(*last), desc.dtype) &&
         (!last->output_bias || last->output_bias.dtype == desc.dtype);
}

const char* one_token_codes(const Op* op, const OneTokenSteps& steps) {
  if (steps.combine.num_tokens != 1) return "more than one token";
  if (steps.combine.top_k > kOneTokenSlots) return "more than 32 experts of a token";
  const Both both(steps);
  if (both.refused || !op) return both.refused;
  constexpr int kReserved = 1 << 10;  // of each CTA
  const int most = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  const int of_sm = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  const int up = std::max(OneTokenLayout(both.up).bytes, std::min(most, of_sm / 2 + kReserved));
  const int down =
      std::max(OneTokenLayout(both.down).bytes, std::min(most, of_sm - up - 2 * kReserved));
  launch_one_token_codes(*op, both.up, both.gemms[0].codes[0].quant.scheme, up, most);
  launch_one_token_codes(*op, both.down, both.gemms[1].codes[0].quant.scheme, down, most);
  return nullptr;
}

}  // namespace moec::cuda
