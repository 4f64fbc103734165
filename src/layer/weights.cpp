// SPDX-License-Identifier: Apache-2.0
#include "layer/weights.h"

#include <sys/mman.h>

#include <cstdio>
#include <optional>

#include "backend/weight_packing.h"
#include "core/dtype.h"
#include "core/workspace.h"

namespace moec {

Weights::Weights(const Context& context, const moec_weights_desc& desc)
    : Object(kKind),
      context_(context),
      packing_(context.backend()),
      desc_(checked_weights_desc(desc)) {}

Weights::~Weights() {
  drop_packed();
}

const WeightsView& Weights::view() const {
  MOEC_REQUIRE(bound_once_, MOEC_E_INVALID_STATE,
               "weights are not bound; call moec_weights_bind or moec_weights_map_sync before");
  return bound_.view;
}

void Weights::check_memory(TensorCheck& check) const {
  check.set_in(bound_.memory);
  check.memory_in("packed weights", packed_.block, packed_.bytes);
}

void Weights::bind(const moec_weight_set& set) {
  const size_t entries = size_t(binding_entries(set, desc_.num_experts, false));
  std::vector<void*> pointers(entries);
  std::vector<MemoryBlock> blocks(entries);
  const BoundWeights bound = bind_weights(*context_, desc_, set, pointers.data(), blocks.data());
  drop_packed();  // it was a copy of other matrices
  pointers_.swap(pointers);
  blocks_.swap(blocks);
  bound_ = bound;
  source_ = bound.view;
  bound_once_ = true;
}

WeightsView Weights::known_view() const {
  return bound_once_ ? bound_.view : unbound_view(desc_, false, false, false);
}

void Weights::require_packable() const {
  MOEC_REQUIRE(packing().takes(known_view()), MOEC_E_UNSUPPORTED,
               "weights of schemes %u and %u have no packed form on %s; use them as they are bound",
               desc_.gate_up_scheme, desc_.down_scheme, context_->backend().name());
}

uint64_t Weights::packed_bytes() const {
  // Of plain weights the same whatever is bound: biases have their place even where there are none.
  const WeightsView view = known_view();
  return packing().takes(view) ? packing().bytes(view) : 0;
}

void Weights::query(moec_weights_info& out) const {
  const bool frozen = desc_.flags & MOEC_WEIGHTS_FROZEN;
  const uint64_t bytes = frozen ? packed_bytes() : 0;
  out.packed_bytes = bytes ? bytes + kAlignSlack : 0;
  out.is_bound = bound_once_ && bound_.view.source_present;
  out.is_packed = is_packed();
  out.is_frozen = frozen;
  out.needs_source = !bound_once_ || !packing().takes(bound_.view);
  if (!is_packed()) return;
  const std::string format = packing().format(bound_.view);
  std::snprintf(out.packed_format, sizeof out.packed_format, "%s", format.c_str());
}

void Weights::require_frozen() const {
  MOEC_REQUIRE(
      desc_.flags & MOEC_WEIGHTS_FROZEN, MOEC_E_INVALID_STATE,
      "weights may change; only those created with MOEC_WEIGHTS_FROZEN have a packed copy");
}

void Weights::adopt(const Packed& packed, const WeightsView& source, const void* head) {
  const uint64_t before =
      uint64_t(static_cast<char*>(packed.data) - static_cast<char*>(packed.block));
  const WeightsView view = packing().view(source, head, packed.data, packed.bytes - before);
  drop_packed();
  packed_ = packed;
  source_ = source;
  bound_.view = view;
  bound_once_ = true;
}

void Weights::drop_packed() noexcept {
  if (packed_.owner == Owner::kContext) context_->deallocate(packed_.block, packed_.bytes, nullptr);
  if (packed_.owner == Owner::kFile) munmap(packed_.block, size_t(packed_.bytes));
  packed_ = {};
  bound_.view.packed = nullptr;
  bound_once_ = bound_once_ && bound_.view.source_present;
}

void Weights::pack(const moec_buffer* memory, moec_stream stream) {
  require_frozen();
  MOEC_REQUIRE(view().source_present, MOEC_E_INVALID_STATE,
               "weights have no source to pack; call moec_weights_bind before");
  const WeightsView source = source_;
  require_packable();
  const uint64_t need = packed_bytes() + kAlignSlack;
  if (memory) {
    check_buffer(*context_, "memory", *memory, need);
    TensorCheck check(*context_);
    check.set_in(bound_.memory);
    check.memory_out("memory", memory->ptr, need);
    check.finish();
  }
  if (!memory) context_->forbid_capture("pack", stream);
  std::optional<Block> own;
  if (!memory) own.emplace(*context_, need, stream);
  Packed packed;
  packed.owner = memory ? Owner::kCaller : Owner::kContext;
  packed.bytes = need;
  packed.block = memory ? memory->ptr : own->data();
  const uint64_t start = round_up(reinterpret_cast<uintptr_t>(packed.block), kCacheLine);
  packed.data = reinterpret_cast<void*>(start);
  packing().pack(source, packed.data, 0, desc_.num_experts, stream);
  if (own) own->release();
  adopt(packed, source, nullptr);
}

void Weights::refresh(int32_t first, int32_t count, moec_stream stream) {
  MOEC_REQUIRE(is_packed() && packed_.owner != Owner::kFile, MOEC_E_INVALID_STATE,
               "weights have %s; call moec_weights_pack before",
               is_packed() ? "a packed file, which is read-only" : "no packed copy");
  MOEC_REQUIRE(bound_.view.source_present, MOEC_E_INVALID_STATE,
               "the source of the weights was released; call moec_weights_bind and pack again");
  check_range("first", first, 0, desc_.num_experts);
  check_range("count", count, 0, desc_.num_experts - first);
  packing().pack(source_, packed_.data, first, count, stream);
}

void Weights::release_source() {
  require_packable();
  MOEC_REQUIRE(is_packed(), MOEC_E_INVALID_STATE,
               "weights have no packed copy; call moec_weights_pack before");
  bound_.view.source_present = source_.source_present = false;
  bound_.memory.count = 0;
}

void Weights::unpack(const moec_weight_set& to, moec_stream stream) const {
  MOEC_REQUIRE(is_packed(), MOEC_E_INVALID_STATE,
               "weights have no packed copy; call moec_weights_pack before");
  const size_t entries = size_t(binding_entries(to, desc_.num_experts, false));
  std::vector<void*> pointers(entries);
  std::vector<MemoryBlock> blocks(entries);
  const BoundWeights out = bind_weights(*context_, desc_, to, pointers.data(), blocks.data());
  const auto same_bias = [](const char* name, const ExpertMatrix& own, const ExpertMatrix& given) {
    MOEC_REQUIRE(own.has_bias() == given.has_bias(), MOEC_E_MISMATCH,
                 "%s has %s bias; the packed weights have %s", name, given.has_bias() ? "a" : "no",
                 own.has_bias() ? "one" : "none");
  };
  same_bias("gate", bound_.view.gate, out.view.gate);
  same_bias("up", bound_.view.up, out.view.up);
  same_bias("down", bound_.view.down, out.view.down);
  TensorCheck check(*context_);
  check.set_out(out.memory);
  check.memory_in("packed weights", packed_.block, packed_.bytes);
  check.finish();
  packing().unpack(bound_.view, out.view, stream);
}

Weights::Form Weights::form(uint32_t matrix) const {
  const WeightsView& bound = view();
  MOEC_REQUIRE(bound.source_present, MOEC_E_INVALID_STATE,
               "the source of the weights was released; call moec_weights_bind before");
  check_enum("matrix", matrix, MOEC_MATRIX_DOWN);
  const int64_t I = desc_.inter, H = desc_.hidden;
  const bool down = matrix == MOEC_MATRIX_DOWN, both = matrix == MOEC_MATRIX_GATE_UP;
  const PartOfRows gate_rows = part_rows(desc_.gate_layout, I, false);
  MOEC_REQUIRE((!both || gate_rows.step) && (matrix != MOEC_MATRIX_GATE || bound.gated),
               MOEC_E_INVALID_ARG, "matrix is %u (%s); gate_layout %u has none", matrix,
               both ? "GATE_UP" : "GATE", desc_.gate_layout);
  const bool in_out = (down ? desc_.down_orientation : desc_.gate_up_orientation) == MOEC_IN_OUT;
  const PartOfRows whole = {0, 1};
  if (down) return {H, I, in_out, 1, {{&bound.down, H, whole, false}}};
  if (both)
    return {2 * I,
            H,
            in_out,
            2,
            {{&bound.gate, I, gate_rows, false},
             {&bound.up, I, part_rows(desc_.gate_layout, I, true), true}}};
  const bool up = matrix == MOEC_MATRIX_UP;
  return {I, H, in_out, 1, {{up ? &bound.up : &bound.gate, I, whole, up}}};
}

ExpertMatrix Weights::Form::plain(const Part& part, void* values, moec_dtype dtype) const {
  const int64_t row = in_out ? 1 : k;
  ExpertMatrix to;
  to.values = ExpertArray{values, nullptr, n * k, 0, dtype}.from(part.place.first * row);
  to.row_stride = part.place.step * row;
  to.col_stride = in_out ? n : 1;
  to.dtype = dtype;
  return to;
}

void Weights::dequantise(uint32_t matrix, int32_t expert, const moec_tensor& to,
                         moec_stream stream) const {
  const Form form = this->form(matrix);
  check_range("expert", expert, 0, desc_.num_experts - 1);
  TensorCheck check(*context_);
  const Array out = check.out("to", to, {form.rows(), form.cols()}, kReal);
  check_memory(check);
  check.finish();
  for (int32_t i = 0; i < form.count; ++i) {
    const Form::Part& part = form.parts[i];
    const MatrixView place = form.plain(part, out.data, out.dtype).expert(0);
    context_->backend().run(ValuesArgs{part.from, expert, part.rows, form.k, place}, stream);
  }
}

}  // namespace moec
