// SPDX-License-Identifier: Apache-2.0
// Version, errors, log.
#include <cstdio>
#include <cstring>

#include "boundary.h"
#include "core/build_id.h"
#include "core/log.h"
#include "layer/check.h"

using namespace moec;
using namespace moec::capi;

namespace {

struct StatusName {
  moec_status status;
  const char* name;
};
#define MOEC_STATUS(name) {name, #name}
constexpr StatusName kStatusNames[] = {
    MOEC_STATUS(MOEC_OK),
    MOEC_STATUS(MOEC_S_NOT_READY),
    MOEC_STATUS(MOEC_E_INVALID_ARG),
    MOEC_STATUS(MOEC_E_INVALID_STATE),
    MOEC_STATUS(MOEC_E_ABI),
    MOEC_STATUS(MOEC_E_SHAPE),
    MOEC_STATUS(MOEC_E_DTYPE),
    MOEC_STATUS(MOEC_E_LAYOUT),
    MOEC_STATUS(MOEC_E_DEVICE),
    MOEC_STATUS(MOEC_E_UNSUPPORTED),
    MOEC_STATUS(MOEC_E_OUT_OF_MEMORY),
    MOEC_STATUS(MOEC_E_WORKSPACE),
    MOEC_STATUS(MOEC_E_NO_BACKEND),
    MOEC_STATUS(MOEC_E_BACKEND_ABI),
    MOEC_STATUS(MOEC_E_WOULD_SYNC),
    MOEC_STATUS(MOEC_E_WOULD_ALLOC),
    MOEC_STATUS(MOEC_E_CUDA),
    MOEC_STATUS(MOEC_E_COMM),
    MOEC_STATUS(MOEC_E_TIMEOUT),
    MOEC_STATUS(MOEC_E_CALLBACK),
    MOEC_STATUS(MOEC_E_FORKED),
    MOEC_STATUS(MOEC_E_OVERFLOW),
    MOEC_STATUS(MOEC_E_ALIAS),
    MOEC_STATUS(MOEC_E_MISMATCH),
    MOEC_STATUS(MOEC_E_CORRUPT),
    MOEC_STATUS(MOEC_E_INTERNAL),
};
#undef MOEC_STATUS

#if defined(__clang__)
#define MOEC_COMPILER "clang " __clang_version__
#else
#define MOEC_COMPILER "gcc " __VERSION__
#endif
#if defined(NDEBUG)
#define MOEC_ASSERTIONS "false"
#else
#define MOEC_ASSERTIONS "true"
#endif
#if defined(__x86_64__)
#define MOEC_ISAS "\"portable\", \"avx2\", \"avx512\", \"avx512bf16\", \"amx\""
#elif defined(__aarch64__)
#define MOEC_ISAS "\"portable\", \"neon\", \"neonbf16\""
#else
#define MOEC_ISAS "\"portable\""
#endif

struct BuildInfo {
  char text[512];
  BuildInfo() {
    std::snprintf(text, sizeof text,
                  "{\"version\": \"%s\", \"abi\": %d, \"build_id\": \"%s\", \"compiler\": \"%s\", "
                  "\"isas\": [%s], \"assertions\": %s}",
                  kVersion, MOEC_ABI_VERSION, kBuildId, MOEC_COMPILER, MOEC_ISAS, MOEC_ASSERTIONS);
  }
};

}  // namespace

uint32_t moec_version(void) {
  return uint32_t(MOEC_VERSION_MAJOR) << 22 | uint32_t(MOEC_VERSION_MINOR) << 12 |
         MOEC_VERSION_PATCH;
}

const char* moec_version_string(void) {
  return kVersion;
}

uint32_t moec_abi_version(void) {
  return MOEC_ABI_VERSION;
}

const char* moec_build_info(void) {
  static const BuildInfo info;
  return info.text;
}

const char* moec_status_name(moec_status status) {
  for (const StatusName& row : kStatusNames)
    if (row.status == status) return row.name;
  return "MOEC_E_UNKNOWN";
}

moec_status moec_last_error(moec_error_info* out) {
  try {  // not guard(): a failure here must not replace the one that is asked for
    Out<moec_error_info> info(out, "out", 1);
    const uint32_t size = info->struct_size;
    *info = last_error();
    info->struct_size = size;
    info.commit();
    return MOEC_OK;
  } catch (const Error& error) {
    return error.code;
  }
}

void moec_struct_init(void* sized_struct, size_t bytes) {
  if (!sized_struct || bytes < 8) return;
  const uint32_t size = uint32_t(bytes);
  std::memset(sized_struct, 0, bytes);
  std::memcpy(sized_struct, &size, sizeof size);
}

moec_status moec_set_log(moec_log_function sink, void* user, int32_t min_level) {
  return guard(__func__, [&] {
    check_range("min_level", min_level, MOEC_LOG_TRACE, MOEC_LOG_OFF);
    set_log(sink, user, min_level);
  });
}
