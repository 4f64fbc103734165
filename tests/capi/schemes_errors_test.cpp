// SPDX-License-Identifier: Apache-2.0
// Mistakes in what weights of each scheme bind and in moec_weights_dequantise, and the matrices
// that it writes. Shown once to fail: the rows of gate and up exchanged in part_rows().
#include "mistakes.h"

namespace moec::test {
namespace {

constexpr int64_t E = Problem::kExperts;

// Weights of a plain MLP with H = 64 and I = 32, whose `up` [I,H] is of a scheme.
struct Bound {
  static constexpr int64_t H = 64, I = 32;
  std::vector<uint8_t> memory = std::vector<uint8_t>(size_t(E * H * I * 8), 1);
  std::vector<moec_tensor> arrays;
  moec_weights_desc desc;
  moec_quant quant = sized<moec_quant>();
  moec_weight_set set = sized<moec_weight_set>();

  Bound(const Problem& p, uint32_t scheme, bool in_out) : desc(p.weights_desc) {
    desc.gate_layout = MOEC_GATE_NONE;
    desc.hidden = H;
    desc.inter = I;
    desc.gate_up_scheme = scheme;
    desc.gate_up_orientation = in_out ? MOEC_IN_OUT : MOEC_OUT_IN;
    set.down.data = at(MOEC_F32, {E, H, I});
    set.up.quant = &quant;
  }
  moec_tensor at(moec_dtype dtype, std::initializer_list<int64_t> shape) {
    return tensor_of(memory.data(), dtype, shape);
  }
  // As each scheme has them.
  static Bound of(const Problem& p, uint32_t scheme) {
    const bool in_out = scheme >= MOEC_SCHEME_AWQ && scheme <= MOEC_SCHEME_GPTQ_V2;
    Bound b(p, scheme, in_out);
    moec_quant& q = b.quant;
    moec_tensor& codes = b.set.up.data;
    switch (scheme) {
      case MOEC_SCHEME_FP8:
        codes = b.at(MOEC_F8_E4M3, {E, I, H});
        q.scales = b.at(MOEC_F32, {E, I, 1});
        break;
      case MOEC_SCHEME_CODEBOOK4:
        codes = b.at(MOEC_U8, {E * I * H / 2, 1});
        q.scales = b.at(MOEC_F32, {E * I * H / 64});
        q.codebook = b.at(MOEC_F32, {16});
        break;
      case MOEC_SCHEME_MXFP4:
        codes = b.at(MOEC_U8, {E, I, H / 32, 16});
        q.scales = b.at(MOEC_U8, {E, I, H / 32});
        break;
      case MOEC_SCHEME_NVFP4:
        codes = b.at(MOEC_U8, {E, I, H / 2});
        q.scales = b.at(MOEC_F8_E4M3, {E, I, H / 16});
        q.scales2 = b.at(MOEC_F32, {E});
        break;
      case MOEC_SCHEME_INT4:
        codes = b.at(MOEC_I32, {E, I, H / 8});
        q.scales = b.at(MOEC_BF16, {E, I, 2});
        q.zeros = b.at(MOEC_I32, {E, I / 8, 2});
        q.group_index = b.at(MOEC_I32, {E, H});
        q.block_k = 32;
        break;
      case MOEC_SCHEME_AWQ:
        codes = b.at(MOEC_I32, {E, H, I / 8});
        break;
      case MOEC_SCHEME_GPTQ:
      case MOEC_SCHEME_GPTQ_V2:
        codes = b.at(MOEC_I32, {E, H / 8, I});
        break;
      case MOEC_SCHEME_GGUF_Q8_0:
        codes = b.at(MOEC_U8, {E, I, H / 32 * 34});
        b.set.up.quant = nullptr;
        break;
      default:
        break;
    }
    if (!in_out) return b;
    q.scales = b.at(MOEC_F16, {E, 3, I});  // K is no multiple of the group
    q.zeros = b.at(MOEC_I32, {E, 3, I / 8});
    q.block_k = 24;
    return b;
  }
};

moec_status bind(Problem& p, Bound& b) {
  const auto weights = make<Weights>(moec_weights_create, p.context, &b.desc);
  return moec_weights_bind(weights.get(), &b.set);
}
template <class Spoil>
std::function<moec_status(Problem&)> with(uint32_t scheme, Spoil spoil) {
  return [=](Problem& p) {
    Bound b = Bound::of(p, scheme);
    if (b.set.up.quant) b.set.up.quant = &b.quant;
    spoil(b);
    return bind(p, b);
  };
}
template <class Spoil>
std::function<moec_status(Problem&)> dequantising(Spoil spoil) {
  return [=](Problem& p) {
    Bound b = Bound::of(p, MOEC_SCHEME_MXFP4);
    b.set.up.quant = &b.quant;
    const auto weights = make<Weights>(moec_weights_create, p.context, &b.desc);
    check(moec_weights_bind(weights.get(), &b.set));
    std::vector<float> values(size_t(Bound::H * Bound::I));
    uint32_t matrix = MOEC_MATRIX_UP;
    int32_t expert = 0;
    moec_tensor to = tensor_of(values.data(), MOEC_F32, {Bound::I, Bound::H});
    spoil(b, matrix, expert, to);
    return moec_weights_dequantise(weights.get(), matrix, expert, to.data ? &to : nullptr, nullptr);
  };
}

const Mistake kMistakes[] = {
    {"unknown_scheme", MOEC_E_UNSUPPORTED,
     "the scheme is 15; this version has 0 (none) to 14 (gguf_mxfp4)",
     [](Problem& p) {
       Bound b(p, 15, false);
       moec_weights* out = nullptr;
       return moec_weights_create(p.context, &b.desc, &out);
     }},
    {"awq_out_in", MOEC_E_UNSUPPORTED, "the orientation of up is OUT_IN (0); awq has IN_OUT (1)",
     with(MOEC_SCHEME_AWQ, [](Bound& b) { b.desc.gate_up_orientation = MOEC_OUT_IN; })},
    {"gguf_in_out", MOEC_E_UNSUPPORTED,
     "the orientation of up is IN_OUT (1); gguf_q8_0 has OUT_IN (0)",
     with(MOEC_SCHEME_GGUF_Q8_0, [](Bound& b) { b.desc.gate_up_orientation = MOEC_IN_OUT; })},
    {"mxfp4_inputs", MOEC_E_SHAPE, "up has 48 inputs; mxfp4 has a multiple of 32",
     with(MOEC_SCHEME_MXFP4,
          [](Bound& b) {
            b.desc.hidden = 48;
            b.set.down.data = b.at(MOEC_F32, {E, 48, Bound::I});
          })},
    {"mxfp4_codes", MOEC_E_SHAPE, "up has shape [4,32,64]; expected [4,32,32]",
     with(MOEC_SCHEME_MXFP4, [](Bound& b) { b.set.up.data = b.at(MOEC_U8, {E, 32, 64}); })},
    {"mxfp4_scales_dtype", MOEC_E_DTYPE, "up.quant.scales has dtype f32; expected e8m0 or u8",
     with(MOEC_SCHEME_MXFP4, [](Bound& b) { b.quant.scales = b.at(MOEC_F32, {E, 32, 2}); })},
    {"mxfp4_block", MOEC_E_UNSUPPORTED, "up.quant.block_k is 16; mxfp4 has 0 or 32",
     with(MOEC_SCHEME_MXFP4, [](Bound& b) { b.quant.block_k = 16; })},
    {"fp8_codes", MOEC_E_DTYPE, "up has dtype i8; expected e4m3 or e5m2",
     with(MOEC_SCHEME_FP8,
          [](Bound& b) { b.set.up.data = b.at(MOEC_I8, {E, Bound::I, Bound::H}); })},
    {"fp8_three_rows", MOEC_E_SHAPE, "up.quant.scales has shape [4,3,1]; expected [4,1,1]",
     with(MOEC_SCHEME_FP8,
          [](Bound& b) {
            b.quant.block_n = 128;
            b.quant.block_k = 128;
            b.quant.scales = b.at(MOEC_F32, {E, 3, 1});
          })},
    {"stream_bytes", MOEC_E_SHAPE, "up has 4094 bytes; expected 4096, for a stream of 8192 codes",
     with(MOEC_SCHEME_CODEBOOK4, [](Bound& b) { b.set.up.data = b.at(MOEC_U8, {4094}); })},
    {"stream_block", MOEC_E_UNSUPPORTED, "up.quant.block_k is 48; codebook4 has powers of two",
     with(MOEC_SCHEME_CODEBOOK4, [](Bound& b) { b.quant.block_k = 48; })},
    {"stream_scales", MOEC_E_SHAPE, "up.quant.scales has shape [64]; expected [128]",
     with(MOEC_SCHEME_CODEBOOK4, [](Bound& b) { b.quant.scales = b.at(MOEC_F32, {64}); })},
    {"stream_codebook", MOEC_E_INVALID_ARG,
     "up.quant.codebook is absent; codebook4 of plain scales",
     with(MOEC_SCHEME_CODEBOOK4, [](Bound& b) { b.quant.codebook = {}; })},
    {"nested_offset", MOEC_E_INVALID_ARG,
     "up.quant.scale_offset is absent; codebook4 of nested scales needs it",
     with(MOEC_SCHEME_CODEBOOK4,
          [](Bound& b) {
            b.quant.scales = b.at(MOEC_U8, {128});
            b.quant.scale_book = b.at(MOEC_F32, {256});
            b.quant.scales2 = b.at(MOEC_F32, {1});
          })},
    {"nested_scales2", MOEC_E_SHAPE, "up.quant.scales2 has shape [1]; expected [2]",
     with(MOEC_SCHEME_CODEBOOK4,
          [](Bound& b) {
            b.quant.scales = b.at(MOEC_U8, {128});
            b.quant.scale_book = b.at(MOEC_F32, {256});
            b.quant.scales2 = b.at(MOEC_F32, {1});
            b.quant.scale_offset = b.at(MOEC_F32, {1});
            b.quant.scale_block = 64;
          })},
    {"stream_per_expert_scales", MOEC_E_INVALID_ARG,
     "up.quant.scales is per expert and its codes are one tensor",
     with(MOEC_SCHEME_CODEBOOK4,
          [](Bound& b) {
            b.arrays.assign(size_t(E), b.at(MOEC_F32, {32}));
            b.quant.scales = {};
            b.quant.per_expert_scales = b.arrays.data();
            b.set.up.count = E;
          })},
    {"nvfp4_scales2", MOEC_E_INVALID_ARG, "up.quant.scales2 is absent; nvfp4 needs it",
     with(MOEC_SCHEME_NVFP4, [](Bound& b) { b.quant.scales2 = {}; })},
    {"nvfp4_scales2_shape", MOEC_E_SHAPE, "up.quant.scales2 has shape [4,2]; expected [4]",
     with(MOEC_SCHEME_NVFP4, [](Bound& b) { b.quant.scales2 = b.at(MOEC_F32, {E, 2}); })},
    {"divides_what", MOEC_E_INVALID_ARG, "up.quant.flags is 0x1; the known bits are 0x0",
     with(MOEC_SCHEME_MXFP4, [](Bound& b) { b.quant.flags = MOEC_QUANT_SCALES2_DIVIDES; })},
    {"int4_zeros", MOEC_E_SHAPE, "up.quant.zeros has shape [4,32,2]; expected [4,4,2]",
     with(MOEC_SCHEME_INT4, [](Bound& b) { b.quant.zeros = b.at(MOEC_I32, {E, 32, 2}); })},
    {"int4_group_index", MOEC_E_DTYPE, "up.quant.group_index has dtype i64; expected i32",
     with(MOEC_SCHEME_INT4, [](Bound& b) { b.quant.group_index = b.at(MOEC_I64, {E, Bound::H}); })},
    {"awq_zeros", MOEC_E_INVALID_ARG, "up.quant.zeros is absent; awq needs it",
     with(MOEC_SCHEME_AWQ, [](Bound& b) { b.quant.zeros = {}; })},
    {"awq_group_index", MOEC_E_INVALID_ARG, "up.quant.group_index is given; awq has none",
     with(MOEC_SCHEME_AWQ, [](Bound& b) { b.quant.group_index = b.at(MOEC_I32, {E, Bound::H}); })},
    {"gptq_codes", MOEC_E_SHAPE, "up has shape [4,64,4]; expected [4,8,32]",
     with(MOEC_SCHEME_GPTQ,
          [](Bound& b) { b.set.up.data = b.at(MOEC_I32, {E, Bound::H, Bound::I / 8}); })},
    {"gguf_scales", MOEC_E_INVALID_ARG, "up.quant.scales is given; gguf_q8_0 has none",
     with(MOEC_SCHEME_GGUF_Q8_0,
          [](Bound& b) {
            b.set.up.quant = &b.quant;
            b.quant.scales = b.at(MOEC_F32, {E, 32, 1});
          })},
    {"unpack_unpacked", MOEC_E_INVALID_STATE, "weights have no packed copy",
     [](Problem& p) {
       Bound b = Bound::of(p, MOEC_SCHEME_MXFP4);
       b.set.up.quant = &b.quant;
       const auto weights = make<Weights>(moec_weights_create, p.context, &b.desc);
       check(moec_weights_bind(weights.get(), &b.set));
       return moec_weights_unpack(weights.get(), &b.set, nullptr);
     }},
    {"codes_in_the_place_of_plain_weights", MOEC_E_MISMATCH,
     "weights are codes of mxfp4; desc.flags has MOEC_EXPERTS_PLAIN_WEIGHTS",
     [](Problem& p) {
       Bound b = Bound::of(p, MOEC_SCHEME_MXFP4);
       b.set.up.quant = &b.quant;
       const auto weights = make<Weights>(moec_weights_create, p.context, &b.desc);
       check(moec_weights_bind(weights.get(), &b.set));
       moec_experts_desc desc = p.experts_desc;
       desc.hidden = Bound::H;
       desc.inter = Bound::I;
       desc.gate_layout = MOEC_GATE_NONE;
       desc.activation.kind = MOEC_ACT_SILU;
       const auto call = [&] {
         const auto experts = make<Experts>(moec_experts_create, p.context, &desc);
         uint64_t need = 0;
         return moec_experts_describe(experts.get(), weights.get(), 5, nullptr, 0, &need);
       };
       EXPECT_EQ(call(), MOEC_OK);
       desc.flags = MOEC_EXPERTS_PLAIN_WEIGHTS;
       return call();
     }},
    {"dequantise_unbound", MOEC_E_INVALID_STATE, "weights are not bound",
     [](Problem& p) {
       const auto weights = make<Weights>(moec_weights_create, p.context, &p.weights_desc);
       std::vector<float> values(1);
       const moec_tensor to = tensor_of(values.data(), MOEC_F32, {1, 1});
       return moec_weights_dequantise(weights.get(), MOEC_MATRIX_DOWN, 0, &to, nullptr);
     }},
    {"dequantise_to_null", MOEC_E_INVALID_ARG, "to is NULL; it is required",
     dequantising([](Bound&, uint32_t&, int32_t&, moec_tensor& to) { to = {}; })},
    {"dequantise_expert", MOEC_E_INVALID_ARG, "expert is 4; expected 0 to 3",
     dequantising([](Bound&, uint32_t&, int32_t& expert, moec_tensor&) { expert = 4; })},
    {"dequantise_matrix", MOEC_E_INVALID_ARG, "matrix is 4; expected 0 to 3",
     dequantising([](Bound&, uint32_t& matrix, int32_t&, moec_tensor&) { matrix = 4; })},
    {"dequantise_no_gate", MOEC_E_INVALID_ARG, "matrix is 1 (GATE); gate_layout 4 has none",
     dequantising(
         [](Bound&, uint32_t& matrix, int32_t&, moec_tensor&) { matrix = MOEC_MATRIX_GATE; })},
    {"dequantise_shape", MOEC_E_SHAPE, "to has shape [64,32]; expected [32,64]",
     dequantising([](Bound&, uint32_t&, int32_t&, moec_tensor& to) {
       to = tensor_of(to.data, MOEC_F32, {Bound::H, Bound::I});
     })},
    {"dequantise_dtype", MOEC_E_DTYPE, "to has dtype u8; expected f32",
     dequantising([](Bound&, uint32_t&, int32_t&, moec_tensor& to) {
       to = tensor_of(to.data, MOEC_U8, {Bound::I, Bound::H});
     })},
    {"dequantise_into_the_weights", MOEC_E_ALIAS, "to [0x",
     dequantising([](Bound& b, uint32_t&, int32_t&, moec_tensor& to) {
       to = b.at(MOEC_F32, {Bound::I, Bound::H});
     })},
};
MOEC_TEST_MISTAKES(kMistakes);

TEST(Schemes, AreBoundAsTheyArePublished) {
  Problem p;
  for (uint32_t scheme = MOEC_SCHEME_FP8; scheme <= MOEC_SCHEME_GGUF_Q8_0; ++scheme) {
    Bound b = Bound::of(p, scheme);
    if (b.set.up.quant) b.set.up.quant = &b.quant;
    EXPECT_EQ(bind(p, b), MOEC_OK) << scheme << ": " << error_info().message;
    if (scheme != MOEC_SCHEME_CODEBOOK4) continue;
    b.set.up.data = b.at(MOEC_BF16, {E * Bound::I * Bound::H / 4, 1});  // its quant_storage
    EXPECT_EQ(bind(p, b), MOEC_OK) << error_info().message;
  }
}

// gate_up has its rows as they are bound, and gate and up are parts of it.
TEST(Dequantise, WritesTheMatricesOfEachLayout) {
  Problem p;
  constexpr int64_t H = Problem::kHidden, I = Problem::kInter;
  for (const uint32_t orientation : {MOEC_OUT_IN, MOEC_IN_OUT})
    for (const uint32_t layout : {MOEC_GATE_THEN_UP, MOEC_UP_THEN_GATE, MOEC_GATE_INTERLEAVED}) {
      const bool in_out = orientation == MOEC_IN_OUT;
      auto desc = p.weights_desc;
      desc.gate_layout = layout;
      desc.gate_up_orientation = orientation;
      auto set = p.weight_set(p.gate_up, p.down);
      set.gate_up.data =
          tensor_of(p.gate_up.data(), MOEC_F32, {E, in_out ? H : 2 * I, in_out ? 2 * I : H});
      const auto weights = make<Weights>(moec_weights_create, p.context, &desc);
      check(moec_weights_bind(weights.get(), &set));
      const auto values = [&](uint32_t matrix, int64_t rows) {
        std::vector<float> v(size_t(rows * H), -7);
        const moec_tensor to =
            tensor_of(v.data(), MOEC_F32, {in_out ? H : rows, in_out ? rows : H});
        check(moec_weights_dequantise(weights.get(), matrix, 2, &to, nullptr));
        return v;
      };
      const std::vector<float> both = values(MOEC_MATRIX_GATE_UP, 2 * I);
      EXPECT_EQ(both, std::vector<float>(p.gate_up.begin() + 2 * 2 * I * H,
                                         p.gate_up.begin() + 3 * 2 * I * H));
      const std::vector<float> gate = values(MOEC_MATRIX_GATE, I), up = values(MOEC_MATRIX_UP, I);
      for (int64_t n = 0; n < I; ++n)
        for (int64_t k = 0; k < H; ++k) {
          const auto at = [&](const std::vector<float>& v, int64_t row, int64_t rows) {
            return v[size_t(in_out ? k * rows + row : row * H + k)];
          };
          const int64_t gate_row = layout == MOEC_GATE_THEN_UP   ? n
                                   : layout == MOEC_UP_THEN_GATE ? I + n
                                                                 : 2 * n;
          const int64_t up_row = layout == MOEC_GATE_THEN_UP   ? I + n
                                 : layout == MOEC_UP_THEN_GATE ? n
                                                               : 2 * n + 1;
          ASSERT_EQ(at(gate, n, I), at(both, gate_row, 2 * I));
          ASSERT_EQ(at(up, n, I), at(both, up_row, 2 * I));
        }
    }
}

}  // namespace
}  // namespace moec::test
