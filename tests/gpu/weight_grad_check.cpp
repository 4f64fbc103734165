// SPDX-License-Identifier: Apache-2.0
// Weight gradients against plain loops: of gate and up and of down, in both orientations, in the
// type of the operands and in f32, stored and added. kernel_check.cpp has the problems and says
// which faults these checks have caught.
#include "backend/cuda/sm90/weight_grad.h"

#include "gpu/kernel_cases.h"

namespace moec::test {
namespace {

struct GradCase {
  const KernelCase* kernel;
  const ExpertsCase* problem;
  int parts;     // 2: gate and up, 1: down
  bool f32;      // the type of the gradient
  int launches;  // the second one adds to the first
  int parity;    // rows of experts of this parity are NaN

  std::string name() const {
    return std::string(problem->shape.name) + (problem->transposed ? "_in_out" : "") +
           (parts == 2 ? "_gate_up" : "_down") + (f32 ? "_f32" : "") +
           (launches == 2 ? "_added" : "") + (parity ? "_nan_odd" : "_nan_even");
  }
};
std::ostream& operator<<(std::ostream& out, const GradCase& c) {
  return out << c.name();
}

std::vector<GradCase> grad_cases() {
  std::vector<GradCase> cases;
  for (const KernelCase& c : kernel_cases())
    for (const bool f32 : {false, true})
      for (const int launches : {1, 2})
        for (const int parts : {1, 2})
          for (const int parity : {0, 1})
            if (c.experts.stride == 1 || (!f32 && launches == 1))  // large ones: once
              cases.push_back({&c, &c.experts, parts, f32, launches, parity});
  return cases;
}

class WeightGrad : public ExpertsTest<GradCase> {
 protected:
  // The orientation that a matrix [E,H,I] or [E,2I,H] has, or the other one.
  bool m_is_contiguous() const { return (GetParam().parts == 1) != c_.transposed; }
  int64_t size() const { return GetParam().parts * inter_ * hidden_; }  // of an expert

  // The only place that fills the arguments of the kernel.
  void run(const DeviceBytes& out, const DeviceArray<Half>& rows) {
    const auto& [kernel, problem, parts, f32, launches, parity] = GetParam();
    const int64_t part_bytes = inter_ * hidden_ * (f32 ? 4 : 2);
    const DeviceArray<unsigned> counter(1);
    cuda::WeightGradArgs a = {};
    a.dtype = MOEC_BF16;
    a.out_f32 = f32;
    a.out_m_contiguous = m_is_contiguous();
    a.parts = parts;
    a.m_size = inter_;
    a.n_size = hidden_;
    a.max_rows = rows_;
    a.rows = rows.data();
    for (int part = 0; part < parts; ++part) a.out[part] = out.data() + part * part_bytes;
    a.out_expert_stride = size();
    a.out_stride = m_is_contiguous() ? inter_ : hidden_;
    a.params.x = x_.data();
    a.params.x_stride = hidden_;
    a.params.row_token = plan_.plan.row_token;
    a.params.group_offsets = plan_.plan.group_offsets;
    a.params.num_experts = int(experts_);
    must_take(cuda::weight_grad_refuses(a));
    for (int i = 0; i < launches; ++i) {
      // Two launches without adding come before the four that add, of six a problem.
      const Way way(*kernel, launches == 1 ? parity : 2 + 2 * parity + i, 6);
      a.params.accumulate = i > 0;
      a.single_tiles = way.has_single_tiles() ? cuda::kSingleTiles : 0;
      CHECK_CUDA(cudaMemset(counter.data(), 0, counter.bytes()));
      a.params.work_counter = way.counts() ? counter.data() : nullptr;
      CHECK_CUDA(cuda::launch_weight_grad(a, multiprocessors(), nullptr));
    }
    CHECK_CUDA(cudaDeviceSynchronize());
  }

  // Some experts of a large problem, and its fullest.
  bool is_sampled(int expert) const {
    const auto fuller = [this](int a, int b) { return rows_of(a) < rows_of(b); };
    std::vector<int> all(experts_);
    for (int e = 0; e < experts_; ++e) all[e] = e;
    const int step = c_.stride == 1 ? 1 : std::max(1, int(experts_) / 3);
    return expert % step == 0 || expert == *std::max_element(all.begin(), all.end(), fuller);
  }

  template <typename Out>
  void compare(const DeviceBytes& out, const DeviceArray<Half>& rows) {
    const auto& [kernel, problem, parts, f32, launches, parity] = GetParam();
    const int64_t count = inter_ * hidden_;
    const DeviceArray<float> reference(count);
    RowError worst;
    int worst_expert = -1;
    for (int e = 0; e < experts_; ++e) {
      const bool empty = rows_of(e) == 0;
      if (!is_sampled(e) || (e % 2 == parity && !empty)) continue;
      for (int part = 0; part < parts; ++part) {
        const auto* const of_all = reinterpret_cast<const Out*>(out.data());
        const Out* const of_part = of_all + e * size() + part * count;
        if (empty) {
          const auto bytes = download<uint8_t>(of_part, count * sizeof(Out));
          EXPECT_EQ(first_difference(bytes, std::vector<uint8_t>(bytes.size())), -1)
              << "empty expert " << e << ", part " << part << " is not exactly zero";
          continue;
        }
        auto got = floats(download(of_part, count));
        if (m_is_contiguous()) got = transposed(got);
        plain_grad(offsets_[e], offsets_[e + 1], int(inter_), int(hidden_),
                   {rows.data() + part * inter_, parts * inter_}, gathered(x_, hidden_),
                   reference.data());
        auto want = reference.host();
        for (float& value : want) value *= float(launches);
        const RowError error = row_error(got, want, size_t(hidden_), kNoFloor);
        if (worst.row >= 0 && error.error <= worst.error) continue;
        worst = error;
        worst_expert = e;
      }
    }
    expect_within("weight gradient, worst in expert " + std::to_string(worst_expert), worst,
                  f32 ? 1e-5 : 5e-3);
  }
  // [hidden, inter] -> [inter, hidden]
  std::vector<float> transposed(const std::vector<float>& values) const {
    std::vector<float> turned(values.size());
    for (int64_t m = 0; m < inter_; ++m)
      for (int64_t n = 0; n < hidden_; ++n) turned[m * hidden_ + n] = values[n * inter_ + m];
    return turned;
  }
};
INSTANTIATE_TEST_SUITE_P(Kernel, WeightGrad, testing::ValuesIn(grad_cases()), name_of<GradCase>);

TEST_P(WeightGrad, agrees_with_plain_loops) {
  const GradCase& c = GetParam();
  const auto rows = normal_array<Half>(rows_ * c.parts * inter_, 1.0f, test_seed() + 7);
  poison_rows(rows, c.parts * inter_, c.parity);
  const DeviceBytes out(size() * experts_ * (c.f32 ? 4 : 2));
  run(out, rows);
  c.f32 ? compare<float>(out, rows) : compare<Half>(out, rows);
  expect_guards(out, "weight gradient");
}

}  // namespace
}  // namespace moec::test
