// SPDX-License-Identifier: Apache-2.0
// The packed copy of codes on the device under test beside the CPU's: files have the same bytes,
// and those of one device are mapped on another; its memory is the context's or lent, refresh
// follows the source, and a GPU refuses plain weights. schemes_test has what calls make of a copy.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "support/layer_runner.h"
#include "support/skip.h"
#include "support/tensors.h"

namespace moec::test {
namespace {

using Bytes = std::vector<uint8_t>;

constexpr int64_t E = 3, H = 21, I = 10;

bool on_cpu() {
  return test_device().type == MOEC_CPU;
}

// INT8 by channels, a plain MLP whose biases are bf16, and memory for what is unpacked.
struct Codes {
  struct Matrix {
    std::vector<double> codes, scales, biases;
    moec_tensor data, scale, bias;
  };
  Tensors tensors;
  Matrix up, down;
  moec_quant up_quant = sized<moec_quant>(), down_quant = sized<moec_quant>();
  moec_weight_set set = sized<moec_weight_set>();

  explicit Codes(int seed) {
    const auto bind = [&](Matrix& m, moec_matrix& to, moec_quant& quant, int64_t N, int64_t K) {
      for (int64_t i = 0; i < E * N * K; ++i)
        m.codes.push_back(double((i * 37 + seed) % 251) - 125);
      for (int64_t i = 0; i < E * N; ++i) m.scales.push_back(double(i + seed) / 64);
      for (int64_t i = 0; i < E * N; ++i) m.biases.push_back(double(i - seed) / 8);
      to.data = m.data = tensors.input(m.codes, MOEC_I8, {E, N, K});
      quant.scales = m.scale = tensors.input(m.scales, MOEC_F32, {E, N, 1});
      to.bias = m.bias = tensors.input(m.biases, MOEC_BF16, {E, N});
      to.quant = &quant;
    };
    bind(up, set.up, up_quant, I, H);
    bind(down, set.down, down_quant, H, I);
  }
  std::vector<Bytes> read() const {
    std::vector<Bytes> all;
    for (const Matrix* m : {&up, &down})
      for (const moec_tensor* t : {&m->data, &m->scale, &m->bias})
        all.push_back(tensors.read_bytes(*t));
    return all;
  }
};

moec_weights_desc weights_desc(uint32_t scheme = MOEC_SCHEME_INT8) {
  auto desc = sized<moec_weights_desc>();
  desc.flags = MOEC_WEIGHTS_FROZEN;
  desc.num_experts = E;
  desc.gate_layout = MOEC_GATE_NONE;
  desc.hidden = H;
  desc.inter = I;
  desc.dtype = MOEC_BF16;
  desc.gate_up_scheme = desc.down_scheme = scheme;
  return desc;
}
Weights make_weights(const moec_context* context, uint32_t scheme = MOEC_SCHEME_INT8) {
  const moec_weights_desc desc = weights_desc(scheme);
  return make<Weights>(moec_weights_create, context, &desc);
}
Weights bound(const moec_context* context, const Codes& codes) {
  Weights weights = make_weights(context);
  check(moec_weights_bind(weights.get(), &codes.set));
  return weights;
}
moec_weights_info info_of(const Weights& weights) {
  auto info = sized<moec_weights_info>();
  check(moec_weights_query(weights.get(), &info));
  return info;
}

class PackedCodes : public testing::Test {
 protected:
  ~PackedCodes() override { std::remove(path.c_str()); }
  Bytes file(const Weights& weights) {
    check(moec_weights_save_sync(weights.get(), path.c_str()));
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }

