// SPDX-License-Identifier: Apache-2.0
// fuzz_capi SECONDS [SEED]: calls random entry points with random arguments until the time is up.
// Prints the seed first; the same seed replays the same calls. Built under ASan and UBSan.
// Mutation noted: with the kind check of handles removed in capi/boundary.h it stops within a
// second.
#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <iterator>
#include <map>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#include "fuzz.h"
#include "hooks.h"

namespace moec_fuzz {
namespace {
struct Call {
  const char* name;
  int64_t (*run)(Fuzz&);
  bool returns_status = false;
};
#include "fuzz_table.inc"

constexpr uint32_t kBlocks = 48, kFresh = 12, kArguments = 16, kOwned = 64;

void* nth_block(uint32_t index) {  // never freed: weights borrow them
  static auto& blocks = *new std::map<uint32_t, void*>;
  void*& block = blocks[index];
  if (!block) {
    block = std::malloc(kBlock);
    std::memset(block, int(index * 37), kBlock);
  }
  return block;
}

void quiet(void*, int32_t, const char*, size_t) {}
const char* current_call = "";
uint64_t current_seed = 0;
void say_where() {
  std::fprintf(stderr, "fuzz_capi: died in %s, seed %llu\n", current_call,
               static_cast<unsigned long long>(current_seed));
}
void watch_for_death() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_set_death_callback(say_where);  // after the sanitizer's own report
#else
  for (int number : {SIGSEGV, SIGFPE, SIGILL, SIGBUS, SIGABRT})
    std::signal(number, [](int) {
      say_where();
      std::_Exit(1);
    });
#endif
}
}  // namespace

const Struct* find_struct(const std::string& name) {
  for (const Struct& row : kStructs)
    if (name == row.name) return &row;
  return nullptr;
}

uint64_t Fuzz::wild() {
  static constexpr uint64_t kEdges[] = {
      0,          1,          2,     3,          4,          7,          8,
      31,         64,         255,   65535,      0x7fffffff, 0x80000000, 0xffffffff,
      1ull << 40, 1ull << 62, ~0ull, 0x7f800000, 0x7fc00000, 0xff800000, 0x3f800000};
  return chance(70) ? kEdges[below(std::size(kEdges))] : random_();
}

int64_t Fuzz::integer(const std::string& name) {
  if (name == "bytes") return int64_t(chance(80) ? below(kBlock + 1) : below(64));
  if (name == "count") {  // of a list, which lies in one block, or too many for any
    const auto count = int32_t(wild());
    return chance(80) ? int64_t(below(14)) : count < 0 || count > kMostListed ? count : 0;
  }
  if (name == "num_tokens" || name == "field" || name == "first")
    return chance(80) ? int64_t(below(14)) : int64_t(wild());
  if (name == "dtype" && chance(70)) return MOEC_F32;
  return chance(50) ? int64_t(below(4)) : int64_t(wild());
}

float Fuzz::real() {
  const uint32_t bits = uint32_t(wild());
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return chance(50) ? 0.001f : value;
}

moec_log_function Fuzz::log_function() {
  return chance(50) ? &quiet : nullptr;
}

const char* Fuzz::text() {
  static constexpr const char* kTexts[] = {"", "/nonexistent/x", "/proc/self/status",
                                           "fuzz_capi.pack"};
  return chance(20) ? nullptr : kTexts[below(std::size(kTexts))];
}

void* Fuzz::block() {
  return nth_block(next_block_++ % kBlocks);
}
void* Fuzz::fresh_block() {
  return nth_block(kBlocks + uint32_t(below(kFresh)));
}
void* Fuzz::owned_block() {
  if (next_owned_ == kOwned) return nullptr;
  return nth_block(kBlocks + kFresh + kArguments + next_owned_++);
}
void* Fuzz::memory() {
  return chance(10) ? nullptr : block();
}

moec_tensor Fuzz::tensor(moec_dtype dtype, std::initializer_list<int64_t> shape) {
  moec_tensor out = {};
  out.data = block();
  out.device_type = MOEC_CPU;
  out.dtype = dtype;
  out.ndim = int32_t(shape.size());
  std::copy(shape.begin(), shape.end(), out.shape);
  return out;
}

