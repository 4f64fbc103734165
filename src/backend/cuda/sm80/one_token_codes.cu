// SPDX-License-Identifier: Apache-2.0
// one_token_codes_kernel: the products of the experts of one token, of codes along k. A warp makes
// fragments of mma.sync of codes: lines are on the m side, the token on the n side, so most columns
// of a product are zeros. Nobody waits for another warp between the operand and the sums. Code is
// short: a call finds no instructions in the caches.
//
//   set    16 lines: of gate and of up of eight features (up), or of eight features of two slots
//          (down), whose operands are in two columns
//   step   of a set: a lane has two pieces, 16 bytes of codes, of lines g and g + 8, and their
//          scales. It copies those of the next step while it multiplies these, and reads what it
//          has copied itself
//   share  a CTA has neighbouring sets, a warp neighbouring steps of these. The sums of a set are
//          added in one order
//   up     waits for the plan before it lets down in, so down may read the plan, and its first
//          codes, which depend on nothing, while up still runs. Their shared memory is chosen so
//          that one CTA of each fits a multiprocessor, and never two of up
#include "backend/cuda/device/check.h"
#include "backend/cuda/sm80/few_rows_decode.cuh"
#include "backend/cuda/sm80/mma.cuh"
#include "backend/cuda/sm80/one_token_share.cuh"

namespace moec::cuda {
namespace {

// ---- formats: bytes of a scale, which pairs fragments have, and decoders of pieces
template <class Of, int kBytesOfScale>
struct OfNumbers {
  static constexpr int kScaleBytes = kBytesOfScale, kRuns = Of::kRuns;
  static constexpr bool kApart = std::is_same_v<Of, FewApartIntegers<__nv_bfloat16>>;
  static constexpr bool kBook = std::is_same_v<Of, FewBook<__nv_bfloat16>>;
  static __device__ __forceinline__ Of decoder(const FewContext& context, uint32_t bits,
                                               moec_dtype dtype) {
    if (kBytesOfScale == 2)
      bits = kBook && dtype == MOEC_F16
                 ? __float_as_uint(__half2float(__ushort_as_half(uint16_t(bits))))
                 : bits << 16;
    return Of(context, {__uint_as_float(bits), 0});
  }
};
struct OfPowers {
  static constexpr int kScaleBytes = 1, kRuns = 4;
  static constexpr bool kApart = true, kBook = false;
};
using OfIntegers = OfNumbers<FewApartIntegers<__nv_bfloat16>, 2>;
template <int kBytes>
using OfBook = OfNumbers<FewBook<__nv_bfloat16>, kBytes>;
using OfBytes = OfNumbers<FewBytes<__nv_bfloat16>, 4>;
using OfFp8 = OfNumbers<FewFp8<__nv_bfloat16>, 4>;

template <class Of>
class OneToken : OneTokenShare {
  static constexpr int kShift = Of::kRuns == 4 ? 2 : 1;  // of bytes of codes to those of elements

 public:
  __device__ __forceinline__ OneToken(const OneTokenParams& params, unsigned char* memory)
      : OneTokenShare(params, memory),
        ring_(at_ + layout_.ring + few_warp() * 2 * kOneTokenStageBytes + few_lane() * 16),
        stages_(2 * ring_ + kOneTokenStageBytes) {}

  // What depends on no other kernel.
  __device__ __forceinline__ void begin_memory() {
    const uint32_t zeros = ptx::shared_address(shared_.zeros);
    if (threadIdx.x < sizeof(shared_.zeros) / 16)
      ptx::shared_store(zeros + threadIdx.x * 16, uint4{});
    for (int at = layout_.sums + int(threadIdx.x) * 16; at < layout_.bytes;
         at += kOneTokenThreads * 16)
      ptx::shared_store(at_ + at, uint4{});
    if constexpr (Of::kBook) {
      if (threadIdx.x < 64) {
        const float* const book = p_.parts[threadIdx.x / 32].codebook;
        shared_.book[threadIdx.x / 32][few_lane()] =
            book ? book[few_lane() % 16] : float(few_lane() - 15);
      }
    }
    if (p_.up && blockIdx.x == 0 && threadIdx.x * 128 < p_.units << kShift)
      ptx::prefetch(static_cast<const char*>(p_.operand) + threadIdx.x * 128);
  }
  // What depends on the plan: asks for the first codes.
  __device__ __forceinline__ void begin() {
    find_slots();
    __syncthreads();
    find_sets();
    const int steps = OneTokenExtent(p_).steps;
    step_ = few_warp() * sets_ * steps / kOneTokenWarps;
    left_ = (few_warp() + 1) * sets_ * steps / kOneTokenWarps - step_;
    set_ = one_token_divide(step_, steps);
    unit_ = step_ * kOneTokenStep + few_lane() % 4 * 16;
    if (left_ > 0) find_lines();
    ask();
    bias_ = begin_set();
  }
  // What depends on the operand.
  __device__ __forceinline__ void run() {
    load_operand();
    if (threadIdx.x < sets_ * kOneTokenLines)
      sums_of_set(threadIdx.x / kOneTokenLines)[threadIdx.x % kOneTokenLines] = bias_;
    __syncthreads();
    walk();
    __syncthreads();
    if (p_.up)
      finish_up();
    else
      finish_down();
  }

