// SPDX-License-Identifier: Apache-2.0
// A plan as bytes: a header that says which plan it is, then its arrays in the order of
// kPlanArrays.
#include <cstring>
#include <vector>

#include "core/checksum.h"
#include "layer/plan.h"

namespace moec {
namespace {

using ull = unsigned long long;

constexpr char kPlanMagic[8] = {'M', 'O', 'E', 'C', 'P', 'L', 'A', 'N'};
constexpr uint32_t kPlanVersion = 1;

struct PlanHeader {  // little-endian, without implicit padding
  char magic[8];
  uint32_t version, kind;
  int32_t num_experts, num_zero, top_k, expert_begin, num_local, align;
  uint32_t drop, reserved;
  int64_t num_tokens, max_rows, capacity;
  uint64_t payload_bytes, payload_checksum;
  uint64_t header_checksum;  // of the bytes before it
};
static_assert(sizeof(PlanHeader) == 96);

uint64_t payload_bytes(const PlanView& plan) {
  uint64_t sum = 0;
  for_each_array(plan, [&](const PlanArray&, uint64_t bytes) { sum += bytes; });
  return sum;
}

// The same view with its arrays inside `memory`, which has payload_bytes(plan).
PlanView view_in(PlanView plan, char* memory) {
  for_each_array(plan, [&](const PlanArray& array, uint64_t bytes) {
    array.set(plan, memory);
    memory += bytes;
  });
  return plan;
}

PlanHeader header_of(const PlanView& plan) {
  PlanHeader header = {};
  std::memcpy(header.magic, kPlanMagic, sizeof kPlanMagic);
  header.version = kPlanVersion;
  header.kind = plan.kind;
  header.num_experts = plan.num_experts;
  header.num_zero = plan.num_zero;
  header.top_k = plan.top_k;
  header.expert_begin = plan.expert_begin;
  header.num_local = plan.num_local;
  header.align = plan.align;
  header.drop = plan.drop;
  header.num_tokens = plan.num_tokens;
  header.max_rows = plan.max_rows;
  header.capacity = plan.capacity;
  header.payload_bytes = payload_bytes(plan);
  return header;
}

PlanHeader read_header(const void* buffer, uint64_t bytes) {
  PlanHeader header;
  MOEC_REQUIRE(bytes >= sizeof header, MOEC_E_CORRUPT,
               "buffer has %llu bytes; a saved plan has at least %zu", ull(bytes), sizeof header);
  std::memcpy(&header, buffer, sizeof header);
  MOEC_REQUIRE(std::memcmp(header.magic, kPlanMagic, sizeof kPlanMagic) == 0, MOEC_E_CORRUPT,
               "buffer does not start as a saved plan; expected the bytes of moec_plan_save_sync");
  MOEC_REQUIRE(header.version == kPlanVersion, MOEC_E_CORRUPT,
               "buffer has version %u of a saved plan; expected %u", header.version, kPlanVersion);
  const uint64_t sum = checksum(&header, offsetof(PlanHeader, header_checksum));
  MOEC_REQUIRE(sum == header.header_checksum, MOEC_E_CORRUPT,
               "header has checksum %016llx; expected %016llx", ull(header.header_checksum),
               ull(sum));
  return header;
}

}  // namespace

uint64_t Plan::saved_bytes() const {
  return sizeof(PlanHeader) + payload_bytes(view());
}

void Plan::save_sync(void* buffer, moec_stream stream) const {
  const uint64_t size = payload_bytes(view());
  check_copy("buffer", buffer, sizeof(PlanHeader) + size);
  context_->synchronize(stream);
  char* const payload = static_cast<char*>(buffer) + sizeof(PlanHeader);
  char* to = payload;
  for_each_array(view(), [&](const PlanArray& array, uint64_t part) {
    if (part) context_->backend().copy_to_host(to, array.data(view()), part, stream);
    to += part;
  });
  PlanHeader header = header_of(view());
  header.payload_checksum = checksum(payload, size);
  header.header_checksum = checksum(&header, offsetof(PlanHeader, header_checksum));
  std::memcpy(buffer, &header, sizeof header);
}

void Plan::restore_sync(const void* buffer, uint64_t bytes, moec_stream stream) {
  const PlanHeader header = read_header(buffer, bytes);
  MOEC_REQUIRE(header.num_tokens >= 0 && header.num_tokens <= desc_.max_tokens, MOEC_E_MISMATCH,
               "buffer holds a plan of %lld tokens; this plan's max_tokens is %lld",
               static_cast<long long>(header.num_tokens), static_cast<long long>(desc_.max_tokens));
  const PlanView plan = view_for(header.num_tokens);
  const uint64_t size = payload_bytes(plan);
  PlanHeader expected = header_of(plan);
  expected.payload_checksum = header.payload_checksum;
  expected.header_checksum = header.header_checksum;
  MOEC_REQUIRE(std::memcmp(&header, &expected, sizeof header) == 0, MOEC_E_MISMATCH,
               "buffer holds a plan of E, K, align = %d, %d, %d or other bounds; this plan has %d, "
               "%d, %d",
               header.num_experts, header.top_k, header.align, plan.num_experts, plan.top_k,
               plan.align);
  MOEC_REQUIRE(bytes >= sizeof header + size, MOEC_E_CORRUPT,
               "buffer has %llu bytes; expected %llu", ull(bytes), ull(sizeof header + size));
  const char* const payload = static_cast<const char*>(buffer) + sizeof header;
  const uint64_t sum = checksum(payload, size);
  MOEC_REQUIRE(sum == header.payload_checksum, MOEC_E_CORRUPT,
               "plan has checksum %016llx; expected %016llx", ull(sum),
               ull(header.payload_checksum));
  std::vector<char> copy(payload, payload + size);  // aligned: it is read as a plan
  MOEC_REQUIRE(plan_holds(view_in(plan, copy.data())), MOEC_E_CORRUPT,
               "buffer has a right checksum but its arrays contradict each other");
  context_->synchronize(stream);
  const char* from = copy.data();
  built_ = false;
  for_each_array(plan, [&](const PlanArray& array, uint64_t part) {
    if (part) context_->backend().copy(array.data(plan), from, part, stream);
    from += part;
  });
  context_->synchronize(stream);
  adopt(plan);
}

}  // namespace moec
