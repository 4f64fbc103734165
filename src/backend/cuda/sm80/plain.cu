// SPDX-License-Identifier: Apache-2.0
// portable_plain_kernel: grouped products of operands of any type, stride and alignment, or coded
// in any format. They pass through shared memory as fp32.
//
//   tile     128 x 128 x 16, 256 threads; true fp32: 8 x 8 values a thread; TF32: mma m16n8k8
//   loads    the next k block waits in registers while this one is multiplied
// One kernel: what it does differently is known at run time, outside the loops over values.
#include "backend/cuda/device/codes.cuh"
#include "backend/cuda/sm80/tile.cuh"

namespace moec::cuda {
namespace {

constexpr int kDepth = 16, kStride = kPortableTile + 8;
constexpr int kLoads = kPortableTile * kDepth / kPortableThreads;
using Block = float[kDepth][kStride];
static_assert(2 * sizeof(Block) <= kPortableTileBytes);

// Which elements of a k block a thread has.
struct LoaderPlaces {
  bool along_k;  // neighbours of k lie together

  __device__ int i_of(int j) const {
    const int at = threadIdx.x + j * kPortableThreads;
    return along_k ? at / kDepth : at % kPortableTile;
  }
  __device__ int k_of(int j) const {
    const int at = threadIdx.x + j * kPortableThreads;
    return along_k ? at % kDepth : at / kPortableTile;
  }
  __device__ void store(const float (&values)[kLoads], Block& to) const {
#pragma unroll
    for (int j = 0; j < kLoads; ++j) to[k_of(j)][i_of(j)] = values[j];
  }
};

// One thread's elements of the k blocks of one operand.
struct PlainLoader : LoaderPlaces {
  const Operand& from;
  const char* base;
  int64_t i0, i_end, first_row, k_end;
  bool rows_along_k;  // whether the index over rows is k
  moec_dtype dtype;   // that values are rounded to

  // first_row: of the group, where the index over rows is one of this operand
  __device__ PlainLoader(const Operand& operand, moec_dtype read_as, const char* first,
                         int64_t begin, int64_t end, int64_t row, int64_t depth, bool along)
      : LoaderPlaces{operand.k_stride == 1},
        from(operand),
        base(first),
        i0(begin),
        i_end(end),
        first_row(row),
        k_end(depth),
        rows_along_k(along),
        dtype(read_as) {}
  __device__ int64_t row(int64_t index) const {
    return from.gather ? from.gather[first_row + index] : first_row + index;
  }
  __device__ void load(int64_t k0, float (&values)[kLoads]) const {
    int64_t places[kLoads];  // -1: outside
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      int64_t i = i0 + i_of(j), k = k0 + k_of(j);
      bool inside = i < i_end && k < k_end;
      if (inside && rows_along_k) {
        k = row(k);
        inside = k >= 0;
      } else if (inside && from.gather) {
        i = row(i);
        inside = i >= 0;
      } else {
        i += first_row;
      }
      places[j] = inside ? i * from.i_stride + k * from.k_stride : -1;
    }
    with_real(from.dtype, [&]<class T>() {
#pragma unroll
      for (int j = 0; j < kLoads; ++j)
        values[j] = places[j] >= 0 ? to_float(reinterpret_cast<const T*>(base)[places[j]]) : 0.0f;
    });
    if (dtype == from.dtype) return;
#pragma unroll
    for (float& value : values) value = round_real(dtype, value);
  }
};

// The same of operand b where it is coded. One element after another: decoders are long.
struct CodedLoader : LoaderPlaces {
  const OperandCodes& codes;
  quant::CodedView view;
  int64_t i0, i_end, k_end;

  __device__ CodedLoader(const PortableGemm& p, int part, const PortableTile& t)
      : LoaderPlaces{p.b[part].k_stride == 1},
        codes(p.codes[part]),
        view(coded_view(p, part, t.group)),
        i0(t.n0),
        i_end(p.n),
        k_end(t.k_end) {}
  __device__ void load(int64_t k0, float (&values)[kLoads]) const {
    quant::Formats::with(view.scheme, [&]<class Format>() {
#pragma unroll 1
      for (int j = 0; j < kLoads; ++j) {
        const int64_t i = i0 + i_of(j), k = k0 + k_of(j);
        const bool turned = codes.transposed;
        values[0] = 0.0f;
        if (i < i_end && k < k_end)
          values[0] = quant::value<Format>(view, turned ? k : i, turned ? i : k);
        rotate(values);
      }
    });
#pragma unroll
    for (float& value : values) value = round_real(codes.dtype, value);
  }
};

// Sums of a thread, and where they belong. Both products keep as many.
using Sums = float[64];

struct Fp32Product {  // thread: rows y, y + 64 and columns x, x + 64, four of each
  static __device__ int place(int of, int i) { return i / 4 * 64 + of * 4 + i % 4; }
  static __device__ void multiply(const Block& a, const Block& b, Sums& c) {
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
#pragma unroll
    for (int k = 0; k < kDepth; ++k) {
      float row[8], column[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        row[i] = a[k][place(y, i)];
        column[i] = b[k][place(x, i)];
      }
#pragma unroll
      for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) c[8 * i + j] = fmaf(row[i], column[j], c[8 * i + j]);
    }
  }
  static __device__ void stage(float* tile, const Sums& c) {
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
      for (int j = 0; j < 8; j += 2)
        stage_pair(tile, place(y, i), place(x, j), c[8 * i + j], c[8 * i + j + 1]);
  }
};

