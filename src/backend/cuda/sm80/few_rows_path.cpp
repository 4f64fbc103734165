// SPDX-License-Identifier: Apache-2.0
// Frozen experts of codes that have few rows, beside Hopper's path: the portable path where its
// kernels of few rows (few_lines.cu, few_rows.cu) multiply all and are the faster ones. What lies
// between the steps has the types of every path of the context, so forward and backward of one step
// may go different ways.
#include <algorithm>

#include "backend/cuda/sm80/portable_path.h"
#include "quant/format.h"

namespace moec::cuda {
namespace {

// Calls at which these kernels are the faster ones, told by what all ranks of an ep share: the rows
// that kernels are chosen for. bench/results/h200/few_rows.json and few_rows_reach.json have the
// times of both paths.
struct Reach {
  bool backward;
  int64_t least_codes, most_codes;  // of an expert
  int64_t most_experts;             // that can have rows
  int64_t most_rows;                // an expert, on average
  int64_t most_bits;                // of a code
  uint32_t scheme;                  // 0: any
};
constexpr int64_t kMi = 1 << 20, kAny = int64_t(1) << 62;
constexpr Reach kReach[] = {
    {false, 0, kAny, 16, 16, 8, 0},
    {false, 16 * kMi, kAny, 64, 8, 8, 0},
    {false, 0, kAny, kAny, 4, 8, 0},
    {false, 16 * kMi, kAny, kAny, 8, 4, 0},
    {false, 0, kAny, kAny, 8, 4, MOEC_SCHEME_MXFP4},
    {false, 0, kAny, kAny, 8, 8, MOEC_SCHEME_INT8},
    {true, 0, 8 * kMi, 128, 4, 8, 0},
};

bool is_backward(const Program& program) {
  return std::any_of(program.steps.begin(), program.steps.begin() + program.num_steps,
                     [](const Step& step) { return std::holds_alternative<ActGrad>(step); });
}

bool is_in_reach(const Program& program) {
  const Mlp& mlp = program.routed;
  const RowGroups& groups = mlp.groups;
  const int64_t codes = (mlp.parts() + 1) * mlp.hidden * mlp.inter;
  const int64_t experts = std::min(int64_t(groups.count), groups.choice_rows);
  const bool backward = is_backward(program);
  const quant::FormatInfo* const up = quant::find_format(mlp.weights->up.scheme);
  const quant::FormatInfo* const down = quant::find_format(mlp.weights->down.scheme);
  if (!up || !down) return false;  // plain weights
  const int64_t bits = std::max<int64_t>(up->code_bits, down->code_bits);
  return std::any_of(std::begin(kReach), std::end(kReach), [&](const Reach& reach) {
    return backward == reach.backward && codes >= reach.least_codes && codes <= reach.most_codes &&
           experts <= reach.most_experts && groups.choice_rows <= reach.most_rows * groups.count &&
           bits <= reach.most_bits &&
           (!reach.scheme || (up->scheme == reach.scheme && down->scheme == reach.scheme));
  });
}

class FewRowsPath final : public PortablePath {
 public:
  FewRowsPath(const CudaBackend& backend, bool alone)
      : PortablePath(PathCounter::kFewRows, backend, false), alone_(alone) {}
  const char* name() const override { return "few_rows"; }

  const char* refuses(const moec_experts_desc& desc) const override {
    if (const char* const why = sm90_refuses(desc)) return why;
    const Lack rules[] = {
        {desc.dtype != MOEC_BF16, "types other than bf16"},
        {desc.shared != MOEC_SHARED_NONE, "shared experts"},
    };
    return first_lack(rules);
  }

  const char* leaves(const ExpertsCall& call) const override {
    return call.weights.up.is_coded() ? nullptr : "plain weights";
  }

  const char* run(const Program& program, moec_stream stream) const override {
    const char* const why = passes_on(program);
    return why ? why : PortablePath::run(program, stream);
  }

  const char* describe(const Program& program, std::string& text) const override {
    const char* const why = passes_on(program);
    return why ? why : PortablePath::describe(program, text);
  }

 private:
  // Why it leaves this program to others, or null.
  const char* passes_on(const Program& program) const {
    const Lack rules[] = {
        {program.has_adapters(), "adapters"},
        {!alone_ && !is_in_reach(program), "this many rows"},
    };
    if (const char* const why = first_lack(rules)) return why;
    return has_only_few_rows(program) ? nullptr : "products that are not of few rows of codes";
  }

  const bool alone_;  // no other path is there: it takes all that its kernels can
};

}  // namespace

std::unique_ptr<const ExpertsPath> make_few_rows_path(const CudaBackend& backend, bool alone) {
  return std::make_unique<FewRowsPath>(backend, alone);
}

}  // namespace moec::cuda
