// SPDX-License-Identifier: Apache-2.0
#include "backend/registry.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/build_id.h"
#include "core/device_name.h"
#include "core/files.h"
#include "core/json_text.h"
#include "core/log.h"

namespace moec {
namespace {

// The one plug-in there is: CUDA. Its file is called this, beside libmoec or in moec/ below it.
constexpr const char* kPluginFile = "libmoec_cuda.so.0";

// Trivially destroyed, because a plug-in is never unloaded and may outlive our static objects.
std::recursive_mutex mutex;
const BackendEntry* plugin = nullptr;
bool searched = false;
Error search_error = {};  // why the last candidate of the search was refused; code 0 = none found

void hold_mutex_over_fork() {  // so that the child can make contexts of its own
  static const int registered = pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); },
                                               [] { new (&mutex) std::recursive_mutex; });
  (void)registered;
}

// Lines of a search, to be said when the lock is gone: a sink may wait for what another thread
// holds that waits for the lock.
class LateLog {
 public:
  ~LateLog() {
    for (const auto& [level, text] : lines_) log(level, "%s", text.c_str());
  }
  void add(int32_t level, std::string text) { lines_.emplace_back(level, std::move(text)); }

 private:
  std::vector<std::pair<int32_t, std::string>> lines_;
};

const BackendEntry* open_plugin(const char* file, LateLog& late) {
  void* const handle = dlopen(file, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  const std::string shown = end_of(file);
  const char* const path = shown.c_str();
  if (!handle) {
    const char* const text = dlerror();
    std::string reason = text ? text : "no reason given";
    const std::string named = std::string(file) + ": ";
    if (reason.starts_with(named)) reason.erase(0, named.size());
    MOEC_FAIL(MOEC_E_NO_BACKEND, "cannot open %s: %s", path, reason.c_str());
  }
  const auto entry = reinterpret_cast<BackendEntryFunction>(dlsym(handle, "moec_backend_entry"));
  MOEC_REQUIRE(entry, MOEC_E_BACKEND_ABI,
               "%s exports no moec_backend_entry; expected a plug-in of build %s", path, kBuildId);
  const BackendEntry* const table = entry();
  MOEC_REQUIRE(table && table->interface_version == kBackendInterface, MOEC_E_BACKEND_ABI,
               "%s has interface %u; expected %u", path, table ? table->interface_version : 0,
               kBackendInterface);
  MOEC_REQUIRE(table->build_id && std::strcmp(table->build_id, kBuildId) == 0, MOEC_E_BACKEND_ABI,
               "%s has build id %s; expected %s", path,
               table->build_id ? table->build_id : "(none)", kBuildId);
  MOEC_REQUIRE(table->device_type == MOEC_CUDA, MOEC_E_BACKEND_ABI,
               "%s serves device type %d; expected MOEC_CUDA (2)", path, table->device_type);
  late.add(MOEC_LOG_INFO, "loaded backend " + shown);
  return table;
}

// The file that an address belongs to; of a program an empty text. Also empty: not known.
std::string file_of(const void* address) {
  Dl_info info;
  void* found = nullptr;
  if (!dladdr1(address, &info, &found, RTLD_DL_LINKMAP)) return "";
  return static_cast<const link_map*>(found)->l_name;
}

std::string cuda_version(int32_t version) {  // 13000 -> 13.0; empty: not known
  if (version <= 0) return "";
  return std::to_string(version / 1000) + '.' + std::to_string(version % 1000 / 10);
}

// Of libmoec, or of the program that it is linked into, whose name there is what its caller chose.
// Empty: not known.
std::string folder_of_library() {
  std::string path = file_of(reinterpret_cast<const void*>(&moec_version));
  if (path.empty()) {
    char program[PATH_MAX];
    const ssize_t length = readlink("/proc/self/exe", program, sizeof program);
    path.assign(program, size_t(std::max<ssize_t>(length, 0)));
  }
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "" : path.substr(0, slash);
}

// MOEC_BACKEND_PATH (folders or files, separated by ':'), the folder of libmoec, the loader's path.
std::vector<std::string> candidates() {
  std::vector<std::string> paths;
  const auto add_folder = [&](const std::string& folder) {
    paths.push_back(folder + "/" + kPluginFile);
  };
  const char* const variable = std::getenv("MOEC_BACKEND_PATH");
  const std::string list = variable ? variable : "";
  for (size_t begin = 0; begin < list.size();) {
    const size_t end = std::min(list.find(':', begin), list.size());
    const std::string item = list.substr(begin, end - begin);
    const std::string name = item.substr(item.rfind('/') + 1) + '.';
    if (name.find(".so.") != std::string::npos)
      paths.push_back(item);
    else if (!item.empty())
      add_folder(item);
    begin = end + 1;
  }
  if (const std::string folder = folder_of_library(); !folder.empty()) {
    add_folder(folder);
    add_folder(folder + "/moec");
  }
  paths.push_back(kPluginFile);
  return paths;
}

const BackendEntry* find_plugin() {  // null: none, search_error says why
  LateLog late;
  const std::lock_guard lock(mutex);
  hold_mutex_over_fork();
  if (plugin || searched) return plugin;
  for (const std::string& path : candidates()) {
    try {
      return plugin = open_plugin(path.c_str(), late);
    } catch (const Error& error) {
      late.add(MOEC_LOG_DEBUG, error.text);
      // A plug-in that is there but refused says more than a file that is not.
      if (search_error.code != MOEC_E_BACKEND_ABI) search_error = error;
    }
  }
  searched = true;
  return nullptr;
}

void check_type(int32_t device_type) {
  MOEC_REQUIRE(device_type == MOEC_CPU || device_type == MOEC_CUDA, MOEC_E_INVALID_ARG,
               "device_type is %d; expected MOEC_CPU (1) or MOEC_CUDA (2)", device_type);
}

void check_device(int32_t device_type, int32_t device_id) {
  const int32_t count = device_count(device_type);
  if (device_id >= 0 && device_id < count) return;
  if (device_type == MOEC_CUDA && count == 0) {
    const BackendEntry* const entry = find_plugin();
    if (!entry) MOEC_FAIL(search_error.code, "no CUDA backend: %s", search_error.text);
    const DeviceSearch found = entry->search();
    fail_native(MOEC_E_NO_BACKEND, found.native_code, "no CUDA device: %s", found.text);
  }
  MOEC_FAIL(MOEC_E_NO_BACKEND, "%s is absent; there are %d devices of its type",
            device_name(device_type, device_id).c_str(), count);
}

}  // namespace

