// SPDX-License-Identifier: Apache-2.0
// Values of quantised matrices.
#include "quant.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>

namespace moec::oracle {

Vec dequantise_int8(const Coded& matrix, Rounding rounding) {
  const size_t channels = matrix.scales.size(), inputs = matrix.codes.size() / channels;
  Vec values;
  values.reserve(matrix.codes.size());
  for (size_t n = 0; n < channels; ++n) {
    const double zero = matrix.zeros.empty() ? 0 : matrix.zeros[n];
    for (size_t k = 0; k < inputs; ++k) {
      const double exact = (matrix.codes[n * inputs + k] - zero) * matrix.scales[n];
      values.push_back(round_to(rounding, round_to(Rounding::kFp32, exact)));
    }
  }
  return values;
}

namespace {

double fp32(double exact) {
  return round_to(Rounding::kFp32, exact);
}

// A float of `exponent` and `mantissa` bits; all ones of the exponent are infinity and NaN where
// the format has them.
double small_float(int code, int exponent_bits, int mantissa_bits, bool ieee) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int mantissa = code & ((1 << mantissa_bits) - 1);
  const int exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1);
  const bool negative = code >> (mantissa_bits + exponent_bits) & 1;
  const bool ones = exponent == (1 << exponent_bits) - 1;
  const int digits = exponent ? (1 << mantissa_bits) + mantissa : mantissa;
  double size = digits * power_of_two(std::max(exponent, 1) - bias - mantissa_bits);
  if (ieee && ones) size = mantissa ? NAN : INFINITY;
  if (!ieee && mantissa_bits == 3 && (code & 127) == 127) size = NAN;
  return negative ? -size : size;
}
double e2m1(int code) {
  return small_float(code, 2, 1, false);
}
double power(int code) {
  return code == 255 ? NAN : power_of_two(code - 127);
}
int nibble(const Bytes& bytes, int64_t byte, bool high) {
  return bytes[size_t(byte)] >> (high ? 4 : 0) & 15;
}
int low_first(const Bytes& bytes, int64_t index) {
  return nibble(bytes, index / 2, index % 2);
}
int64_t ceil_of(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

struct Element {  // of expert e
  int64_t e, n, k;
};

// Index of (i, j) of expert e in a tensor [experts, I, J], or [experts, J, I].
int64_t index_of(bool turned, int64_t e, int64_t i, int64_t j, int64_t I, int64_t J) {
  return e * I * J + (turned ? j * I + i : i * J + j);
}

class Reader {
 public:
  explicit Reader(const Quantised& q) : q_(q) {}

  double value(const Element& x) const {
    switch (q_.scheme) {
      case Scheme::kInt8:
        return fp32((plain_code(x) - int8_zero(x)) * scale(x));
      case Scheme::kFp8:
        return fp32(plain_code(x) * scale(x));
      case Scheme::kCodebook4:
        return stream_value(x);
      case Scheme::kMxfp4:
        return fp32(e2m1(row_nibble(x)) * scale(x));
      case Scheme::kNvfp4:
        return fp32(e2m1(row_nibble(x)) * nvfp4_scale(x));
      case Scheme::kInt4:  // both are stored 8 too large
        return fp32((row_nibble(x) - (q_.zeros.empty() ? 8 : zero(x, x.n / q_.block_n % 8))) *
                    scale(x));
      case Scheme::kAwq: {
        const int64_t word = (x.e * q_.K + x.k) * (q_.N / 8) + x.n / 8;
        return fp32((low_first(q_.codes, 8 * word + awq_place(x.n)) -
                     zero(x, awq_place(x.n / q_.block_n))) *
                    scale(x));
      }
      case Scheme::kGptq:
      case Scheme::kGptqV2: {
        const int64_t word = (x.e * (q_.K / 8) + x.k / 8) * q_.N + x.n;
        const int more = q_.scheme == Scheme::kGptq ? 1 : 0;
        return fp32(
            (low_first(q_.codes, 8 * word + x.k % 8) - (zero(x, x.n / q_.block_n % 8) + more)) *
            scale(x));
      }
      default:
        return gguf_value(x);
    }
  }

 private:
  double plain_code(const Element& x) const {
    return number_at(q_.codes, q_.code_type, index_of(q_.in_out, x.e, x.n, x.k, q_.N, q_.K));
  }
  int row_nibble(const Element& x) const {  // rows are padded to eight codes
    const int64_t width = ceil_of(q_.in_out ? q_.N : q_.K, 8) * 8;
    const int64_t row = q_.in_out ? x.e * q_.K + x.k : x.e * q_.N + x.n;
    return low_first(q_.codes, row * width + (q_.in_out ? x.n : x.k));
  }
  // Eight columns lie in the order 0 2 4 6 1 3 5 7.
  static int64_t awq_place(int64_t column) {
    static constexpr int kOrder[8] = {0, 2, 4, 6, 1, 3, 5, 7};
    for (int place = 0; place < 8; ++place)
      if (kOrder[place] == column % 8) return place;
    return -1;
  }
  int64_t rows_of_scales() const {
    return q_.scale_rows ? q_.scale_rows : ceil_of(q_.N, q_.block_n);
  }
  int64_t groups() const { return ceil_of(q_.K, q_.block_k); }
  int64_t group(const Element& x) const {
    if (q_.group_index.empty()) return x.k / q_.block_k;
    const int64_t given = q_.group_index[size_t(x.e * q_.K + x.k)];
    return given < 0 || given >= groups() ? x.k / q_.block_k : given;
  }
  int64_t entry(const Element& x) const {
    return index_of(q_.in_out, x.e, x.n / q_.block_n, group(x), rows_of_scales(), groups());
  }
  double scale(const Element& x) const { return number_at(q_.scales, q_.scale_type, entry(x)); }
  double int8_zero(const Element& x) const {
    return q_.zeros.empty() ? 0 : number_at(q_.zeros, Number::kI8, entry(x));
  }
  // Of eight zero points along N in a word, the one at a place.
  int zero(const Element& x, int64_t place) const {
    const int64_t words = ceil_of(ceil_of(q_.N, q_.block_n), 8);
    const int64_t word = index_of(q_.in_out, x.e, x.n / q_.block_n / 8, group(x), words, groups());
    return low_first(q_.zeros, 8 * word + place);
  }
  double nvfp4_scale(const Element& x) const {
    int64_t at = q_.scales2_parts ? x.e * q_.scales2_parts : 0;
    if (q_.scales2_parts == 2) {
      const bool second = q_.alternating ? x.n % 2 : x.n >= q_.N / 2;
      at += second != q_.part_of_first_is_second;
    }
    const double other = number_at(q_.scales2, Number::kF32, at);
    return fp32(q_.divides ? scale(x) / other : scale(x) * other);
  }
  double stream_value(const Element& x) const {
    const int64_t i = index_of(q_.in_out, x.e, x.n, x.k, q_.N, q_.K), block = i / q_.block_k;
    const int code = nibble(q_.codes, i / 2, i % 2 == 0);  // the first is the high one
    double scale = 0;
    if (q_.scale_book.empty()) {
      scale = number_at(q_.scales, q_.scale_type, block);
    } else {
      const double book = number_at(q_.scale_book, Number::kF32, q_.scales[size_t(block)]);
      const double second = number_at(q_.scales2, Number::kF32, block / q_.scale_block);
      scale = fp32(fp32(book * second) + number_at(q_.scale_offset, Number::kF32, 0));
    }
    return fp32(number_at(q_.codebook, Number::kF32, code) * scale);
  }

  double gguf_value(const Element& x) const {
    const auto start = [&](int64_t values, int64_t bytes) {
      return ((x.e * q_.N + x.n) * (q_.K / values) + x.k / values) * bytes;
    };
    const auto half = [&](int64_t byte) { return number_at(q_.codes, Number::kF16, byte / 2); };
    const auto byte = [&](int64_t at) { return int(q_.codes[size_t(at)]); };
    const int j = int(x.k % 32), k = int(x.k % 256);
    if (q_.scheme == Scheme::kGgufQ8) {
      const int64_t at = start(32, 34);
      return fp32(half(at) * number_at(q_.codes, Number::kI8, at + 2 + j));
    }
    if (q_.scheme == Scheme::kGgufQ4) {
      const int64_t at = start(32, 18);
      return fp32((nibble(q_.codes, at + 2 + j % 16, j >= 16) - 8) * half(at));
    }
    if (q_.scheme == Scheme::kGgufMxfp4) {
      const int64_t at = start(32, 17);
      return fp32(e2m1(nibble(q_.codes, at + 1 + j % 16, j >= 16)) * power(byte(at)));
    }
    if (q_.scheme == Scheme::kGgufQ4K) {
      const int64_t at = start(256, 144), sc = at + 4;
      const int sub = k / 32;
      const int scale =
          sub < 4 ? byte(sc + sub) % 64 : byte(sc + sub + 4) % 16 + byte(sc + sub - 4) / 64 * 16;
      const int least =
          sub < 4 ? byte(sc + sub + 4) % 64 : byte(sc + sub + 4) / 16 + byte(sc + sub) / 64 * 16;
      const int q = nibble(q_.codes, at + 16 + k / 64 * 32 + j, sub % 2);
      return fp32(fp32(fp32(half(at) * scale) * q) - fp32(half(at + 2) * least));
    }
    const int64_t at = start(256, 210), ql = at + k / 128 * 64, qh = at + 128 + k / 128 * 32;
    const int l = k % 32, quarter = k % 128 / 32;
    const int low = nibble(q_.codes, ql + (quarter % 2) * 32 + l, quarter >= 2);
    const int high = byte(qh + l) >> (2 * quarter) & 3;
    const double scale = number_at(q_.codes, Number::kI8, at + 192 + k / 16);
    return fp32(fp32(half(at + 208) * scale) * (low + 16 * high - 32));
  }

  const Quantised& q_;
};

}  // namespace

