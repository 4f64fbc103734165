// SPDX-License-Identifier: Apache-2.0
// few_rows_kernel: row products of coded matrices whose experts have few rows, of codes along k
// (few_rows.cu: across k). Each lane holds the codes of its next step in registers, and makes
// fragments of mma.sync of those it has, features on the m side, rows on the n side. A CTA has one
// tile; the last one of a matrix begins so that it is whole.
//
//   tile     64 features x 16 rows
//   step     a lane has a piece, 16 bytes of codes, of each of eight features g + 8 i. The k of
//            lanes c = 0 to 3 of a quad follow each other, and k is permuted alike in the rows:
//            lane c has the k of its pieces there, too
//   codes    a piece of the next step is asked for where one of this step has been decoded
//   rows     those of the next step are copied to shared memory, each lane's own, or read where
//            they are
//   warps    four or two, which take turns in k; their sums are added in their order
//   grid     tiles of features, row tiles of all groups, parts; surplus CTAs leave at once
#include "backend/cuda/sm80/few_rows_tile.cuh"
#include "backend/cuda/sm80/few_scales.h"

namespace moec::cuda {
namespace {

using Form = FewForm<false>;

constexpr int kPieces = 8, kTileFeatures = 64, kTileRows = 16;
constexpr int kStep = 64;                           // of k, bytes of codes
constexpr int kWarpsOfLong = 4, kWarpsOfShort = 2;  // of a CTA, for lines of codes
template <int kWarps>
constexpr int kCtas = 12 / kWarps;  // of an SM: registers for twelve warps
constexpr int kSumPitch = kTileFeatures + 4;

template <int kWarps, bool kCopied>
struct LinesShared {
  union {
    // Of two steps: rows g and g + 8, runs, lanes.
    uint4 rows[kWarps][kCopied ? 2 : 1][kCopied ? 2 : 1][4][32];
    float sums[kWarps][kTileRows][kSumPitch];
  };
  alignas(128) float book[32];  // inside 256 bytes
};

// Eight neighbours of a row as the fragments of a decoder want them. kApart: those four apart are
// pairs.
template <bool kApart>
__device__ __forceinline__ uint4 row_pairs(const uint4& x) {
  if constexpr (!kApart) return x;
  return {permute(x.x, x.z, 0x5410), permute(x.x, x.z, 0x7632), permute(x.y, x.w, 0x5410),
          permute(x.y, x.w, 0x7632)};
}

// The lane's part of a tile's rows in columns g and g + 8; zeros where there are none. Copied rows
// come a step early, through shared memory, where each lane reads what it has copied.
template <bool kCopied>
class FewOperand {
 public:
  __device__ FewOperand(const PortableGemm& p, const PortableTile& t, Form form, int part,
                        int count, uint32_t to)
      : to_(to),
        stages_(2 * to + kStageBytes),
        end_(form.units(int(p.k))),
        form_(form),
        both_(count > 8) {
#pragma unroll
    for (int y = 0; y < 2; ++y) {
      const int i = few_lane() / 4 + 8 * y;
      int64_t row = i < count ? t.first_row + t.m0 + i : -1;
      if (p.a.gather && row >= 0) row = p.a.gather[row];
      there_[y] = row >= 0;
      rows_[y] = ptx::kept(static_cast<const char*>(p.a.base) +
                           2 * (part * p.a_part + (there_[y] ? row * p.a.i_stride : 0)));
    }
  }
  // Asks for those at k; behind the end, for zeros.
  __device__ __forceinline__ void fetch(int k) {
    if constexpr (!kCopied) return;
    for_chunks([&](int y, int run) {
      const uint32_t bytes = k < end_ && there_[y] ? 16 : 0;
      ptx::copy_async_kept(to_ + (y * 4 + run) * 512, bytes ? chunk(y, run, k) : rows_[y], bytes);
    });
    ptx::copy_async_commit();
    to_ = stages_ - to_;
  }
  // Those at k, which were asked for before the last ones.
  template <bool kApart>
  __device__ __forceinline__ void take(int k, uint4 (&x)[2][4]) const {
    if constexpr (kCopied) ptx::copy_async_wait<1>();
    for_chunks([&](int y, int run) {
      uint4 v = {};
      if constexpr (kCopied)
        v = ptx::shared_load(to_ + (y * 4 + run) * 512);
      else if (k < end_ && there_[y])
        v = ptx::load_chunk(chunk(y, run, k));
      x[y][run] = row_pairs<kApart>(v);
    });
  }
  // Whether rows of both octets are multiplied: copied ones always, since a loop without branches
  // is worth more.
  __device__ __forceinline__ bool both() const { return kCopied || both_; }

