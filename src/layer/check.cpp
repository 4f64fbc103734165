// SPDX-License-Identifier: Apache-2.0
#include "layer/check.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstring>

#include "core/device_name.h"
#include "core/dtype.h"
#include "layer/context.h"

namespace moec {
namespace {

using ll = long long;

// "[4,8]"; long texts are cut: "[4611686018427387904,4611686018427387904,...]".
struct Text {
  char text[64] = "";
  const char* c_str() const { return text; }
};

Text shape_text(const int64_t* extents, int64_t count) {
  Text out;
  size_t used = size_t(std::snprintf(out.text, sizeof out.text, "["));
  for (int64_t i = 0; i < count; ++i) {
    if (used + sizeof ",-9223372036854775808,...]" > sizeof out.text) {
      used += size_t(std::snprintf(out.text + used, sizeof out.text - used, ",..."));
      break;
    }
    used += size_t(std::snprintf(out.text + used, sizeof out.text - used, i ? ",%lld" : "%lld",
                                 ll(extents[i])));
  }
  std::snprintf(out.text + used, sizeof out.text - used, "]");
  return out;
}

Text dtypes_text(Dtypes dtypes) {
  Text out;
  size_t used = 0;
  for (auto dtype = dtypes.begin(); dtype != dtypes.end(); ++dtype)
    if (std::find(dtypes.begin(), dtype, *dtype) == dtype)  // some name one type twice
      used += size_t(std::snprintf(out.text + used, sizeof out.text - used, used ? " or %s" : "%s",
                                   dtype_name(*dtype)));
  return out;
}

bool is_compact(const moec_tensor& tensor) {
  bool all_zero = true;
  for (int32_t i = 0; i < tensor.ndim; ++i) all_zero &= tensor.strides[i] == 0;
  if (all_zero || tensor_numel(tensor) == 0) return true;
  int64_t expected = 1;
  for (int32_t i = tensor.ndim - 1; i >= 0; --i) {  // an extent of 1 is never stepped over
    if (tensor.shape[i] != 1 && tensor.strides[i] != expected) return false;
    expected *= tensor.shape[i];
  }
  return true;
}

uintptr_t address(const moec_tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.data) + tensor.byte_offset;
}

}  // namespace

void check_flags(const char* name, uint32_t flags, uint32_t known) {
  MOEC_REQUIRE((flags & ~known) == 0, MOEC_E_INVALID_ARG, "%s is 0x%x; the known bits are 0x%x",
               name, flags, known);
}
void check_enum(const char* name, uint32_t value, uint32_t last) {
  MOEC_REQUIRE(value <= last, MOEC_E_INVALID_ARG, "%s is %u; expected 0 to %u", name, value, last);
}
void check_at_least(const char* name, int64_t value, int64_t least) {
  MOEC_REQUIRE(value >= least, MOEC_E_INVALID_ARG, "%s is %lld; expected at least %lld", name,
               ll(value), ll(least));
}
void check_range(const char* name, int64_t value, int64_t least, int64_t most) {
  MOEC_REQUIRE(value >= least && value <= most, MOEC_E_INVALID_ARG,
               "%s is %lld; expected %lld to %lld", name, ll(value), ll(least), ll(most));
}
void check_not_negative(const char* name, float value) {
  MOEC_REQUIRE(value >= 0 && std::isfinite(value), MOEC_E_INVALID_ARG,
               "%s is %g; expected a finite number, 0 or more", name, double(value));
}
void check_zero(const char* name, float value, const char* why) {
  MOEC_REQUIRE(value == 0, MOEC_E_INVALID_ARG, "%s is %g; expected 0, %s", name, double(value),
               why);
}

int64_t checked_num_ids(int32_t num_experts, int32_t num_zero_experts) {
  check_at_least("desc.num_experts", num_experts, 1);
  check_at_least("desc.num_zero_experts", num_zero_experts, 0);
  const int64_t num_ids = int64_t(num_experts) + num_zero_experts;
  MOEC_REQUIRE(num_ids <= INT32_MAX, MOEC_E_OVERFLOW,
               "desc.num_experts + desc.num_zero_experts is %lld; expected less than 2^31",
               ll(num_ids));
  return num_ids;
}
void check_local_experts(int32_t begin, int32_t end, int32_t num_experts) {
  if (!begin && !end) return;
  check_range("desc.expert_begin", begin, 0, num_experts - 1);
  check_range("desc.expert_end", end, begin + 1, num_experts);
}

