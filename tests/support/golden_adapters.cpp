// SPDX-License-Identifier: Apache-2.0
#include "golden_adapters.h"

namespace moec::test {

using oracle::Factors;
using oracle::Vec;

oracle::Adapter golden_adapter(const SafeTensors& file, const std::string& prefix,
                               const std::string& end, const GoldenExperts& of, double scale) {
  const auto factors = [&](const std::string& matrix, int N) {
    const auto& a = file.at(prefix + matrix + ".lora_A." + end);
    const int rank = int(a.shape[0]) / of.experts;
    const Vec stored = file.at(prefix + matrix + ".lora_B." + end).as_double();
    Vec b(stored.size());  // stored [N, rank E]: element (e, n, j) at n rank E + j E + e
    for (int e = 0; e < of.experts; ++e)
      for (int n = 0; n < N; ++n)
        for (int j = 0; j < rank; ++j)
          b[size_t((e * N + n) * rank + j)] = stored[size_t((n * rank + j) * of.experts + e)];
    return Factors{rank, scale, a.as_double(), b};
  };
  oracle::Adapter adapter;
  const Factors both = factors("gate_up_proj", 2 * of.inter);
  adapter.gate = adapter.up = both;
  golden::split_gate_up({of.experts, 2 * of.inter, both.rank, false}, of.gate_layout, both.b,
                        &adapter.gate.b, &adapter.up.b);
  if (end == "grad") adapter.up.a.assign(both.a.size(), 0.0);
  adapter.down = factors("down_proj", of.hidden);
  return adapter;
}

}  // namespace moec::test
