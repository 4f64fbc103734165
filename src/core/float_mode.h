// SPDX-License-Identifier: Apache-2.0
// A host may flush subnormal numbers to zero on its own threads (torch.set_flush_denormal) or round
// in another direction; the pool's threads do neither. While one of these lives, its thread
// computes as they do.
#pragma once

#include <cstdint>

namespace moec {

class FloatMode {
 public:
  FloatMode() : before_(read()) {
    if (before_ & kOther) write(before_ & ~kOther);
  }
  ~FloatMode() {
    if (before_ & kOther) write(before_);
  }
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;

 private:
#if defined(__x86_64__)
  using Word = uint32_t;
  static constexpr Word kOther = 0xe040;  // MXCSR: flush to zero, rounding, denormals are zeros
  static Word read() { return __builtin_ia32_stmxcsr(); }
  static void write(Word word) { __builtin_ia32_ldmxcsr(word); }
#elif defined(__aarch64__)
  using Word = uint64_t;
  static constexpr Word kOther = 0x1c80000;  // FPCR: FZ, rounding, FZ16
  static Word read() {
    Word word;
    asm volatile("mrs %0, fpcr" : "=r"(word));
    return word;
  }
  static void write(Word word) { asm volatile("msr fpcr, %0" ::"r"(word)); }
#else
  using Word = uint32_t;
  static constexpr Word kOther = 0;
  static Word read() { return 0; }
  static void write(Word) {}
#endif
  const Word before_;
};

}  // namespace moec
