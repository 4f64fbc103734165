// SPDX-License-Identifier: Apache-2.0
// cpu_layer: layers of published models through the C API, beside this machine's own limits and
// beside the plain per-expert loop. Three rounds over all cases of a model, medians; weights are
// cold.
//
//   cpu_layer --shapes bench/shapes.json [--model NAME]... [--dtype bf16|f32] [--tokens N]...
//             [--threads N]... [--rounds N] [--commit TEXT] [--out FILE.json]
//
// The model `overhead` is E = 128, top-8, H = I = 32: routing, gather and barriers, no work to
// speak of. With several --threads the cases of all are in the same rounds, named .../threadsN.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iomanip>
#include <iostream>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>

#include "calls.h"
#include "layer_case.h"
#include "machine_limits.h"

namespace moec::bench {
namespace {

struct Options {
  std::string shapes = "bench/shapes.json", out, commit = "unknown", command;
  std::vector<std::string> models;
  std::vector<int64_t> tokens;
  std::vector<std::string> dtypes;
  std::vector<int> threads;
  int rounds = 3;
};

Options parse(int argc, char** argv) {
  Options o;
  for (int i = 0; i < argc; ++i) o.command.append(i ? " " : "").append(argv[i]);
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string key = argv[i], value = argv[i + 1];
    if (key == "--shapes")
      o.shapes = value;
    else if (key == "--out")
      o.out = value;
    else if (key == "--commit")
      o.commit = value;
    else if (key == "--model")
      o.models.push_back(value);
    else if (key == "--dtype")
      o.dtypes.push_back(value);
    else if (key == "--tokens")
      o.tokens.push_back(std::stoll(value));
    else if (key == "--threads")
      o.threads.push_back(std::stoi(value));
    else if (key == "--rounds")
      o.rounds = std::stoi(value);
    else
      throw std::runtime_error("unknown option " + key + "; see the top of cpu_layer.cpp");
  }
  if (argc % 2 == 0) throw std::runtime_error("each option takes one value");
  if (o.models.empty()) o.models = {"qwen3-30b", "gpt-oss-20b", "olmoe-1b-7b", "mixtral-8x7b"};
  if (o.dtypes.empty()) o.dtypes = {"bf16", "f32"};
  if (o.tokens.empty()) o.tokens = {1, 16, 128, 512, 2048};
  return o;
}

struct Samples {
  std::vector<double> seconds;
  double flops = 0, bytes = 0, rows = 0;
};
using Results = std::map<std::string, Samples>;

class Collector : public benchmark::ConsoleReporter {
 public:
  explicit Collector(Results& results) : results_(results) {}
  void ReportRuns(const std::vector<Run>& runs) override {
    ConsoleReporter::ReportRuns(runs);
    for (const Run& run : runs) {
      if (run.error_occurred) throw std::runtime_error(run.error_message);
      Samples& s = results_[run.run_name.function_name];
      const double seconds = run.real_accumulated_time / double(run.iterations);
      s.seconds.push_back(seconds);
      s.flops = run.counters.at("GFLOP/s").value * seconds;
      s.bytes = run.counters.at("GB/s").value * seconds;
      s.rows = run.counters.at("rows").value;
    }
  }