 private:
  // Of the set that is asked for.
  __device__ __forceinline__ void find_lines() {
    const OneTokenPlace place = place_of(set_);
    const int n = place.feature + few_lane() / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const OneTokenPart& of = p_.parts[i];
      const int group = shared_.slots[slot_of(place, i)].expert;
      const int row = (of.first_row + n * of.row_step) >> of.rows_shift;
      codes_[i] = of.codes + group * of.codes_expert + n * int64_t(of.codes_line);
      scales_[i] = of.scales + group * of.scales_expert + row * int64_t(of.scales_line);
    }
  }
  // Asks for the pieces at unit_, or behind the end of lines for others, which then have no scale.
  __device__ __forceinline__ void ask() {
    if (left_ > 0) {
#pragma unroll
      for (int index = 0; index < kOneTokenPieces; ++index) {
        const int at = min(unit_ + index * kQuadCodes, p_.units - 16), k = at << kShift >> 1;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const OneTokenPart& of = p_.parts[i];
          ptx::copy_async(ring_ + (index * 2 + i) * 512, codes_[i] + at, 16);
          ptx::load_bits_if<Of::kScaleBytes>(
              true, bits_[index][i],
              scales_[i] + uint32_t(k >> of.k_shift) * uint32_t(of.scale_step));
        }
      }
    }
    ptx::copy_async_commit();
    ring_ = stages_ - ring_;
  }

  // Rows of the operand, eight elements at a time in the order of fragments, zeros behind them.
  __device__ __forceinline__ void load_operand() {
    const int rows = p_.up ? 1 : slots_, chunks = OneTokenExtent(p_).operand / 16;
    const int end = p_.units << kShift >> 4;  // a chunk has eight elements
    int slot = 0, chunk = int(threadIdx.x);
#pragma unroll 1
    for (int i = int(threadIdx.x); i < rows * chunks; i += kOneTokenThreads) {
      slot += one_token_divide(chunk, chunks);
      uint4 v = {};
      if (chunk < end) {
        const int64_t row = p_.up ? 0 : shared_.slots[slot].row;
        v = __ldcg(static_cast<const uint4*>(p_.operand) + row * p_.operand_stride + chunk);
      }
      if constexpr (Of::kApart)
        v = {permute(v.x, v.z, 0x5410), permute(v.x, v.z, 0x7632), permute(v.y, v.w, 0x5410),
             permute(v.y, v.w, 0x7632)};
      ptx::shared_store(at_ + uint32_t(sizeof(OneTokenShared)) + i * 16, v);
      chunk += kOneTokenThreads;
    }
  }
  __device__ __forceinline__ FewContext context(int i) const {
    const bool is_book = p_.parts[i].codebook != nullptr;
    return {ptx::shared_address(shared_.book[i]), is_book ? 0 : 7, is_book ? 30 : 2, false};
  }

  // The operand of a lane at the begin of a set: zeros in columns that have none.
  __device__ __forceinline__ uint32_t operand_of(OneTokenPlace place) const {
    const int column = few_lane() / 4, slot = p_.up ? 0 : 2 * place.turn + column;
    return column < (p_.up ? 1 : 2) && (p_.up || slot < slots_)
               ? at_ + uint32_t(sizeof(OneTokenShared)) + slot * OneTokenExtent(p_).operand
               : 0;
  }

  template <class Make>
  __device__ __forceinline__ void multiply(float (&sums)[2][4], uint32_t x, const Make& decoder) {
#pragma unroll
    for (int i = 0; i < kOneTokenPieces; ++i) {
      const auto low = decoder(i, 0), high = decoder(i, 1);
      const uint4 codes[2] = {ptx::shared_load(ring_ + i * 1024),
                              ptx::shared_load(ring_ + i * 1024 + 512)};
#pragma unroll
      for (int run = 0; run < Of::kRuns; ++run) {
        const uint4 v = ptx::shared_load(x + i * (kQuadCodes << kShift) + run * 16);
        const FourPairs a = low.elements(codes[0], run), b = high.elements(codes[1], run);
        const uint32_t one[4] = {a.pair[0], b.pair[0], a.pair[1], b.pair[1]};
        const uint32_t two[4] = {a.pair[2], b.pair[2], a.pair[3], b.pair[3]};
        mma<__nv_bfloat16>(sums[0], one, v.x, v.y);
        mma<__nv_bfloat16>(sums[1], two, v.z, v.w);
      }
    }
  }

