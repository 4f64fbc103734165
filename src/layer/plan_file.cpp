// SPDX-License-Identifier: Apache-2.0
// A plan as bytes: a header that says which plan it is, then its arrays in the order of
// plan_parts().
#include <cstring>
#include <vector>

#include "core/checksum.h"
#include "layer/plan.h"

namespace moec {
namespace {

using ull = unsigned long long;

constexpr char kMagic[8] = {'M', 'O', 'E', 'C', 'P', 'L', 'A', 'N'};
constexpr uint32_t kVersion = 1;

struct Header {  // little-endian, without implicit padding
  char magic[8];
  uint32_t version, kind;
  int32_t num_experts, num_zero, top_k, expert_begin, num_local, align;
  uint32_t drop, reserved;
  int64_t num_tokens, max_rows, capacity;
  uint64_t payload_bytes, payload_checksum;
  uint64_t header_checksum;  // of the bytes before it
};
static_assert(sizeof(Header) == 96);

struct Part {
  void* data;
  uint64_t bytes;
};

struct Parts {
  Part part[11];
  uint64_t bytes = 0;
};

Parts plan_parts(const PlanView& plan) {
  const uint64_t local = uint64_t(plan.num_local), rows = uint64_t(plan.max_rows);
  const uint64_t slots = uint64_t(plan.num_tokens) * uint64_t(plan.top_k);
  const bool choice = plan.kind == MOEC_PLAN_EXPERT_CHOICE;
  const uint64_t tokens = choice ? uint64_t(plan.num_tokens) + 1 : 0;
  const uint64_t choices = choice ? local * uint64_t(plan.capacity) : 0;
  Parts parts = {{{plan.totals, 4},
                  {plan.counts, local},
                  {plan.group_offsets, local + 1},
                  {plan.row_token, rows},
                  {plan.row_slot, rows},
                  {plan.row_weight, rows},
                  {plan.assignment_row, slots},
                  {plan.expert_ids, slots},
                  {plan.routing_weights, slots},
                  {plan.token_offsets, tokens},
                  {plan.token_rows, choices}}};
  for (Part& part : parts.part) parts.bytes += part.bytes *= 4;  // every element has 4 bytes
  return parts;
}

// The same view with its arrays inside `memory`, which has parts.bytes bytes.
PlanView view_in(PlanView plan, char* memory) {
  const Parts parts = plan_parts(plan);
  int32_t** const arrays[] = {&plan.totals,         &plan.counts,     &plan.group_offsets,
                              &plan.row_token,      &plan.row_slot,   nullptr,
                              &plan.assignment_row, &plan.expert_ids, nullptr,
                              &plan.token_offsets,  &plan.token_rows};
  for (int i = 0; i < 11; ++i) {
    if (i == 5)
      plan.row_weight = reinterpret_cast<float*>(memory);
    else if (i == 8)
      plan.routing_weights = reinterpret_cast<float*>(memory);
    else
      *arrays[i] = reinterpret_cast<int32_t*>(memory);
    memory += parts.part[i].bytes;
  }
  return plan;
}

Header header_of(const PlanView& plan, uint64_t payload_bytes) {
  Header header = {};
  std::memcpy(header.magic, kMagic, sizeof kMagic);
  header.version = kVersion;
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
  header.payload_bytes = payload_bytes;
  return header;
}

Header read_header(const void* buffer, uint64_t bytes) {
  Header header;
  MOEC_REQUIRE(bytes >= sizeof header, MOEC_E_CORRUPT,
               "buffer has %llu bytes; a saved plan has at least %zu", ull(bytes), sizeof header);
  std::memcpy(&header, buffer, sizeof header);
  MOEC_REQUIRE(std::memcmp(header.magic, kMagic, sizeof kMagic) == 0, MOEC_E_CORRUPT,
               "buffer does not start as a saved plan; expected the bytes of moec_plan_save_sync");
  MOEC_REQUIRE(header.version == kVersion, MOEC_E_CORRUPT,
               "buffer has version %u of a saved plan; expected %u", header.version, kVersion);
  const uint64_t sum = checksum(&header, offsetof(Header, header_checksum));
  MOEC_REQUIRE(sum == header.header_checksum, MOEC_E_CORRUPT,
               "header has checksum %016llx; expected %016llx", ull(header.header_checksum),
               ull(sum));
  return header;
}

}  // namespace

uint64_t Plan::saved_bytes() const {
  return sizeof(Header) + plan_parts(view()).bytes;
}

void Plan::save_sync(void* buffer, moec_stream stream) const {
  const Parts parts = plan_parts(view());
  check_copy("buffer", buffer, sizeof(Header) + parts.bytes);
  context_->synchronize(stream);
  char* const payload = static_cast<char*>(buffer) + sizeof(Header);
  char* to = payload;
  for (const Part& part : parts.part) {
    if (part.bytes) context_->backend().copy_to_host(to, part.data, part.bytes, stream);
    to += part.bytes;
  }
  Header header = header_of(view(), parts.bytes);
  header.payload_checksum = checksum(payload, parts.bytes);
  header.header_checksum = checksum(&header, offsetof(Header, header_checksum));
  std::memcpy(buffer, &header, sizeof header);
}

void Plan::restore_sync(const void* buffer, uint64_t bytes, moec_stream stream) {
  const Header header = read_header(buffer, bytes);
  MOEC_REQUIRE(header.num_tokens >= 0 && header.num_tokens <= desc_.max_tokens, MOEC_E_MISMATCH,
               "buffer holds a plan of %lld tokens; this plan's max_tokens is %lld",
               static_cast<long long>(header.num_tokens), static_cast<long long>(desc_.max_tokens));
  const PlanView plan = view_for(header.num_tokens);
  const Parts parts = plan_parts(plan);
  Header expected = header_of(plan, parts.bytes);
  expected.payload_checksum = header.payload_checksum;
  expected.header_checksum = header.header_checksum;
  MOEC_REQUIRE(std::memcmp(&header, &expected, sizeof header) == 0, MOEC_E_MISMATCH,
               "buffer holds a plan of E, K, align = %d, %d, %d or other bounds; this plan has %d, "
               "%d, %d",
               header.num_experts, header.top_k, header.align, plan.num_experts, plan.top_k,
               plan.align);
  MOEC_REQUIRE(bytes >= sizeof header + parts.bytes, MOEC_E_CORRUPT,
               "buffer has %llu bytes; expected %llu", ull(bytes),
               ull(sizeof header + parts.bytes));
  const char* const payload = static_cast<const char*>(buffer) + sizeof header;
  const uint64_t sum = checksum(payload, parts.bytes);
  MOEC_REQUIRE(sum == header.payload_checksum, MOEC_E_CORRUPT,
               "plan has checksum %016llx; expected %016llx", ull(sum),
               ull(header.payload_checksum));
  std::vector<char> copy(payload,
                         payload + parts.bytes);  // aligned, so that it can be read as a plan
  MOEC_REQUIRE(plan_holds(view_in(plan, copy.data())), MOEC_E_CORRUPT,
               "buffer has a right checksum but its arrays contradict each other");
  context_->synchronize(stream);
  const char* from = copy.data();
  built_ = false;
  for (const Part& part : parts.part) {
    if (part.bytes) context_->backend().copy(part.data, from, part.bytes, stream);
    from += part.bytes;
  }
  context_->synchronize(stream);
  adopt(plan);
}

}  // namespace moec