void load_backend(const char* path) {
  MOEC_REQUIRE(path && *path, MOEC_E_INVALID_ARG, "path is %s; expected the file of a plug-in",
               path ? "empty" : "NULL");
  LateLog late;
  const std::lock_guard lock(mutex);
  hold_mutex_over_fork();
  const BackendEntry* const table = open_plugin(path, late);
  MOEC_REQUIRE(!plugin || plugin == table, MOEC_E_INVALID_STATE,
               "%s cannot replace the CUDA backend already loaded; load it before the first use",
               end_of(path).c_str());
  plugin = table;
}

int32_t device_count(int32_t device_type) {
  check_type(device_type);
  if (device_type == MOEC_CPU) return 1;
  const BackendEntry* const entry = find_plugin();
  return entry ? entry->device_count() : 0;
}

std::string describe_backend(int32_t device_type) {
  const int32_t count = device_count(device_type);
  JsonObject json;
  if (device_type == MOEC_CPU) {
    json.add("state", "ready").add("devices", count);
  } else if (const BackendEntry* const entry = find_plugin()) {
    const DeviceSearch found = entry->search();
    char products[512] = {};
    entry->dense_products(products, sizeof products);
    json.add("state", found.state).add("devices", count).add("why", found.text);
    json.add("plugin", real_path(file_of(reinterpret_cast<const void*>(entry))));
    json.add("driver", cuda_version(found.driver_version));
    json.add("needs", cuda_version(found.needs_version));
    json.add("dense_products", products);
  } else {
    const bool absent = search_error.code != MOEC_E_BACKEND_ABI;
    json.add("state", absent ? "no_plugin" : "other_build").add("devices", count);
    json.add("why", search_error.text);
  }
  return '{' + json.members() + '}';
}

void query_device(int32_t device_type, int32_t device_id, moec_device_info& info) {
  check_type(device_type);
  check_device(device_type, device_id);
  info.device_type = device_type;
  info.device_id = device_id;
  if (device_type == MOEC_CPU)
    make_cpu_backend({.device_id = 0, .num_threads = 1})->device_info(info);
  else
    find_plugin()->device_info(device_id, &info);
}

std::unique_ptr<Backend> make_backend(int32_t device_type, const BackendOptions& options) {
  check_device(device_type, options.device_id);
  if (device_type == MOEC_CPU) return make_cpu_backend(options);
  Error error = {};
  Backend* const backend = find_plugin()->create(options, &error);
  if (!backend) throw error;
  return std::unique_ptr<Backend>(backend);
}

}  // namespace moec