  __device__ __forceinline__ void walk() {
    float sums[2][4] = {};
    const int steps = OneTokenExtent(p_).steps;
    const uint32_t zeros = ptx::shared_address(shared_.zeros);
    int set = set_;
    uint32_t first = left_ > 0 ? operand_of(place_of(set)) : 0;
    uint32_t x = first ? first + (unit_ << kShift) : zeros;
#pragma unroll 1
    while (left_ > 0) {
      --left_;
      uint32_t bits[kOneTokenPieces][2];
#pragma unroll
      for (int i = 0; i < kOneTokenPieces; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j)
          bits[i][j] = unit_ + i * kQuadCodes < p_.units ? bits_[i][j] : 0;
      unit_ += kOneTokenStep;
      const bool ends = ++step_ == steps;
      if (ends) {
        step_ = 0;
        unit_ = few_lane() % 4 * 16;
        ++set_;
        if (left_ > 0) find_lines();
      }
      ask();  // and ring_ is the stage of this step
      ptx::copy_async_wait<1>();
      if constexpr (std::is_same_v<Of, OfPowers>) {
        const uint32_t most = max(max(bits[0][0], bits[0][1]), max(bits[1][0], bits[1][1]));
        const auto by = [&]<bool kLarge>() {
          multiply(sums, x, [&](int i, int j) { return FewApartE2m1<kLarge>(bits[i][j]); });
        };
        if (__any_sync(~0u, FewApartE2m1<false>::is_large(most)))
          by.template operator()<true>();
        else
          by.template operator()<false>();
      } else {
        multiply(sums, x, [&](int i, int j) {
          return Of::decoder(context(j), bits[i][j], p_.parts[j].dtype);
        });
      }
      if (ends || left_ == 0) {
        const int own = 1 + few_warp() % (sums_ - 1);
        float* const to = sums_of_set(set) + own * kOneTokenLines + few_lane() / 4;
        if (few_lane() % 4 == 0) {
          // Line g meets the first column, line g + 8 that one or the second.
          to[0] = sums[0][0] + sums[1][0];
          to[kOneTokenFeatures] = p_.up ? sums[0][2] + sums[1][2] : sums[0][3] + sums[1][3];
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) sums[i / 4][i % 4] = 0;
        set = set_;
        if (left_ > 0) first = operand_of(place_of(set));
      }
      x = first ? first + (unit_ << kShift) : zeros;
    }
  }

  uint32_t ring_;          // the lane's part of the stage that is asked for next
  const uint32_t stages_;  // both, added
  // What is asked for next, and how many steps of the warp are left with it.
  int set_, step_, unit_, left_;
  const char *codes_[2], *scales_[2];
  uint32_t bits_[kOneTokenPieces][2] = {};
  float bias_;  // of a set and line, the thread's
};

template <class Of>
__global__ __launch_bounds__(kOneTokenThreads, 2) void one_token_codes_kernel(
    const __grid_constant__ OneTokenParams params) {
  extern __shared__ __align__(128) unsigned char memory[];
  OneToken<Of> one(params, memory);
  one.begin_memory();
  if (params.up) begin_kernel();  // down reads the plan behind up, which has waited for it
  one.begin();
  if (!params.up) begin_kernel();
  one.run();
}

template <class Of>
void launch(const Op& op, const OneTokenParams& p, int bytes, int most) {
  constexpr const char* kWhat = "the experts of one token";
  const auto kernel = one_token_codes_kernel<Of>;
  static std::atomic<uint64_t> allowed;
  check(allow_shared_memory(kernel, most, allowed), kWhat);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                             cudaSharedmemCarveoutMaxShared),
        kWhat);
  run(op, kWhat, kernel, dim3(unsigned(op.multiprocessors)), kOneTokenThreads, bytes, p);
}

}  // namespace

void launch_one_token_codes(const Op& op, const OneTokenParams& p, uint32_t scheme, int bytes,
                            int most) {
  const moec_dtype dtype = p.parts[0].dtype;
  if (scheme == MOEC_SCHEME_MXFP4) return launch<OfPowers>(op, p, bytes, most);
  if (scheme == MOEC_SCHEME_INT8) return launch<OfBytes>(op, p, bytes, most);
  if (scheme == MOEC_SCHEME_FP8) return launch<OfFp8>(op, p, bytes, most);
  if (scheme == MOEC_SCHEME_INT4 && dtype == MOEC_BF16)
    return launch<OfIntegers>(op, p, bytes, most);
  return dtype == MOEC_F32 ? launch<OfBook<4>>(op, p, bytes, most)
                           : launch<OfBook<2>>(op, p, bytes, most);
}

}  // namespace moec::cuda
