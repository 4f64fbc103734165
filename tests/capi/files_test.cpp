// SPDX-License-Identifier: Apache-2.0
// Saved plans and packed files: they come back bit for bit, and a damaged byte anywhere is refused.
// Mutation noted: with the payload checksum not compared, the flipped bytes are accepted.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>

#include "problem.h"
#include "support/describe.h"

namespace moec::test {
namespace {

std::vector<uint8_t> saved_plan(const moec_plan* plan) {
  uint64_t need = 0;
  check(moec_plan_save_sync(plan, nullptr, 0, &need, nullptr));
  std::vector<uint8_t> bytes(need);
  check(moec_plan_save_sync(plan, bytes.data(), bytes.size(), &need, nullptr));
  return bytes;
}

TEST(PlanFile, comes_back_bit_for_bit) {
  Problem p;
  p.build_plan();
  const std::vector<uint8_t> bytes = saved_plan(p.plan.get());
  Problem other;
  check(moec_plan_restore_sync(other.plan.get(), bytes.data(), bytes.size(), nullptr));
  EXPECT_EQ(saved_plan(other.plan.get()), bytes);
}

TEST(PlanFile, a_short_buffer_only_tells_the_size) {
  Problem p;
  p.build_plan();
  std::vector<uint8_t> bytes = saved_plan(p.plan.get());
  const std::vector<uint8_t> before(bytes.size(), 0x77);
  bytes = before;
  uint64_t need = 0;
  EXPECT_EQ(moec_plan_save_sync(p.plan.get(), bytes.data(), bytes.size() - 1, &need, nullptr),
            MOEC_E_WORKSPACE);
  EXPECT_EQ(need, bytes.size());
  EXPECT_EQ(bytes, before);
}

TEST(PlanFile, every_damaged_byte_is_refused_and_the_plan_kept) {
  Problem p;
  p.build_plan();
  const std::vector<uint8_t> bytes = saved_plan(p.plan.get());
  for (size_t i = 0; i < bytes.size(); ++i) {
    std::vector<uint8_t> damaged = bytes;
    damaged[i] ^= uint8_t(1u << (i % 8));
    EXPECT_EQ(moec_plan_restore_sync(p.plan.get(), damaged.data(), damaged.size(), nullptr),
              MOEC_E_CORRUPT)
        << "byte " << i;
  }
  for (size_t size = 0; size < bytes.size(); size += 7)
    EXPECT_EQ(moec_plan_restore_sync(p.plan.get(), bytes.data(), size, nullptr), MOEC_E_CORRUPT);
  EXPECT_EQ(saved_plan(p.plan.get()), bytes);
}

TEST(PlanFile, another_desc_is_a_mismatch) {
  Problem p;
  p.build_plan();
  const std::vector<uint8_t> bytes = saved_plan(p.plan.get());
  auto desc = p.plan_desc;
  const auto refused = [&](const char* text) {
    const auto plan =
        make<PlanHandle>(moec_plan_create, p.context, static_cast<const moec_plan_desc*>(&desc),
                         static_cast<const moec_buffer*>(nullptr));
    EXPECT_EQ(moec_plan_restore_sync(plan.get(), bytes.data(), bytes.size(), nullptr),
              MOEC_E_MISMATCH);
    EXPECT_NE(std::string(error_info().message).find(text), std::string::npos)
        << error_info().message;
  };
  desc.align = 4;
  refused("E, K, align = 4, 2, 1");
  desc = p.plan_desc;
  desc.max_tokens = 2;
  refused("a plan of 5 tokens; this plan's max_tokens is 2");
}

TEST(PlanFile, attach_takes_a_plan_that_is_there_and_nothing_else) {
  Problem p;
  uint64_t bytes = 0;
  int64_t rows = 0;
  check(moec_plan_size(&p.plan_desc, &bytes, &rows));
  std::vector<uint8_t> memory(bytes, 0x5a);
  const moec_buffer buffer = p.buffer(memory);
  const auto attach = [&](int64_t tokens) {
    const auto plan = make<PlanHandle>(moec_plan_create, p.context,
                                       static_cast<const moec_plan_desc*>(&p.plan_desc), &buffer);
    return moec_plan_attach(plan.get(), tokens);
  };
  EXPECT_EQ(attach(p.T), MOEC_E_CORRUPT);
  const auto writer = make<PlanHandle>(moec_plan_create, p.context,
                                       static_cast<const moec_plan_desc*>(&p.plan_desc), &buffer);
  const moec_tensor ids = tensor_of(p.given_ids.data(), MOEC_I32, {p.T, Problem::kTopK});
  check(moec_plan_from_topk(writer.get(), &ids, nullptr, nullptr));
  EXPECT_EQ(attach(p.T), MOEC_OK);
  EXPECT_EQ(attach(p.T - 1), MOEC_E_CORRUPT);
  EXPECT_EQ(attach(-1), MOEC_E_INVALID_ARG);
  p.given_ids.assign(p.given_ids.size(), -1);  // rows of no expert are read, too
  check(moec_plan_from_topk(writer.get(), &ids, nullptr, nullptr));
  EXPECT_EQ(attach(p.T), MOEC_OK);
  moec_tensor row_token = {};
  check(moec_plan_view(writer.get(), MOEC_PLAN_ROW_TOKEN, &row_token));
  static_cast<int32_t*>(row_token.data)[1] = 1 << 30;
  EXPECT_EQ(attach(p.T), MOEC_E_CORRUPT);
  EXPECT_EQ(attach(p.T + 100), MOEC_E_SHAPE);
}

class PackedFile : public testing::Test {
 protected:
  PackedFile() {
    path = testing::TempDir() + "moec-packed-XXXXXX";
    close(mkstemp(path.data()));
  }
  ~PackedFile() override { std::remove(path.c_str()); }

