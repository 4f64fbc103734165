// SPDX-License-Identifier: Apache-2.0
// Each CUDA kernel and the layer made of them, beside the bound of cuBLAS (kernel_layer.cuh). One
// second of load first; then all implementations of a shape take turns in windows (windows.cuh);
// median of five. L2 is as the kernels leave it.
//
// Usage: kernel_bench OUTPUT.json WINDOW_MS [only=NAME,NAME..] SHAPE:TOKENS...
//        (all: every shape, T = 4096 and 16384). WINDOW_MS 0: two steps without timing, for a
//        profiler. only: the kernels to time.
#include "kernel_layer.cuh"

using namespace moec::test;

constexpr int kRounds = 5;

int main(int argc, char** argv) {
  if (argc < 4) {
    std::printf("usage: kernel_bench OUTPUT.json WINDOW_MS [only=NAMES] SHAPE:TOKENS... | all\n");
    return 2;
  }
  std::vector<std::pair<Shape, int64_t>> cases;
  std::string only;
  for (int i = 3; i < argc; ++i) {
    if (!std::strncmp(argv[i], "only=", 5)) only = "," + std::string(argv[i] + 5) + ",";
    for (const Shape& shape : kShapes) {
      const size_t length = std::strlen(shape.name);
      if (!std::strcmp(argv[i], "all")) {
        cases.push_back({shape, 4096});
        cases.push_back({shape, 16384});
      } else if (!std::strncmp(argv[i], shape.name, length) && argv[i][length] == ':') {
        cases.push_back({shape, std::atoll(argv[i] + length + 1)});
      }
    }
  }
  std::FILE* const out = std::fopen(argv[1], "w");
  if (!out) return 2;
  const Cublas cublas;
  if (!cublas.present()) std::printf("libcublas.so.13 not found: no bound\n");
  std::fprintf(out, "[");
  const char* comma = "";
  Windows windows;
  float load_ms = 1000;
  for (const auto& [shape, tokens] : cases) {
    const Layer layer(shape, tokens);
    layer.forward(true);
    layer.backward();
    CHECK_CUDA(cudaDeviceSynchronize());
    if (std::atof(argv[2]) == 0) {
      layer.forward(false);
      layer.forward(true);
      layer.backward();
      CHECK_CUDA(cudaDeviceSynchronize());
      continue;
    }
    std::vector<Timed> all = layer.timed(cublas);
    std::erase_if(all, [&](const Timed& timed) {
      return !only.empty() && only.find("," + std::string(timed.name) + ",") == std::string::npos;
    });
    windows.measure(all, float(std::atof(argv[2])), kRounds, load_ms);
    load_ms = 0;
    for (const Timed& timed : all) {
      const double ms = timed.median(), tflops = timed.flops / ms * 1e-9;
      std::printf("%-14s %6lld %-18s %9.4f ms  %6.1f TFLOP/s  %5.2f TB/s\n", shape.name,
                  (long long)tokens, timed.name, ms, tflops, timed.bytes / ms * 1e-9);
      std::fprintf(out,
                   "%s\n {\"shape\": \"%s\", \"tokens\": %lld, \"impl\": \"%s\", \"ms\": %.5f, "
                   "\"spread\": %.3f, \"tflops\": %.1f}",
                   comma, shape.name, (long long)tokens, timed.name, ms,
                   (timed.ms.back() - timed.ms.front()) / ms, tflops);
      comma = ",";
    }
    std::fflush(stdout);
  }
  std::fprintf(out, "\n]\n");
  std::fclose(out);
  return 0;
}
