// SPDX-License-Identifier: Apache-2.0
#include <dnnl.hpp>
#include <map>

#include "layer_case.h"

namespace moec::bench {
namespace {
using dnnl::memory;
using Tag = memory::format_tag;
}  // namespace

// One of gate, up and down: y [m, n] = x [m, k] * W^T, W [n, k] of each expert.
struct OneDnnLayer::Matrix {
  int64_t n, k;
  std::vector<memory> packed;
  std::map<int64_t, dnnl::matmul> by_rows;
};

struct OneDnnLayer::Engine {
  dnnl::engine cpu{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream{cpu};
  memory::data_type dtype;
  Matrix matrices[3];

  dnnl::matmul::primitive_desc plan(const Matrix& matrix, int64_t m, const memory::desc& weights) {
    const memory::desc x({m, matrix.k}, dtype, Tag::ab), y({m, matrix.n}, dtype, Tag::ab);
    return {dnnl::matmul::desc(x, weights, y), cpu};
  }
  void pack(Matrix& matrix, char* source, int32_t experts, int64_t rows) {
    const memory::dims shape = {matrix.k, matrix.n};
    const memory::desc plain(shape, dtype, Tag::ba), any(shape, dtype, Tag::any);
    const memory::desc wanted = plan(matrix, rows, any).weights_desc();
    const int64_t bytes = matrix.n * matrix.k * int64_t(memory::data_type_size(dtype));
    for (int32_t e = 0; e < experts; ++e) {
      memory from(plain, cpu, source + e * bytes), to(wanted, cpu);
      dnnl::reorder(from, to).execute(stream, from, to);
      matrix.packed.push_back(to);
    }
    stream.wait();
  }
  void run(Matrix& matrix, size_t expert, int64_t m, void* x, void* y) {
    memory& weights = matrix.packed[expert];
    auto found = matrix.by_rows.find(m);
    if (found == matrix.by_rows.end())
      found = matrix.by_rows.emplace(m, plan(matrix, m, weights.get_desc())).first;
    memory in({{m, matrix.k}, dtype, Tag::ab}, cpu, x),
        out({{m, matrix.n}, dtype, Tag::ab}, cpu, y);
    found->second.execute(stream,
                          {{DNNL_ARG_SRC, in}, {DNNL_ARG_WEIGHTS, weights}, {DNNL_ARG_DST, out}});
  }
};

OneDnnLayer::OneDnnLayer(const Shape& shape, moec_dtype dtype, const Memory* const source[3],
                         int64_t rows, int64_t max_rows)
    : engine_(std::make_unique<Engine>()),
      gate_(size_t(max_rows * shape.inter * 4)),
      up_(gate_.bytes()),
      y_(size_t(max_rows * shape.hidden * 4)) {
  engine_->dtype = dtype == MOEC_F32 ? memory::data_type::f32 : memory::data_type::bf16;
  const int64_t H = shape.hidden, I = shape.inter, dims[3][2] = {{I, H}, {I, H}, {H, I}};
  for (int i = 0; i < 3; ++i) {
    engine_->matrices[i].n = dims[i][0];
    engine_->matrices[i].k = dims[i][1];
    engine_->pack(engine_->matrices[i], source[i]->as<char>(), shape.experts, rows);
  }
}
OneDnnLayer::~OneDnnLayer() = default;

void OneDnnLayer::forward(const std::vector<int64_t>& rows_of_expert, const Memory& x) {
  for (size_t e = 0; e < rows_of_expert.size(); ++e) {
    const int64_t m = rows_of_expert[e];
    if (m == 0) continue;
    engine_->run(engine_->matrices[0], e, m, x.as<void>(), gate_.as<void>());
    engine_->run(engine_->matrices[1], e, m, x.as<void>(), up_.as<void>());
    engine_->run(engine_->matrices[2], e, m, gate_.as<void>(), y_.as<void>());
  }
  engine_->stream.wait();
}

}  // namespace moec::bench
