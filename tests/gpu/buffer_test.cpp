// SPDX-License-Identifier: Apache-2.0
// Device memory that callers own on a GPU: copies in the order of a stream, what waits, what a
// capture takes, buffers and packed codes during a capture, the allocator hook.
#include <gtest/gtest.h>

#include <numeric>

#include "step.h"

namespace moec::test {
namespace {

constexpr int64_t kCount = 1 << 20;

moec_tensor tensor_at(void* data, int32_t device_type) {
  moec_tensor out = {};
  check(moec_tensor_make(&out, data, MOEC_F32, device_type, 0, 1, &kCount));
  return out;
}

struct Buffer {  // kCount floats of the library's
  explicit Buffer(const moec_context* owner) : context(owner) {
    check(moec_buffer_alloc(context, kCount * 4, &memory));
  }
  ~Buffer() { EXPECT_EQ(moec_buffer_free(context, &memory), MOEC_OK); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  moec_tensor tensor() const { return tensor_at(memory.ptr, MOEC_CUDA); }

  const moec_context* context;
  moec_buffer memory = {};
};

struct Pinned {
  Pinned() { CHECK_CUDA(cudaMallocHost(reinterpret_cast<void**>(&data), kCount * 4)); }
  ~Pinned() { cudaFreeHost(data); }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;
  moec_tensor tensor() const { return tensor_at(data, MOEC_CUDA_HOST); }

  float* data = nullptr;
};

std::vector<float> numbers(float first) {
  std::vector<float> values(kCount);
  std::iota(values.begin(), values.end(), first);
  return values;
}

void copy(const moec_context* context, const moec_tensor& source, const moec_tensor& target,
          cudaStream_t stream) {
  check(moec_tensor_copy(context, &source, &target, stream));
}

TEST(Buffer, pageable_memory_is_read_and_written_before_the_calls_return) {
  const Context context = gpu_context();
  const GpuStream stream;
  const Buffer buffer(context.get()), second(context.get());
  EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.memory.ptr) % 256, 0u);
  std::vector<float> in = numbers(1), out(kCount);
  const uint64_t syncs = stats_of(context.get()).host_syncs;
  copy(context.get(), tensor_at(in.data(), MOEC_CPU), buffer.tensor(), stream);
  std::fill(in.begin(), in.end(), -1.0f);  // too late to show
  copy(context.get(), buffer.tensor(), second.tensor(), stream);
  EXPECT_EQ(stats_of(context.get()).host_syncs, syncs);
  copy(context.get(), second.tensor(), tensor_at(out.data(), MOEC_CPU), stream);
  EXPECT_EQ(out, numbers(1));
  EXPECT_EQ(stats_of(context.get()).host_syncs, syncs + 1);

