// SPDX-License-Identifier: Apache-2.0
// A packed copy as a file: one page of header, then the bytes as the backend wrote them, so that
// they can be mapped and shared between processes.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>
#include <utility>

#include "backend/weight_packing.h"
#include "core/checksum.h"
#include "core/dtype.h"
#include "layer/weights.h"

namespace moec {
namespace {

using ull = unsigned long long;

constexpr char kPackMagic[8] = {'M', 'O', 'E', 'C', 'P', 'A', 'C', 'K'};
constexpr uint32_t kPackVersion = 1;
constexpr uint64_t kHeaderBytes = 4096;
constexpr uint32_t kGateBias = 1, kUpBias = 2, kDownBias = 4;

struct PackHeader {
  char magic[8];
  uint32_t version, biases;
  int32_t num_experts;
  uint32_t gate_layout;
  int64_t hidden, inter;
  uint32_t dtype, bias_dtype, gate_up_scheme, down_scheme;
  char format[64];
  uint64_t payload_bytes, payload_checksum;
  uint64_t header_checksum;  // of the bytes before it
};
static_assert(sizeof(PackHeader) == 144 && sizeof(PackHeader) <= kHeaderBytes);

uint32_t biases_of(const WeightsView& view) {
  return (view.gate.has_bias() ? kGateBias : 0u) | (view.up.has_bias() ? kUpBias : 0u) |
         (view.down.has_bias() ? kDownBias : 0u);
}

// A packed copy is the same whatever layout it was made from: only "gated or not" is kept.
PackHeader header_of(const moec_weights_desc& desc, const WeightsView& view,
                     const std::string& format) {
  PackHeader header = {};
  std::memcpy(header.magic, kPackMagic, sizeof kPackMagic);
  header.version = kPackVersion;
  header.biases = biases_of(view);
  header.num_experts = desc.num_experts;
  header.gate_layout = view.gated ? 0 : MOEC_GATE_NONE;
  header.hidden = desc.hidden;
  header.inter = desc.inter;
  header.dtype = desc.dtype;
  header.bias_dtype = header.biases ? desc.bias_dtype : 0;
  header.gate_up_scheme = desc.gate_up_scheme;
  header.down_scheme = desc.down_scheme;
  std::snprintf(header.format, sizeof header.format, "%s", format.c_str());
  return header;
}

// For messages.
const char* kind_of(const PackHeader& header) {
  return header.gate_layout == MOEC_GATE_NONE ? "plain" : "gated";
}
std::string biases_text(const PackHeader& header) {
  if (!header.biases) return "no biases";
  std::string text;
  const std::pair<uint32_t, const char*> names[] = {
      {kGateBias, "gate"}, {kUpBias, "up"}, {kDownBias, "down"}};
  for (const auto& [bit, name] : names)
    if (header.biases & bit) text += (text.empty() ? "" : ", ") + std::string(name);
  return text + " biases in " + dtype_name(header.bias_dtype);
}

class File {
 public:
  // shown: the name for messages.
  File(const char* path, int flags, mode_t mode = 0, const char* shown = nullptr)
      : path_(shown ? shown : path), number_(open(path, flags, mode)) {
    if (number_ < 0) fail("open");
  }
  ~File() { close(number_); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int number() const { return number_; }

  void write(const void* data, uint64_t bytes) const {
    for (const char* from = static_cast<const char*>(data); bytes > 0;) {
      const ssize_t written = ::write(number_, from, size_t(bytes));
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) fail("write");
      from += written;
      bytes -= uint64_t(written);
    }
  }
  uint64_t size() const {
    struct stat status;
    if (fstat(number_, &status) != 0) fail("read");
    MOEC_REQUIRE(S_ISREG(status.st_mode), MOEC_E_INVALID_ARG, "%s is no regular file",
                 end_of(path_).c_str());
    return uint64_t(status.st_size);
  }
  [[noreturn]] void fail(const char* action) const {
    fail_native(MOEC_E_INVALID_ARG, errno, "cannot %s %s: %s", action, end_of(path_).c_str(),
                std::strerror(errno));
  }

