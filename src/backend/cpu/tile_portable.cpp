// SPDX-License-Identifier: Apache-2.0
// Kernels for any machine of this architecture: 16-byte vectors of the compiler, plain loops for
// the rest.
#include <cstring>

#include "backend/cpu/tile_kernels.h"
#include "core/dtype.h"

namespace moec::cpu {
namespace {

struct PortableOps {
  typedef float Vec __attribute__((vector_size(16)));
  static constexpr int kBytes = 16;
  static constexpr bool kInParts = true;
  static Vec load(const void* from) {
    Vec v;
    std::memcpy(&v, from, sizeof v);
    return v;
  }
  static void store(void* to, Vec v) { std::memcpy(to, &v, sizeof v); }
  static Vec zero() { return Vec{}; }
  static Vec broadcast(const void* from) {
    float value;
    std::memcpy(&value, from, sizeof value);
    return Vec{value, value, value, value};
  }
  static Vec add(Vec a, Vec b) { return a + b; }
  static Vec sub(Vec a, Vec b) { return a - b; }
  static Vec mul(Vec a, Vec b) { return a * b; }
  static Vec fma(Vec a, Vec b, Vec sum) { return sum + a * b; }

  struct Line {
    uint32_t dword[kLanes];
  };
  template <class T>
  static Line widen(const T* from, int n) {
    Line line = {};
    for (int i = 0; i < n; ++i) line.dword[i] = std::bit_cast<uint32_t>(to_float(from[i]));
    return line;
  }
  template <class T>
  static void narrow(T* to, const Line& line, int n) {
    for (int i = 0; i < n; ++i) to[i] = from_float<T>(std::bit_cast<float>(line.dword[i]));
  }
  static Line f32(const float* from, int n) { return widen(from, n); }
  static Line bf16(const uint16_t* from, int n) {
    return widen(reinterpret_cast<const moec::bf16*>(from), n);
  }
  static Line f16(const uint16_t* from, int n) {
    return widen(reinterpret_cast<const moec::f16*>(from), n);
  }
  static Line i8(const int8_t* from) { return widen(from, kLanes); }
  static Line pairs(const uint16_t* from, int n) {
    Line line = {};
    if (n > 0) std::memcpy(line.dword, from, size_t(n) * 2);
    return line;
  }
  static Line interleave(const uint16_t* even, const uint16_t* odd, int n) {
    Line line = {};
    for (int i = 0; i < n; ++i)
      line.dword[i] = (even ? even[i] : 0u) | (odd ? uint32_t(odd[i]) << 16 : 0u);
    return line;
  }
  static void put(void* to, const Line& line) { std::memcpy(to, line.dword, sizeof line.dword); }
  static void put_f32(float* to, const Line& line, int n) { narrow(to, line, n); }
  static void put_bf16(uint16_t* to, const Line& line, int n) {
    narrow(reinterpret_cast<moec::bf16*>(to), line, n);
  }
  static void put_f16(uint16_t* to, const Line& line, int n) {
    narrow(reinterpret_cast<moec::f16*>(to), line, n);
  }
  template <class T>
  static Line as(Line line) {
    for (uint32_t& dword : line.dword)
      dword = std::bit_cast<uint32_t>(to_float(from_float<T>(std::bit_cast<float>(dword))));
    return line;
  }
  static Line as_bf16(const Line& line) { return as<moec::bf16>(line); }
  static Line as_f16(const Line& line) { return as<moec::f16>(line); }
  static void transpose(const Line (&lines)[kLanes], Line (&turned)[kLanes]) {
    for (int i = 0; i < kLanes; ++i)
      for (int j = 0; j < kLanes; ++j) turned[j].dword[i] = lines[i].dword[j];
  }
  static Line round_bf16(const Line& line) { return as_bf16(line); }
  static Line e4m3(const uint8_t* from) {
    Line line;
    for (int i = 0; i < kLanes; ++i) line.dword[i] = std::bit_cast<uint32_t>(quant::e4m3(from[i]));
    return line;
  }
  static Vec power(Vec v) {
    typedef uint32_t Bits __attribute__((vector_size(16)));
    return reinterpret_cast<Vec>(reinterpret_cast<Bits>(v) & 0xff800000u);
  }
  struct E4m3Seen {};
  static void e4m3_parts(const uint8_t* from, Line (&lines)[2], E4m3Seen&) {
    for (int i = 0; i < 2 * kLanes; ++i)
      lines[i / kLanes].dword[i % kLanes] = std::bit_cast<uint32_t>(quant::e4m3(from[i]) * 0x1p-8f);
  }
  static bool any_nan(E4m3Seen) { return false; }  // quick_bf16 keeps it
  static void put_high_words(uint16_t* to, const Line (&lines)[2]) {
    for (int i = 0; i < 2 * kLanes; ++i)
      to[i] = uint16_t(lines[i / kLanes].dword[i % kLanes] >> 16);
  }
  struct Numbers {
    const float* value;
  };
  static Numbers numbers(const float* from) { return {from}; }
  struct Values {
    uint16_t of[16];
  };
  struct NibbleTable {
    Values half[2];  // of each half of the codes
  };
  template <Rounding kRounding, bool kZeros>
  static Values values(Numbers numbers, float scale, float zero) {
    Values values;
    for (int i = 0; i < 16; ++i) {
      const float value = (kZeros ? numbers.value[i] - zero : numbers.value[i]) * scale;
      values.of[i] = kRounding == Rounding::kF16 ? from_float<moec::f16>(value).bits
                                                 : from_float<moec::bf16>(value).bits;
    }
    return values;
  }
  static NibbleTable table(const Values& first, const Values& second) { return {{first, second}}; }
  static constexpr int byte_of_word(int i) { return i; }
  static Line look_up(const uint8_t* from, const NibbleTable& table, int shift) {
    uint16_t words[2 * kLanes];
    for (int i = 0; i < 2 * kLanes; ++i) words[i] = table.half[i / 16].of[from[i] >> shift & 15];
    return pairs(words, 2 * kLanes);
  }
  static Line low_nibbles(const uint8_t* from, const NibbleTable& table) {
    return look_up(from, table, 0);
  }
  static Line high_nibbles(const uint8_t* from, const NibbleTable& table) {
    return look_up(from, table, 4);
  }
  using DotNibbles = WordNibbles<PortableOps>;
  static void put_nibbles(uint16_t* to, const Line& first, const Line& second) {
    for (int64_t i = 0; i < 2 * kLanes; ++i) {
      to[2 * i] = uint16_t(first.dword[i / 2] >> i % 2 * 16);
      to[2 * i + 1] = uint16_t(second.dword[i / 2] >> i % 2 * 16);
    }
  }
  static Line even_bf16(Line line) {
    for (uint32_t& dword : line.dword) dword <<= 16;
    return line;
  }
  static Line odd_bf16(Line line) {
    for (uint32_t& dword : line.dword) dword &= 0xffff0000u;
    return line;
  }
  static Line even_f16(Line line) {
    for (uint32_t& dword : line.dword)
      dword = std::bit_cast<uint32_t>(to_float(moec::f16{uint16_t(dword)}));
    return line;
  }
  static Line odd_f16(Line line) {
    for (uint32_t& dword : line.dword) dword >>= 16;
    return even_f16(line);
  }
};

constexpr ProductTable<PortableOps, 4> kProducts;

}  // namespace

constinit const TileKernels kTilePortable =
    make_tile_kernels<PortableOps>("portable", "portable f32 4x32", kProducts);

}  // namespace moec::cpu
