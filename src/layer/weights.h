// SPDX-License-Identifier: Apache-2.0
// The weights of a set of experts: borrowed matrices, and for frozen ones a packed copy, which the
// library allocates, the caller lends, or a file maps.
#pragma once

#include <vector>

#include "backend/coded_packing.h"
#include "layer/check.h"
#include "layer/context.h"
#include "layer/weights_view.h"

namespace moec {

class Weights final : public Object {
 public:
  static constexpr Kind kKind = Kind::kWeights;
  Weights(const Context& context, const moec_weights_desc& desc);
  ~Weights() override;

  const Context& context() const { return *context_; }
  const moec_weights_desc& desc() const { return desc_; }
  const WeightsView& view() const;  // throws E_INVALID_STATE when unbound
  // The borrowed matrices and the packed copy, for a check of overlaps.
  void check_memory(TensorCheck& check) const;
  // Of the borrowed matrices, which a call will write.
  void check_written(TensorCheck& check) const { check.set_out(bound_.memory); }

  void bind(const moec_weight_set& set);
  void query(moec_weights_info& out) const;
  void pack(const moec_buffer* memory, moec_stream stream);
  void refresh(int32_t first, int32_t count, moec_stream stream);
  void release_source();
  void unpack(const moec_weight_set& to, moec_stream stream) const;
  void dequantise(uint32_t matrix, int32_t expert, const moec_tensor& to, moec_stream stream) const;

  // One of moec_matrix_name, and the parts that its rows are of.
  struct Form {
    int64_t n, k;
    bool in_out;
    int32_t count;
    struct Part {
      const ExpertMatrix* from;
      int64_t rows;
      PartOfRows place;
      bool is_up;
    } parts[2];
    int64_t rows() const { return in_out ? k : n; }  // as it is stored
    int64_t cols() const { return in_out ? n : k; }
    // A part in plain values of this form, the experts' one after the other.
    ExpertMatrix plain(const Part& part, void* values, moec_dtype dtype) const;
  };
  Form form(uint32_t matrix) const;  // E_INVALID_STATE without the source; E_INVALID_ARG

  // packed_file.cpp
  void save_sync(const char* path) const;
  void map_sync(const char* path);

 private:
  enum class Owner { kNone, kCaller, kContext, kFile };
  struct Packed {
    Owner owner = Owner::kNone;
    void* data = nullptr;   // 64-byte aligned
    void* block = nullptr;  // what to give back
    uint64_t bytes = 0;     // of the block
  };
  bool is_packed() const { return packed_.owner != Owner::kNone; }
  const WeightPacking& packing() const { return packing_.get(); }
  WeightsView known_view() const;  // as far as it is known before a bind
  void require_packable() const;   // E_UNSUPPORTED: these have no packed form on the device
  uint64_t packed_bytes() const;   // without the bytes that aligning may cost
  void require_frozen() const;
  // head: as WeightPacking::view has it.
  void adopt(const Packed& packed, const WeightsView& source, const void* head);
  void drop_packed() noexcept;

  Ref<const Context> context_;
  DevicePacking packing_;
  moec_weights_desc desc_;
  std::vector<void*> pointers_;
  std::vector<MemoryBlock> blocks_;
  BoundWeights bound_;       // as they are read
  WeightsView source_;       // as they are bound
  bool bound_once_ = false;  // view() has something to show
  Packed packed_;
};

}  // namespace moec
