// SPDX-License-Identifier: Apache-2.0
// Quantised weights at the C boundary: mistakes in what a set binds, and packed files. Mutations
// noted: without check_quant() the rows about fields and blocks fail, without the refusal in
// Binder::matrix() the row about a gradient of codes; where down is read in the packed form of up,
// the file of mixed formats gives another y.
#include <unistd.h>

#include <cstdio>

#include "mistakes.h"

namespace moec::test {
namespace {

constexpr int64_t E = Problem::kExperts, H = Problem::kHidden, I = Problem::kInter;

// INT8 weights of a Problem's shape.
struct Quantised {
  std::vector<int8_t> up_codes, down_codes, zeros;
  std::vector<float> scales;
  std::vector<moec_tensor> arrays;
  moec_quant up_quant = sized<moec_quant>(), down_quant = sized<moec_quant>();
  moec_weights_desc desc;
  moec_weight_set set = sized<moec_weight_set>();

  explicit Quantised(const Problem& p) : desc(p.weights_desc) {
    desc.gate_up_scheme = desc.down_scheme = MOEC_SCHEME_INT8;
    Random random(5);
    for (int64_t i = 0; i < E * 2 * I * H; ++i) up_codes.push_back(int8_t(random.below(256) - 128));
    for (int64_t i = 0; i < E * H * I; ++i) down_codes.push_back(int8_t(random.below(256) - 128));
    for (int64_t i = 0; i < E * 2 * I; ++i) zeros.push_back(int8_t(random.below(9) - 4));
    for (int64_t i = 0; i < E * 2 * I; ++i) scales.push_back(float(0.001 + 0.0001 * double(i % 7)));
    set.gate_up.data = tensor_of(up_codes.data(), MOEC_I8, {E, 2 * I, H});
    set.down.data = tensor_of(down_codes.data(), MOEC_I8, {E, H, I});
    up_quant.scales = column(MOEC_F32, 2 * I);
    up_quant.zeros = tensor_of(zeros.data(), MOEC_I8, {E, 2 * I, 1});
    down_quant.scales = column(MOEC_F32, H);
    set.gate_up.quant = &up_quant;
    set.down.quant = &down_quant;
  }
  moec_tensor column(moec_dtype dtype, int64_t rows) {
    return tensor_of(scales.data(), dtype, {E, rows, 1});
  }
  moec_tensor anything() { return tensor_of(scales.data(), MOEC_F32, {1}); }
  Weights make_weights(const Problem& p) const {
    return make<Weights>(moec_weights_create, p.context, &desc);
  }
};

template <class Spoil>
moec_status bind_with(Problem& p, Spoil spoil) {
  Quantised q(p);
  spoil(q);
  const Weights weights = q.make_weights(p);
  return moec_weights_bind(weights.get(), &q.set);
}
// Of a backward call that asks for gradients as `spoil` says.
template <class Spoil>
moec_status backward_with(Problem& p, Spoil spoil) {
  Quantised q(p);
  const Weights weights = q.make_weights(p);
  check(moec_weights_bind(weights.get(), &q.set));
  auto args = p.forward_args();
  args.weights = weights.get();
  check(moec_layer_forward(p.layer.get(), &args, nullptr));
  std::vector<uint8_t> kept = p.saved;
  p.fill_outputs();
  args.saved = p.buffer(kept);
  auto grads = p.backward_args(&args);
  p.gradients.gate_up = p.gradients.down = {};
  spoil(q, p.gradients);
  return moec_layer_backward(p.layer.get(), &grads, nullptr);
}

const Mistake kMistakes[] = {
    {"no_quant", MOEC_E_INVALID_ARG, "down.quant is NULL; the scheme of the weights is int8",
     [](Problem& p) { return bind_with(p, [](auto& q) { q.set.down.quant = nullptr; }); }},
    {"quant_of_plain", MOEC_E_INVALID_ARG,
     "down.quant is given; expected NULL for MOEC_SCHEME_NONE",
     [](Problem& p) {
       return bind_with(p, [](auto& q) { q.desc.down_scheme = MOEC_SCHEME_NONE; });
     }},
    {"quant_of_no_matrix", MOEC_E_INVALID_ARG, "gate is given; gate_layout 1 has no such matrix",
     [](Problem& p) { return bind_with(p, [](auto& q) { q.set.gate.quant = &q.up_quant; }); }},
    {"quant_size", MOEC_E_ABI, "set.quant.struct_size",
     [](Problem& p) { return bind_with(p, [](auto& q) { q.up_quant.struct_size = 8; }); }},
    {"quant_flags", MOEC_E_INVALID_ARG, "quant.flags",
     [](Problem& p) { return bind_with(p, [](auto& q) { q.up_quant.flags = 1; }); }},
    {"codes_dtype", MOEC_E_DTYPE, "down has dtype f32; expected i8",
     [](Problem& p) {
       return bind_with(
           p, [&](auto& q) { q.set.down.data = tensor_of(p.down.data(), MOEC_F32, {E, H, I}); });
     }},
    {"codes_shape", MOEC_E_SHAPE, "down has shape",
     [](Problem& p) {
       return bind_with(p, [](auto& q) {
         q.set.down.data = tensor_of(q.down_codes.data(), MOEC_I8, {E, I, H});
       });
     }},
    {"no_scales", MOEC_E_INVALID_ARG, "gate_up.quant.scales is absent; int8 needs it",
     [](Problem& p) { return bind_with(p, [](auto& q) { q.up_quant.scales = {}; }); }},
    {"scales_shape", MOEC_E_SHAPE, "down.quant.scales has shape [4,24,1]; expected [4,16,1]",
     [](Problem& p) {
       return bind_with(p, [](auto& q) { q.down_quant.scales = q.column(MOEC_F32, I); });
     }},
    {"scales_of_two_dimensions", MOEC_E_SHAPE, "down.quant.scales has shape [4,16]; expected",
     [](Problem& p) {
       return bind_with(
           p, [](auto& q) { q.down_quant.scales = tensor_of(q.scales.data(), MOEC_F32, {E, H}); });
     }},
    {"scales_dtype", MOEC_E_DTYPE, "down.quant.scales has dtype i32; expected",
     [](Problem& p) {
       return bind_with(p, [](auto& q) { q.down_quant.scales = q.column(MOEC_I32, H); });
     }},
    {"zeros_dtype", MOEC_E_DTYPE, "down.quant.zeros has dtype f32; expected i8",
     [](Problem& p) {
       return bind_with(p, [](auto& q) { q.down_quant.zeros = q.column(MOEC_F32, H); });
     }},
    {"zeros_shape", MOEC_E_SHAPE, "gate_up.quant.zeros has shape [4,16,1]; expected [4,48,1]",
     [](Problem& p) {
       return bind_with(
           p, [](auto& q) { q.up_quant.zeros = tensor_of(q.zeros.data(), MOEC_I8, {E, H, 1}); });
     }},
    {"scales_twice", MOEC_E_INVALID_ARG, "gate_up.quant.scales is given twice",
     [](Problem& p) {
       return bind_with(p, [](auto& q) {
         q.arrays.assign(size_t(E), tensor_of(q.scales.data(), MOEC_F32, {2 * I, 1}));
         q.up_quant.per_expert_scales = q.arrays.data();
         q.set.gate_up.count = E;
       });
     }},
    {"scales_of_no_count", MOEC_E_INVALID_ARG, "down.count is 0; expected 4",
     [](Problem& p) {
       return bind_with(p, [](auto& q) {
         q.arrays.assign(size_t(E), tensor_of(q.scales.data(), MOEC_F32, {H, 1}));
         q.down_quant.per_expert_scales = q.arrays.data();
         q.down_quant.scales = {};
       });
     }},
    {"scales2", MOEC_E_INVALID_ARG, "down.quant.scales2 is given; int8 has none",
     [](Problem& p) { return bind_with(p, [](auto& q) { q.down_quant.scales2 = q.anything(); }); }},
    {"codebook", MOEC_E_INVALID_ARG, "down.quant.codebook is given; int8 has none",
     [](Problem& p) {
       return bind_with(p, [](auto& q) { q.down_quant.codebook = q.anything(); });
     }},
    {"scale_book", MOEC_E_INVALID_ARG, "down.quant.scale_book is given; int8 has none",
     [](Problem& p) {
       return bind_with(p, [](auto& q) { q.down_quant.scale_book = q.anything(); });
     }},
    {"scale_offset", MOEC_E_INVALID_ARG, "down.quant.scale_offset is given; int8 has none",
     [](Problem& p) {
       return bind_with(p, [](auto& q) { q.down_quant.scale_offset = q.anything(); });
     }},
    {"group_index", MOEC_E_INVALID_ARG, "down.quant.group_index is given; int8 has none",
     [](Problem& p) {
       return bind_with(p, [](auto& q) { q.down_quant.group_index = q.anything(); });
     }},
    {"block_n", MOEC_E_SHAPE, "down.quant.scales has shape [4,16,1]; expected [4,8,1]",
     [](Problem& p) { return bind_with(p, [](auto& q) { q.down_quant.block_n = 2; }); }},
    {"block_k", MOEC_E_SHAPE, "down.quant.scales has shape [4,16,1]; expected [4,16,3]",
     [](Problem& p) { return bind_with(p, [](auto& q) { q.down_quant.block_k = 8; }); }},
    {"negative_block", MOEC_E_INVALID_ARG, "down.quant.block_k is -8; expected 0 or more",
     [](Problem& p) { return bind_with(p, [](auto& q) { q.down_quant.block_k = -8; }); }},
    {"scale_block", MOEC_E_UNSUPPORTED, "down.quant.scale_block is 256; int8 has 0",
     [](Problem& p) { return bind_with(p, [](auto& q) { q.down_quant.scale_block = 256; }); }},
    {"gradient_of_codes", MOEC_E_UNSUPPORTED,
     "the gradient of down is asked for, whose scheme is int8",
     [](Problem& p) {
       return backward_with(p, [&](auto&, moec_weight_set& gradients) {
         gradients.down.data = tensor_of(p.d_down.data(), MOEC_F32, {E, H, I});
       });
     }},
    {"quant_of_a_gradient", MOEC_E_INVALID_ARG, "down.quant is given; expected NULL for a gradient",
     [](Problem& p) {
       return backward_with(
           p, [](auto& q, moec_weight_set& gradients) { gradients.down.quant = &q.down_quant; });
     }},
};
MOEC_TEST_MISTAKES(kMistakes);

TEST(Blocks, may_be_spelled_out) {
  Problem p;
  Quantised q(p);
  q.down_quant.block_n = 1;
  q.down_quant.block_k = I;
  const Weights weights = q.make_weights(p);
  EXPECT_EQ(moec_weights_bind(weights.get(), &q.set), MOEC_OK) << error_info().message;
}

class PackedFile : public testing::Test {
 protected:
  ~PackedFile() override { std::remove(path.c_str()); }
  std::vector<float> forward(const moec_weights* weights) {
    auto args = p.forward_args();
    args.weights = weights;
    check(moec_layer_forward(p.layer.get(), &args, nullptr));
    return p.y;
  }
  // y as bound, packed, without the source, and from the file.
  void expect_same_y(Quantised& q) {
    const Weights weights = q.make_weights(p);
    check(moec_weights_bind(weights.get(), &q.set));
    const std::vector<float> expected = forward(weights.get());
    check(moec_weights_pack(weights.get(), nullptr, nullptr));
    check(moec_weights_save_sync(weights.get(), path.c_str()));
    check(moec_weights_release_source(weights.get()));
    EXPECT_EQ(forward(weights.get()), expected);
    const Weights mapped = q.make_weights(p);
    check(moec_weights_map_sync(mapped.get(), path.c_str()));
    EXPECT_EQ(forward(mapped.get()), expected);
  }