int64_t checked_product(const char* name, int64_t a, int64_t b) {
  int64_t product = 0;
  MOEC_REQUIRE(!__builtin_mul_overflow(a, b, &product), MOEC_E_OVERFLOW,
               "%s is %lld * %lld; expected less than 2^63", name, ll(a), ll(b));
  return product;
}
int64_t checked_rows(const char* name, int64_t rows) {
  MOEC_REQUIRE(rows <= INT32_MAX, MOEC_E_OVERFLOW, "%s is %lld; expected less than 2^31", name,
               ll(rows));
  return rows;
}
uint64_t checked_bytes(const char* name, const moec_size& size, int64_t tokens) {
  uint64_t bytes = 0;
  const bool overflow = __builtin_mul_overflow(size.per_token, uint64_t(tokens), &bytes) ||
                        __builtin_add_overflow(bytes, size.base, &bytes) || bytes > INT64_MAX;
  MOEC_REQUIRE(!overflow, MOEC_E_OVERFLOW, "%s for %lld tokens exceeds 2^63 bytes", name,
               ll(tokens));
  return bytes;
}

bool is_absent(const moec_tensor& tensor) {
  static constexpr moec_tensor kAbsent = {};
  return !tensor.data && std::memcmp(&tensor, &kAbsent, sizeof tensor) == 0;
}

int64_t tensor_numel(const moec_tensor& tensor) {
  if (tensor.ndim < 0 || tensor.ndim > MOEC_MAX_DIMS) return -1;
  int64_t numel = 1;
  bool empty = false, overflow = false;
  for (int32_t i = 0; i < tensor.ndim; ++i) {
    if (tensor.shape[i] < 0) return -1;
    empty |= tensor.shape[i] == 0;
    overflow |= __builtin_mul_overflow(numel, tensor.shape[i], &numel);
  }
  return empty ? 0 : overflow ? -1 : numel;
}

void check_tensor(const char* name, const moec_tensor& tensor) {
  const int32_t type = tensor.device_type;
  MOEC_REQUIRE(
      type == MOEC_CPU || type == MOEC_CUDA || type == MOEC_CUDA_HOST || type == MOEC_CUDA_MANAGED,
      MOEC_E_DEVICE, "%s has device_type %d; expected MOEC_CPU (1) or MOEC_CUDA (2)", name, type);
  MOEC_REQUIRE(known_name(tensor.dtype), MOEC_E_DTYPE,
               "%s has dtype 0x%x; expected a moec_dtype_value", name, tensor.dtype);
  MOEC_REQUIRE(tensor.ndim >= 0 && tensor.ndim <= MOEC_MAX_DIMS, MOEC_E_INVALID_ARG,
               "%s.ndim is %d; expected 0 to %d", name, tensor.ndim, MOEC_MAX_DIMS);
  const Text shape = shape_text(tensor.shape, tensor.ndim);
  const int64_t numel = tensor_numel(tensor);
  for (int32_t i = 0; i < tensor.ndim; ++i)
    MOEC_REQUIRE(tensor.shape[i] >= 0, MOEC_E_SHAPE, "%s has shape %s; expected no negative extent",
                 name, shape.c_str());
  int64_t bytes = 0;
  MOEC_REQUIRE(numel >= 0 && !__builtin_mul_overflow(numel, dtype_bytes(tensor.dtype), &bytes),
               MOEC_E_OVERFLOW, "%s has shape %s; expected less than 2^63 bytes", name,
               shape.c_str());
  MOEC_REQUIRE(is_compact(tensor), MOEC_E_LAYOUT,
               "%s has strides %s for shape %s; expected compact row-major", name,
               shape_text(tensor.strides, tensor.ndim).c_str(), shape.c_str());
  MOEC_REQUIRE(tensor.data || numel == 0, MOEC_E_INVALID_ARG, "%s.data is NULL for shape %s", name,
               shape.c_str());
  MOEC_REQUIRE(tensor.byte_offset <= UINTPTR_MAX - reinterpret_cast<uintptr_t>(tensor.data) &&
                   uint64_t(bytes) <= UINTPTR_MAX - address(tensor),
               MOEC_E_OVERFLOW, "%s ends past the address space", name);
  MOEC_REQUIRE(address(tensor) % uintptr_t(dtype_bytes(tensor.dtype)) == 0, MOEC_E_INVALID_ARG,
               "%s is at address 0x%llx; expected a multiple of its %lld-byte element", name,
               static_cast<unsigned long long>(address(tensor)), ll(dtype_bytes(tensor.dtype)));
}

