// SPDX-License-Identifier: Apache-2.0
#include "quantised.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "handles.h"

namespace moec::test {
namespace {

using oracle::Bytes;
using oracle::Number;
using oracle::Scheme;

static_assert(int(Scheme::kGgufMxfp4) == MOEC_SCHEME_GGUF_MXFP4 &&
              int(Scheme::kInt4) == MOEC_SCHEME_INT4 &&
              int(Scheme::kCodebook4) == MOEC_SCHEME_CODEBOOK4);

moec_dtype dtype_of(Number type) {
  static constexpr moec_dtype kTypes[] = {MOEC_F32, MOEC_F16,     MOEC_BF16,    MOEC_I8,
                                          MOEC_U8,  MOEC_F8_E4M3, MOEC_F8_E5M2, MOEC_F8_E8M0};
  return kTypes[int(type)];
}
int64_t ceil_of(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
struct Gguf {
  int values, bytes;
};
Gguf gguf_of(Scheme scheme) {
  static constexpr Gguf kBlocks[] = {{32, 34}, {32, 18}, {256, 144}, {256, 210}, {32, 17}};
  return kBlocks[int(scheme) - int(Scheme::kGgufQ8)];
}
bool is_gguf(Scheme scheme) {
  return scheme >= Scheme::kGgufQ8;
}
bool is_byte(Scheme scheme) {
  return scheme == Scheme::kInt8 || scheme == Scheme::kFp8;
}
bool is_int4(Scheme scheme) {
  return scheme >= Scheme::kInt4 && scheme <= Scheme::kGptqV2;
}

// The tensor of codes of one expert.
struct Stored {
  moec_dtype dtype;
  std::vector<int64_t> shape;
};
Stored stored_codes(const Quantised& q, bool whole_shape) {
  const int64_t R = q.in_out ? q.K : q.N, C = q.in_out ? q.N : q.K;
  if (is_byte(q.scheme)) return {dtype_of(q.code_type), {R, C}};
  if (is_gguf(q.scheme)) {
    const Gguf block = gguf_of(q.scheme);
    return {MOEC_U8, {R, C / block.values * block.bytes}};
  }
  if (q.scheme == Scheme::kInt4) return {MOEC_I32, {R, ceil_of(C, 8)}};
  if (q.scheme == Scheme::kAwq) return {MOEC_I32, {q.K, q.N / 8}};
  if (is_int4(q.scheme)) return {MOEC_I32, {q.K / 8, q.N}};
  if (whole_shape) return {MOEC_U8, {R, C / 32, 16}};
  return {MOEC_U8, {R, C / 2}};
}
int64_t scale_rows(const Quantised& q) {
  return q.scale_rows ? q.scale_rows : ceil_of(q.N, q.block_n);
}
std::vector<int64_t> oriented(const Quantised& q, int64_t n, int64_t k) {
  return q.in_out ? std::vector<int64_t>{k, n} : std::vector<int64_t>{n, k};
}

Bytes random_bytes(int64_t count, Random* random) {
  Bytes bytes;
  for (int64_t i = 0; i < count; ++i) bytes.push_back(uint8_t(random->below(256)));
  return bytes;
}
void put_real(Bytes* to, Number type, double value) {
  const Bytes bytes = encode({value}, dtype_of(type));
  to->insert(to->end(), bytes.begin(), bytes.end());
}
// A scale about as large as `size`.
void put_scale(Bytes* to, Number type, double size, Random* random) {
  const double value = size * (0.5 + random->uniform());
  if (type == Number::kE8m0)
    to->push_back(uint8_t(127 + std::lround(std::log2(value))));
  else if (type == Number::kE4m3)
    to->push_back(uint8_t(48 + random->below(24)));  // 0.5 to 3.75
  else
    put_real(to, type, value);
}
// Largest code that is likely, by which scales are chosen.
double code_size(const QuantCase& c) {
  switch (c.scheme) {
    case Scheme::kInt8:
    case Scheme::kGgufQ8:
      return 75;
    case Scheme::kFp8:
      return c.code_type == Number::kE5m2 ? 8 : 60;
    case Scheme::kCodebook4:
      return 0.6;
    case Scheme::kMxfp4:
    case Scheme::kNvfp4:
    case Scheme::kGgufMxfp4:
      return 3;
    default:
      return 6;
  }
}
void put_gguf_scales(Quantised* q, double size, Random* random) {
  const Gguf block = gguf_of(q->scheme);
  for (size_t at = 0; at < q->codes.size(); at += size_t(block.bytes)) {
    const auto half = [&](size_t byte, double value) {
      Bytes bytes;
      put_real(&bytes, Number::kF16, value * (0.5 + random->uniform()));
      std::copy(bytes.begin(), bytes.end(), q->codes.begin() + std::ptrdiff_t(at + byte));
    };
    if (q->scheme == Scheme::kGgufMxfp4)
      q->codes[at] = uint8_t(127 + std::lround(std::log2(size)));
    else if (q->scheme == Scheme::kGgufQ4K) {
      half(0, size / 32);
      half(2, size / 8);
    } else
      half(q->scheme == Scheme::kGgufQ6K ? 208 : 0,
           q->scheme == Scheme::kGgufQ6K ? size / 200 : size);
  }
}
// FP8 codes without infinity, NaN and the largest numbers.
void tame_fp8(Quantised* q, Random* random) {
  const int most = q->code_type == Number::kE5m2 ? 80 : 108;
  for (uint8_t& code : q->codes) code = uint8_t((code & 128) + random->below(most));
}

}  // namespace

using oracle::Number;
const std::vector<QuantCase> kQuantCases = {
    {.name = "int8", .scheme = Scheme::kInt8},
    {.name = "int8_zeros_blocks",
     .scheme = Scheme::kInt8,
     .block_n = 3,
     .block_k = 24,
     .zeros = true},
    {.name = "int8_groups_bf16",
     .scheme = Scheme::kInt8,
     .block_k = 32,
     .scale_type = Number::kBf16},
    {.name = "fp8_channel", .scheme = Scheme::kFp8, .code_type = Number::kE4m3},
    {.name = "fp8_tensor", .scheme = Scheme::kFp8, .block_n = 0, .code_type = Number::kE4m3},
    {.name = "fp8_block128",
     .scheme = Scheme::kFp8,
     .block_n = 128,
     .block_k = 128,
     .code_type = Number::kE4m3},
    {.name = "fp8_spare_row",
     .scheme = Scheme::kFp8,
     .block_n = 0,
     .block_k = 16,
     .spare_row = true,
     .scale_type = Number::kBf16,
     .code_type = Number::kE4m3},
    {.name = "fp8_e5m2_f16",
     .scheme = Scheme::kFp8,
     .block_n = 2,
     .scale_type = Number::kF16,
     .code_type = Number::kE5m2},
    {.name = "mxfp8",
     .scheme = Scheme::kFp8,
     .block_k = 32,
     .scale_type = Number::kE8m0,
     .code_type = Number::kE4m3},
    {.name = "codebook4_64", .scheme = Scheme::kCodebook4, .block_k = 64},
    {.name = "codebook4_32_bf16",
     .scheme = Scheme::kCodebook4,
     .block_k = 32,
     .scale_type = Number::kBf16},
    {.name = "codebook4_nested", .scheme = Scheme::kCodebook4, .block_k = 64, .nested = true},
    {.name = "codebook4_nested_256", .scheme = Scheme::kCodebook4, .block_k = 256, .nested = true},
    {.name = "mxfp4",
     .scheme = Scheme::kMxfp4,
     .block_k = 32,
     .scale_type = Number::kE8m0,
     .multiple_k = 32},
    {.name = "mxfp4_blocks",
     .scheme = Scheme::kMxfp4,
     .block_k = 32,
     .scale_type = Number::kE8m0,
     .multiple_k = 32,
     .whole_shape = true},
    {.name = "nvfp4",
     .scheme = Scheme::kNvfp4,
     .block_k = 16,
     .scales2 = 1,
     .scale_type = Number::kE4m3,
     .multiple_k = 16},
    {.name = "nvfp4_divides",
     .scheme = Scheme::kNvfp4,
     .block_k = 16,
     .divides = true,
     .scales2 = 2,
     .scale_type = Number::kE4m3,
     .multiple_k = 16},
    {.name = "nvfp4_one_for_all",
     .scheme = Scheme::kNvfp4,
     .block_k = 16,
     .scale_type = Number::kE4m3,
     .multiple_k = 16},
    {.name = "int4_g32", .scheme = Scheme::kInt4, .block_k = 32},
    {.name = "int4_channel_f16", .scheme = Scheme::kInt4, .scale_type = Number::kF16},
    {.name = "int4_asym_g_idx",
     .scheme = Scheme::kInt4,
     .block_k = 16,
     .zeros = true,
     .group_index = true,
     .scale_type = Number::kBf16},
    {.name = "int4_blocks", .scheme = Scheme::kInt4, .block_n = 3, .block_k = 20, .zeros = true},
    {.name = "awq",
     .scheme = Scheme::kAwq,
     .block_k = 32,
     .zeros = true,
     .scale_type = Number::kF16,
     .multiple_n = 8,
     .only_in_out = true},
    {.name = "gptq",
     .scheme = Scheme::kGptq,
     .block_k = 32,
     .zeros = true,
     .scale_type = Number::kF16,
     .multiple_k = 8,
     .only_in_out = true},
    {.name = "gptq_g_idx",
     .scheme = Scheme::kGptq,
     .block_k = 48,
     .zeros = true,
     .group_index = true,
     .scale_type = Number::kF16,
     .multiple_k = 8,
     .only_in_out = true},
    {.name = "gptq_v2_g_idx",
     .scheme = Scheme::kGptqV2,
     .block_k = 32,
     .zeros = true,
     .group_index = true,
     .multiple_k = 8,
     .only_in_out = true},
    {.name = "gguf_q8_0", .scheme = Scheme::kGgufQ8, .multiple_k = 32, .only_out_in = true},
    {.name = "gguf_q4_0", .scheme = Scheme::kGgufQ4, .multiple_k = 32, .only_out_in = true},
    {.name = "gguf_q4_k", .scheme = Scheme::kGgufQ4K, .multiple_k = 256, .only_out_in = true},
    {.name = "gguf_q6_k", .scheme = Scheme::kGgufQ6K, .multiple_k = 256, .only_out_in = true},
    {.name = "gguf_mxfp4", .scheme = Scheme::kGgufMxfp4, .multiple_k = 32, .only_out_in = true},
};

Quantised random_quantised(const QuantCase& c, int64_t experts, int64_t N, int64_t K, bool in_out,
                           int parts, Random* random) {
  Quantised q;
  q.scheme = c.scheme;
  q.experts = experts;
  q.N = N;
  q.K = K;
  q.in_out = in_out;
  q.code_type = c.code_type;
  q.scale_type = c.nested ? Number::kU8 : c.scale_type;
  q.divides = c.divides;
  // Blocks of MXFP4 and NVFP4 lie along the contiguous axis.
  const bool turned = in_out && (c.scheme == Scheme::kMxfp4 || c.scheme == Scheme::kNvfp4);
  q.block_n = turned ? c.block_k : c.block_n ? c.block_n : N;
  q.block_k = turned ? 1 : c.block_k ? c.block_k : K;
  const double size = 1 / (code_size(c) * std::sqrt(double(K)));
  if (c.scheme == Scheme::kCodebook4) {
    const int64_t codes = experts * N * K, blocks = ceil_of(codes, c.block_k);
    q.codes = random_bytes(ceil_of(codes, 2), random);
    q.block_n = 1;
    q.block_k = c.block_k;
    for (int i = 0; i < 16; ++i) put_real(&q.codebook, Number::kF32, random->uniform() * 2 - 1);
    if (!c.nested) {
      for (int64_t i = 0; i < blocks; ++i) put_scale(&q.scales, q.scale_type, size, random);
      return q;
    }
    q.scales = random_bytes(blocks, random);
    q.scale_block = c.block_k == 64 ? 256 : 8;
    for (int i = 0; i < 256; ++i) put_real(&q.scale_book, Number::kF32, random->uniform() - 0.5);
    for (int64_t i = 0; i < ceil_of(blocks, q.scale_block); ++i)
      put_scale(&q.scales2, Number::kF32, size, random);
    put_real(&q.scale_offset, Number::kF32, 1.5 * size);
    return q;
  }
  const Stored stored = stored_codes(q, false);
  q.codes = random_bytes(
      experts * stored.shape[0] * stored.shape[1] * int64_t(element_bytes(stored.dtype)), random);
  if (is_gguf(c.scheme)) {
    put_gguf_scales(&q, size, random);
    return q;
  }
  if (c.scheme == Scheme::kFp8) tame_fp8(&q, random);
  if (c.spare_row && ceil_of(N, q.block_n) == 1) q.scale_rows = 2;
  const int64_t groups = ceil_of(K, q.block_k), rows = scale_rows(q);
  for (int64_t i = 0; i < experts * rows * groups; ++i)
    put_scale(&q.scales, q.scale_type, size, random);
  if (c.zeros && c.scheme == Scheme::kInt8)
    for (int64_t i = 0; i < experts * rows * groups; ++i)
      q.zeros.push_back(uint8_t(random->below(41) - 20));
  else if (c.zeros)
    q.zeros = random_bytes(experts * ceil_of(rows, 8) * groups * 4, random);
  if (c.group_index)
    for (int64_t i = 0; i < experts * K; ++i)  // some that name no block
      q.group_index.push_back(random->below(9) == 0 ? -1 : int(random->below(groups)));
  if (c.scheme == Scheme::kNvfp4) {
    q.scales2_parts = std::min(c.scales2, parts);
    const int64_t count = q.scales2_parts ? experts * q.scales2_parts : 1;
    for (int64_t i = 0; i < count; ++i)
      put_real(&q.scales2, Number::kF32,
               (c.divides ? 2 / size : size / 2) * (0.5 + random->uniform()));
  }
  return q;
}

oracle::Vec dequantise(const QuantisedMatrix& matrix, oracle::Rounding rounding) {
  oracle::Vec all;
  for (const Quantised& q : matrix) {
    const oracle::Vec one = oracle::dequantise(q, rounding);
    all.insert(all.end(), one.begin(), one.end());
  }
  return all;
}

moec_matrix QuantBinder::matrix(const QuantisedMatrix& from, bool whole_shape) {
  const Quantised& first = from[0];
  const bool per_expert = from.size() > 1, stream = first.scheme == Scheme::kCodebook4;
  moec_matrix m = {};
  if (per_expert) m.count = int64_t(from.size());
  // One tensor of each member; stacked ones have a dimension of experts, but not those of streams.
  const auto bind = [&](auto bytes_of, auto stored_of, bool is_stacked, moec_tensor* stacked,
                        const moec_tensor** each) {
    if (bytes_of(first).empty()) return;
    std::vector<moec_tensor> tensors;
    for (const Quantised& q : from) {
      Stored stored = stored_of(q);
      if (!per_expert && is_stacked) stored.shape.insert(stored.shape.begin(), q.experts);
      tensors.push_back(tensors_.input_bytes(bytes_of(q), stored.dtype, stored.shape));
    }
    if (!per_expert || !each) {
      *stacked = tensors[0];
      return;
    }
    arrays_.push_back(tensors);
    *each = arrays_.back().data();
  };
  const auto count_of = [](const Bytes& bytes, Number type) {
    return Stored{dtype_of(type), {int64_t(bytes.size() / element_bytes(dtype_of(type)))}};
  };
  bind([](const Quantised& q) { return q.codes; },
       [&](const Quantised& q) {
         return stream ? count_of(q.codes, Number::kU8) : stored_codes(q, whole_shape);
       },
       !stream, &m.data, &m.per_expert);
  if (is_gguf(first.scheme)) return m;
  moec_quant& quant = quants_.emplace_back(sized<moec_quant>());
  m.quant = &quant;
  if (first.divides) quant.flags = MOEC_QUANT_SCALES2_DIVIDES;
  const bool fixed = first.scheme == Scheme::kMxfp4 || first.scheme == Scheme::kNvfp4;
  if (stream)
    (first.in_out ? quant.block_n : quant.block_k) = first.block_k;
  else if (!fixed) {
    quant.block_n = first.block_n;
    quant.block_k = first.block_k;
  }
  bind([](const Quantised& q) { return q.scales; },
       [&](const Quantised& q) {
         if (stream) return count_of(q.scales, q.scale_type);
         return Stored{dtype_of(q.scale_type), oriented(q, scale_rows(q), ceil_of(q.K, q.block_k))};
       },
       !stream, &quant.scales, &quant.per_expert_scales);
  bind([](const Quantised& q) { return q.zeros; },
       [&](const Quantised& q) {
         const bool bytes = q.scheme == Scheme::kInt8;
         const int64_t rows = bytes ? scale_rows(q) : ceil_of(scale_rows(q), 8);
         return Stored{moec_dtype(bytes ? MOEC_I8 : MOEC_I32),
                       oriented(q, rows, ceil_of(q.K, q.block_k))};
       },
       true, &quant.zeros, &quant.per_expert_zeros);
  bind([](const Quantised& q) { return q.scales2; },
       [&](const Quantised& q) {
         Stored stored = count_of(q.scales2, Number::kF32);
         if (!stream && q.scales2_parts && !per_expert) {
           stored.shape = {q.experts};
           if (q.scales2_parts == 2) stored.shape.push_back(2);
         }
         return stored;
       },
       false, &quant.scales2, &quant.per_expert_scales2);
  const auto floats = [&](const Bytes& bytes) { return count_of(bytes, Number::kF32); };
  bind([](const Quantised& q) { return q.codebook; },
       [&](const Quantised& q) { return floats(q.codebook); }, false, &quant.codebook, nullptr);
  bind([](const Quantised& q) { return q.scale_book; },
       [&](const Quantised& q) { return floats(q.scale_book); }, false, &quant.scale_book, nullptr);
  bind([](const Quantised& q) { return q.scale_offset; },
       [&](const Quantised& q) { return floats(q.scale_offset); }, false, &quant.scale_offset,
       &quant.per_expert_scale_offset);
  if (!first.scale_book.empty()) quant.scale_block = first.scale_block;
  bind(
      [](const Quantised& q) {
        Bytes bytes(q.group_index.size() * sizeof(int));
        if (!bytes.empty()) std::memcpy(bytes.data(), q.group_index.data(), bytes.size());
        return bytes;
      },
      [](const Quantised& q) { return Stored{MOEC_I32, {q.K}}; }, true, &quant.group_index,
      &quant.per_expert_group_index);
  return m;
}

}  // namespace moec::test