  const std::string path = testing::TempDir() + "moec-quant-" + std::to_string(getpid());
  Problem p;
};

TEST_F(PackedFile, of_codes_is_mapped_without_the_source) {
  Quantised q(p);
  expect_same_y(q);
}

TEST_F(PackedFile, of_mixed_formats_is_mapped_without_the_source) {
  Quantised q(p);
  q.desc.down_scheme = MOEC_SCHEME_NONE;
  q.set.down.data = tensor_of(p.down.data(), MOEC_F32, {E, H, I});
  q.set.down.quant = nullptr;
  expect_same_y(q);
}

TEST_F(PackedFile, keeps_eight_bits_a_code) {
  Quantised q(p);
  const Weights weights = q.make_weights(p);
  check(moec_weights_bind(weights.get(), &q.set));
  auto info = sized<moec_weights_info>();
  check(moec_weights_query(weights.get(), &info));
  // Every tensor as it is, padded to a line; 1128 bytes say how they lie. A line more, so that any
  // memory can be aligned.
  const auto lines = [](uint64_t bytes) { return (bytes + 63) / 64 * 64; };
  const uint64_t up = lines(E * 2 * I * H) + lines(E * 2 * I * 4) + lines(E * 2 * I);
  const uint64_t down = lines(E * H * I) + lines(E * H * 4);
  EXPECT_EQ(info.packed_bytes, lines(1128) + up + down + 64);
}

// What was bound comes back; tensors that overlap each other are refused.
TEST_F(PackedFile, is_unpacked) {
  Quantised q(p);
  std::vector<float> down_scales(q.scales.begin(), q.scales.begin() + E * H);
  q.down_quant.scales = tensor_of(down_scales.data(), MOEC_F32, {E, H, 1});
  const Weights weights = q.make_weights(p);
  check(moec_weights_bind(weights.get(), &q.set));
  EXPECT_EQ(moec_weights_unpack(weights.get(), &q.set, nullptr), MOEC_E_INVALID_STATE);
  check(moec_weights_pack(weights.get(), nullptr, nullptr));
  check(moec_weights_release_source(weights.get()));
  const auto bytes = [&] {
    const auto* const begin = static_cast<const uint8_t*>(q.set.down.data.data);
    return std::vector<uint8_t>(begin, begin + E * H * I);
  };
  const std::vector<uint8_t> before = bytes();
  std::fill_n(static_cast<uint8_t*>(q.set.down.data.data), before.size(), uint8_t(0x5a));
  EXPECT_EQ(moec_weights_unpack(weights.get(), &q.set, nullptr), MOEC_OK);
  EXPECT_EQ(bytes(), before);
  q.set.down.data.data = q.set.gate_up.data.data;
  EXPECT_EQ(moec_weights_unpack(weights.get(), &q.set, nullptr), MOEC_E_ALIAS);
}

TEST_F(PackedFile, of_another_format_is_a_mismatch) {
  Quantised q(p);
  const Weights weights = q.make_weights(p);
  check(moec_weights_bind(weights.get(), &q.set));
  check(moec_weights_pack(weights.get(), nullptr, nullptr));
  check(moec_weights_save_sync(weights.get(), path.c_str()));
  q.desc.down_scheme = MOEC_SCHEME_NONE;
  const Weights other = q.make_weights(p);
  EXPECT_EQ(moec_weights_map_sync(other.get(), path.c_str()), MOEC_E_MISMATCH);
  const std::string text = error_info().message;
  EXPECT_NE(text.find("-int8-int8-"), std::string::npos) << text;
  EXPECT_NE(text.find("-int8-plain-"), std::string::npos) << text;
}

}  // namespace
}  // namespace moec::test
