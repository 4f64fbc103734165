/* SPDX-License-Identifier: Apache-2.0
 * std::__throw_bad_array_new_length, by its symbol: what g++ 11 and newer call where a new[] would
 * overflow. Older libstdc++ lacks it, so packaged libraries bring it (scripts/link_packaged.sh). */
void _ZSt17__throw_bad_allocv(void) __attribute__((noreturn)); /* std::__throw_bad_alloc */

__attribute__((visibility("hidden"), noreturn)) void _ZSt28__throw_bad_array_new_lengthv(void);
void _ZSt28__throw_bad_array_new_lengthv(void) {
  _ZSt17__throw_bad_allocv();
}
