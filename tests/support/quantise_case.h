// SPDX-License-Identifier: Apache-2.0
// A quantisation through moec.h with memory of a test, and what its bytes stand for, in double
// precision.
#pragma once

#include <moec/moec.h>

#include <string>
#include <utility>
#include <vector>

#include "support/handles.h"

namespace moec::test {

using NamedTensors = std::vector<std::pair<const char*, moec_tensor*>>;
// The tensors of `quant` that a query has left a shape, by name.
NamedTensors tensors_of(moec_quant* quant);

struct QuantiseCase {
  uint32_t kind = MOEC_QUANTISE_INT8, flags = 0, orientation = MOEC_OUT_IN;
  moec_dtype dtype = MOEC_F32, scale_dtype = 0;
  int64_t num_experts = 1, out_features = 1, in_features = 1, block_n = 0, block_k = 0;

  moec_quantise_desc desc() const;
  std::vector<int64_t> source_shape() const;
  size_t count() const { return size_t(num_experts * out_features * in_features); }
  bool is_stream() const { return kind == MOEC_QUANTISE_NF4 || kind == MOEC_QUANTISE_FP4; }
  // Element (e, n, k) of the source.
  size_t index(int64_t e, int64_t n, int64_t k) const;
  std::string text() const;
};

// Queries, lets make(name, dtype, shape) give memory to each output, quantises.
template <class Make>
void quantise(const moec_context* context, const QuantiseCase& c, const moec_tensor& source,
              const moec_buffer& workspace, Make make) {
  const moec_quantise_desc desc = c.desc();
  auto info = sized<moec_quantise_info>();
  auto quant = sized<moec_quant>();
  check(moec_quantise_query(context, &desc, &info, &quant));
  const auto give = [&](const char* name, moec_tensor* tensor) {
    *tensor = make(name, tensor->dtype,
                   std::vector<int64_t>(tensor->shape, tensor->shape + tensor->ndim));
  };
  auto args = sized<moec_quantise_args>();
  args.desc = &desc;
  args.source = source;
  args.codes = info.codes;
  args.quant = &quant;
  args.workspace = workspace;
  give("codes", &args.codes);
  for (const auto& [name, tensor] : tensors_of(&quant)) give(name, tensor);
  check(moec_quantise(context, &args, nullptr));
}
uint64_t quantise_workspace(const moec_context* context, const QuantiseCase& c);

struct QuantisedBytes {
  std::vector<uint8_t> codes, scales, scales2, zeros, codebook, scale_book, scale_offset;
  bool operator==(const QuantisedBytes&) const = default;
  std::vector<uint8_t>& of(const std::string& name);
};
// On the device under test; `workspace`: the caller's, else the context's. Adds a failure where a
// byte beside the outputs was written.
QuantisedBytes quantise(const moec_context* context, const QuantiseCase& c,
                        const std::vector<double>& source, bool workspace = false);

// How one element was coded.
struct Coded1 {
  double value;                       // that its code stands for
  double scale, zero;                 // value = (level - zero) * scale
  const std::vector<double>* levels;  // what the codes of the kind can be
};
Coded1 coded_element(const QuantiseCase& c, const QuantisedBytes& bytes, int64_t e, int64_t n,
                     int64_t k);

}  // namespace moec::test
