// SPDX-License-Identifier: Apache-2.0
// A host may flush subnormal numbers to zero on its own threads (torch.set_flush_denormal), round
// in another direction or trap on overflow (feenableexcept), which exp() does on purpose. While one
// of these lives, its thread does none of these.
#pragma once

#include <cstdint>

namespace moec {

class FloatMode {
 public:
  FloatMode() : before_(read()) {
    if (before_ != usual()) write(usual());
  }
  ~FloatMode() {
    if (before_ != usual()) write(before_);
  }
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;

 private:
#if defined(__x86_64__)
  using Word = uint32_t;                   // MXCSR
  static constexpr Word kOther = 0xe040;   // flush to zero, rounding, denormals are zeros
  static constexpr Word kMasked = 0x1f80;  // no exception traps
  static Word read() { return __builtin_ia32_stmxcsr(); }
  static void write(Word word) { __builtin_ia32_ldmxcsr(word); }
#elif defined(__aarch64__)
  using Word = uint64_t;  // FPCR
  // AHP, DN, FZ, rounding, FZ16, traps, EBF, NEP, AH, FIZ
  static constexpr Word kOther = 0x7c8bf07;
  static constexpr Word kMasked = 0;
  static Word read() {
    Word word;
    asm volatile("mrs %0, fpcr" : "=r"(word));
    return word;
  }
  static void write(Word word) { asm volatile("msr fpcr, %0" ::"r"(word)); }
#else
  using Word = uint32_t;
  static constexpr Word kOther = 0, kMasked = 0;
  static Word read() { return 0; }
  static void write(Word) {}
#endif
  Word usual() const { return (before_ & ~kOther) | kMasked; }

  const Word before_;
};

}  // namespace moec