void check_device(const char* name, const moec_tensor& tensor, const Context& context) {
  const bool pinned =
      tensor.device_type == MOEC_CUDA_HOST || tensor.device_type == MOEC_CUDA_MANAGED;
  const bool same =
      tensor.device_type == context.device_type() && tensor.device_id == context.device_id();
  MOEC_REQUIRE(pinned || same, MOEC_E_DEVICE, "%s is on %s; expected %s", name,
               device_name(tensor.device_type, tensor.device_id).c_str(), context.name().c_str());
}

void check_alike(const char* name, const moec_tensor& tensor, const char* other_name,
                 const moec_tensor& other) {
  MOEC_REQUIRE(tensor.dtype == other.dtype, MOEC_E_DTYPE, "%s has dtype %s; %s has %s", name,
               dtype_name(tensor.dtype), other_name, dtype_name(other.dtype));
  MOEC_REQUIRE(tensor.ndim == other.ndim &&
                   std::equal(tensor.shape, tensor.shape + tensor.ndim, other.shape),
               MOEC_E_SHAPE, "%s has shape %s; %s has %s", name,
               shape_text(tensor.shape, tensor.ndim).c_str(), other_name,
               shape_text(other.shape, other.ndim).c_str());
}

void check_is_matrix(const char* name, const moec_tensor& tensor) {
  MOEC_REQUIRE(tensor.ndim == 2, MOEC_E_SHAPE, "%s has %d dimensions; expected 2", name,
               tensor.ndim);
}

int64_t TensorCheck::tokens(const char* name, const moec_tensor& tensor) const {
  MOEC_REQUIRE(!is_absent(tensor), MOEC_E_INVALID_ARG, "%s is absent; it is required", name);
  check_tensor(name, tensor);
  check_is_matrix(name, tensor);
  return checked_rows(name, tensor.shape[0]);
}

Array checked_array(const char* name, const moec_tensor& tensor, Shape shape, Dtypes dtypes,
                    const Context& context) {
  MOEC_REQUIRE(!is_absent(tensor), MOEC_E_INVALID_ARG, "%s is absent; it is required", name);
  check_tensor(name, tensor);
  check_device(name, tensor, context);
  bool fits = false;
  for (const moec_dtype dtype : dtypes) fits |= dtype == tensor.dtype;
  MOEC_REQUIRE(fits, MOEC_E_DTYPE, "%s has dtype %s; expected %s", name, dtype_name(tensor.dtype),
               dtypes_text(dtypes).c_str());
  fits = tensor.ndim == int32_t(shape.size());
  for (size_t i = 0; fits && i < shape.size(); ++i) fits = tensor.shape[i] == shape.begin()[i];
  MOEC_REQUIRE(fits, MOEC_E_SHAPE, "%s has shape %s; expected %s", name,
               shape_text(tensor.shape, tensor.ndim).c_str(),
               shape_text(shape.begin(), int64_t(shape.size())).c_str());
  static char empty;  // present, though it has no element
  const bool any = tensor_numel(tensor) > 0;
  return {any ? reinterpret_cast<void*>(address(tensor)) : &empty, tensor.dtype};
}

Array TensorCheck::check(const char* name, const moec_tensor& tensor, Shape shape, Dtypes dtypes,
                         bool written) {
  const Array array = checked_array(name, tensor, shape, dtypes, context_);
  add(name, array.data, uint64_t(tensor_numel(tensor) * dtype_bytes(tensor.dtype)), written);
  return array;
}

Array TensorCheck::in(const char* name, const moec_tensor& tensor, Shape shape, Dtypes dtypes) {
  return check(name, tensor, shape, dtypes, false);
}
Array TensorCheck::out(const char* name, const moec_tensor& tensor, Shape shape, Dtypes dtypes) {
  return check(name, tensor, shape, dtypes, true);
}
Array TensorCheck::optional_in(const char* name, const moec_tensor& tensor, Shape shape,
                               Dtypes dtypes) {
  return is_absent(tensor) ? Array{} : check(name, tensor, shape, dtypes, false);
}
Array TensorCheck::optional_out(const char* name, const moec_tensor& tensor, Shape shape,
                                Dtypes dtypes) {
  return is_absent(tensor) ? Array{} : check(name, tensor, shape, dtypes, true);
}
Array TensorCheck::in_if(bool wanted, const char* reason, const char* name,
                         const moec_tensor& tensor, Shape shape, Dtypes dtypes) {
  if (!wanted) {
    absent(name, tensor, reason);
    return {};
  }
  MOEC_REQUIRE(!is_absent(tensor), MOEC_E_INVALID_ARG, "%s is absent; it is required with %s", name,
               reason);
  return check(name, tensor, shape, dtypes, false);
}
void TensorCheck::absent(const char* name, const moec_tensor& tensor, const char* why) const {
  MOEC_REQUIRE(is_absent(tensor), MOEC_E_INVALID_ARG, "%s is given; expected absent without %s",
               name, why);
}