  const std::string path = testing::TempDir() + "moec-packed-codes-" + std::to_string(getpid());
  const moec_context* const context = test_context();
};

// The same codes in the host's memory: a file of them from a context of the CPU.
Bytes packed_on_the_cpu(const Codes& codes, const std::string& path) {
  const Context cpu =
      make<Context>(moec_context_create, static_cast<const moec_context_desc*>(nullptr));
  std::vector<Bytes> memory = codes.read();
  moec_weight_set set = codes.set;
  moec_quant quants[] = {codes.up_quant, codes.down_quant};
  size_t next = 0;
  const auto on_host = [&](moec_tensor& tensor) {
    tensor.data = memory[next++].data();
    tensor.device_type = MOEC_CPU;
  };
  moec_matrix* const matrices[] = {&set.up, &set.down};
  for (int i = 0; i < 2; ++i) {
    on_host(matrices[i]->data), on_host(quants[i].scales), on_host(matrices[i]->bias);
    matrices[i]->quant = &quants[i];
  }
  const Weights weights = make_weights(cpu.get());
  check(moec_weights_bind(weights.get(), &set));
  check(moec_weights_pack(weights.get(), nullptr, nullptr));
  check(moec_weights_save_sync(weights.get(), path.c_str()));
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

TEST_F(PackedCodes, have_one_file_on_every_device) {
  const Codes codes(1);
  const Weights weights = bound(context, codes);
  EXPECT_EQ(info_of(weights).needs_source, 0);
  check(moec_weights_pack(weights.get(), nullptr, nullptr));
  EXPECT_STREQ(info_of(weights).packed_format, "codes-bf16-int8-int8-v1");
  check(moec_weights_release_source(weights.get()));
  const Bytes own = file(weights);
  EXPECT_EQ(packed_on_the_cpu(codes, path), own);  // and path is the CPU's file now
  const Weights mapped = make_weights(context);
  check(moec_weights_map_sync(mapped.get(), path.c_str()));
  const Codes other(2);
  check(moec_weights_unpack(mapped.get(), &other.set, nullptr));
  check(moec_context_sync(context, nullptr));
  EXPECT_EQ(other.read(), codes.read());
  EXPECT_TRUE(other.tensors.neighbours_untouched());
  EXPECT_EQ(file(mapped), own);
}

TEST_F(PackedCodes, follow_their_source_by_experts) {
  Codes codes(1);
  const Codes second(2);
  const Weights weights = bound(context, codes);
  Tensors lent;
  const moec_buffer memory = lent.buffer(info_of(weights).packed_bytes);
  check(moec_weights_pack(weights.get(), &memory, nullptr));
  const Bytes before = file(weights);
  const std::vector<Bytes> now = second.read();
  for (size_t i = 0; i < now.size(); ++i) {
    const moec_tensor* const to[] = {&codes.up.data,   &codes.up.scale,   &codes.up.bias,
                                     &codes.down.data, &codes.down.scale, &codes.down.bias};
    DeviceBuffer::copy_in(to[i]->data, now[i].data(), now[i].size());
  }
  EXPECT_EQ(file(weights), before) << "the packed copy is read until it is refreshed";
  check(moec_weights_refresh(weights.get(), 1, 1, nullptr));
  EXPECT_NE(file(weights), before);
  check(moec_weights_refresh(weights.get(), 0, 1, nullptr));
  check(moec_weights_refresh(weights.get(), 2, 1, nullptr));
  const Weights whole = bound(context, second);
  check(moec_weights_pack(whole.get(), nullptr, nullptr));
  EXPECT_EQ(file(weights), file(whole));
  EXPECT_TRUE(lent.neighbours_untouched());
}

struct Hook {  // gives memory of another context of the device
  const moec_context* from = test_context();
  std::vector<size_t> taken;
  size_t live = 0;

  static void* alloc(void* self, size_t bytes, size_t, int32_t, int32_t, moec_stream) {
    Hook& hook = *static_cast<Hook*>(self);
    moec_buffer memory = {};
    if (moec_buffer_alloc(hook.from, bytes, &memory) != MOEC_OK) return nullptr;
    hook.taken.push_back(bytes);
    ++hook.live;
    return memory.ptr;
  }
  static void release(void* self, void* pointer, size_t bytes, int32_t, int32_t, moec_stream) {
    Hook& hook = *static_cast<Hook*>(self);
    moec_buffer memory = {pointer, bytes};
    EXPECT_EQ(moec_buffer_free(hook.from, &memory), MOEC_OK);
    --hook.live;
  }
};

TEST_F(PackedCodes, lie_in_one_block_of_the_contexts_memory) {
  Hook hook;
  auto allocator = sized<moec_allocator>();
  allocator.user = &hook;
  allocator.alloc = Hook::alloc;
  allocator.release = Hook::release;
  auto desc = sized<moec_context_desc>();
  desc.device_type = test_device().type;
  desc.device_id = test_device().id;
  desc.allocator = &allocator;
  const auto own = make<Context>(moec_context_create, static_cast<const moec_context_desc*>(&desc));
  const Codes codes(1);
  const Weights weights = bound(own.get(), codes);
  const size_t before = hook.taken.size();
  check(moec_weights_pack(weights.get(), nullptr, nullptr));
  ASSERT_EQ(hook.taken.size(), before + 1);
  EXPECT_EQ(hook.taken.back(), info_of(weights).packed_bytes);
  const size_t live = hook.live;
  check(moec_weights_bind(weights.get(), &codes.set));  // drops the copy
  EXPECT_EQ(hook.live, live - 1);
  check(moec_weights_pack(weights.get(), nullptr, nullptr));
  check(moec_weights_save_sync(weights.get(), path.c_str()));
  if (on_cpu()) return;  // which maps the file itself
  check(moec_weights_map_sync(weights.get(), path.c_str()));
  EXPECT_EQ(hook.live, live) << "a mapped file is in memory of the context, too";
}

TEST_F(PackedCodes, alone_are_packed_on_a_gpu) {
  if (on_cpu()) GTEST_SKIP() << "the CPU packs plain weights, too";
  const Weights plain = make_weights(context, MOEC_SCHEME_NONE);
  Tensors tensors;
  auto set = sized<moec_weight_set>();
  set.up.data = tensors.output(MOEC_BF16, {E, I, H});
  set.down.data = tensors.output(MOEC_BF16, {E, H, I});
  check(moec_weights_bind(plain.get(), &set));
  EXPECT_EQ(info_of(plain).packed_bytes, 0u);
  EXPECT_EQ(info_of(plain).needs_source, 1);
  EXPECT_EQ(moec_weights_pack(plain.get(), nullptr, nullptr), MOEC_E_UNSUPPORTED);
  EXPECT_NE(last_error().find("schemes 0 and 0 have no packed form on cuda"), std::string::npos)
      << last_error();
  EXPECT_EQ(moec_weights_release_source(plain.get()), MOEC_E_UNSUPPORTED);
  EXPECT_EQ(moec_weights_map_sync(plain.get(), path.c_str()), MOEC_E_UNSUPPORTED);
}

}  // namespace
}  // namespace moec::test
