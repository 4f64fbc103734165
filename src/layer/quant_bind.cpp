// SPDX-License-Identifier: Apache-2.0
#include "layer/quant_bind.h"

#include <algorithm>

#include "core/workspace.h"

namespace moec {
namespace {

using quant::FormatInfo;
using quant::Storage;

int64_t numel(const Extents& shape) {
  int64_t product = 1;
  for (int32_t i = 0; i < shape.rank; ++i) product *= shape.extent[i];
  return product;
}
Extents matrix_extents(bool out_in, int64_t n, int64_t k) {
  return {{out_in ? n : k, out_in ? k : n}, 2};
}

class CodesBinder {
 public:
  CodesBinder(const CodesPlace& place, const CodedShape& shape, int parts, const moec_matrix& from)
      : place_(place),
        shape_(shape),
        format_(shape.format),
        parts_(parts),
        from_(from),
        is_stream_(format_.storage == Storage::kStream) {}

  void bind(ExpertMatrix& to) {
    check_extents(shape_);
    to.scheme = format_.scheme;
    if (is_stream_)
      bind_stream(to);
    else
      bind_rows(to);
    const bool has_scales = format_.scale_dtypes.size() > 0;
    MOEC_REQUIRE(from_.quant || !has_scales, MOEC_E_INVALID_ARG,
                 "%s.quant is NULL; the scheme of the weights is %s, whose codes need scales",
                 shape_.name, format_.name);
    if (!from_.quant) return;
    const moec_quant& q = *from_.quant;
    check_fields(shape_, q);
    to.flags = q.flags;
    const Blocks blocks = checked_blocks(shape_, q);
    if (is_stream_)
      bind_stream_scales(q, blocks.k, to);
    else if (has_scales)
      bind_scales(q, blocks, to);
  }

 private:
  int64_t experts() const { return place_.experts; }

  void add(const moec_tensor& tensor) {
    place_.memory.add(static_cast<const char*>(tensor.data) + tensor.byte_offset,
                      uint64_t(tensor_numel(tensor) * dtype_bytes(tensor.dtype)));
  }
  // Of one of these shapes: the first is the one that messages name.
  Array tensor(const std::string& name, const moec_tensor& given,
               std::initializer_list<Extents> shapes, Dtypes types) {
    const Extents* shape = shapes.begin();
    for (const Extents& other : shapes)
      if (has_shape(given, other)) shape = &other;
    const Array array = checked_array(name.c_str(), given, *shape, types, place_.context);
    add(given);
    return array;
  }
  static Extents stacked_shape(Extents shape, int64_t experts) {
    Extents stacked = {{experts}, 1};
    for (int32_t i = 0; i < shape.rank; ++i) stacked.extent[stacked.rank++] = shape.extent[i];
    return stacked;
  }
  // Stacked [E, shape], or as tensors of one expert each. `other`: the same elements in another
  // shape.
  ExpertArray array(const std::string& name, const moec_tensor& stacked,
                    const moec_tensor* per_expert, const Extents& shape, const Extents& other,
                    Dtypes types) {
    ExpertArray to;
    to.expert_stride = numel(shape);
    if (!per_expert) {
      if (is_absent(stacked)) return to;
      const Array found = tensor(
          name, stacked, {stacked_shape(shape, experts()), stacked_shape(other, experts())}, types);
      to.base = found.data;
      to.dtype = found.dtype;
      return to;
    }
    return each(
        per_expert,
        [&](const moec_tensor& given) { return tensor(name, given, {shape, other}, types); }, name,
        to);
  }
  // check(tensor) -> Array, for each expert; all have the type of the first.
  template <class Check>
  ExpertArray each(const moec_tensor* per_expert, const Check& check, const std::string& name,
                   ExpertArray to) {
    to.pointers = place_.pointers;
    for (int64_t e = 0; e < experts(); ++e) {
      const Array found = check(per_expert[e]);
      MOEC_REQUIRE(e == 0 || found.dtype == to.dtype, MOEC_E_DTYPE,
                   "%s has dtype %s; that of the experts before has %s", name.c_str(),
                   dtype_name(found.dtype), dtype_name(to.dtype));
      to.dtype = found.dtype;
      *place_.pointers++ = found.data;
    }
    return to;
  }
  std::string field(const char* of_quant) const {
    return std::string(shape_.name) + ".quant." + of_quant;
  }
  // Shapes of one element may be left out.
  static Extents without_ones(const Extents& shape) {
    return numel(shape) == 1 ? Extents{} : shape;
  }

