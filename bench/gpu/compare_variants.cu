// SPDX-License-Identifier: Apache-2.0
// Kernels of several source trees (kernel_variant.cu) side by side in one process.
//
// Usage: compare_variants time ROUNDS KERNELS VARIANTS SHAPE:TOKENS...
//        compare_variants clocks ROUNDS KERNELS VARIANTS SHAPE:TOKENS...
//        compare_variants bits 1 KERNELS VARIANTS SHAPE:TOKENS...
// KERNELS and VARIANTS: names with commas between them; variants are files VARIANT.so of this
// folder. time and clocks print medians of milliseconds and of thousands of clocks of a
// multiprocessor, each with its distance from the first variant's and the quartiles' from each
// other. time: of windows of 1.5 s, each behind half of that which is not counted: the power limit
// acts slowly, and windows of 150 ms lie 3 % apart by chance where these repeat to 0.2 %. clocks:
// of single calls with rests. bits: a hash of all memory of the layer behind the kernel, outputs
// and padding poisoned.
#include <dlfcn.h>

#include <string>

#include "kernel_variant.h"
#include "windows.cuh"

using namespace moec::test;

namespace {

constexpr float kWindowMs = 1500;
constexpr size_t kSpared = size_t(6) << 30;  // of the GPU's memory, for contexts and libraries

std::vector<std::string> parts_of(const std::string& text, char between) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == between) {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

struct Variant {
  std::string name;
  const KernelVariant* kernels;
  void* layer;
};

Variant open(const std::string& name) {
  void* const library = dlopen(("./" + name + ".so").c_str(), RTLD_NOW | RTLD_LOCAL);
  const void* const symbol = library ? dlsym(library, kVariantSymbol) : nullptr;
  if (!symbol) {
    std::printf("%s\n", dlerror());
    std::exit(2);
  }
  return {name, static_cast<const KernelVariant*>(symbol), nullptr};
}

__global__ void hash_words(const uint64_t* words, size_t count, unsigned long long* sum) {
  unsigned long long mine = 0;
  const size_t step = size_t(gridDim.x) * blockDim.x;
  for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    uint64_t z = words[i] + i * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    mine += (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  }
  atomicAdd(sum, mine);
}

class Comparison {
 public:
  Comparison(std::vector<std::string> kernels, const std::vector<std::string>& variants)
      : kernels_(std::move(kernels)) {
    for (const std::string& name : variants) variants_.push_back(open(name));
    size_t total = 0;
    CHECK_CUDA(cudaMemGetInfo(&size_, &total));
    size_ -= kSpared;
    CHECK_CUDA(cudaMalloc(&block_, size_));
    CHECK_CUDA(cudaMalloc(&sum_, sizeof(*sum_)));
  }

  void time(const std::string& shape, int rounds, bool rested) {
    for (Variant& variant : variants_) {
      make(variant, shape);
      run(variant, "forward_backward");  // what each kernel reads is there
    }
    for (const std::string& kernel : kernels_) {
      std::vector<Turn> turns;
      for (const Variant& variant : variants_) {
        turns.push_back({[&] { run(variant, kernel); }});
      }
      if (rested) {
        windows_.measure_rested(turns, rounds);
      } else {
        windows_.measure(turns, kWindowMs, rounds);
      }
      std::printf("%-20s %-16s", shape.c_str(), kernel.c_str());
      for (size_t i = 0; i < turns.size(); ++i) {
        std::printf("  %s %.4f (%s) %.1f (%s)", variants_[i].name.c_str(), turns[i].median(),
                    beside(turns[i].ms, turns[0].ms).c_str(), Turn::middle(turns[i].clocks) / 1e3,
                    beside(turns[i].clocks, turns[0].clocks).c_str());
      }
      std::printf("\n");
      std::fflush(stdout);
    }
    for (Variant& variant : variants_) destroy(variant);
  }

  void bits(const std::string& shape) {
    make(variants_[0], shape);  // how much memory
    destroy(variants_[0]);
    for (const std::string& kernel : kernels_) {
      std::printf("%-20s %-16s", shape.c_str(), kernel.c_str());
      for (Variant& variant : variants_) {
        CHECK_CUDA(cudaMemset(block_, 0xff, used_));
        make(variant, shape);
        run(variant, kernel);
        variant.kernels->poison_counters(variant.layer);
        CHECK_CUDA(cudaMemset(sum_, 0, sizeof(*sum_)));
        hash_words<<<1024, 256>>>(static_cast<const uint64_t*>(block_), used_ / 8, sum_);
        CHECK_CUDA(cudaGetLastError());
        unsigned long long sum = 0;
        CHECK_CUDA(cudaMemcpy(&sum, sum_, sizeof(sum), cudaMemcpyDefault));
        std::printf("  %s %016llx", variant.name.c_str(), sum);
        destroy(variant);
      }
      std::printf("\n");
    }
  }

 private:
  void make(Variant& variant, const std::string& text) {
    const std::vector<std::string> shape = parts_of(text, ':');
    const int64_t tokens = shape.size() == 2 ? std::atoll(shape[1].c_str()) : 0;
    const auto made = variant.kernels->make;
    variant.layer = tokens > 0 ? made(shape[0].c_str(), tokens, block_, size_, &used_) : nullptr;
    if (variant.layer) return;
    std::printf("%s: SHAPE:TOKENS of a shape in kernel_layer.cuh is needed\n", text.c_str());
    std::exit(2);
  }
  // Medians apart and quartiles apart, per cent.
  static std::string beside(const std::vector<float>& samples, const std::vector<float>& first) {
    const float median = Turn::middle(samples);
    const float apart = samples[samples.size() * 3 / 4] - samples[samples.size() / 4];
    char text[40];
    std::snprintf(text, sizeof(text), "%+.2f %%, %.2f", 100 * (median / Turn::middle(first) - 1),
                  100 * apart / median);
    return text;
  }
  static void run(const Variant& variant, const std::string& kernel) {
    if (variant.kernels->run(variant.layer, kernel.c_str())) return;
    std::printf("%s: no such kernel in kernel_layer.cuh\n", kernel.c_str());
    std::exit(2);
  }
  static void destroy(Variant& variant) {
    CHECK_CUDA(cudaDeviceSynchronize());
    variant.kernels->destroy(variant.layer);
  }

  std::vector<std::string> kernels_;
  std::vector<Variant> variants_;
  Windows windows_;
  void* block_ = nullptr;
  size_t size_ = 0, used_ = 0;
  unsigned long long* sum_ = nullptr;
};

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 5 ? argv[1] : "";
  if (what != "time" && what != "clocks" && what != "bits") {
    std::printf(
        "usage: compare_variants time|clocks|bits ROUNDS KERNELS VARIANTS SHAPE:TOKENS...\n");
    return 2;
  }
  Comparison comparison(parts_of(argv[3], ','), parts_of(argv[4], ','));
  for (int i = 5; i < argc; ++i) {
    if (what == "bits") {
      comparison.bits(argv[i]);
    } else {
      comparison.time(argv[i], std::max(1, std::atoi(argv[2])), what == "clocks");
    }
  }
  return 0;
}