  const moec_tensor tensor = buffer.tensor();
  check(moec_tensor_zero(context.get(), &tensor, static_cast<cudaStream_t>(stream)));
  copy(context.get(), tensor, tensor_at(out.data(), MOEC_CPU), stream);
  EXPECT_EQ(out, std::vector<float>(kCount));
}

TEST(Buffer, a_graph_of_copies_of_pinned_memory_reads_what_is_there_at_each_replay) {
  const Context context = gpu_context();
  const GpuStream stream;
  const Buffer buffer(context.get());
  const Pinned in, out;
  std::vector<float> pageable(kCount);
  moec_buffer during = {};
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  copy(context.get(), in.tensor(), buffer.tensor(), stream);
  copy(context.get(), buffer.tensor(), out.tensor(), stream);
  const moec_tensor tensor = buffer.tensor(), host = tensor_at(pageable.data(), MOEC_CPU);
  const cudaStream_t captured = stream;
  EXPECT_EQ(moec_tensor_copy(context.get(), &host, &tensor, captured), MOEC_E_WOULD_SYNC);
  EXPECT_EQ(moec_tensor_copy(context.get(), &tensor, &host, captured), MOEC_E_WOULD_SYNC);
  check(moec_tensor_zero(context.get(), &tensor, captured));
  check(moec_buffer_alloc(context.get(), 4096, &during));  // neither ends the capture
  check(moec_buffer_free(context.get(), &during));
  CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  CHECK_CUDA(cudaGraphInstantiate(&replay, graph, 0));
  for (const float first : {5.0f, 9.0f}) {
    const std::vector<float> want = numbers(first);
    std::copy(want.begin(), want.end(), in.data);
    CHECK_CUDA(cudaGraphLaunch(replay, stream));
    stream.wait();
    EXPECT_EQ(std::vector<float>(out.data, out.data + kCount), want);
    copy(context.get(), buffer.tensor(), host, stream);
    EXPECT_EQ(pageable, std::vector<float>(kCount));
  }
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
}

TEST(Buffer, a_free_leaves_queued_work_its_memory) {
  const Context context = gpu_context();
  const GpuStream stream;
  const Pinned in, out;
  const std::vector<float> want = numbers(3);
  std::copy(want.begin(), want.end(), in.data);
  for (int round = 0; round < 20; ++round) {
    const Buffer buffer(context.get());
    copy(context.get(), in.tensor(), buffer.tensor(), stream);
    copy(context.get(), buffer.tensor(), out.tensor(), stream);
  }
  stream.wait();
  EXPECT_EQ(std::vector<float>(out.data, out.data + kCount), want);
}

// Codes of one expert, INT8 by channels, and a copy of them in lent memory.
TEST(Packed, a_graph_reads_the_codes_of_each_replay) {
  constexpr int64_t kH = 32, kI = 16;
  const Context context = gpu_context();
  const GpuStream stream;
  const DeviceArray<int8_t> up(size_t(kI * kH)), down(size_t(kH * kI));
  const DeviceArray<float> scales(std::vector<float>(size_t(kH), 0.5f));
  auto desc = sized<moec_weights_desc>();
  desc.flags = MOEC_WEIGHTS_FROZEN;
  desc.num_experts = 1;
  desc.gate_layout = MOEC_GATE_NONE;
  desc.hidden = kH;
  desc.inter = kI;
  desc.dtype = MOEC_BF16;
  desc.gate_up_scheme = desc.down_scheme = MOEC_SCHEME_INT8;
  const auto weights = make<Weights>(moec_weights_create, context.get(),
                                     static_cast<const moec_weights_desc*>(&desc));
  auto set = sized<moec_weight_set>();
  moec_quant up_quant = sized<moec_quant>(), down_quant = sized<moec_quant>();
  const auto place = [](moec_tensor& to, void* data, moec_dtype dtype, int64_t n, int64_t k) {
    const int64_t shape[] = {1, n, k};
    check(moec_tensor_make(&to, data, dtype, MOEC_CUDA, 0, 3, shape));
  };
  place(set.up.data, up.data(), MOEC_I8, kI, kH);
  place(up_quant.scales, scales.data(), MOEC_F32, kI, 1);
  place(set.down.data, down.data(), MOEC_I8, kH, kI);
  place(down_quant.scales, scales.data(), MOEC_F32, kH, 1);
  set.up.quant = &up_quant;
  set.down.quant = &down_quant;
  check(moec_weights_bind(weights.get(), &set));
  auto info = sized<moec_weights_info>();
  check(moec_weights_query(weights.get(), &info));
  const DeviceBytes lent(info.packed_bytes);
  const moec_buffer memory = buffer_of(lent);
  const DeviceArray<int8_t> got_up(up.size()), got_down(down.size());
  const DeviceArray<float> got_scales(2 * scales.size());
  const uint64_t syncs = stats_of(context.get()).host_syncs;
  const cudaStream_t captured = stream;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  EXPECT_EQ(moec_weights_pack(weights.get(), nullptr, captured), MOEC_E_WOULD_ALLOC);
  check(moec_weights_pack(weights.get(), &memory, captured));
  set.up.data.data = got_up.data();
  set.down.data.data = got_down.data();
  up_quant.scales.data = got_scales.data();
  down_quant.scales.data = got_scales.data() + scales.size();
  check(moec_weights_unpack(weights.get(), &set, captured));
  CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  EXPECT_EQ(stats_of(context.get()).host_syncs, syncs);
  CHECK_CUDA(cudaGraphInstantiate(&replay, graph, 0));
  for (const int8_t first : {int8_t(3), int8_t(40)}) {
    std::vector<int8_t> codes(up.size());
    std::iota(codes.begin(), codes.end(), first);
    up.assign(codes);
    down.assign(codes);
    CHECK_CUDA(cudaGraphLaunch(replay, stream));
    stream.wait();
    EXPECT_EQ(got_up.host(), codes);
    EXPECT_EQ(got_down.host(), codes);
  }
  EXPECT_EQ(download(got_scales.data() + scales.size(), kH), scales.host());
  EXPECT_TRUE(lent.guards_intact());
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
}

TEST(Buffer, mistakes_are_named) {
  const Context context = gpu_context();
  const DeviceBytes foreign(kCount * 4);
  moec_buffer buffer = buffer_of(foreign), large = {};
  EXPECT_EQ(moec_buffer_free(context.get(), &buffer), MOEC_E_INVALID_ARG);
  EXPECT_EQ(buffer.ptr, foreign.data());
  EXPECT_EQ(moec_buffer_alloc(context.get(), uint64_t(1) << 50, &large), MOEC_E_OUT_OF_MEMORY);
  std::vector<float> host(kCount);
  const moec_tensor on_host = tensor_at(host.data(), MOEC_CPU);
  EXPECT_EQ(moec_tensor_zero(context.get(), &on_host, nullptr), MOEC_E_DEVICE);
}

}  // namespace
}  // namespace moec::test