 private:
  static constexpr uint32_t kStageBytes = 4096;
  template <class Body>
  __device__ __forceinline__ void for_chunks(const Body& body) const {
#pragma unroll
    for (int y = 0; y < 2; ++y)
#pragma unroll
      for (int run = 0; run < 4; ++run)
        if ((y == 0 || both()) && (run < 2 || form_.nibbles)) body(y, run);
  }
  __device__ __forceinline__ const char* chunk(int y, int run, int k) const {
    return rows_[y] + (unsigned(k) << form_.shift) + 16 * run;
  }
  const char* rows_[2];
  uint32_t to_;            // the stage that is filled next
  const uint32_t stages_;  // both, added
  int end_;
  const Form form_;
  const bool both_;
  bool there_[2];
};

// The lane's pieces of codes.
template <int kStride>
class FewLines {
 public:
  __device__ FewLines(const PortableGemm& p, const PortableTile& t, int part, Form form, int first)
      : k_(first), end_(form.units(int(p.k))) {
    const Operand& b = p.b[part];
    const OperandCodes& codes = p.codes[part];
    const int64_t pitch = few_pitch(b, codes, form);
    next_ = unsigned(8 * pitch);
    at_ = few_codes(b, codes, t.group, form) + pitch * (unsigned(t.n0) + few_lane() / 4) + k_;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      piece[i] = uint4{};
      fetch(i);
    }
  }
  // On to the next step, whose pieces are fetched from here on.
  __device__ __forceinline__ void advance() {
    k_ += kStride;
    at_ += kStride;
  }
  __device__ __forceinline__ int k() const { return k_; }
  __device__ __forceinline__ bool inside() const { return k_ < end_; }
  // Piece i; behind the end it stays as it is, since there rows are zeros, and scales.
  __device__ __forceinline__ void fetch(int i) {
    ptx::load_codes_if(inside(), piece[i], at_ + uint64_t(next_) * unsigned(i));
  }
  uint4 piece[kPieces];

 private:
  int k_, end_;
  const char* at_;
  unsigned next_;  // bytes from one piece to the next one
};

// How a kernel decodes, which kinds of scales it meets, which pairs its fragments have, whether its
// rows are copied (lookups of codes leave shared memory no time for that), whether each line has
// scales of its own, and whether short lines have a kernel. Kernels that meet one kind alone have
// registers to spare.
template <unsigned kKindsMet, bool kPairsApart, bool kRowsCopied, bool kScalesOfLines>
struct FewDecoding {
  static constexpr unsigned kKinds = kKindsMet;
  static constexpr bool kApart = kPairsApart, kCopied = kRowsCopied, kOfLines = kScalesOfLines;
  static constexpr bool kShort = kPairsApart || kKindsMet == 1 << kFewF32;
};
struct OfPowers : FewDecoding<1 << kFewPowers, true, true, true> {};
struct OfIntegers : FewDecoding<1 << kFewBf16 | 1 << kFewZeros, true, true, true> {
  using Decoder = FewApartIntegers<__nv_bfloat16>;
};
template <unsigned kKinds>
struct OfBook : FewDecoding<kKinds, false, false, true> {
  using Decoder = FewBook<__nv_bfloat16>;
};
template <unsigned kKinds>
struct OfBytes : FewDecoding<kKinds, false, true, false> {
  using Decoder = FewBytes<__nv_bfloat16>;
};
template <unsigned kKinds>
struct OfFp8 : FewDecoding<kKinds, false, true, false> {
  using Decoder = FewFp8<__nv_bfloat16>;
};

// The products of a step. decoder(i): of piece i; fetch(i) asks for its successor.
template <int kRuns, class Lines, class Make, class Fetch>
__device__ __forceinline__ void multiply_lines(FewSums& c, const Lines& codes,
                                               const uint4 (&x)[2][4], bool both,
                                               const Make& decoder, const Fetch& fetch) {
#pragma unroll
  for (int m = 0; m < kPieces / 2; ++m) {
    const auto low = decoder(2 * m), high = decoder(2 * m + 1);
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      const FourPairs a = low.elements(codes.piece[2 * m], run);
      const FourPairs b = high.elements(codes.piece[2 * m + 1], run);
      const uint32_t one[4] = {a.pair[0], b.pair[0], a.pair[1], b.pair[1]};
      const uint32_t two[4] = {a.pair[2], b.pair[2], a.pair[3], b.pair[3]};
      mma<__nv_bfloat16>(c[2 * m], one, x[0][run].x, x[0][run].y);
      mma<__nv_bfloat16>(c[2 * m], two, x[0][run].z, x[0][run].w);
      if (both) {
        mma<__nv_bfloat16>(c[2 * m + 1], one, x[1][run].x, x[1][run].y);
        mma<__nv_bfloat16>(c[2 * m + 1], two, x[1][run].z, x[1][run].w);
      }
    }
    fetch(2 * m);
    fetch(2 * m + 1);
  }
}