void Fuzz::random_tensor(moec_tensor* at) {
  static constexpr moec_dtype kTypes[] = {MOEC_F32, MOEC_F16, MOEC_BF16, MOEC_F64,
                                          MOEC_I32, MOEC_I64, MOEC_U8,   MOEC_BOOL};
  switch (below(8)) {
    case 0:
      *at = {};
      return;
    case 1:
      at->data = nullptr;
      return;
    case 2:
      at->device_type = int32_t(wild());
      return;
    case 3:
      at->dtype = chance(80) ? kTypes[below(std::size(kTypes))] : moec_dtype(wild());
      break;
    case 4:
      at->ndim = chance(80) ? int32_t(below(8)) : int32_t(wild());
      break;
    case 5:
      at->shape[below(3)] = chance(80) ? int64_t(below(17)) : int64_t(wild());
      break;
    case 6:
      at->byte_offset = below(48);
      break;
    default:
      at->strides[below(3)] = chance(80) ? int64_t(below(17)) : int64_t(wild());
  }
  // The promise that must hold: what shape and dtype say is there.
  int64_t bytes = 64;
  for (int i = 0; i < MOEC_MAX_DIMS && i < at->ndim && bytes <= int64_t(kBlock); ++i)
    bytes *= std::clamp<int64_t>(at->shape[i], 1, kBlock + 1);
  if (bytes > int64_t(kBlock)) at->data = nullptr;
}

void* Fuzz::live(const std::string& kind) {
  std::vector<void*> matching;
  for (const Live& entry : live_)
    if (entry.kind == kind) matching.push_back(entry.handle);
  return matching.empty() ? nullptr : matching[below(matching.size())];
}

void* Fuzz::handle(const std::string& kind) {
  if (chance(5)) return nullptr;
  if (chance(5) && !live_.empty()) return live_[below(live_.size())].handle;  // any kind
  return live(kind);
}

void* Fuzz::out_handle(const std::string& kind) {
  created_ = nullptr;
  created_kind_ = kind;
  return chance(3) ? nullptr : &created_;
}

void Fuzz::collect(bool succeeded) {
  if (created_kind_.empty()) return;
  if (created_ && !succeeded) {
    std::fprintf(stderr, "fuzz_capi: a failed call stored a %s\n", created_kind_.c_str());
    std::abort();
  }
  if (created_) live_.push_back({created_kind_, created_});
  created_ = nullptr;
  created_kind_.clear();
  if (live_.size() > 40) free_everything();
}