struct Tf32Product {  // 8 warps of 64 x 32
  static __device__ uint32_t rounded(float value) {
    uint32_t bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
    return bits;
  }
  static __device__ int row0() { return threadIdx.x / 128 * 64; }
  static __device__ int column0() { return threadIdx.x / 32 % 4 * 32; }
  static __device__ void multiply(const Block& a, const Block& b, Sums& c) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int k = 0; k < kDepth; k += 8) {
      uint32_t row[4][4], column[4][2];
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int r = 0; r < 4; ++r)
          row[i][r] = rounded(a[k + t + r / 2 * 4][row0() + 16 * i + g + r % 2 * 8]);
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int r = 0; r < 2; ++r) column[j][r] = rounded(b[k + t + 4 * r][column0() + 8 * j + g]);
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float* const d = c + 16 * i + 4 * j;
          asm volatile(
              "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, "
              "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
              : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
              : "r"(row[i][0]), "r"(row[i][1]), "r"(row[i][2]), "r"(row[i][3]), "r"(column[j][0]),
                "r"(column[j][1]));
        }
    }
  }
  static __device__ void stage(float* tile, const Sums& c) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float* const d = c + 16 * i + 4 * j + 2 * half;
          stage_pair(tile, row0() + 16 * i + 8 * half + g, column0() + 8 * j + 2 * t, d[0], d[1]);
        }
  }
};

__global__ __launch_bounds__(kPortableThreads) void portable_plain_kernel(const PortableGemm p,
                                                                          bool tf32,
                                                                          bool weight_gradient) {
  extern __shared__ __align__(16) float tile[];  // the blocks of both operands, then the result
  Block &a_block = *reinterpret_cast<Block*>(tile), &b_block = *(&a_block + 1);
  begin_kernel();
  PortableTile t;
  if (!(weight_gradient ? find_weight_tile(p, t) : find_row_tile(p, t))) return;
  const bool coded = is_coded(p);
  Sums c = {};
  for (int i = 0; i < (p.sum ? p.parts : 1); ++i) {
    const int part = p.sum ? i : t.part;
    const PlainLoader a(p.a, p.a.dtype,
                        p.a.of_group(t.group) + i * p.a_part * dtype_bytes(p.a.dtype), t.m0,
                        t.m_end, t.first_row, t.k_end, weight_gradient);
    const PlainLoader b(p.b[part], dtype_of_b(p, part), p.b[part].of_group(t.group), t.n0, p.n,
                        weight_gradient ? t.first_row : 0, t.k_end, weight_gradient);
    const CodedLoader b_codes(p, part, t);
    float next_a[kLoads], next_b[kLoads];
    // A block is loaded while the one before is multiplied. One place loads.
    for (int64_t k0 = 0; k0 < t.k_end + kDepth; k0 += kDepth) {
      const bool more = k0 < t.k_end;
      if (more) {
        a.load(k0, next_a);
        if (coded)
          b_codes.load(k0, next_b);
        else
          b.load(k0, next_b);
      }
      if (k0 > 0) {
        if (tf32)
          Tf32Product::multiply(a_block, b_block, c);
        else
          Fp32Product::multiply(a_block, b_block, c);
      }
      __syncthreads();
      if (more) {
        a.store(next_a, a_block);
        b.store(next_b, b_block);
      }
      __syncthreads();
    }
  }
  if (tf32)
    Tf32Product::stage(tile, c);
  else
    Fp32Product::stage(tile, c);
  __syncthreads();
  write_tile(p, t, tile, weight_gradient);
}

}  // namespace

void plain_product(const Op& op, const PortableGemm& p, bool weight_gradient) {
  const bool tf32 = op.tf32 && p.a.dtype == MOEC_F32 && dtype_of_b(p, 0) == MOEC_F32;
  static std::atomic<uint64_t> allowed;
  check(allow_shared_memory(portable_plain_kernel, kPortableTileBytes, allowed),
        "portable product");
  run(op, "portable product", portable_plain_kernel, portable_grid(p, weight_gradient),
      kPortableThreads, kPortableTileBytes, p, tf32, weight_gradient);
}

}  // namespace moec::cuda
