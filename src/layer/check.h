// SPDX-License-Identifier: Apache-2.0
// The promises of a caller, checked by table-like calls: each throws an Error that says what is
// wrong, with both values. Nothing is written before all checks of a call have passed.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "backend/args.h"
#include "core/error.h"

namespace moec {

class Context;

// ---- scalars of descriptors
constexpr uint32_t kGradFlags = MOEC_GRAD_ACCUMULATE | MOEC_GRAD_ACCUMULATE_X;  // of backward calls
void check_flags(const char* name, uint32_t flags, uint32_t known);
void check_enum(const char* name, uint32_t value, uint32_t last);
void check_at_least(const char* name, int64_t value, int64_t least);
void check_range(const char* name, int64_t value, int64_t least, int64_t most);
void check_not_negative(const char* name, float value);  // finite, >= 0
void check_zero(const char* name, float value, const char* why);

// ---- what plans, routers and experts all say
// num_experts + num_zero_experts, which is below 2^31.
int64_t checked_num_ids(int32_t num_experts, int32_t num_zero_experts);
// The experts that are here: all (0, 0) or a range.
void check_local_experts(int32_t begin, int32_t end, int32_t num_experts);

// ---- products that must fit; E_OVERFLOW names them
int64_t checked_product(const char* name, int64_t a, int64_t b);
// Rows or assignments: below 2^31.
int64_t checked_rows(const char* name, int64_t rows);
// size.base + tokens * size.per_token, or E_OVERFLOW.
uint64_t checked_bytes(const char* name, const moec_size& size, int64_t tokens);

// ---- tensors
using Shape = std::initializer_list<int64_t>;
using Dtypes = std::initializer_list<moec_dtype>;
inline constexpr Dtypes kReal = {MOEC_F32, MOEC_F16, MOEC_BF16};
inline constexpr Dtypes kFloat = {MOEC_F32};
inline constexpr Dtypes kId = {MOEC_I32, MOEC_I64};
inline constexpr Dtypes kInt = {MOEC_I32};
inline constexpr Dtypes kMask = {MOEC_U8, MOEC_BOOL};

bool is_absent(const moec_tensor& tensor);  // all zero
// Elements, or -1: NULL shape entries, a negative extent or overflow.
int64_t tensor_numel(const moec_tensor& tensor);
// What holds for every tensor: known dtype, extents, compact strides, alignment, known device type.
void check_tensor(const char* name, const moec_tensor& tensor);
// Throws unless both have one dtype and one shape: E_DTYPE, E_SHAPE.
void check_alike(const char* name, const moec_tensor& tensor, const char* other_name,
                 const moec_tensor& other);
// Throws unless it has two dimensions.
void check_is_matrix(const char* name, const moec_tensor& tensor);
// Throws unless the tensor's memory is reachable by a context's device.
void check_device(const char* name, const moec_tensor& tensor, const Context& context);

// A present tensor of this shape and one of these dtypes, in memory that the context's device
// reaches.
Array checked_array(const char* name, const moec_tensor& tensor, Shape shape, Dtypes dtypes,
                    const Context& context);

// The same with a shape of any rank.
struct Extents {
  int64_t extent[4] = {};
  int32_t rank = 0;
};
bool has_shape(const moec_tensor& tensor, const Extents& shape);
Array checked_array(const char* name, const moec_tensor& tensor, const Extents& shape,
                    Dtypes dtypes, const Context& context);

struct MemoryBlock {
  uintptr_t begin, end;
};
// Many blocks under one name: the matrices of a set of weights. Sorted, so that checks stay cheap.
struct MemorySet {
  const char* name = "";
  MemoryBlock* blocks = nullptr;
  int64_t count = 0;
  bool overlaps_itself = false;
  void add(const void* data, uint64_t bytes);
  void sort();                                                    // and join blocks that overlap
  const MemoryBlock* find(uintptr_t begin, uintptr_t end) const;  // a block that overlaps, or null
};

// The tensors of one call. Remembers the memory of each, so that finish() finds an output that
// overlaps anything else. Absent optional tensors give an Array without data; empty ones do not.
class TensorCheck {
 public:
  explicit TensorCheck(const Context& context) : context_(context) {}

  // Extent 0 of a required tensor of rank 2: T.
  int64_t tokens(const char* name, const moec_tensor& tensor) const;

  Array in(const char* name, const moec_tensor& tensor, Shape shape, Dtypes dtypes);
  Array out(const char* name, const moec_tensor& tensor, Shape shape, Dtypes dtypes);
  Array optional_in(const char* name, const moec_tensor& tensor, Shape shape, Dtypes dtypes);
  Array optional_out(const char* name, const moec_tensor& tensor, Shape shape, Dtypes dtypes);
  // Required where `wanted` (because of `reason`), refused where not.
  Array in_if(bool wanted, const char* reason, const char* name, const moec_tensor& tensor,
              Shape shape, Dtypes dtypes);
  void absent(const char* name, const moec_tensor& tensor, const char* why) const;

  void memory_in(const char* name, const void* data, uint64_t bytes);
  void memory_out(const char* name, const void* data, uint64_t bytes);
  // A `saved` buffer of at least `bytes`: E_INVALID_ARG, E_WORKSPACE.
  void saved_in(const moec_buffer& saved, uint64_t bytes);
  void saved_out(const moec_buffer& saved, uint64_t bytes);
  void set_in(const MemorySet& set);
  void set_out(const MemorySet& set);
  // `out` and `in` (as named before) may be the same memory, exactly.
  void may_be_same(const char* out, const char* in);
  void finish() const;  // E_ALIAS

 private:
  struct Range {
    const char* name;
    uintptr_t begin, end;
    bool written;
  };
  Array check(const char* name, const moec_tensor& tensor, Shape shape, Dtypes dtypes,
              bool written);
  void add(const char* name, const void* data, uint64_t bytes, bool written);
  void compare(const Range& out, const Range& other) const;
  void compare_sets() const;

  static constexpr int kMaxRanges = 64, kMaxSets = 6;
  const Context& context_;
  const char *same_out_ = nullptr, *same_in_ = nullptr;
  int num_ranges_ = 0;
  Range ranges_[kMaxRanges];
  int num_sets_ = 0;
  struct {
    const MemorySet* set;
    bool written;
  } sets_[kMaxSets];
};

}  // namespace moec
