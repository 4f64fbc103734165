// SPDX-License-Identifier: Apache-2.0
// Quantised matrices by the names and types of tensors in checkpoints.
#include <cstring>
#include <map>
#include <stdexcept>

#include "json.h"
#include "quantised.h"

namespace moec::test {
namespace {

using oracle::Number;
using oracle::Scheme;

Number number_of(const StoredTensor& tensor) {
  static const std::map<std::string, Number> kNumbers = {
      {"F32", Number::kF32}, {"F16", Number::kF16}, {"BF16", Number::kBf16},
      {"I8", Number::kI8},   {"U8", Number::kU8},   {"F8_E4M3", Number::kE4m3}};
  return kNumbers.at(tensor.dtype);
}
void set_scales(Quantised* q, const StoredTensor& tensor) {
  q->scales = tensor.bytes;
  q->scale_type = number_of(tensor);
}
oracle::Bytes bytes_of(float value) {
  oracle::Bytes bytes(4);
  std::memcpy(bytes.data(), &value, 4);
  return bytes;
}

// bitsandbytes: `state` before the names of what lies beside the codes.
void read_stream(const SafeTensors& file, const std::string& codes, const std::string& state,
                 Quantised* q) {
  q->scheme = Scheme::kCodebook4;
  q->codes = file.at(codes).bytes;
  q->block_n = 1;
  q->block_k = std::stoi(file.metadata.at("blocksize"));
  q->codebook = file.at(state + "quant_map").bytes;
  set_scales(q, file.at(state + "absmax"));
  if (!file.has(state + "nested_absmax")) return;
  q->scale_book = file.at(state + "nested_quant_map").bytes;
  q->scales2 = file.at(state + "nested_absmax").bytes;
  if (file.has(state + "nested_offset")) {
    q->scale_offset = file.at(state + "nested_offset").bytes;
    return;
  }
  for (const char* type : {"nf4", "fp4"}) {
    const std::string name = state + "quant_state.bitsandbytes__" + type;
    if (!file.has(name)) continue;
    const auto& text = file.at(name).bytes;
    const Json json = parse_json({reinterpret_cast<const char*>(text.data()), text.size()});
    q->scale_offset = bytes_of(float(json.at("nested_offset").number));
  }
}

// AWQ [K,N/8] and GPTQ [K/8,N].
void read_columns(const SafeTensors& file, const std::string& prefix, Quantised* q) {
  const StoredTensor& codes = file.at(prefix + "qweight");
  q->in_out = true;
  q->codes = codes.bytes;
  q->zeros = file.at(prefix + "qzeros").bytes;
  set_scales(q, file.at(prefix + "scales"));
  q->block_n = 1;
  q->block_k = std::stoi(file.metadata.at("group_size"));
  q->scheme = codes.shape[0] == q->K                            ? Scheme::kAwq
              : file.metadata.at("checkpoint_format") == "gptq" ? Scheme::kGptq
                                                                : Scheme::kGptqV2;
  if (!file.has(prefix + "g_idx")) return;
  for (const double group : file.at(prefix + "g_idx").as_double())
    q->group_index.push_back(int(group));
}

// compressed-tensors, modelopt and FP8 of transformers.
void read_rows(const SafeTensors& file, const std::string& prefix, Quantised* q) {
  const bool packed = file.has(prefix + "weight_packed");
  const StoredTensor& codes = file.at(prefix + (packed ? "weight_packed" : "weight"));
  const bool inverse = file.has(prefix + "weight_scale_inv");
  const StoredTensor& scales = file.at(prefix + (inverse ? "weight_scale_inv" : "weight_scale"));
  q->codes = codes.bytes;
  set_scales(q, scales);
  if (file.has(prefix + "weight_zero_point"))
    q->zeros = file.at(prefix + "weight_zero_point").bytes;
  const int64_t rows = scales.shape.size() == 2 ? scales.shape[0] : 1;
  const int64_t columns = scales.shape.size() == 2 ? scales.shape[1] : 1;
  q->block_n = rows == q->N ? 1 : rows == 1 ? q->N : 128;
  q->block_k = rows == q->N ? q->K / columns : columns == 1 && rows == 1 ? q->K : 128;
  if (codes.dtype == "I8") {
    q->scheme = Scheme::kInt8;
  } else if (codes.dtype == "F8_E4M3") {
    q->scheme = Scheme::kFp8;
    q->code_type = Number::kE4m3;
    if (scales.dtype == "U8") q->scale_type = Number::kE8m0;
  } else if (codes.dtype == "I32") {
    q->scheme = Scheme::kInt4;
  } else if (scales.dtype == "U8") {
    q->scheme = Scheme::kMxfp4;
    q->scale_type = Number::kE8m0;
  } else {
    q->scheme = Scheme::kNvfp4;
    q->divides = packed;
    q->scales2_parts = 1;
    q->scales2 = file.at(prefix + (packed ? "weight_global_scale" : "weight_scale_2")).bytes;
  }
}

}  // namespace

Quantised stored_matrix(const SafeTensors& file, const std::string& prefix, int64_t N, int64_t K) {
  Quantised q;
  q.N = N;
  q.K = K;
  if (file.has(prefix + "qweight"))
    read_columns(file, prefix, &q);
  else if (file.has(prefix + "absmax"))
    read_stream(file, prefix + "weight", prefix, &q);
  else if (file.has(prefix + "weight.absmax"))
    read_stream(file, prefix + "weight", prefix + "weight.", &q);
  else
    read_rows(file, prefix, &q);
  return q;
}

QuantisedMatrix golden_matrix(const SafeTensors& file, const std::string& matrix) {
  const bool is_down = matrix == "down_proj",
             is_part = matrix == "gate_proj" || matrix == "up_proj";
  const auto shape =
      parse_json(file.metadata.at(is_down ? "shape_down_proj" : "shape_gate_up_proj")).array;
  const bool in_out = file.metadata.at("stack_orientation") == "in_out";
  const auto extent = [&](size_t i) { return int64_t(shape.at(i).number); };
  const int64_t experts = extent(0), N = extent(in_out ? 2 : 1), K = extent(in_out ? 1 : 2);
  const std::string name = "ckpt.experts." + matrix;
  if (file.has(name) || file.has(name + "_blocks")) {
    Quantised q;
    q.experts = experts;
    q.N = N;
    q.K = K;
    if (file.has(name)) {
      q.in_out = in_out;
      read_stream(file, name, name + ".", &q);
      return {q};
    }
    q.scheme = Scheme::kMxfp4;
    q.codes = file.at(name + "_blocks").bytes;
    q.scales = file.at(name + "_scales").bytes;
    q.scale_type = Number::kE8m0;
    q.block_k = 32;
    return {q};
  }
  QuantisedMatrix all;
  for (int64_t e = 0; e < experts; ++e)
    all.push_back(stored_matrix(file, "ckpt.experts." + std::to_string(e) + "." + matrix + ".",
                                is_part ? N / 2 : N, K));
  return all;
}

}  // namespace moec::test
