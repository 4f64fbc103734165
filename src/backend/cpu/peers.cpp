// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/peers.h"

#include <chrono>
#include <cstdlib>
#include <thread>
#include <type_traits>

#include "backend/peer_crew.h"
#include "core/error.h"
#include "core/portable.h"

namespace moec::cpu {
namespace {

struct Crew {  // one thread
  int index() const { return 0; }
  int crews() const { return 1; }
  int thread() const { return 0; }
  int threads() const { return 1; }
  int lane() const { return 0; }
  int lanes() const { return 1; }
  int64_t team() const { return 0; }
  int64_t teams() const { return 1; }
  int64_t global_thread() const { return 0; }
  int64_t global_threads() const { return 1; }
  void sync() const {}
  bool any(bool value) const { return value; }
  uint32_t join(uint32_t bits) const { return bits; }
  void say(uint64_t* word, uint64_t value) const {
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
  }
  uint64_t hear(const uint64_t* word) const { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
  uint64_t now() const {
    return uint64_t(std::chrono::steady_clock::now().time_since_epoch() /
                    std::chrono::nanoseconds(1));
  }
  void pause() const { std::this_thread::yield(); }
  template <class T>
  T load(const T* from) const {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
  }
  template <class T>
  void store(T* to, const T& value) const {
    std::memcpy(to, &value, sizeof value);
  }
  void go_on() const {}
};

}  // namespace

PeerMemory CpuPeers::allocate(uint64_t bytes, PeerTicket& ticket) const {
  const uint64_t whole = (bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
  void* const memory = std::aligned_alloc(kCacheLine, whole);
  MOEC_REQUIRE(memory, MOEC_E_OUT_OF_MEMORY, "no %llu bytes for the rows of peers",
               static_cast<unsigned long long>(whole));
  std::memset(memory, 0xff, whole);
  ticket.device_type = MOEC_CPU;
  ticket.address = reinterpret_cast<uintptr_t>(memory);
  return {memory, {[](void* data, int32_t) { std::free(data); }}};
}

void* CpuPeers::adopt(uint64_t bytes, const std::function<void*()>& take) const {
  return std::memset(take(), 0xff, bytes);
}

PeerMemory CpuPeers::open(const PeerTicket& ticket, bool same_process) const {
  MOEC_REQUIRE(same_process && ticket.device_type == MOEC_CPU, MOEC_E_UNSUPPORTED,
               "on the CPU it would be of a thread of this process");
  return PeerMemory(reinterpret_cast<void*>(uintptr_t(ticket.address)));
}

void CpuPeers::run(const PeerDispatch& step, moec_stream) const {
  Crew crew;
  with_real(step.x.dtype, [&]<class T>() {
    using Word = std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>;
    peer::run(step, crew, [&] { peer::send_rows<Word>(step, crew); });
  });
}

void CpuPeers::run(const PeerCombine& step, moec_stream) const {
  Crew crew;
  with_real(step.y.dtype, [&]<class Y>() {
    peer::run(step, crew, [&](bool is_well) {
      if (step.partial_dtype == MOEC_F32) return peer::sum_rows<float, Y, 1>(step, crew, is_well);
      peer::sum_rows<Y, Y, 1>(step, crew, is_well);
    });
  });
}

}  // namespace moec::cpu