double number_at(const Bytes& bytes, Number type, int64_t index) {
  const auto i = size_t(index);
  switch (type) {
    case Number::kF32: {
      float value;
      std::memcpy(&value, bytes.data() + 4 * i, 4);
      return value;
    }
    case Number::kF16:
      return small_float(bytes[2 * i] | bytes[2 * i + 1] << 8, 5, 10, true);
    case Number::kBf16:
      return small_float(bytes[2 * i] | bytes[2 * i + 1] << 8, 8, 7, true);
    case Number::kI8:
      return bytes[i] < 128 ? bytes[i] : bytes[i] - 256;
    case Number::kU8:
      return bytes[i];
    case Number::kE4m3:
      return small_float(bytes[i], 4, 3, false);
    case Number::kE5m2:
      return small_float(bytes[i], 5, 2, true);
    default:
      return power(bytes[i]);
  }
}

Vec dequantise(const Quantised& q, Rounding rounding) {
  const Reader reader(q);
  Vec values;
  values.reserve(size_t(q.experts * q.N * q.K));
  for (int64_t e = 0; e < q.experts; ++e)
    for (int64_t n = 0; n < q.N; ++n)
      for (int64_t k = 0; k < q.K; ++k)
        values.push_back(round_to(rounding, reader.value({e, n, k})));
  return values;
}

}  // namespace moec::oracle