namespace {
struct Release {
  const char* kind;
  const void* function;
  void (*run)(void*);
};
#define RELEASE(kind)                                  \
  {#kind, reinterpret_cast<const void*>(&kind##_free), \
   [](void* handle) { kind##_free(static_cast<kind*>(handle)); }}
const Release kReleases[] = {RELEASE(moec_context), RELEASE(moec_router),   RELEASE(moec_plan),
                             RELEASE(moec_weights), RELEASE(moec_adapters), RELEASE(moec_experts),
                             RELEASE(moec_layer),   RELEASE(moec_comm),     RELEASE(moec_ep)};
#undef RELEASE
}  // namespace

void* Fuzz::pick_to_free(const void* release) {
  for (const Release& row : kReleases) {
    if (row.function != release || chance(60)) continue;
    for (size_t i = 0; i < live_.size(); ++i) {
      if (live_[i].kind != row.kind || chance(50)) continue;
      void* const handle = live_[i].handle;
      live_.erase(live_.begin() + int64_t(i));
      return handle;
    }
  }
  return nullptr;
}

void Fuzz::free_everything() {
  next_owned_ = 0;
  while (!live_.empty()) {
    const size_t i = below(live_.size());
    for (const Release& row : kReleases)
      if (live_[i].kind == row.kind) row.run(live_[i].handle);
    live_.erase(live_.begin() + int64_t(i));
  }
}

void* Fuzz::dl_tensor() {  // DLTensor: data, {type, id}, ndim, {code, bits, lanes}, shape, strides,
                           // offset
  if (chance(10)) return nullptr;
  struct DlTensor {
    void* data;
    int32_t device_type, device_id, ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
  };
  auto* const out = static_cast<DlTensor*>(block());
  auto* const extents = static_cast<int64_t*>(block());
  for (int i = 0; i < 16; ++i) extents[i] = chance(80) ? int64_t(below(9)) : int64_t(wild());
  *out = {memory(),
          chance(80) ? MOEC_CPU : int32_t(wild()),
          0,
          int32_t(below(9)) - 1,
          uint8_t(below(5)),
          uint8_t(8u << below(4)),
          1,
          chance(90) ? extents : nullptr,
          chance(50) ? extents + 8 : nullptr,
          chance(90) ? 0 : wild()};
  return out;
}

void Fuzz::mutate(const Struct& kind, char* at, int depth) {
  if (std::strcmp(kind.name, "moec_buffer") == 0) {  // memory of its own, or less of it
    auto* const buffer = reinterpret_cast<moec_buffer*>(at);
    *buffer = {chance(30) ? nullptr : buffer->ptr, below(kBlock + 1)};
    return;
  }
  if (std::strcmp(kind.name, "moec_tensor") == 0)
    return random_tensor(reinterpret_cast<moec_tensor*>(at));
  const Field& field = kind.fields[below(kind.num_fields)];
  char* const place = at + field.offset;
  const auto put = [&](const void* value) { std::memcpy(place, &value, sizeof value); };
  switch (field.kind) {
    case Field::kScalar: {
      if (std::strcmp(kind.name, "moec_matrix") == 0) break;
      const uint64_t value = chance(60) ? below(5) : wild();
      // Counts of arrays behind pointers are promises, too: only fewer than there are.
      const bool promise = std::strcmp(kind.name, "moec_loss_args") == 0 && field.bytes == 8;
      // The hooks of communicators are those of one rank.
      const bool ranks = std::strcmp(kind.name, "moec_comm_desc") == 0 &&
                         field.offset >= offsetof(moec_comm_desc, rank);
      const uint64_t stored = promise || ranks ? below(2) : value;
      if (field.offset != 0 || !kind.sized)
        std::memcpy(place, &stored, std::min<size_t>(field.bytes, 8));
      break;
    }
    case Field::kTensor:
      random_tensor(reinterpret_cast<moec_tensor*>(place));
      break;
    case Field::kBuffer: {
      auto* const buffer = reinterpret_cast<moec_buffer*>(place);
      *buffer = {chance(30) ? nullptr : fresh_block(), below(kBlock + 1)};
      break;
    }
    case Field::kFunction:
      put(chance(30) ? nullptr : hook_named(field.pointee));
      break;
    case Field::kHandle:
      put(handle(field.pointee));
      break;
    case Field::kStruct:
      put(std::strcmp(field.pointee, "moec_tensor") == 0 || depth > 1
              ? nullptr
              : structure(field.pointee, false, depth + 1));
      break;
    case Field::kPointer:
      put(memory());
      break;
  }
}

void* Fuzz::structure(const std::string& name, bool out, int depth) {
  if (chance(4)) return nullptr;
  const Struct& kind = *find_struct(name);
  char* const at = static_cast<char*>(nth_block(kBlocks + kFresh + next_struct_++ % kArguments));
  std::memset(at, 0, kBlock);
  if (out) {
    for (uint32_t i = 0; i < kind.bytes; ++i) at[i] = char(random_());
  } else {
    make_valid(name, at);
    static constexpr int kDamage[] = {0, 0, 0, 1, 1, 2, 5};
    for (int n = kDamage[below(std::size(kDamage))]; n > 0; --n) mutate(kind, at, depth);
  }
  if (kind.sized) {
    const uint32_t odd[] = {
        0, 8, kind.bytes - 8, kind.bytes + 8, uint32_t(kBlock), uint32_t(wild())};
    const uint32_t size = chance(92) ? kind.bytes : odd[below(std::size(odd))];
    std::memcpy(at, &size, sizeof size);
    if (chance(3)) at[kind.bytes + below(64)] = 1;
  }
  return at;
}

int run(double seconds, uint64_t seed) {
  std::printf("fuzz_capi: seed %llu, %zu entry points\n", static_cast<unsigned long long>(seed),
              std::size(kCalls));
  std::fflush(stdout);
  current_seed = seed;
  watch_for_death();
  Fuzz fuzz(seed);
  uint64_t calls = 0, successes[std::size(kCalls)] = {};
  const std::clock_t start = std::clock();
  const auto elapsed = [&] { return double(std::clock() - start) / CLOCKS_PER_SEC; };
  while (calls % 256 != 0 || elapsed() < seconds) {
    const size_t index = fuzz.below(std::size(kCalls));
    current_call = kCalls[index].name;
    const int64_t result = kCalls[index].run(fuzz);
    const bool bad = kCalls[index].returns_status &&
                     std::strcmp(moec_status_name(moec_status(result)), "MOEC_E_UNKNOWN") == 0;
    if (bad || (kCalls[index].returns_status && result == MOEC_E_INTERNAL)) {
      std::fprintf(stderr, "fuzz_capi: %s returned %lld, seed %llu\n", current_call,
                   static_cast<long long>(result), static_cast<unsigned long long>(seed));
      return 1;
    }
    successes[index] += result == 0;
    fuzz.collect(result == 0);
    ++calls;
  }
  fuzz.free_everything();
  int silent = 0;
  for (size_t i = 0; i < std::size(kCalls); ++i)
    if (kCalls[i].returns_status && successes[i] == 0) {
      std::printf("fuzz_capi: never succeeded: %s\n", kCalls[i].name);
      ++silent;
    }
  std::printf("fuzz_capi: %llu calls, %.0f calls/s, %d entry points never succeeded\n",
              static_cast<unsigned long long>(calls), double(calls) / elapsed(), silent);
  return 0;
}

}  // namespace moec_fuzz

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 30;
  const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : std::random_device{}();
  return moec_fuzz::run(seconds, seed);
}