  void bind_rows(ExpertMatrix& to) {
    const int64_t per_unit = format_.unit_elements, N = shape_.N, K = shape_.K;
    const bool along_k = format_.storage == Storage::kAlongK, out_in = shape_.out_in;
    const int64_t units = div_up(along_k ? K : out_in ? K : N, format_.unit_values);
    const int64_t lines = along_k || out_in ? N : K;
    Extents shape = {{lines, units * per_unit}, 2}, other = shape;
    if (per_unit > 1) other = {{lines, units, per_unit}, 3};
    if (along_k) shape = other = {{units, lines}, 2};
    to.values = array(shape_.name, from_.data, from_.per_expert, shape, other, format_.code_dtypes);
    const bool has_blocks = format_.scale_dtypes.size() == 0;  // distances of rows in bytes
    const int64_t line = has_blocks ? units * per_unit : units * format_.unit_values;
    to.row_stride = out_in ? line : 1;
    to.col_stride = along_k ? N : out_in ? 1 : line;
  }

  void bind_scales(const moec_quant& q, const Blocks& blocks, ExpertMatrix& to) {
    int64_t n = blocks.n.count(shape_.N);
    const int64_t k = blocks.k.count(shape_.K);
    if (format_.spare_row && n == 1) n += has_spare_row(q);
    const Extents shape = matrix_extents(shape_.out_in, n, k);
    to.scales =
        entries("scales", q.scales, q.per_expert_scales, shape, n, k, blocks, format_.scale_dtypes);
    const int64_t words = div_up(n, format_.zeros_values);
    if (q.per_expert_zeros || !is_absent(q.zeros))
      to.zeros =
          entries("zeros", q.zeros, q.per_expert_zeros, matrix_extents(shape_.out_in, words, k),
                  words, k, blocks, format_.zeros_dtypes);
    to.blocks_along_k = k;
    if (q.per_expert_group_index || !is_absent(q.group_index)) {
      const Extents inputs = {{shape_.K}, 1};
      to.group_index = array(field("group_index"), q.group_index, q.per_expert_group_index, inputs,
                             inputs, kInt);
    }
    if (format_.extras & quant::kScales2) bind_scales2(q, to);
  }
  ExpertBlocks entries(const char* name, const moec_tensor& stacked, const moec_tensor* per_expert,
                       const Extents& shape, int64_t n, int64_t k, const Blocks& blocks,
                       Dtypes types) {
    ExpertBlocks to;
    to.array = array(field(name), stacked, per_expert, shape, without_ones(shape), types);
    to.row_stride = shape_.out_in ? k : 1;
    to.col_stride = shape_.out_in ? 1 : n;
    to.block_n = blocks.n;
    to.block_k = blocks.k;
    return to;
  }
  bool has_spare_row(const moec_quant& q) const {
    const moec_tensor& given = q.per_expert_scales ? q.per_expert_scales[0] : q.scales;
    const int32_t rank = q.per_expert_scales ? 2 : 3;
    return given.ndim == rank && given.shape[shape_.out_in ? rank - 2 : rank - 1] == 2;
  }
  // One for each part of each expert, for each expert, or for all.
  void bind_scales2(const moec_quant& q, ExpertMatrix& to) {
    const std::string name = field("scales2");
    const Extents one = {{1}, 1}, none, of_parts = {{parts_}, 1};
    if (q.per_expert_scales2) {
      const moec_tensor& first = q.per_expert_scales2[0];
      const auto check = [&](const moec_tensor& given) {
        const Array found = tensor(name, given, {of_parts, one, none}, kFloat);
        check_alike(name.c_str(), given, "that of the first expert", first);
        return found;
      };
      to.scales2 = each(q.per_expert_scales2, check, name, {});
      to.scales2.expert_stride = tensor_numel(first);
      return;
    }
    const Extents of_experts = {{experts()}, 1}, of_both = {{experts(), parts_}, 2};
    const Array found = tensor(name, q.scales2, {of_experts, of_both, one, none}, kFloat);
    const int64_t count = tensor_numel(q.scales2);
    to.scales2 = {found.data, nullptr, count == 1 ? 0 : count / experts(), 0, found.dtype};
  }

