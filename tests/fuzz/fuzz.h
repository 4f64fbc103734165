// SPDX-License-Identifier: Apache-2.0
// Random but legal uses of the C API: every pointer is NULL, valid memory of at least kBlock bytes,
// or a live handle (of any kind); everything else is arbitrary. Whatever comes out must be a
// status, never a signal. What a caller must promise is kept: extents never claim more memory than
// there is, memory of plans and saved states is not scribbled over behind the library's back.
#pragma once

#include <moec/moec.h>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace moec_fuzz {

inline constexpr uint64_t kBlock = 64 * 1024;
inline constexpr int32_t kMostListed = 256;  // adapters

struct Field {
  enum Kind { kScalar, kTensor, kBuffer, kFunction, kHandle, kStruct, kPointer } kind;
  uint32_t offset, bytes;
  const char* pointee;
};
struct Struct {
  const char* name;
  uint32_t bytes;
  bool sized;
  const Field* fields;
  size_t num_fields;
};

class Fuzz {
 public:
  explicit Fuzz(uint64_t seed) : random_(seed) {}

  // ---- arguments, named by make_table.py
  int64_t integer(const std::string& name);
  float real();
  moec_stream stream() { return nullptr; }
  moec_log_function log_function();
  const char* text();
  void* memory();  // NULL or kBlock bytes
  void* structure(const std::string& name, bool out, int depth = 0);
  void* handle(const std::string& kind);
  void* out_handle(const std::string& kind);
  void* dl_tensor();
  template <class T>
  void free_handle(void (*release)(T*)) {
    release(static_cast<T*>(pick_to_free(reinterpret_cast<const void*>(release))));
  }

  // ---- after a call: a created handle joins the live ones
  void collect(bool succeeded);
  void free_everything();

  // ---- for the templates of valid calls (valid.cpp)
  uint64_t below(uint64_t bound) { return random_() % bound; }
  bool chance(int percent) { return below(100) < uint64_t(percent); }
  void* block();        // data: tensors, texts
  void* fresh_block();  // for saved states and workspaces, which nothing else writes
  void* owned_block();  // for a plan or a pack alone, until everything is freed; NULL when used up
  void* live(const std::string& kind);  // a live handle of this kind or NULL
  moec_tensor tensor(moec_dtype dtype, std::initializer_list<int64_t> shape);
  // Fill a zeroed struct so that a call with it may well succeed; false if the name has no
  // template.
  bool make_valid(const std::string& name, void* out);

 private:
  void mutate(const Struct& kind, char* at, int depth);
  void random_tensor(moec_tensor* at);
  uint64_t wild();
  void* pick_to_free(const void* release);

  struct Live {
    std::string kind;
    void* handle;
  };
  std::mt19937_64 random_;
  std::vector<Live> live_;
  void* created_ = nullptr;
  std::string created_kind_;
  uint32_t next_block_ = 0, next_struct_ = 0, next_owned_ = 0;
};

const Struct* find_struct(const std::string& name);

}  // namespace moec_fuzz