void TensorCheck::memory_in(const char* name, const void* data, uint64_t bytes) {
  add(name, data, bytes, false);
}
void TensorCheck::memory_out(const char* name, const void* data, uint64_t bytes) {
  add(name, data, bytes, true);
}
void TensorCheck::saved_in(const moec_buffer& saved, uint64_t bytes) {
  check_buffer(context_, "saved", saved, bytes);
  add("saved", saved.ptr, bytes, false);
}
void TensorCheck::saved_out(const moec_buffer& saved, uint64_t bytes) {
  saved_in(saved, bytes);
  if (bytes) ranges_[num_ranges_ - 1].written = true;
}
void TensorCheck::may_be_same(const char* out, const char* in) {
  same_out_ = out;
  same_in_ = in;
}

void TensorCheck::add(const char* name, const void* data, uint64_t bytes, bool written) {
  if (!bytes || !data) return;
  assert(num_ranges_ < kMaxRanges);
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data);
  ranges_[num_ranges_++] = {name, begin, begin + uintptr_t(bytes), written};
}

void TensorCheck::compare(const Range& out, const Range& other) const {
  if (out.begin >= other.end || other.begin >= out.end) return;
  const bool allowed = same_out_ && out.begin == other.begin && out.end == other.end &&
                       std::strcmp(out.name, same_out_) == 0 &&
                       std::strcmp(other.name, same_in_) == 0;
  MOEC_REQUIRE(allowed, MOEC_E_ALIAS,
               "%s [0x%llx, +%lld) overlaps %s [0x%llx, +%lld); give it memory "
               "of its own",
               out.name, static_cast<unsigned long long>(out.begin), ll(out.end - out.begin),
               other.name, static_cast<unsigned long long>(other.begin),
               ll(other.end - other.begin));
}

void MemorySet::add(const void* data, uint64_t bytes) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data);
  if (bytes) blocks[count++] = {begin, begin + uintptr_t(bytes)};
}
void MemorySet::sort() {
  std::sort(blocks, blocks + count,
            [](const MemoryBlock& a, const MemoryBlock& b) { return a.begin < b.begin; });
  int64_t kept = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (kept && blocks[i].begin < blocks[kept - 1].end) {
      overlaps_itself = true;
      blocks[kept - 1].end = std::max(blocks[kept - 1].end, blocks[i].end);
    } else {
      blocks[kept++] = blocks[i];
    }
  }
  count = kept;
}
const MemoryBlock* MemorySet::find(uintptr_t begin, uintptr_t end) const {
  const MemoryBlock* const after =
      std::lower_bound(  // the first block that starts at or past `end`
          blocks, blocks + count, end,
          [](const MemoryBlock& block, uintptr_t value) { return block.begin < value; });
  return after != blocks && after[-1].end > begin ? after - 1 : nullptr;
}

void TensorCheck::set_in(const MemorySet& set) {
  assert(num_sets_ < kMaxSets);
  sets_[num_sets_++] = {&set, false};
}
void TensorCheck::set_out(const MemorySet& set) {
  assert(num_sets_ < kMaxSets);
  sets_[num_sets_++] = {&set, true};
}

void TensorCheck::compare_sets() const {
  for (int i = 0; i < num_sets_; ++i) {
    const MemorySet& set = *sets_[i].set;
    for (int r = 0; r < num_ranges_; ++r) {
      if (!sets_[i].written && !ranges_[r].written) continue;
      const MemoryBlock* const block = set.find(ranges_[r].begin, ranges_[r].end);
      if (block) compare(ranges_[r], {set.name, block->begin, block->end, true});
    }
    if (!sets_[i].written) continue;
    MOEC_REQUIRE(!set.overlaps_itself, MOEC_E_ALIAS,
                 "two matrices of %s overlap; give each memory of its own", set.name);
    for (int j = 0; j < num_sets_; ++j) {
      if (j == i) continue;
      for (int64_t b = 0; b < set.count; ++b) {
        const MemoryBlock *const mine = set.blocks + b, *const other = sets_[j].set->find(
                                                            mine->begin, mine->end);
        if (other)
          compare({set.name, mine->begin, mine->end, true},
                  {sets_[j].set->name, other->begin, other->end, true});
      }
    }
  }
}

void TensorCheck::finish() const {
  compare_sets();
  for (int i = 0; i < num_ranges_; ++i)
    for (int j = 0; j < num_ranges_; ++j)
      if (i != j && ranges_[i].written) compare(ranges_[i], ranges_[j]);
}

}  // namespace moec