 private:
  const char* path_;
  int number_;
};

// A file of its own name beside `path` that takes path's place at the end: readers see the old file
// or the whole new one, however many write to it at once.
class NewFile {
 public:
  explicit NewFile(const char* path)
      : path_(path),
        name_(name_beside(path)),
        file_(name_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644, path) {}
  ~NewFile() {
    if (!name_.empty()) unlink(name_.c_str());
  }
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  void write(const void* data, uint64_t bytes) const { file_.write(data, bytes); }
  void finish() {
    if (rename(name_.c_str(), path_) != 0) file_.fail("write");
    name_.clear();
  }

 private:
  // In the same folder; not made of the file's name, which may be as long as names can be.
  static std::string name_beside(const std::string& path) {
    static std::atomic<uint32_t> number{0};
    const auto now = std::chrono::system_clock::now().time_since_epoch().count();
    return path.substr(0, path.rfind('/') + 1) + "unfinished." + std::to_string(now) + "." +
           std::to_string(getpid()) + "." + std::to_string(number++);
  }

  const char* path_;
  std::string name_;
  File file_;
};

class Mapping {  // of a whole file, read-only; unmapped unless released
 public:
  explicit Mapping(const File& file) : bytes_(file.size()) {
    MOEC_REQUIRE(bytes_ >= kHeaderBytes, MOEC_E_CORRUPT,
                 "the file has %llu bytes; a packed file has more than %llu", ull(bytes_),
                 ull(kHeaderBytes));
    data_ = mmap(nullptr, size_t(bytes_), PROT_READ, MAP_SHARED, file.number(), 0);
    if (data_ == MAP_FAILED) file.fail("map");
  }
  ~Mapping() {
    if (data_) munmap(data_, size_t(bytes_));
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  void* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }
  void* release() { return std::exchange(data_, nullptr); }

