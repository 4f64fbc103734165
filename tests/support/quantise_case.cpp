// SPDX-License-Identifier: Apache-2.0
#include "support/quantise_case.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "support/tensors.h"

namespace moec::test {

NamedTensors tensors_of(moec_quant* quant) {
  NamedTensors present;
  for (const auto& [name, tensor] : NamedTensors{{"scales", &quant->scales},
                                                 {"scales2", &quant->scales2},
                                                 {"zeros", &quant->zeros},
                                                 {"codebook", &quant->codebook},
                                                 {"scale_book", &quant->scale_book},
                                                 {"scale_offset", &quant->scale_offset}})
    if (tensor->ndim) present.emplace_back(name, tensor);
  return present;
}

moec_quantise_desc QuantiseCase::desc() const {
  auto d = sized<moec_quantise_desc>();
  d.kind = kind;
  d.flags = flags;
  d.orientation = orientation;
  d.dtype = dtype;
  d.scale_dtype = scale_dtype;
  d.num_experts = num_experts;
  d.out_features = out_features;
  d.in_features = in_features;
  d.block_n = block_n;
  d.block_k = block_k;
  return d;
}
std::vector<int64_t> QuantiseCase::source_shape() const {
  return orientation == MOEC_OUT_IN ? std::vector{num_experts, out_features, in_features}
                                    : std::vector{num_experts, in_features, out_features};
}
size_t QuantiseCase::index(int64_t e, int64_t n, int64_t k) const {
  return size_t(e * out_features * in_features +
                (orientation == MOEC_OUT_IN ? n * in_features + k : k * out_features + n));
}
std::string QuantiseCase::text() const {
  std::string t = "kind " + std::to_string(kind) + " flags " + std::to_string(flags);
  for (const auto& [name, value] :
       std::vector<std::pair<const char*, int64_t>>{{"orientation", orientation},
                                                    {"dtype", dtype},
                                                    {"scale_dtype", scale_dtype},
                                                    {"E", num_experts},
                                                    {"N", out_features},
                                                    {"K", in_features},
                                                    {"block_n", block_n},
                                                    {"block_k", block_k}})
    t += std::string(" ") + name + " " + std::to_string(value);
  return t;
}

uint64_t quantise_workspace(const moec_context* context, const QuantiseCase& c) {
  const moec_quantise_desc desc = c.desc();
  auto info = sized<moec_quantise_info>();
  auto quant = sized<moec_quant>();
  check(moec_quantise_query(context, &desc, &info, &quant));
  return info.workspace;
}

std::vector<uint8_t>& QuantisedBytes::of(const std::string& name) {
  if (name == "codes") return codes;
  if (name == "scales") return scales;
  if (name == "scales2") return scales2;
  if (name == "zeros") return zeros;
  if (name == "codebook") return codebook;
  return name == "scale_book" ? scale_book : scale_offset;
}

QuantisedBytes quantise(const moec_context* context, const QuantiseCase& c,
                        const std::vector<double>& source, bool workspace) {
  Tensors tensors;
  std::vector<std::pair<std::string, moec_tensor>> outputs;
  const moec_tensor from = tensors.input(source, c.dtype, c.source_shape());
  const uint64_t bytes = workspace ? quantise_workspace(context, c) : 0;
  quantise(context, c, from, bytes ? tensors.buffer(bytes) : moec_buffer{},
           [&](const char* name, moec_dtype dtype, const std::vector<int64_t>& shape) {
             const moec_tensor tensor = tensors.output(dtype, shape);
             outputs.emplace_back(name, tensor);
             return tensor;
           });
  QuantisedBytes result;
  for (const auto& [name, tensor] : outputs) result.of(name) = tensors.read_bytes(tensor);
  EXPECT_TRUE(tensors.neighbours_untouched()) << c.text();
  return result;
}

namespace {

// Levels of the codes, by code; of integers sorted.
double e2m1(int code) {
  static const double kSizes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return code & 8 ? -kSizes[code & 7] : kSizes[code & 7];
}
double e4m3(int code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const double size = (code & 127) == 127 ? NAN
                      : exponent          ? std::ldexp(8 + mantissa, exponent - 10)
                                          : std::ldexp(mantissa, -9);
  return code & 128 ? -size : size;
}
double e8m0(int code) {
  return code == 255 ? NAN : std::ldexp(1, code - 127);
}
template <class Value>
std::vector<double> levels(int first, int last, Value value) {
  std::vector<double> all;
  for (int code = first; code <= last; ++code)
    if (!std::isnan(double(value(code)))) all.push_back(value(code));
  return all;
}
double f32_at(const std::vector<uint8_t>& bytes, size_t i) {
  return decode({bytes.begin() + long(4 * i), bytes.begin() + long(4 * i + 4)}, MOEC_F32)[0];
}
double real_at(const std::vector<uint8_t>& bytes, moec_dtype dtype, size_t i) {
  const long size = long(element_bytes(dtype));
  const auto begin = bytes.begin() + long(i) * size;
  return decode({begin, begin + size}, dtype)[0];
}
int nibble(uint8_t byte, bool high) {
  return high ? byte >> 4 : byte & 15;
}
int64_t up(int64_t value, int64_t by) {
  return (value + by - 1) / by;
}

// NF4 and FP4: the levels are what codebook says.
Coded1 stream_element(const QuantiseCase& c, const QuantisedBytes& b, size_t i) {
  static thread_local std::vector<double> book;
  book.clear();
  for (size_t code = 0; code < 16; ++code) book.push_back(f32_at(b.codebook, code));
  const int64_t given = c.orientation == MOEC_OUT_IN ? c.block_k : c.block_n;
  const size_t block = i / size_t(given ? given : 64);
  double scale = 0;
  if (c.flags & MOEC_QUANTISE_NESTED)  // two roundings
    scale = float(float(f32_at(b.scale_book, b.scales[block]) * f32_at(b.scales2, block / 256)) +
                  f32_at(b.scale_offset, 0));
  else
    scale = f32_at(b.scales, block);
  return {book[size_t(nibble(b.codes[i / 2], i % 2 == 0))] * scale, scale, 0, &book};
}

}  // namespace

Coded1 coded_element(const QuantiseCase& c, const QuantisedBytes& b, int64_t e, int64_t n,
                     int64_t k) {
  static const std::vector<double> kInt8 = levels(-128, 127, [](int q) { return double(q); }),
                                   kInt4 = levels(-8, 7, [](int q) { return double(q); }),
                                   kE2m1 = levels(0, 15, e2m1), kE4m3 = levels(0, 255, e4m3);
  if (c.is_stream()) return stream_element(c, b, c.index(e, n, k));
  const int64_t N = c.out_features, K = c.in_features;
  const moec_dtype scale_dtype = c.scale_dtype ? c.scale_dtype : c.dtype;
  const bool asymmetric = c.flags & MOEC_QUANTISE_ASYMMETRIC;
  const auto row = e * N + n;
  const auto at = [&](int64_t per_row, int64_t column) { return size_t(row * per_row + column); };
  const auto finish = [](double level, double scale, double zero, const std::vector<double>& all) {
    return Coded1{(level - zero) * scale, scale, zero, &all};
  };
  switch (c.kind) {
    case MOEC_QUANTISE_INT8:
      return finish(int8_t(b.codes[at(K, k)]), real_at(b.scales, scale_dtype, size_t(row)),
                    asymmetric ? int8_t(b.zeros[size_t(row)]) : 0, kInt8);
    case MOEC_QUANTISE_INT4: {
      const int64_t group = c.block_k ? c.block_k : K, groups = up(K, group);
      const auto word = [](const std::vector<uint8_t>& bytes, int64_t index, int64_t shift) {
        return int(nibble(bytes[size_t(4 * index + shift / 2)], shift % 2)) - 8;
      };
      const int64_t zero_word = (e * up(N, 8) + n / 8) * groups + k / group;
      return finish(word(b.codes, row * up(K, 8) + k / 8, k % 8),
                    real_at(b.scales, scale_dtype, at(groups, k / group)),
                    asymmetric ? word(b.zeros, zero_word, n % 8) : 0, kInt4);
    }
    case MOEC_QUANTISE_FP8: {
      const int64_t bn = c.block_n ? c.block_n : 1, bk = c.block_k ? c.block_k : K;
      const int64_t block = (e * up(N, bn) + n / bn) * up(K, bk) + k / bk;
      return finish(e4m3(b.codes[at(K, k)]), real_at(b.scales, scale_dtype, size_t(block)), 0,
                    kE4m3);
    }
    case MOEC_QUANTISE_MXFP8:
      return finish(e4m3(b.codes[at(K, k)]), e8m0(b.scales[at(up(K, 32), k / 32)]), 0, kE4m3);
    case MOEC_QUANTISE_MXFP4:
      return finish(e2m1(nibble(b.codes[at(K / 2, k / 2)], k % 2)),
                    e8m0(b.scales[at(K / 32, k / 32)]), 0, kE2m1);
    case MOEC_QUANTISE_NVFP4: {
      const double own = e4m3(b.scales[at(K / 16, k / 16)]), whole = f32_at(b.scales2, size_t(e));
      const bool divides = c.flags & MOEC_QUANTISE_SCALES2_DIVIDES;
      return finish(e2m1(nibble(b.codes[at(K / 2, k / 2)], k % 2)),
                    float(divides ? own / whole : own * whole), 0, kE2m1);
    }
  }
  throw std::runtime_error("coded_element: unknown kind");
}

}  // namespace moec::test