// The sums of all warps to where they belong.
template <int kWarps, class Shared>
__device__ __forceinline__ void write_lines(const PortableGemm& p, const PortableTile& t,
                                            const FewSums& c, int rows, Shared& shared) {
  const int lane = few_lane();
  float* const own = &shared.sums[few_warp()][lane % 4 * 2][lane / 4];
#pragma unroll
  for (int a = 0; a < 8; ++a) {
    if (a % 2 && rows <= 8) continue;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      own[(a % 2 * 8 + i % 2) * kSumPitch + a / 2 * 16 + i / 2 * 8] = c[a][i];
  }
  __syncthreads();
  const int column = int(threadIdx.x) % kTileFeatures;
#pragma unroll 1
  for (int row = int(threadIdx.x) / kTileFeatures; row < rows; row += 32 * kWarps / kTileFeatures) {
    float sum = shared.sums[0][row][column];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) sum += shared.sums[w][row][column];
    store_few(p, t, row, t.n0 + column, sum);
  }
}

template <class Of, int kWarps>
__global__ __launch_bounds__(32 * kWarps,
                             kCtas<kWarps>) void few_rows_kernel(const PortableGemm p) {
  constexpr bool kPowers = std::is_same_v<Of, OfPowers>;
  constexpr int kStride = kStep * kWarps;
  __shared__ LinesShared<kWarps, Of::kCopied> shared;
  if (!p.groups_made) begin_kernel();
  const Form form(p);
  PortableTile t;
  t.part = int(blockIdx.z);
  t.n0 = min(int(blockIdx.x) * kTileFeatures, int(p.n) - kTileFeatures);
  if (!find_few_rows(p.groups, int(blockIdx.y), kTileRows, t)) {
    if (p.groups_made) begin_kernel();  // kernels behind this one wait for it alone
    return;
  }
  const int lane = few_lane(), count = int(min(t.m_end - t.m0, int64_t(kTileRows)));
  const int own = lane % 4 * 16, end = form.units(int(p.k)) + own;  // a warp leaves together
  const int last_part = p.sum ? p.parts - 1 : t.part;
  FewSums c = {};
#pragma unroll 1
  for (int part = t.part; part <= last_part; ++part) {
    const int first = few_warp() * kStep + own;
    FewLines<kStride> codes(p, t, part, form, first);
    FewScales<Form, Of::kKinds, Of::kOfLines> scales(p, part, t.group, int(t.n0), form, end - own);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) scales.fetch(i, first);
    if (p.groups_made && part == t.part) begin_kernel();  // codes come meanwhile
    FewOperand<Of::kCopied> rows(p, t, form, part, count,
                                 ptx::shared_address(&shared.rows[few_warp()][0][0][0][lane]));
    rows.fetch(first);
    FewContext context;
    if constexpr (!kPowers) {
      __syncthreads();  // the book of another part
      context = few_context(p, part, shared.book);
      __syncthreads();
    }
#pragma unroll 1
    for (int k = first; k < end; k += kStride) {
      const bool inside = codes.inside();
      rows.fetch(k + kStride);
      codes.advance();
      uint4 x[2][4];
      rows.template take<Of::kApart>(k, x);
      const auto fetch = [&](int i) {
        codes.fetch(i);
        scales.fetch(i, codes.k());
      };
      const auto multiply = [&]<int kRuns>(const auto& decoder) {
        multiply_lines<kRuns>(c, codes, x, rows.both(), decoder, fetch);
      };
      if constexpr (kPowers) {
        uint32_t most = 0;
#pragma unroll
        for (int i = 0; i < kPieces; ++i) most = max(most, scales.power(i));
        const auto of = [&]<bool kLarge>(int i) {
          return FewApartE2m1<kLarge>(inside ? scales.power(i) : 0);
        };
        if (__any_sync(~0u, FewApartE2m1<false>::is_large(most)))
          multiply.template operator()<4>([&](int i) { return of.template operator()<true>(i); });
        else
          multiply.template operator()<4>([&](int i) { return of.template operator()<false>(i); });
      } else {
        using Decoder = typename Of::Decoder;
        scales.convert(k, inside);
        multiply.template operator()<Decoder::kRuns>(
            [&](int i) { return Decoder(context, scales.block(i)); });
      }
    }
    ptx::copy_async_wait<0>();  // of nothing, which may be under way
  }
  __syncthreads();  // the rows
  write_lines<kWarps>(p, t, c, count, shared);
}

