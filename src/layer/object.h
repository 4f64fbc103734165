// SPDX-License-Identifier: Apache-2.0
// What stands behind every handle: a kind that can be read through any live handle, a reference
// count (children keep their parents alive, so handles are freed in any order), and the process it
// was made in.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <utility>

namespace moec {

enum class Kind : uint64_t {  // ASCII, for a reader of core dumps
  kContext = 0x6d6f65632e637478,
  kRouter = 0x6d6f65632e726f75,
  kPlan = 0x6d6f65632e706c61,
  kWeights = 0x6d6f65632e776569,
  kAdapters = 0x6d6f65632e616461,
  kExperts = 0x6d6f65632e657870,
  kLayer = 0x6d6f65632e6c6179,
  kComm = 0x6d6f65632e636f6d,
  kEp = 0x6d6f65632e657020,
  kDead = 0x6d6f65632e2d2d2d
};

inline const char* kind_name(Kind kind) {
  switch (kind) {
    case Kind::kContext:
      return "moec_context";
    case Kind::kRouter:
      return "moec_router";
    case Kind::kPlan:
      return "moec_plan";
    case Kind::kWeights:
      return "moec_weights";
    case Kind::kAdapters:
      return "moec_adapters";
    case Kind::kExperts:
      return "moec_experts";
    case Kind::kLayer:
      return "moec_layer";
    case Kind::kComm:
      return "moec_comm";
    case Kind::kEp:
      return "moec_ep";
    case Kind::kDead:
      break;
  }
  return "no live handle";
}

// How many forks lie between the first process that made an object and this one.
inline std::atomic<uint32_t>& fork_generation() {
  static std::atomic<uint32_t> generation{0};
  return generation;
}
inline void watch_forks() {
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { fork_generation().fetch_add(1); });
  (void)registered;
}

class Object {
 public:
  Object(const Object&) = delete;
  Object& operator=(const Object&) = delete;

  Kind kind() const { return kind_; }
  // Made in a parent process: its locks and threads cannot be trusted here.
  bool forked() const { return generation_ != fork_generation().load(std::memory_order_relaxed); }
  void retain() const noexcept { references_.fetch_add(1, std::memory_order_relaxed); }
  void release() const noexcept {
    if (references_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }

 protected:
  explicit Object(Kind kind) : kind_(kind) {
    watch_forks();
    generation_ = fork_generation().load(std::memory_order_relaxed);
  }
  virtual ~Object() { kind_ = Kind::kDead; }

 private:
  Kind kind_;
  mutable std::atomic<int32_t> references_{1};
  uint32_t generation_ = 0;
};

// Owns one reference.
template <class T>
class Ref {
 public:
  Ref() = default;
  explicit Ref(T& object) : object_(&object) { object_->retain(); }
  Ref(const Ref& other) : object_(other.object_) {
    if (object_) object_->retain();
  }
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Ref() {
    if (object_) object_->release();
  }
  T& operator*() const { return *object_; }
  T* operator->() const { return object_; }
  explicit operator bool() const { return object_ != nullptr; }
  // Takes over the reference that a new object is born with.
  static Ref of_new(T* object) {
    Ref ref;
    ref.object_ = object;
    return ref;
  }

 private:
  T* object_ = nullptr;
};

}  // namespace moec