  // ---- streams: all experts of a stack in one, or one an expert
  bool stacked_stream() const { return !from_.per_expert; }
  int64_t stream_codes() const { return (stacked_stream() ? experts() : 1) * shape_.N * shape_.K; }
  void bind_stream(ExpertMatrix& to) {
    const auto check = [&](const moec_tensor& given) {
      MOEC_REQUIRE(!is_absent(given), MOEC_E_INVALID_ARG, "%s is absent; it is required",
                   shape_.name);
      Extents same = {{}, std::clamp(given.ndim, 0, 4)};
      std::copy(given.shape, given.shape + same.rank, same.extent);
      const Array found = tensor(shape_.name, given, {same}, format_.code_dtypes);
      const int64_t size = dtype_bytes(given.dtype), bytes = tensor_numel(given) * size;
      const int64_t expected = div_up(div_up(stream_codes(), 2), size) * size;
      MOEC_REQUIRE(bytes == expected, MOEC_E_SHAPE,
                   "%s has %lld bytes; expected %lld, for a stream of %lld codes", shape_.name,
                   static_cast<long long>(bytes), static_cast<long long>(expected),
                   static_cast<long long>(stream_codes()));
      return found;
    };
    if (from_.per_expert) {
      to.values = each(from_.per_expert, check, shape_.name, {});
    } else {
      const Array found = check(from_.data);
      to.values.base = found.data;
      to.values.dtype = found.dtype;
      to.expert_codes = shape_.N * shape_.K;
    }
    to.row_stride = shape_.out_in ? shape_.K : 1;
    to.col_stride = shape_.out_in ? 1 : shape_.N;
  }
  void bind_stream_scales(const moec_quant& q, quant::BlockSize block, ExpertMatrix& to) {
    const int64_t scales = block.count(stream_codes());
    to.scales.array =
        of_stream("scales", q.scales, q.per_expert_scales, scales, format_.scale_dtypes);
    to.scales.block_k = block;
    to.codebook =
        static_cast<const float*>(tensor(field("codebook"), q.codebook, {{{16}, 1}}, kFloat).data);
    if (is_absent(q.scale_book)) return;
    to.scale_block =
        quant::BlockSize(q.scale_block ? q.scale_block : quant::Codebook4::kScaleBlock);
    to.scale_book = static_cast<const float*>(
        tensor(field("scale_book"), q.scale_book, {{{256}, 1}}, kFloat).data);
    to.scales2 =
        of_stream("scales2", q.scales2, q.per_expert_scales2, to.scale_block.count(scales), kFloat);
    to.scale_offset =
        of_stream("scale_offset", q.scale_offset, q.per_expert_scale_offset, 1, kFloat);
  }
  ExpertArray of_stream(const char* name, const moec_tensor& stacked, const moec_tensor* per_expert,
                        int64_t count, Dtypes types) {
    const Extents shape = {{count}, 1};
    MOEC_REQUIRE(stacked_stream() == !per_expert, MOEC_E_INVALID_ARG,
                 "%s is %s and its codes are %s; one stream has one of each", field(name).c_str(),
                 per_expert ? "per expert" : "one tensor",
                 stacked_stream() ? "one tensor" : "per expert");
    const auto check = [&](const moec_tensor& given) {
      return tensor(field(name), given, {shape, without_ones(shape)}, types);
    };
    if (per_expert) return each(per_expert, check, field(name), {});
    const Array found = check(stacked);
    return {found.data, nullptr, 0, 0, found.dtype};
  }

  const CodesPlace& place_;
  const CodedShape& shape_;
  const FormatInfo& format_;
  const int parts_;
  const moec_matrix& from_;
  const bool is_stream_;
};

}  // namespace

void bind_codes(const CodesPlace& place, const CodedShape& shape, int parts,
                const moec_matrix& from, ExpertMatrix& to) {
  CodesBinder(place, shape, parts, from).bind(to);
}

int64_t quant_entries(const moec_quant& q, int64_t each) {
  int64_t entries = 2;  // the codebook and scale_book
  for (const moec_tensor* per_expert :
       {q.per_expert_scales, q.per_expert_scales2, q.per_expert_zeros, q.per_expert_scale_offset,
        q.per_expert_group_index})
    entries += per_expert ? each : 1;
  return entries;
}

}  // namespace moec