template <class Of, int kWarps>
void launch_with(const Op& op, const PortableGemm& p) {
  const dim3 grid = few_grid(p, kTileRows, kTileFeatures);
  run(op, "portable product", few_rows_kernel<Of, kWarps>, grid, 32 * kWarps, 0, p);
}
// Two warps have less to begin and to add up: for short lines, where CTAs are enough.
template <class Of>
void launch(const Op& op, const PortableGemm& p) {
  const int64_t groups = std::min(int64_t(p.groups.count), p.groups.choice_rows);
  const int64_t tiles = p.n / kTileFeatures * groups * (p.sum ? 1 : p.parts);
  const bool is_short = Form(p).units(int(p.k)) <= 16 * kStep && tiles >= 1024;
  if constexpr (Of::kShort)
    if (is_short) return launch_with<Of, kWarpsOfShort>(op, p);
  launch_with<Of, kWarpsOfLong>(op, p);
}

}  // namespace

void few_lines_product(const Op& op, const PortableGemm& p) {
  const CommonScales scales = common_scales(p.codes[0].quant, p.codes[p.parts - 1].quant);
  const moec_dtype dtype = scales.zeros ? moec_dtype(0) : scales.dtype;
  constexpr unsigned kF32 = 1 << kFewF32, kBf16 = 1 << kFewBf16, kZeros = 1 << kFewZeros;
  switch (p.codes[0].quant.scheme) {
    case MOEC_SCHEME_MXFP4:
      return launch<OfPowers>(op, p);
    case MOEC_SCHEME_INT8:
      return dtype == MOEC_F32 ? launch<OfBytes<kF32>>(op, p)
                               : launch<OfBytes<kFewFloats | kZeros>>(op, p);
    case MOEC_SCHEME_FP8:
      return dtype == MOEC_F32 ? launch<OfFp8<kF32>>(op, p)
                               : launch<OfFp8<kFewFloats | 1 << kFewPowers>>(op, p);
    case MOEC_SCHEME_INT4:
      if (scales.dtype == p.a.dtype) return launch<OfIntegers>(op, p);
      break;
    default:
      break;
  }
  if (dtype == MOEC_F32)
    launch<OfBook<kF32>>(op, p);
  else if (dtype == MOEC_BF16)
    launch<OfBook<kBf16>>(op, p);
  else
    launch<OfBook<kFewFloats | 1 << kFewNested | kZeros>>(op, p);
}

}  // namespace moec::cuda
