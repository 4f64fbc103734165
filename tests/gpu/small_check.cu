// SPDX-License-Identifier: Apache-2.0
// The small-token kernels against plain loops, and those of one token against them, chained as the
// layer chains them. Outputs start as NaN, guard bytes surround them, tokens that nobody selects
// and rows of every second expert are NaN in turn. Usage: small_check [seed]
//
// Faults it has caught, planted: down without its wait for up, rows stored beyond an item's end,
// the second half of k left out of down.
//
#include <cstring>

#include "backend/cuda/few_tokens/one_token.h"
#include "backend/cuda/few_tokens/small_gemm.h"
#include "gpu/plain.cuh"

namespace {

struct SmallCase {
  const char* name;
  Shape shape;
  std::vector<int32_t> ids;
  bool interleaved = false, biases = false;
  uint32_t activation = MOEC_ACT_SWIGLU;
  int align = 1;
};

double worse(double a, double b) {
  return a != a || b <= a ? a : b;
}  // NaN stays
double value_of(uint32_t activation, double g, double u) {
  if (activation == MOEC_ACT_SWIGLU) return g / (1 + std::exp(-g)) * u;
  g = std::min(g, 1.0), u = std::max(-1.0, std::min(u, 1.0));  // MOEC_ACT_GPTOSS, limit 1
  return (u + 1) * g / (1 + std::exp(-1.702 * g));
}

class SmallCheck {
 public:
  explicit SmallCheck(const SmallCase& c)
      : c_(c),
        h_(c.shape.hidden),
        i_(c.shape.inter),
        e_(c.shape.experts),
        k_(c.shape.top_k),
        tokens_(int64_t(c.ids.size()) / k_),
        plan_(c.ids, c.shape, c.align),
        rows_count_(plan_.plan.max_rows) {
    plan_.build();
    CHECK_CUDA(cudaDeviceSynchronize());
    offsets_ = download(plan_.plan.group_offsets, e_ + 1);
    row_token_ = download(plan_.plan.row_token, rows_count_);
    assignment_row_ = download(plan_.plan.assignment_row, tokens_ * k_);
    weights_ = download(plan_.plan.routing_weights, tokens_ * k_);
    x_ = normal_array<Half>(tokens_ * h_, 1.0f, seed + 1);
    gate_up_ = normal_array<Half>(2LL * e_ * i_ * h_, 1.0f / std::sqrt(float(h_)), seed + 2);
    down_ = normal_array<Half>(int64_t(e_) * i_ * h_, 1.0f / std::sqrt(float(i_)), seed + 3);
    gate_up_bias_ = normal_array<Half>(2LL * e_ * i_, 1.0f, seed + 4);
    down_bias_ = normal_array<float>(int64_t(e_) * h_, 1.0f, seed + 5);
    residual_ = normal_array<Half>(tokens_ * h_, 1.0f, seed + 6);
    act_ = DeviceArray<Half>(rows_count_ * i_);
    pre_ = DeviceArray<Half>(rows_count_ * 2 * i_);
    rows_ = DeviceArray<Half>(rows_count_ * h_);
    y_ = DeviceArray<Half>(tokens_ * h_);
    std::vector<int> all(rows_count_), expert(rows_count_);
    for (int r = 0; r < offsets_.back(); ++r) {
      all[r] = r;
      expert[r] = int(std::upper_bound(offsets_.begin(), offsets_.end(), r) - offsets_.begin()) - 1;
    }
    expert_ = expert;
    all_device_ = DeviceArray<int>(rows_count_);
    expert_device_ = DeviceArray<int>(rows_count_);
    all_device_.assign(all);
    expert_device_.assign(expert);
    for (int64_t t = 0; t < tokens_; ++t) {  // tokens of nobody
      if (std::find(row_token_.begin(), row_token_.end(), int(t)) == row_token_.end())
        CHECK_CUDA(cudaMemset(x_.data() + t * h_, 0xff, h_ * 2));
    }
  }

  void run() {
    chain();
    check_up();
    check_down(-1);
    for (int parity = 0; parity < 2; ++parity) {  // down alone, NaN neighbours
      act_ = normal_array<Half>(rows_count_ * i_, 1.0f, seed + 7);
      for (int e = parity; e < e_; e += 2) {
        CHECK_CUDA(cudaMemset(act_.data() + offsets_[e] * i_, 0xff,
                              int64_t(offsets_[e + 1] - offsets_[e]) * i_ * 2));
      }
      rows_.poison();
      launch(false);
      CHECK_CUDA(cudaDeviceSynchronize());
      check_down(parity);
    }
    repeat();
    if (tokens_ == 1) one_token();
  }

