// SPDX-License-Identifier: Apache-2.0
// Arrays of a device for callbacks that take memory of the host: pieces of them pass through memory
// that both reach, and the host waits for the device.
#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#include "backend/backend.h"

namespace moec::ep {

using Wait = std::function<void(moec_stream)>;

struct Parts {  // of memory, one for each rank
  const uint64_t *bytes, *at;
};

class Staging {
 public:
  static constexpr uint64_t kBytes = 8 << 20;

  Staging(const Backend& backend, const Wait& wait, int32_t ranks, void* memory)
      : backend_(backend),
        wait_(wait),
        ranks_(uint64_t(ranks)),
        piece_(std::max<uint64_t>(kBytes / 2 / ranks_ / kCacheLine * kCacheLine, 1)),
        out_(static_cast<char*>(memory)),
        in_(out_ + kBytes / 2),
        sizes_(4 * ranks_) {}

  // call(send, recv, n) for n bytes at a time of each part: `parts` of `bytes` in `send`, one of
  // each rank in `recv`.
  template <class Call>
  void pass(int32_t parts, const void* send, void* recv, uint64_t bytes, moec_stream stream,
            const Call& call) const {
    for (uint64_t at = 0; at == 0 || at < bytes; at += piece_) {
      const uint64_t n = std::min(piece_, bytes - at);
      for (uint64_t p = 0; p < uint64_t(parts); ++p)
        copy(out_ + p * n, static_cast<const char*>(send) + p * bytes + at, n, stream);
      wait_(stream);
      call(out_, in_, n);
      for (uint64_t r = 0; r < ranks_; ++r)
        copy(static_cast<char*>(recv) + r * bytes + at, in_ + r * n, n, stream);
    }
    wait_(stream);  // another call may use the memory on another stream
  }

  // call(send, its parts, recv, its parts) for pieces of parts, which lie one after the other, so
  // often that parts of `longest` bytes have passed.
  template <class Call>
  void pass_parts(const void* send, Parts sent, void* recv, Parts received, uint64_t longest,
                  moec_stream stream, const Call& call) {
    for (uint64_t at = 0; at == 0 || at < longest; at += piece_) {
      const Parts out = pieces_of(sent, at, sizes_.data());
      const Parts in = pieces_of(received, at, sizes_.data() + 2 * ranks_);
      for (uint64_t r = 0; r < ranks_; ++r)
        copy(out_ + out.at[r], static_cast<const char*>(send) + sent.at[r] + at, out.bytes[r],
             stream);
      wait_(stream);
      call(out_, out, in_, in);
      for (uint64_t r = 0; r < ranks_; ++r)
        copy(static_cast<char*>(recv) + received.at[r] + at, in_ + in.at[r], in.bytes[r], stream);
    }
    wait_(stream);
  }

 private:
  // What is left of each part from byte `first` on, at most a piece; `to` [2,N] holds it.
  Parts pieces_of(Parts parts, uint64_t first, uint64_t* to) const {
    uint64_t end = 0;
    for (uint64_t r = 0; r < ranks_; ++r) {
      to[r] = std::min(piece_, parts.bytes[r] - std::min(first, parts.bytes[r]));
      to[ranks_ + r] = end;
      end += to[r];
    }
    return {to, to + ranks_};
  }
  void copy(void* to, const void* from, uint64_t bytes, moec_stream stream) const {
    if (bytes) backend_.copy(to, from, bytes, stream);
  }

  const Backend& backend_;
  const Wait& wait_;
  const uint64_t ranks_, piece_;
  char *const out_, *const in_;
  std::vector<uint64_t> sizes_;  // [4,N]
};

}  // namespace moec::ep