  std::vector<char> read() const {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  void write(const std::vector<char>& bytes) const {
    std::ofstream(path, std::ios::binary).write(bytes.data(), std::streamsize(bytes.size()));
  }
  static std::vector<float> forward(Problem& p, const moec_weights* weights) {
    auto args = p.forward_args();
    args.weights = weights;
    check(moec_layer_forward(p.layer.get(), &args, nullptr));
    return p.y;
  }

  std::string path;
  Problem p;
};

TEST_F(PackedFile, is_mapped_without_the_source) {
  const std::vector<float> expected = forward(p, p.weights.get());
  check(moec_weights_pack(p.weights.get(), nullptr, nullptr));
  check(moec_weights_save_sync(p.weights.get(), path.c_str()));
  EXPECT_EQ(forward(p, p.weights.get()), expected);
  const auto mapped = make<Weights>(moec_weights_create, p.context, &p.weights_desc);
  check(moec_weights_map_sync(mapped.get(), path.c_str()));
  auto info = sized<moec_weights_info>();
  check(moec_weights_query(mapped.get(), &info));
  EXPECT_EQ(info.is_packed, 1);
  EXPECT_EQ(info.is_bound, 0);
  EXPECT_EQ(info.needs_source, 0);
  EXPECT_EQ(forward(p, mapped.get()), expected);
  EXPECT_EQ(moec_weights_refresh(mapped.get(), 0, 1, nullptr), MOEC_E_INVALID_STATE);
  const auto second = make<Weights>(moec_weights_create, p.context, &p.weights_desc);
  check(moec_weights_map_sync(second.get(), path.c_str()));
  EXPECT_EQ(forward(p, second.get()), expected);
}

TEST_F(PackedFile, source_may_be_released_and_refresh_follows_it) {
  check(moec_weights_pack(p.weights.get(), nullptr, nullptr));
  const std::vector<float> before = forward(p, p.weights.get());
  for (float& value : p.down) value *= 2;
  EXPECT_EQ(forward(p, p.weights.get()), before) << "the packed copy is used until refreshed";
  check(moec_weights_refresh(p.weights.get(), 0, int32_t(Problem::kExperts), nullptr));
  std::vector<float> doubled = before;
  for (float& value : doubled) value *= 2;
  EXPECT_EQ(forward(p, p.weights.get()), doubled);
  check(moec_weights_release_source(p.weights.get()));
  std::fill(p.down.begin(), p.down.end(), 0.0f);
  std::fill(p.gate_up.begin(), p.gate_up.end(), 0.0f);
  EXPECT_EQ(forward(p, p.weights.get()), doubled);
  EXPECT_EQ(moec_weights_refresh(p.weights.get(), 0, 1, nullptr), MOEC_E_INVALID_STATE);
}

// As the ranks of one host do that fill one cache. With one name for all unfinished files most maps
// found a damaged file.
TEST_F(PackedFile, many_may_write_it_while_others_read) {
  check(moec_weights_pack(p.weights.get(), nullptr, nullptr));
  check(moec_weights_save_sync(p.weights.get(), path.c_str()));
  std::atomic<bool> done{false};
  std::atomic<int> failed{0};
  const auto save = [&] {
    for (int i = 0; i < 50; ++i)
      failed += moec_weights_save_sync(p.weights.get(), path.c_str()) != MOEC_OK;
  };
  std::thread first(save), second(save);
  std::thread reader([&] {
    do {
      const auto mapped = make<Weights>(moec_weights_create, p.context, &p.weights_desc);
      failed += moec_weights_map_sync(mapped.get(), path.c_str()) != MOEC_OK;
    } while (!done);
  });
  first.join();
  second.join();
  done = true;
  reader.join();
  EXPECT_EQ(failed, 0);
  const std::string folder = std::filesystem::path(path).parent_path();
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    EXPECT_FALSE(entry.path().string().starts_with(path + ".")) << entry.path();
}

TEST_F(PackedFile, damage_is_refused) {
  check(moec_weights_pack(p.weights.get(), nullptr, nullptr));
  check(moec_weights_save_sync(p.weights.get(), path.c_str()));
  const std::vector<char> bytes = read();
  const auto map = [&] {
    const auto weights = make<Weights>(moec_weights_create, p.context, &p.weights_desc);
    return moec_weights_map_sync(weights.get(), path.c_str());
  };
  EXPECT_EQ(map(), MOEC_OK);
  for (const size_t at : {size_t(0), size_t(9), size_t(20), size_t(140), size_t(200), size_t(4095),
                          bytes.size() - 1, bytes.size() / 2, size_t(4096)}) {
    std::vector<char> damaged = bytes;
    damaged[at] = char(damaged[at] ^ 4);
    write(damaged);
    EXPECT_EQ(map(), MOEC_E_CORRUPT) << "byte " << at;
  }
  for (const size_t size : {size_t(0), size_t(100), size_t(4096), bytes.size() - 1}) {
    write({bytes.begin(), bytes.begin() + std::ptrdiff_t(size)});
    EXPECT_EQ(map(), MOEC_E_CORRUPT) << size << " bytes";
  }
  std::vector<char> longer = bytes;
  longer.push_back(0);
  write(longer);
  EXPECT_EQ(map(), MOEC_E_CORRUPT);
}

TEST_F(PackedFile, another_shape_is_a_mismatch_and_no_file_an_error_with_errno) {
  check(moec_weights_pack(p.weights.get(), nullptr, nullptr));
  check(moec_weights_save_sync(p.weights.get(), path.c_str()));
  auto desc = p.weights_desc;
  desc.inter += 32;
  const auto other = make<Weights>(moec_weights_create, p.context, &desc);
  EXPECT_EQ(moec_weights_map_sync(other.get(), path.c_str()), MOEC_E_MISMATCH);
  EXPECT_EQ(moec_weights_map_sync(other.get(), "/nonexistent/file"), MOEC_E_INVALID_ARG);
  EXPECT_EQ(error_info().native_code, ENOENT);
  EXPECT_EQ(moec_weights_save_sync(p.weights.get(), "/nonexistent/file"), MOEC_E_INVALID_ARG);
}

TEST_F(PackedFile, other_biases_are_named) {
  check(moec_weights_pack(p.weights.get(), nullptr, nullptr));
  check(moec_weights_save_sync(p.weights.get(), path.c_str()));
  const auto other = make<Weights>(moec_weights_create, p.context, &p.weights_desc);
  std::vector<float> bias(size_t(Problem::kExperts * Problem::kHidden));
  moec_weight_set set = p.weight_set(p.gate_up, p.down);
  set.down.bias = tensor_of(bias.data(), MOEC_F32, {Problem::kExperts, Problem::kHidden});
  check(moec_weights_bind(other.get(), &set));
  EXPECT_EQ(moec_weights_map_sync(other.get(), path.c_str()), MOEC_E_MISMATCH);
  const std::string text = error_info().message;
  EXPECT_NE(text.find("gated, f32 weights with no biases; expected gated, f32 with down biases"),
            std::string::npos)
      << text;
}

// As long as a name can be: that of the unfinished file is not made of it.
TEST_F(PackedFile, a_name_may_be_long) {
  const std::string longest = std::filesystem::path(path).parent_path() / std::string(255, 'n');
  check(moec_weights_pack(p.weights.get(), nullptr, nullptr));
  EXPECT_EQ(moec_weights_save_sync(p.weights.get(), longest.c_str()), MOEC_OK)
      << error_info().message;
  EXPECT_EQ(moec_weights_map_sync(p.weights.get(), longest.c_str()), MOEC_OK);
  std::filesystem::remove(longest);
}

TEST_F(PackedFile, a_pipe_is_refused_and_not_waited_for) {
  const std::string pipe = path + ".pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_EQ(moec_weights_map_sync(p.weights.get(), pipe.c_str()), MOEC_E_INVALID_ARG);
  std::filesystem::remove(pipe);
}

TEST(Describe, names_kernels_and_says_how_long_it_is) {
  Problem p;
  uint64_t need = 0;
  check(moec_layer_describe(p.layer.get(), p.weights.get(), 7, nullptr, 0, &need));
  std::vector<char> text(need);
  EXPECT_EQ(moec_layer_describe(p.layer.get(), p.weights.get(), 7, text.data(), need - 1, &need),
            MOEC_E_WORKSPACE);
  check(moec_layer_describe(p.layer.get(), p.weights.get(), 7, text.data(), need, &need));
  EXPECT_EQ(std::strlen(text.data()) + 1, need);
  EXPECT_EQ(text[0], '{');
}

Json described(const Problem& p, const moec_weights* weights, int64_t tokens) {
  return describe_experts(p.experts.get(), weights, tokens);
}

// What a caller must provide, not what the backend makes of it.
TEST(Describe, bytes_are_those_of_the_queries) {
  for (const uint32_t save : {MOEC_SAVE_ALL, MOEC_SAVE_NONE}) {
    const Problem p(nullptr, save);
    const Json json = described(p, p.weights.get(), Problem::kTokens);
    auto info = sized<moec_weights_info>();
    check(moec_weights_query(p.weights.get(), &info));
    const auto bytes = [&](const char* name) { return uint64_t(json.at(name).number); };
    EXPECT_EQ(bytes("packed_bytes"), info.packed_bytes);
    EXPECT_EQ(bytes("saved_bytes"), p.bytes(p.experts_sizes.saved));
    EXPECT_EQ(bytes("forward_workspace_bytes"), p.bytes(p.experts_sizes.forward_workspace));
    EXPECT_EQ(bytes("backward_workspace_bytes"), p.bytes(p.experts_sizes.backward_workspace));
  }
}

TEST(Describe, weights_may_be_of_another_type_than_x) {
  Problem p;
  p.experts_desc.dtype = MOEC_BF16;
  p.experts = make<Experts>(moec_experts_create, p.context, &p.experts_desc);
  const Json json = described(p, p.weights.get(), Problem::kTokens);
  const Json& gate_up = json.at("forward").at("kernels").array[0];
  EXPECT_EQ(int64_t(gate_up.at("weight_bytes").number),
            Problem::kExperts * 2 * Problem::kInter * Problem::kHidden * 4);
}

TEST(Describe, bytes_that_overflow_are_refused) {
  Problem p;
  p.experts_desc.hidden = int64_t(1) << 40;
  p.experts_desc.inter = 1;
  p.weights_desc.hidden = p.experts_desc.hidden;
  p.weights_desc.inter = 1;
  p.experts = make<Experts>(moec_experts_create, p.context, &p.experts_desc);
  const auto weights = make<Weights>(moec_weights_create, p.context, &p.weights_desc);
  const int64_t hidden = p.weights_desc.hidden;
  auto set = sized<moec_weight_set>();  // never read
  set.gate_up.data = tensor_of(p.gate_up.data(), MOEC_F32, {Problem::kExperts, 2, hidden});
  set.down.data = tensor_of(p.down.data(), MOEC_F32, {Problem::kExperts, hidden, 1});
  check(moec_weights_bind(weights.get(), &set));
  uint64_t need = 0;
  EXPECT_EQ(moec_experts_describe(p.experts.get(), weights.get(), INT32_MAX, nullptr, 0, &need),
            MOEC_E_OVERFLOW);
}

}  // namespace
}  // namespace moec::test