 private:
  std::string name(const char* what) const { return std::string(c_.name) + " " + what; }
  cuda::SmallArgs arguments(bool up) const {
    cuda::SmallArgs a = {};
    a.dtype = MOEC_BF16;
    a.group_offsets = plan_.plan.group_offsets;
    a.num_experts = e_;
    a.features = up ? i_ : h_;
    a.k_size = a.weight_stride = a.operand_stride = up ? h_ : i_;
    if (up) {
      a.weights[0] = gate_up_.data();
      a.weights[1] = gate_up_.data() + (c_.interleaved ? h_ : int64_t(i_) * h_);
      a.weight_stride *= c_.interleaved ? 2 : 1;
      a.operand = x_.data();
      a.row_token = plan_.plan.row_token;
      a.out = act_.data();
      a.pre = pre_.data();
      a.activation.kind = c_.activation;
      if (c_.activation == MOEC_ACT_GPTOSS) a.activation.limit = 1.0f;
      if (c_.activation == MOEC_ACT_GPTOSS) a.activation.alpha = 1.702f;
      const int64_t up_bias = c_.interleaved ? 1 : i_, stride = c_.interleaved ? 2 : 1;
      if (c_.biases) {
        a.bias[0] = {gate_up_bias_.data(), 2LL * i_, stride, false};
        a.bias[1] = {gate_up_bias_.data() + up_bias, 2LL * i_, stride, false};
      }
    } else {
      a.weights[0] = down_.data();
      a.operand = act_.data();
      a.out = rows_.data();
      if (c_.biases) a.bias[0] = {down_bias_.data(), h_, 1, true};
      a.combine = combine();
    }
    a.expert_stride = int64_t(i_) * h_ * (up ? 2 : 1);
    return a;
  }
  void launch(bool up) const {
    const cuda::SmallArgs a = arguments(up);
    if (const char* why = cuda::small_refuses(a)) {
      std::printf("FAIL refused: %s\n", why);
      ++failures;
      return;
    }
    int sms = 0;
    CHECK_CUDA(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
    CHECK_CUDA(up ? launch_small_up(a, sms, nullptr) : launch_small_down(a, sms, nullptr));
  }
  cuda::CombineParams combine() const {
    cuda::CombineParams p = plan_.combine(h_, rows_.data(), y_.data());
    p.residual = residual_.data();
    return p;
  }
  void chain() {
    act_.poison(), pre_.poison(), rows_.poison(), y_.poison();
    plan_.build();
    launch(true);
    launch(false);
    CHECK_CUDA(cudaDeviceSynchronize());
  }

  std::vector<float> plain(const int* source, int features, int k, const Half* a, const Half* w,
                           int64_t es, int64_t fs) const {
    const int count = offsets_.back();
    DeviceArray<float> out(std::max(1, count * features));
    if (count > 0) {
      plain_gemm<<<unsigned((int64_t(count) * features + 255) / 256), 256>>>(
          all_device_.data(), expert_device_.data(), source, count, features, k, a, k, w, es, fs, 1,
          out.data());
      CHECK_CUDA(cudaGetLastError());
    }
    return out.host();
  }
  void check_up() {
    const int64_t up_at = c_.interleaved ? h_ : int64_t(i_) * h_, fs = c_.interleaved ? 2 * h_ : h_;
    auto gate = plain(plan_.plan.row_token, i_, h_, x_.data(), gate_up_.data(), 2LL * i_ * h_, fs);
    auto upper =
        plain(plan_.plan.row_token, i_, h_, x_.data(), gate_up_.data() + up_at, 2LL * i_ * h_, fs);
    const auto act = act_.host(), pre = pre_.host(), bias = gate_up_bias_.host();
    double worst = 0, worst_pre = 0;
    std::vector<float> value(i_);
    for (int r = 0; r < offsets_.back(); ++r) {
      if (row_token_[r] < 0) continue;
      float *const g = &gate[int64_t(r) * i_], *const u = &upper[int64_t(r) * i_];
      for (int f = 0; f < i_; ++f) {
        const Half* const b = &bias[2LL * expert_[r] * i_];
        if (c_.biases) g[f] += __bfloat162float(b[c_.interleaved ? 2 * f : f]);
        if (c_.biases) u[f] += __bfloat162float(b[c_.interleaved ? 2 * f + 1 : i_ + f]);
        value[f] = float(value_of(c_.activation, g[f], u[f]));
      }
      worst = worse(worst, row_error(value.data(), &act[int64_t(r) * i_], 1, i_));
      worst_pre = worse(worst_pre, row_error(g, &pre[2LL * r * i_], 1, i_));
      worst_pre = worse(worst_pre, row_error(u, &pre[(2LL * r + 1) * i_], 1, i_));
    }
    report(name("up"), worst, 1e-2);
    report(name("pre-activations"), worst_pre, 5e-3);
    if (!act_.guards_intact() || !pre_.guards_intact()) report(name("guards of up"), 1, 0);
  }
  // Rows of experts of the poisoned parity are NaN; y of tokens with such a row too.
  void check_down(int parity) {
    const auto reference = plain(nullptr, h_, i_, act_.data(), down_.data(), int64_t(i_) * h_, i_);
    const auto rows = rows_.host(), y = y_.host(), residual = residual_.host();
    const auto bias = down_bias_.host();
    double worst = 0, different = 0;
    std::vector<float> row(h_);
    for (int r = 0; r < offsets_.back(); ++r) {
      if (expert_[r] % 2 == parity || row_token_[r] < 0) continue;
      for (int f = 0; f < h_; ++f) {
        row[f] = reference[int64_t(r) * h_ + f] +
                 (c_.biases ? bias[int64_t(expert_[r]) * h_ + f] : 0.0f);
      }
      worst = worse(worst, row_error(row.data(), &rows[int64_t(r) * h_], 1, h_));
    }
    for (int64_t t = 0; t < tokens_; ++t) {
      for (int f = 0; f < h_; ++f) {
        float sum = 0;
        for (int k = 0; k < k_; ++k) {
          const int r = assignment_row_[t * k_ + k];
          if (r >= 0) {
            sum = std::fma(weights_[t * k_ + k], __bfloat162float(rows[int64_t(r) * h_ + f]), sum);
          }
        }
        sum += __bfloat162float(residual[t * h_ + f]);
        const float got = __bfloat162float(y[t * h_ + f]);
        if (sum == sum ? got != bf16(sum) : got == got) different = 1;
      }
    }
    report(name(parity < 0 ? "down" : "down, NaN neighbours"), worst, 5e-3);
    report(name("combine, bit for bit"), different, 0);
    if (!rows_.guards_intact() || !y_.guards_intact()) report(name("guards of down"), 1, 0);
  }
  void repeat() {
    std::vector<Half> first;
    double different = 0;
    for (int i = 0; i < 20; ++i) {
      chain();
      const auto y = y_.host();
      if (i == 0) first = y;
      if (std::memcmp(first.data(), y.data(), y.size() * 2)) different = 1;
    }
    report(name("20 runs equal"), different, 0);
  }

  // y of the small-token kernels is the reference. Experts that are not hit are NaN; 20 runs.
  void one_token() {
    chain();
    const auto want = y_.host();
    std::vector<float> reference(want.size());
    for (size_t i = 0; i < want.size(); ++i) reference[i] = __bfloat162float(want[i]);
    for (int e = 0; e < e_; ++e) {
      if (offsets_[e + 1] > offsets_[e]) continue;
      const int64_t matrix = int64_t(i_) * h_;
      CHECK_CUDA(cudaMemset(gate_up_.data() + 2 * e * matrix, 0xff, 4 * matrix));
      CHECK_CUDA(cudaMemset(down_.data() + e * matrix, 0xff, 2 * matrix));
    }
    cuda::SmallArgs up = arguments(true);
    up.pre = nullptr;
    if (const char* why = cuda::one_token_refuses(up, arguments(false))) {
      std::printf("FAIL %s: one token refused: %s\n", c_.name, why);
      ++failures;
      return;
    }
    int sms = 0;
    CHECK_CUDA(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
    std::vector<Half> first;
    double worst = 0, different = 0;
    for (int i = 0; i < 20; ++i) {
      act_.poison(), y_.poison();
      plan_.build();
      CHECK_CUDA(launch_one_token(up, arguments(false), sms, nullptr));
      CHECK_CUDA(cudaDeviceSynchronize());
      const auto y = y_.host();
      if (i == 0) first = y;
      if (std::memcmp(first.data(), y.data(), y.size() * 2)) different = 1;
      worst = worse(worst, row_error(reference.data(), y.data(), 1, h_));
    }
    report(name("one token"), worst, 1e-2);
    report(name("one token, 20 runs equal"), different, 0);
    if (!act_.guards_intact() || !y_.guards_intact()) report(name("guards of one token"), 1, 0);
  }

  SmallCase c_;
  int h_, i_, e_, k_;
  int64_t tokens_;
  DevicePlan plan_;
  int64_t rows_count_;
  std::vector<int> offsets_, row_token_, assignment_row_, expert_;
  std::vector<float> weights_;
  DeviceArray<Half> x_, gate_up_, down_, gate_up_bias_, residual_, act_, pre_, rows_, y_;
  DeviceArray<float> down_bias_;
  DeviceArray<int> all_device_, expert_device_;
};

std::vector<int32_t> ids_of(const std::vector<int>& counts) {
  std::vector<int32_t> ids(5, -1);
  for (size_t e = 0; e < counts.size(); ++e) ids.insert(ids.end(), counts[e], int32_t(e));
  std::shuffle(ids.begin(), ids.end(), std::mt19937_64(seed));
  return ids;
}

}  // namespace

int main(int argc, char** argv) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("no GPU here\n");
    return 77;  // skipped
  }
  if (argc > 1) seed = std::strtoull(argv[1], nullptr, 10);
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  const std::vector<int> traps = {0, 1, 2, 15, 16, 17, 0, 64, 33, 65, 0, 3, 130, 8, 9};
  const int e = int(traps.size());
  const Shape plain = {"", 264, 200, e, 1}, oss_like = {"", 136, 72, e, 1};
  std::vector<SmallCase> cases = {
      {.name = "traps 264x200", .shape = plain, .ids = ids_of(traps)},
      {.name = "interleaved, biases, gptoss",
       .shape = oss_like,
       .ids = ids_of(traps),
       .interleaved = true,
       .biases = true,
       .activation = MOEC_ACT_GPTOSS},
      {.name = "aligned to 32",
       .shape = {"", 72, 136, e, 1},
       .ids = ids_of(traps),
       .biases = true,
       .align = 32},
      {.name = "one token", .shape = {"", 1176, 200, 9, 4}, .ids = {3, -1, 8, 0}},
      {.name = "one token, interleaved, biases, gptoss, aligned",
       .shape = {"", 136, 72, 9, 2},
       .ids = {7, 2},
       .interleaved = true,
       .biases = true,
       .activation = MOEC_ACT_GPTOSS,
       .align = 16},
      {.name = "one token of nobody", .shape = {"", 256, 128, 4, 2}, .ids = {-1, -1}},
      {.name = "nobody", .shape = {"", 256, 128, 4, 2}, .ids = std::vector<int32_t>(6, -1)},
  };
  if (!std::getenv("MOEC_CHECK_SMALL")) {  // not under a sanitizer
    const Shape qwen = {"", 2048, 768, 128, 8}, oss = {"", 2880, 2880, 8, 4};
    const Shape wide = {"", 7168, 256, 64, 8}, tall = {"", 512, 14336, 4, 2};
    for (const Shape& shape : {wide, tall, oss}) {
      cases.push_back({.name = "T=1", .shape = shape, .ids = random_routing(shape, 1, seed)});
    }
    cases.push_back({.name = "qwen3 T=1", .shape = qwen, .ids = random_routing(qwen, 1, seed)});
    cases.push_back({.name = "qwen3 T=40", .shape = qwen, .ids = random_routing(qwen, 40, seed)});
    cases.push_back({.name = "gpt-oss T=16",
                     .shape = oss,
                     .ids = random_routing(oss, 16, seed),
                     .interleaved = true,
                     .biases = true,
                     .activation = MOEC_ACT_GPTOSS});
    cases.push_back(
        {.name = "hidden 7168 T=64", .shape = wide, .ids = random_routing(wide, 64, seed)});
  }
  for (const SmallCase& one : cases) SmallCheck(one).run();
  std::printf(failures ? "%d checks FAILED\n" : "all checks passed\n", failures);
  return failures ? 1 : 0;
}
