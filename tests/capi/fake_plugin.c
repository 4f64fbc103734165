/* SPDX-License-Identifier: Apache-2.0
 * A plug-in that is wrong in one way, chosen by PLUGIN_*; without one it is right and has no
 * device. The build id it claims is $MOEC_TEST_BUILD_ID. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

struct search {
  char state[16];
  int32_t native_code, driver_version, needs_version;
  char text[256];
};

struct entry {
  uint32_t interface_version;
  const char* build_id;
  int32_t device_type;
  int32_t (*device_count)(void);
  void* (*create)(const void* options, void* error);
  void (*device_info)(int32_t device_id, void* info);
  struct search (*search)(void);
  void (*dense_products)(char* text, size_t bytes);
};

static int32_t no_device(void) {
  return 0;
}
static void* never(const void* options, void* error) {
  (void)options;
  (void)error;
  abort();
}
static void no_info(int32_t device_id, void* info) {
  (void)device_id;
  (void)info;
  abort();
}
static struct search nothing_found(void) {
  const struct search found = {"no_device", 100, 13010, 13000, "a \"GPU\" is not here"};
  return found;
}
static void nobody(char* text, size_t bytes) {
  strncpy(text, "nobody multiplies", bytes);
}

#if defined(PLUGIN_WITHOUT_ENTRY)
#define moec_backend_entry moec_other_entry
#endif
__attribute__((visibility("default"))) const struct entry* moec_backend_entry(void);
const struct entry* moec_backend_entry(void) {
  static struct entry table;
#if defined(PLUGIN_OF_OTHER_INTERFACE)
  table.interface_version = 999;
#else
  table.interface_version = 1;
#endif
#if defined(PLUGIN_OF_OTHER_BUILD)
  table.build_id = "0.0.0-another";
#else
  table.build_id = getenv("MOEC_TEST_BUILD_ID");
#endif
  table.device_type = 2;
  table.device_count = no_device;
  table.create = never;
  table.device_info = no_info;
  table.search = nothing_found;
  table.dense_products = nobody;
  return &table;
}
