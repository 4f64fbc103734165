// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/device/pointer_table.h"

#include <cstring>

#include "backend/backend.h"
#include "backend/cuda/device/op.cuh"
#include "core/dtype.h"

namespace moec::cuda {
namespace {

__global__ void write_pointers_kernel(const PointerTable::Chunk chunk, int count, void** to) {
  begin_kernel();
  if (int(threadIdx.x) < count) to[threadIdx.x] = chunk.pointers[threadIdx.x];
}

struct Words {
  uint32_t word[Backend::kMostStored / 4];
};
__global__ void store_words_kernel(const Words from, int count, uint32_t* to) {
  begin_kernel();
  if (int(threadIdx.x) < count) to[threadIdx.x] = from.word[threadIdx.x];
}

}  // namespace

bool all_aligned(const ExpertArray& a, int num_experts) {
  const int64_t offset = a.pointer_offset * dtype_bytes(a.dtype);
  if (!a.pointers) return reinterpret_cast<uintptr_t>(a.base) % 16 == 0;
  for (int e = 0; e < num_experts; ++e)
    if ((reinterpret_cast<uintptr_t>(a.pointers[e]) + uint64_t(offset)) % 16) return false;
  return true;
}

ExpertMatrix PointerTable::device(const ExpertMatrix& matrix, int num_experts) {
  ExpertMatrix view = matrix;
  view.aligned = all_aligned(matrix.values, num_experts);
  view.scales_aligned = all_aligned(matrix.scales.array, num_experts);
  for (ExpertArray* array : {&view.values, &view.scales.array, &view.zeros.array, &view.scales2,
                             &view.scale_offset, &view.group_index, &view.bias})
    if (array->pointers) array->pointers = place(array->pointers, num_experts);
  return view;
}

void** PointerTable::place(void* const* pointers, int count) {
  void** const to = memory_ + written_ + waiting_;
  for (int i = 0; i < count; ++i) {
    if (waiting_ == kChunk) flush();
    chunk_.pointers[waiting_++] = pointers[i];
  }
  return to;
}

void PointerTable::flush() {
  if (waiting_ == 0) return;
  run(op_, "pointers", write_pointers_kernel, dim3(1), kChunk, 0, chunk_, waiting_,
      memory_ + written_);
  written_ += waiting_;
  waiting_ = 0;
}

void store_words(const Op& op, void* to, const void* from, uint64_t bytes) {
  Words words = {};
  std::memcpy(words.word, from, size_t(bytes));
  run(op, "words of the host", store_words_kernel, dim3(1), 32, 0, words, int(bytes / 4),
      static_cast<uint32_t*>(to));
}

}  // namespace moec::cuda
