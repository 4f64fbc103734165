// SPDX-License-Identifier: Apache-2.0
// Plug-ins: what is refused and why, and where one is looked for. Each case in a process of its
// own, because a plug-in stays. Mutation noted: without the comparison of build ids `another build`
// loads.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "child.h"
#include "problem.h"
#include "support/json.h"

namespace moec::test {
namespace {

// The build id of the library under test, which the good plug-in then claims.
void claim_build_id() {
  const std::string info = moec_build_info(), key = "\"build_id\": \"";
  const size_t begin = info.find(key) + key.size();
  setenv("MOEC_TEST_BUILD_ID", info.substr(begin, info.find('"', begin) - begin).c_str(), 1);
}

moec_status make_cuda_context() {
  auto desc = sized<moec_context_desc>();
  desc.device_type = MOEC_CUDA;
  moec_context* context = nullptr;
  const moec_status status = moec_context_create(&desc, &context);
  moec_context_free(context);
  return status;
}

// Empty: the call failed.
std::string described(int32_t device_type) {
  uint64_t need = 0;
  if (moec_backend_describe(device_type, nullptr, 0, &need) != MOEC_OK) return "";
  std::string text(need, 0);
  if (moec_backend_describe(device_type, text.data(), need - 1, &need) != MOEC_E_WORKSPACE)
    return "";
  if (moec_backend_describe(device_type, text.data(), need, &need) != MOEC_OK) return "";
  return text.data();
}

bool says(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

int expect_refused(const char* path, moec_status status, const char* text) {
  return in_child([&] {
    if (moec_backend_load(path) != status) return 1;
    return std::string(error_info().message).find(text) == std::string::npos ? 2 : 0;
  });
}

TEST(Backend, what_is_no_plug_in_is_refused) {
  EXPECT_EQ(expect_refused("", MOEC_E_INVALID_ARG, "path is empty"), 0);
  EXPECT_EQ(expect_refused("/nonexistent.so", MOEC_E_NO_BACKEND, "cannot open"), 0);
  EXPECT_EQ(expect_refused(PLUGIN_WITHOUT_ENTRY, MOEC_E_BACKEND_ABI, "no moec_backend_entry"), 0);
  EXPECT_EQ(expect_refused(PLUGIN_OF_OTHER_INTERFACE, MOEC_E_BACKEND_ABI,
                           "has interface 999; expected 1"),
            0);
}

TEST(Backend, another_build_is_refused_with_both_ids) {
  EXPECT_EQ(expect_refused(PLUGIN_OF_OTHER_BUILD, MOEC_E_BACKEND_ABI,
                           "has build id 0.0.0-another; expected "),
            0);
}

TEST(Backend, a_plug_in_without_device_is_no_error) {
  EXPECT_EQ(in_child([] {
              claim_build_id();
              if (moec_backend_load(PLUGIN) != MOEC_OK) return 1;
              int32_t count = -1;
              if (moec_device_count(MOEC_CUDA, &count) != MOEC_OK || count != 0) return 2;
              if (make_cuda_context() != MOEC_E_NO_BACKEND) return 3;
              const moec_error_info error = error_info();
              if (!says(error.message, "no CUDA device: a \"GPU\" is not here")) return 4;
              if (error.native_code != 100) return 7;
              const Json json = parse_json(described(MOEC_CUDA));
              if (json.at("state").string != "no_device" || json.at("devices").number != 0)
                return 8;
              if (json.at("why").string != "a \"GPU\" is not here") return 9;
              if (json.at("driver").string != "13.1" || json.at("needs").string != "13.0")
                return 10;
              if (json.at("dense_products").string != "nobody multiplies") return 11;
              if (!says(json.at("plugin").string, "PLUGIN.so")) return 12;
              if (moec_backend_load(PLUGIN) != MOEC_OK) return 5;
              return moec_device_count(MOEC_CPU, &count) == MOEC_OK && count == 1 ? 0 : 6;
            }),
            0);
}

TEST(Backend, is_found_through_the_variable) {
  EXPECT_EQ(in_child([] {
              claim_build_id();
              const std::string of_this = "moec-" + std::to_string(getpid()) + ".of.soft";
              const std::string folder = testing::TempDir() + of_this, plugin = PLUGIN;
              std::filesystem::create_directories(folder);
              std::filesystem::copy_file(plugin, folder + "/libmoec_cuda.so.0",
                                         std::filesystem::copy_options::overwrite_existing);
              setenv("MOEC_BACKEND_PATH", ("/nonexistent:" + folder).c_str(), 1);
              int32_t count = -1;
              if (moec_device_count(MOEC_CUDA, &count) != MOEC_OK || count != 0) return 1;
              std::filesystem::remove_all(folder);
              // It is loaded: the other one comes too late.
              return moec_backend_load(PLUGIN_COPY) == MOEC_E_INVALID_STATE ? 0 : 2;
            }),
            0);
}

TEST(Backend, a_wrong_one_on_the_way_is_told_but_is_no_device) {
  EXPECT_EQ(in_child([] {
              setenv("MOEC_BACKEND_PATH", PLUGIN_OF_OTHER_BUILD, 1);
              int32_t count = -1;
              if (moec_device_count(MOEC_CUDA, &count) != MOEC_OK) return 1;
              const moec_status status = make_cuda_context();
              if (count > 0) return 0;  // a GPU and its own plug-in are here
              return status == MOEC_E_BACKEND_ABI || status == MOEC_E_NO_BACKEND ? 0 : 2;
            }),
            0);
}

TEST(Backend, what_is_described_without_a_plug_in) {
  EXPECT_EQ(in_child([] {
              setenv("MOEC_BACKEND_PATH", PLUGIN_OF_OTHER_BUILD, 1);
              const Json json = parse_json(described(MOEC_CUDA));
              const std::string state = json.at("state").string;
              if (state == "other_build")
                return says(json.at("why").string, "0.0.0-another") ? 0 : 1;
              // The library's own one lies beside it.
              return says(json.at("plugin").string, "libmoec_cuda.so.0") ? 0 : 2;
            }),
            0);
  const Json cpu = parse_json(described(MOEC_CPU));
  EXPECT_EQ(cpu.at("state").string, "ready");
  EXPECT_EQ(cpu.at("devices").number, 1);
  uint64_t need = 0;
  EXPECT_EQ(moec_backend_describe(5, nullptr, 0, &need), MOEC_E_INVALID_ARG);
  EXPECT_EQ(moec_backend_describe(MOEC_CPU, nullptr, 0, nullptr), MOEC_E_INVALID_ARG);
}

TEST(Backend, device_query) {
  auto info = sized<moec_device_info>();
  check(moec_device_query(MOEC_CPU, 0, &info));
  EXPECT_STREQ(info.backend, "cpu");
  EXPECT_GE(info.multiprocessors, 1);
  EXPECT_GT(info.total_bytes, info.free_bytes);
  EXPECT_GT(std::strlen(info.arch), 0u);
  EXPECT_EQ(moec_device_query(MOEC_CPU, 1, &info), MOEC_E_NO_BACKEND);
  EXPECT_EQ(moec_device_query(5, 0, &info), MOEC_E_INVALID_ARG);
}

TEST(Messages, are_utf8_whatever_a_file_is_called) {
  const auto message = [](const std::string& path) -> std::string {
    EXPECT_NE(moec_backend_load(path.c_str()), MOEC_OK);
    return error_info().message;
  };
  std::string accents;  // cut inside of a character, if by bytes
  for (int i = 0; i < 60; ++i) accents += "\u00e9";
  EXPECT_NE(message("/none/" + accents).find("...\u00e9"), std::string::npos);
  EXPECT_NE(message("/none/a" + accents).find("...\u00e9"), std::string::npos);
  EXPECT_NE(message("/\u20ac\U0001f600/lib").find("/\u20ac\U0001f600/lib"), std::string::npos);
  EXPECT_NE(message("/\xff\xe9x\x1b[0m\xc0\x80\xed\xa0\x80l").find("/??x?[0m?????l"),
            std::string::npos);
}

}  // namespace
}  // namespace moec::test
