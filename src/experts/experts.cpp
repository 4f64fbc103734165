// SPDX-License-Identifier: Apache-2.0
#include "experts/experts.h"

#include <algorithm>

#include "core/dtype.h"
#include "experts/memory.h"

namespace moec::experts {
namespace {

moec_size larger(moec_size a, moec_size b) {
  return {std::max(a.base, b.base), std::max(a.per_token, b.per_token)};
}

template <class Layout>
moec_size measure(const Layout& layout) {
  Arena arena;
  layout(arena);
  return arena.size();
}

[[noreturn]] void refuse(ExpertsPaths paths, const char* why) {
  std::string names;
  std::string hint;
  for (const ExpertsPath* path : paths) {
    names.append(names.empty() ? "" : ", ").append(path->name());
    hint = path->hint();
  }
  MOEC_FAIL(MOEC_E_UNSUPPORTED, "the kernels of the experts (%s) have no form for %s%s",
            names.c_str(), why, hint.c_str());
}

// Finds the first path that takes the call. what(path, program) returns null, or why the path does
// not take it.
template <class Record, class What>
Taken take(ExpertsPaths paths, const ExpertsCall& call, const Record& record, const What& what) {
  const char* why = "this description";
  bool is_fallback = false;
  for (const ExpertsPath* path : paths) {
    if ((why = path->refuses(call.desc))) continue;
    if (!(why = path->leaves(call))) {
      Program program;
      record(path->between(call.desc), program);
      if (!(why = what(*path, program))) return {path, is_fallback};
    }
    is_fallback = true;
  }
  refuse(paths, why);
}

}  // namespace

Sizes sizes(ExpertsPaths paths, const moec_experts_desc& desc, const AdaptersView* adapters) {
  Sizes sizes = {};
  for (const ExpertsPath* path : paths) {
    if (path->refuses(desc)) continue;
    const Between between = path->between(desc);
    sizes.forward = larger(sizes.forward, measure([&](Arena& arena) {
                             lay_out_forward(desc, between, adapters, nullptr, arena);
                           }));
    sizes.saved = measure([&](Arena& arena) { lay_out_saved(desc, between, arena); });
    if (desc.save != MOEC_SAVE_NONE)
      sizes.backward = larger(sizes.backward, measure([&](Arena& arena) {
                                lay_out_backward(desc, between, adapters, nullptr, arena);
                              }));
  }
  return sizes;
}

void check(ExpertsPaths paths, const moec_experts_desc& desc) {
  const char* why = "this description";
  for (const ExpertsPath* path : paths)
    if (!(why = path->refuses(desc))) return;
  refuse(paths, why);
}

Taken forward(ExpertsPaths paths, const ExpertsArgs& args, moec_stream stream) {
  return take(
      paths, {*args.desc, *args.weights, *args.plan, false},
      [&](const Between& between, Program& program) { record_forward(between, args, program); },
      [&](const ExpertsPath& path, const Program& program) { return path.run(program, stream); });
}

Taken backward(ExpertsPaths paths, const ExpertsGradArgs& args, moec_stream stream) {
  return take(
      paths, {*args.desc, *args.weights, *args.plan, true},
      [&](const Between& between, Program& program) { record_backward(between, args, program); },
      [&](const ExpertsPath& path, const Program& program) { return path.run(program, stream); });
}

}  // namespace moec::experts
