// SPDX-License-Identifier: Apache-2.0
#include "ep/peer_memory.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <list>
#include <mutex>
#include <utility>

#include "core/checksum.h"
#include "core/error.h"

namespace moec::ep {
namespace {

constexpr size_t kPageBytes = 4096;

[[noreturn]] void refuse(const char* what, const std::string& name) {
  const int why = errno;
  fail_native(MOEC_E_UNSUPPORTED, why, "%s %s: %s; processes that are peers share /dev/shm", what,
              name.c_str(), std::strerror(why));
}

// ESRCH of a process whose number means the same here.
bool has_ended(const Process& process) {
  const Process own = this_process();
  return process.host == own.host && process.space == own.space &&
         kill(pid_t(process.number), 0) != 0 && errno == ESRCH;
}

bool is_closed(const LeftMemory& memory) {
  for (size_t r = 0; r < memory.ranks.size(); ++r)
    if (memory.page->is_closed_by(int(r)) == 0 && !has_ended(memory.ranks[r])) return false;
  return true;
}

struct List {
  std::mutex mutex;
  std::list<LeftMemory> memory;
};
List& list() {
  static List& all = *new List;  // what is left at the end of the process ends with it
  return all;
}

}  // namespace

SharedPage::SharedPage() : name_("/dev/shm/moec-XXXXXX") {
  const int file = mkostemp(name_.data(), O_CLOEXEC);
  if (file < 0) refuse("no page", name_);
  is_named_ = true;
  if (ftruncate(file, kPageBytes) != 0) {
    close(file);
    forget_name();
    refuse("no page", name_);
  }
  map(file);
}

SharedPage::SharedPage(const std::string& name) : name_(name) {
  const int file = ::open(name.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) refuse("cannot map", name_);
  map(file);
}

void SharedPage::map(int file) {
  void* const page = mmap(nullptr, kPageBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (page == MAP_FAILED) {
    forget_name();
    refuse("cannot map", name_);
  }
  words_ = static_cast<std::atomic<int32_t>*>(page);
}

SharedPage::~SharedPage() {
  forget_name();
  munmap(words_, kPageBytes);
}

void SharedPage::forget_name() {
  if (is_named_) unlink(name_.c_str());
  is_named_ = false;
}

Process this_process() {
  static const auto [host, space] = [] {
    std::string boot;
    std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
    struct stat numbers = {};
    if (stat("/proc/self/ns/pid", &numbers) != 0) numbers = {};
    return std::pair(uint64_t(checksum(boot.data(), boot.size())), uint64_t(numbers.st_ino));
  }();
  return {host, space, uint64_t(getpid())};
}

void leave(LeftMemory memory) {
  {
    const std::lock_guard lock(list().mutex);
    list().memory.push_back(std::move(memory));
  }
  free_closed_memory();
}

void free_closed_memory() {
  std::list<LeftMemory> closed;  // freed without the lock
  const std::lock_guard lock(list().mutex);
  auto& all = list().memory;
  for (auto one = all.begin(); one != all.end();) {
    const auto next = std::next(one);
    if (is_closed(*one)) closed.splice(closed.end(), all, one);
    one = next;
  }
}

}  // namespace moec::ep