 private:
  Results& results_;
};

using Method = LayerCase::Work (LayerCase::*)(int64_t tokens);

void measure(benchmark::State& state, LayerCase& layer, Method method, int64_t tokens) {
  LayerCase::Work sum;
  (layer.*method)(tokens);  // first touch
  for (auto _ : state) {
    const LayerCase::Work work = (layer.*method)(tokens);
    sum.flops += work.flops;
    sum.weight_bytes += work.weight_bytes;
    sum.rows_per_expert += work.rows_per_expert;
  }
  using benchmark::Counter;
  state.counters["GFLOP/s"] = Counter(sum.flops, Counter::kIsRate);
  state.counters["GB/s"] = Counter(sum.weight_bytes, Counter::kIsRate);
  state.counters["rows"] = Counter(sum.rows_per_expert, Counter::kAvgIterations);
}

// One case as a JSON object; the roof is the lower of the peak and of streaming the weights.
std::string row(const std::string& name, const Samples& s, const MachineLimits& limits, bool f32) {
  const double seconds = median(s.seconds), peak = f32 ? limits.fma_f32 : limits.bf16();
  const double per_byte = s.flops / s.bytes, roof = std::min(peak, per_byte * limits.read_bytes);
  const auto [low, high] = std::minmax_element(s.seconds.begin(), s.seconds.end());
  std::ostringstream out;
  out << std::setprecision(4) << "{\"case\": \"" << name << "\", \"ms\": " << seconds * 1e3
      << ", \"ms_min\": " << *low * 1e3 << ", \"ms_max\": " << *high * 1e3
      << ", \"rows_per_active_expert\": " << s.rows << ", \"gflops\": " << s.flops / seconds * 1e-9
      << ", \"weight_gbps\": " << s.bytes / seconds * 1e-9
      << ", \"share_of_peak\": " << s.flops / seconds / peak
      << ", \"share_of_read\": " << s.bytes / seconds / limits.read_bytes
      << ", \"share_of_roof\": " << s.flops / seconds / roof << "}";
  return out.str();
}

// Every token count and number of threads of one layer, in rounds; plain loops, and weights that
// are not packed, only while they are short, peers on as many threads as we have.
Results measure_model(const Options& o, const Shape& shape, moec_dtype dtype) {
  constexpr int64_t kFewTokens = 16, kMixtralTokens = 512;
  const std::string prefix = shape.name + "/" + (dtype == MOEC_F32 ? "f32" : "bf16") + "/T";
  const int64_t max_tokens = *std::max_element(o.tokens.begin(), o.tokens.end());
  std::vector<std::unique_ptr<LayerCase>> layers;
  benchmark::ClearRegisteredBenchmarks();
  const auto add = [&](const std::string& name, Method method, int64_t tokens) {
    LayerCase& layer = *layers.back();
    benchmark::RegisterBenchmark(name.c_str(),
                                 [&layer, method, tokens](benchmark::State& state) {
                                   measure(state, layer, method, tokens);
                                 })
        ->UseRealTime()
        ->Unit(benchmark::kMillisecond)
        ->MinTime(0.2);
  };
  for (const int threads : o.threads) {
    layers.push_back(std::make_unique<LayerCase>(shape, dtype, threads, max_tokens));
    const bool last = threads == o.threads.back();
    const std::string suffix = o.threads.size() > 1 ? "/threads" + std::to_string(threads) : "";
    for (const int64_t tokens : o.tokens) {
      if (shape.inter > 8192 && tokens > kMixtralTokens) continue;
      const std::string name = prefix + std::to_string(tokens);
      add(name + suffix, &LayerCase::forward, tokens);
      if (!last) continue;
      if (tokens <= kFewTokens) {
        add(name + "/not_packed", &LayerCase::not_packed, tokens);
        add(name + "/naive_loop", &LayerCase::naive, tokens);
      }
#if MOEC_HAVE_ONEDNN
      add(name + "/onednn_loop", &LayerCase::onednn, tokens);
#endif
      std::cout << layers.back()->describe(tokens) << "\n";
    }
  }
  Results results;
  for (int round = 0; round < o.rounds; ++round) {
    Collector collector(results);
    benchmark::RunSpecifiedBenchmarks(&collector, ".");
  }
  return results;
}

std::string limits_json(const MachineLimits& limits) {
  std::ostringstream out;
  out << "{\"threads\": " << limits.threads << ", \"fma_f32_gflops\": " << limits.fma_f32 * 1e-9
      << ", \"dot_bf16_gflops\": " << limits.dot_bf16 * 1e-9
      << ", \"amx_bf16_gflops\": " << limits.amx_bf16 * 1e-9
      << ", \"read_gbps\": " << limits.read_bytes * 1e-9 << "}";
  return out.str();
}

int run(int argc, char** argv) {
  Options o = parse(argc, argv);
  auto device = moec_device_info();
  moec_struct_init(&device, sizeof device);
  if (moec_device_query(MOEC_CPU, 0, &device) != MOEC_OK) throw std::runtime_error("no CPU device");
  if (o.threads.empty()) o.threads = {device.multiprocessors};
  std::string rows, cpu;
  for (const Shape& shape : load_shapes(o.shapes, o.models))
    for (const std::string& dtype : o.dtypes) {
      const bool f32 = dtype == "f32";
      const MachineLimits limits = measure_limits(o.threads.back());  // beside each model
      cpu = limits.cpu;
      std::cout << shape.name << " " << dtype << " " << limits_json(limits) << "\n";
      const Results results = measure_model(o, shape, f32 ? MOEC_F32 : MOEC_BF16);
      rows.append(rows.empty() ? "" : ",\n").append("  {\"limits\": ").append(limits_json(limits));
      rows.append(", \"cases\": [\n");
      for (const auto& [name, samples] : results) {
        const std::string line = row(name, samples, limits, f32);
        std::cout << line << "\n";
        rows.append("    ").append(line).append(name == results.rbegin()->first ? "]}" : ",\n");
      }
    }
  if (o.out.empty()) return 0;
  std::ofstream file(o.out);
  file << "{\"machine\": \"" << cpu << "\", \"isa\": \"" << device.arch << "\", \"commit\": \""
       << o.commit << "\",\n \"command\": \"" << o.command << "\", \"rounds\": " << o.rounds
       << ",\n \"layers\": [\n"
       << rows << "\n]}\n";
  if (!file) throw std::runtime_error("cannot write " + o.out);
  return 0;
}

}  // namespace
}  // namespace moec::bench

int main(int argc, char** argv) {
  try {
    return moec::bench::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "cpu_layer: %s\n", error.what());
    return 1;
  }
}