 private:
  uint64_t bytes_;
  void* data_ = nullptr;
};

PackHeader read_header(const Mapping& file) {
  PackHeader header;
  std::memcpy(&header, file.data(), sizeof header);
  MOEC_REQUIRE(std::memcmp(header.magic, kPackMagic, sizeof kPackMagic) == 0, MOEC_E_CORRUPT,
               "the file does not start as packed weights; expected one of moec_weights_save_sync");
  MOEC_REQUIRE(header.version == kPackVersion, MOEC_E_CORRUPT,
               "the file has version %u; expected %u", header.version, kPackVersion);
  const uint64_t sum = checksum(&header, offsetof(PackHeader, header_checksum));
  MOEC_REQUIRE(sum == header.header_checksum, MOEC_E_CORRUPT,
               "the file's header has checksum %016llx; expected %016llx", ull(sum),
               ull(header.header_checksum));
  const char* const page = static_cast<const char*>(file.data());
  MOEC_REQUIRE(
      std::all_of(page + sizeof header, page + kHeaderBytes, [](char c) { return c == 0; }),
      MOEC_E_CORRUPT, "the file has bytes other than 0 between its header and byte %llu",
      ull(kHeaderBytes));
  MOEC_REQUIRE(file.bytes() - kHeaderBytes == header.payload_bytes, MOEC_E_CORRUPT,
               "the file has %llu bytes after its header; expected %llu",
               ull(file.bytes() - kHeaderBytes), ull(header.payload_bytes));
  const char* const payload = page + kHeaderBytes;
  const uint64_t payload_sum = checksum(payload, header.payload_bytes);
  MOEC_REQUIRE(payload_sum == header.payload_checksum, MOEC_E_CORRUPT,
               "the file's weights have checksum %016llx; expected %016llx", ull(payload_sum),
               ull(header.payload_checksum));
  return header;
}

void check_path(const char* path) {
  MOEC_REQUIRE(path && *path, MOEC_E_INVALID_ARG, "path is %s; expected the name of a file",
               path ? "empty" : "NULL");
}

}  // namespace

void Weights::save_sync(const char* path) const {
  check_path(path);
  struct stat old;
  MOEC_REQUIRE(stat(path, &old) != 0 || S_ISREG(old.st_mode), MOEC_E_INVALID_ARG,
               "path %s is no regular file; expected a new name or a file to replace",
               end_of(path).c_str());
  MOEC_REQUIRE(is_packed(), MOEC_E_INVALID_STATE,
               "weights have no packed copy; call moec_weights_pack before");
  const uint64_t bytes = packed_bytes();
  std::vector<char> copy;
  const void* payload = packed_.data;
  if (!context_->on_host()) {
    copy.resize(size_t(bytes));
    context_->backend().copy_to_host(copy.data(), packed_.data, bytes, nullptr);
    context_->synchronize(nullptr);
    payload = copy.data();
  }
  char page[kHeaderBytes] = {};
  PackHeader header = header_of(desc_, bound_.view, packing().format(bound_.view));
  header.payload_bytes = bytes;
  header.payload_checksum = checksum(payload, bytes);
  header.header_checksum = checksum(&header, offsetof(PackHeader, header_checksum));
  std::memcpy(page, &header, sizeof header);
  NewFile file(path);
  file.write(page, sizeof page);
  file.write(payload, bytes);
  file.finish();
}

void Weights::map_sync(const char* path) {
  check_path(path);
  require_frozen();
  require_packable();
  const File file(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a pipe would wait for a writer
  Mapping mapping(file);
  const PackHeader header = read_header(mapping);
  const bool bound = bound_once_ && bound_.view.source_present;
  const WeightsView view = bound ? source_
                                 : unbound_view(desc_, header.biases & kGateBias,
                                                header.biases & kUpBias, header.biases & kDownBias);
  PackHeader expected = header_of(desc_, view, packing().format(view));
  // Codes say in the copy how they lie.
  const bool coded = desc_.gate_up_scheme || desc_.down_scheme;
  expected.payload_bytes = coded ? header.payload_bytes : packing().bytes(view);
  expected.payload_checksum = header.payload_checksum;
  expected.header_checksum = header.header_checksum;
  MOEC_REQUIRE(header.biases == expected.biases && header.bias_dtype == expected.bias_dtype &&
                   header.gate_layout == expected.gate_layout && header.dtype == expected.dtype,
               MOEC_E_MISMATCH, "the file is of %s, %s weights with %s; expected %s, %s with %s",
               kind_of(header), dtype_name(header.dtype), biases_text(header).c_str(),
               kind_of(expected), dtype_name(expected.dtype), biases_text(expected).c_str());
  MOEC_REQUIRE(std::memcmp(&header, &expected, sizeof header) == 0, MOEC_E_MISMATCH,
               "the file holds %d experts of H, I = %lld, %lld in format '%.40s'; expected %d of "
               "%lld, %lld in '%.40s'",
               header.num_experts, static_cast<long long>(header.hidden),
               static_cast<long long>(header.inter), header.format, expected.num_experts,
               static_cast<long long>(expected.hidden), static_cast<long long>(expected.inter),
               expected.format);
  const void* const payload = static_cast<char*>(mapping.data()) + kHeaderBytes;
  Packed packed;
  if (context_->on_host()) {
    packed = {Owner::kFile, const_cast<void*>(payload), mapping.data(), mapping.bytes()};
    mapping.release();
  } else {
    Block block(*context_, header.payload_bytes, nullptr);
    context_->backend().copy(block.data(), payload, header.payload_bytes, nullptr);
    context_->synchronize(nullptr);
    packed = {Owner::kContext, block.data(), block.data(), header.payload_bytes};
    block.release();
  }
  adopt(packed, view, payload);
}

}  // namespace moec
