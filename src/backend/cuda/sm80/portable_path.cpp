// SPDX-License-Identifier: Apache-2.0
// The experts on every GPU from compute capability 8.0 on: products and row kernels, one after the
// other. What no wanted gradient needs is not computed.
#include "backend/cuda/sm80/portable_path.h"

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/device/pointer_table.h"
#include "backend/cuda/experts/row_steps.h"
#include "backend/cuda/sm80/decoded_rows.h"
#include "backend/cuda/sm80/one_token_codes.h"
#include "backend/cuda/sm80/row_product.h"
#include "backend/cuda/weights/factors.h"
#include "backend/factor_grads.h"
#include "core/dtype.h"
#include "core/json_text.h"
#include "core/workspace.h"
#include "quant/format.h"

namespace moec::cuda {
namespace {

// The matrices of an MLP and their gradients, each as place(matrix, num_experts) gives it.
struct DeviceMlp {
  ExpertMatrix gate, up, down, d_gate, d_up, d_down;

  DeviceMlp() = default;
  template <class Place>
  DeviceMlp(const Mlp& mlp, const Place& place) {
    if (!mlp) return;
    const auto place_all = [&](const WeightsView& from, ExpertMatrix& g, ExpertMatrix& u,
                               ExpertMatrix& d) {
      if (from.gated) g = place(from.gate, from.num_experts);
      u = place(from.up, from.num_experts);
      d = place(from.down, from.num_experts);
    };
    place_all(*mlp.weights, gate, up, down);
    if (mlp.gradients) place_all(*mlp.gradients, d_gate, d_up, d_down);
  }
};

struct PathScratch {
  void* pointers;  // of experts that are separate tensors
  RowsScratch decoded;
};
PathScratch lay_out_scratch(const moec_experts_desc& desc, Arena& arena) {
  PathScratch scratch = {};
  const int32_t num_experts = desc.expert_end - desc.expert_begin;
  scratch.pointers = arena.take(PointerTable::bytes(num_experts + 1), 0);
  RowsScratch& decoded = scratch.decoded;
  decoded.bytes = decoded_bytes(desc);
  if (decoded.bytes == 0) return scratch;
  decoded.counters = arena.take_array<ProductCounters>(1, 0);
  decoded.values = arena.take(uint64_t(decoded.bytes), 0);
  return scratch;
}
PathScratch scratch_of(const Program& program) {
  Arena arena(program.scratch, 0);
  return lay_out_scratch(*program.desc, arena);
}

const char* stored_as(const ExpertMatrix& m) {
  return m.is_coded() ? quant::find_format(m.scheme)->name : dtype_name(m.values.dtype);
}

Preact preact_of(const Mlp& mlp, const PartRows& parts, moec_dtype dtype) {
  Preact pre;
  pre.data = {parts.gate ? parts.gate : parts.up, dtype};
  pre.gated = mlp.gated();
  pre.inter = mlp.inter;
  pre.activation = mlp.activation;
  if (mlp.act_rounding == MOEC_ACT_PER_OP && mlp.dtype != MOEC_F32) pre.rounding = mlp.dtype;
  return pre;
}

// What a program would multiply by.
struct Products {
  std::string* text = nullptr;  // where they are described
  int count = 0, of_few_rows = 0;
};

// Queues the steps of a program; or, without an op, says by which kernels it would multiply.
class Runner {
 public:
  Runner(const Op& op, const Program& program, moec_dtype pre)
      : op_(&op),
        products_(nullptr),
        program_(program),
        pre_(pre),
        multiprocessors_(op.multiprocessors),
        scratch_(scratch_of(program)) {
    PointerTable table(op, scratch_.pointers);
    place_mlps([&](const ExpertMatrix& m, int experts) { return table.device(m, experts); });
    table.flush();
  }
  Runner(const Program& program, moec_dtype pre, int multiprocessors, Products& products)
      : op_(nullptr),
        products_(&products),
        program_(program),
        pre_(pre),
        multiprocessors_(multiprocessors),
        scratch_(scratch_of(program)) {
    place_mlps([](ExpertMatrix m, int experts) {
      m.aligned = all_aligned(m.values, experts);  // scales: no choice of kernels is by theirs
      return m;
    });
  }

  // Takes the steps of a forward of one token together where there are kernels for that, and says
  // how many these are.
  int take_one_token() const {
    if (!is_of_one_token(program_)) return 0;
    const Up* const up = &std::get<Up>(program_.steps[0]);
    const Down* const down = &std::get<Down>(program_.steps[1]);
    const Mlp& mlp = *up->mlp;
    OneTokenSteps steps = {};
    steps.up = product_of(*up);
    steps.down = product_of(*down);
    steps.pre = {preact_of(mlp, up->pre, pre_).data, up->pre.stride, true, nullptr};
    steps.rows = {down->rows, mlp.hidden, true, nullptr};
    steps.act = up->act;
    steps.combine = combine_params(std::get<Combine>(program_.steps[2]));
    steps.expert_begin = program_.plan->expert_begin;
    steps.activation = mlp.activation;
    steps.multiprocessors = multiprocessors_;
    if (one_token_codes(op_, steps)) return 0;
    if (op_) return 3;
    const DeviceMlp& device = device_of(mlp);
    describe("up", mlp, {ProductKernel::kFewRows, "one token", "1x8+8"}, mlp.inter, mlp.hidden,
             &device.up);
    describe("down and combine", mlp, {ProductKernel::kFewRows, "one token", "1x8"}, mlp.hidden,
             mlp.inter, &device.down);
    return 3;
  }

  template <class Other>
  void operator()(const Other& step) const {
    if (op_) RowSteps(*op_, nullptr)(step);
  }

  void operator()(const Up& s) const {
    const Mlp& mlp = *s.mlp;
    const Preact pre = preact_of(mlp, s.pre, pre_);
    multiply("up", mlp, product_of(s), {pre.data, s.pre.stride, true, nullptr});
    const LowRank& factors = mlp.gate_up_adapters;
    add_narrow(mlp, s.narrow, factors.rank, factors.b[0], false, mlp.inter,
               {{s.pre.gate, pre_}, s.pre.stride});
    add_narrow(mlp, s.narrow, factors.rank, factors.b[1], false, mlp.inter,
               {{s.pre.up, pre_}, s.pre.stride});
    if (s.act && op_) activate(*op_, rows_of(mlp), pre, s.act_weight, {s.act, mlp.dtype});
  }

  void operator()(const Down& s) const {
    const Mlp& mlp = *s.mlp;
    ProductOutput output = {s.rows, mlp.hidden, true, s.bias_weight};
    output.groups_made = true;  // up is in front
    multiply("down", mlp, product_of(s), output);
    const LowRank& factors = mlp.down_adapters;
    add_narrow(mlp, s.narrow, factors.rank, factors.b[0], false, mlp.hidden, {s.rows, mlp.hidden});
  }

  void operator()(const ActGrad& s) const {
    const Mlp& mlp = *s.mlp;
    ActGradient step;
    if (s.wants_d_pre || s.wants_dots) {
      step.q = s.d_act;
      RowProduct p = product_of(mlp, mlp.inter);
      p.add({output_rows(mlp, s.d_y), &device_of(mlp).down, mlp.hidden, true, 0});
      multiply("grad_down", mlp, p, {step.q, mlp.inter});
      const LowRank& factors = mlp.down_adapters;
      add_narrow(mlp, s.narrow, factors.rank, factors.a, true, mlp.inter, {step.q, mlp.inter});
    }
    step.factor = s.factor;
    if (s.wants_d_pre) step.d_pre = elements(mlp, s.d_pre.gate ? s.d_pre.gate : s.d_pre.up);
    if (s.wants_weighted) step.weighted = elements(mlp, s.weighted);
    if (s.wants_dots) step.dots = s.dots;
    if (op_) act_gradient(*op_, rows_of(mlp), preact_of(mlp, s.pre, pre_), step);
  }

  void operator()(const BiasDots& s) const {
    const Mlp& mlp = *s.mlp;
    if (op_)
      row_dots(*op_, rows_of(mlp), mlp.hidden, {}, &device_of(mlp).down, s.d_y, true, s.dots);
  }

  void operator()(const InputGrad& s) const {
    const Mlp& mlp = *s.mlp;
    const DeviceMlp& device = device_of(mlp);
    RowProduct p = product_of(mlp, mlp.hidden);
    const auto add = [&](void* rows, const ExpertMatrix& matrix) {
      p.add({{elements(mlp, rows), s.d_pre.stride, nullptr}, &matrix, mlp.inter, true, 0});
    };
    if (mlp.gated()) add(s.d_pre.gate, device.gate);
    add(s.d_pre.up, device.up);
    ProductOutput output = {s.rows, mlp.hidden};
    output.groups_made = true;  // the activation's gradient is in front
    multiply("grad_up", mlp, p, output);
    const LowRank& factors = mlp.gate_up_adapters;
    add_narrow(mlp, s.narrow, factors.rank, factors.a, true, mlp.hidden, {s.rows, mlp.hidden});
    if (s.input_dots && op_)
      row_dots(*op_, rows_of(mlp), mlp.hidden, s.rows, nullptr, s.x, false, s.input_dots);
  }

  void operator()(const WeightGrads& s) const {
    const Mlp& mlp = *s.mlp;
    const DeviceMlp& device = device_of(mlp);
    const RowOperand gate = {elements(mlp, s.d_pre.gate), s.d_pre.stride, nullptr};
    const RowOperand up = {elements(mlp, s.d_pre.up), s.d_pre.stride, nullptr};
    const RowOperand act = {elements(mlp, s.weighted), mlp.inter, nullptr};
    const struct {
      const char* step;
      const ExpertMatrix& d;
      int64_t n, k;
      RowOperand g, x;
      const float* weight;  // of g's rows in the gradient of the bias; x already has it
    } products[] = {
        {"grad_weights_down", device.d_down, mlp.hidden, mlp.inter, output_rows(mlp, s.d_y), act,
         s.factor},
        {"grad_weights_gate", device.d_gate, mlp.inter, mlp.hidden, gate, mlp.x, nullptr},
        {"grad_weights_up", device.d_up, mlp.inter, mlp.hidden, up, mlp.x, nullptr}};
    for (const auto& p : products) {
      const ExpertMatrix& d = p.d;
      if (d.present()) multiply(p.step, mlp, {mlp.groups, p.n, p.k, p.g, p.x, &p.d, s.accumulate});
      if (d.has_bias() && op_)
        column_sums(*op_, {rows_of(mlp), p.g.gather != nullptr, p.g.data, p.g.stride, p.n, p.weight,
                           1, d.bias, d.bias_stride, s.accumulate});
    }
  }

  // ---- adapters: never described
  void operator()(const PackFactors& s) const {
    if (op_) pack_factors(*op_, s, true);
  }
  void operator()(const NarrowRows& s) const {
    const Mlp& mlp = *s.mlp;
    RowProduct p = s.product;
    ExpertMatrix matrices[2];
    for (int i = 0; i < p.num_terms; ++i) {
      matrices[i] = factor_of(mlp, *p.terms[i].b);
      p.terms[i].b = &matrices[i];
    }
    ProductOutput output = {elements(mlp, s.to), s.adapters->rank};
    output.ranks = s.adapters;
    output.row_token = mlp.row_token;
    multiply("narrow", mlp, p, output);
  }
  void operator()(const FactorGrads& s) const {
    const Mlp& mlp = *s.mlp;
    for_each_factor_grad(
        s,
        [&](const RowOperand& g, int64_t n, const RowOperand& x, int64_t k, const ExpertMatrix& d,
            bool accumulate) {
          const ExpertMatrix placed = factor_of(mlp, d);
          multiply("grad_factors", mlp, {mlp.groups, n, k, g, x, &placed, accumulate});
        },
        [&](int64_t n, const MatrixView& out) {
          if (op_) add_experts(*op_, s.sums, mlp.groups.count, n, s.in, out, s.accumulate);
        });
  }

 private:
  // Factors are stacks of one address, which needs no table of pointers.
  static ExpertMatrix factor_of(const Mlp& mlp, ExpertMatrix factor) {
    factor.aligned = all_aligned(factor.values, mlp.groups.count);
    return factor;
  }
  // A product of its own that adds to the output [P,n] of the one before.
  void add_narrow(const Mlp& mlp, const void* narrow, int64_t rank, const ExpertMatrix& factor,
                  bool transposed, int64_t n, ProductOutput output) const {
    if (!narrow || !factor.present()) return;
    const ExpertMatrix placed = factor_of(mlp, factor);
    RowProduct p = product_of(mlp, n);
    p.add({{elements(mlp, narrow), rank, nullptr}, &placed, rank, transposed, 0});
    output.accumulate = true;
    multiply("narrow_term", mlp, p, output);
  }
  const DeviceMlp& device_of(const Mlp& mlp) const {
    return &mlp == &program_.shared ? shared_ : routed_;
  }
  static RowProduct product_of(const Mlp& mlp, int64_t n) {
    RowProduct p;
    p.groups = mlp.groups;
    p.n = n;
    return p;
  }
  RowProduct product_of(const Up& s) const {
    const Mlp& mlp = *s.mlp;
    const DeviceMlp& device = device_of(mlp);
    RowProduct p = product_of(mlp, mlp.inter);
    if (mlp.gated()) p.add({mlp.x, &device.gate, mlp.hidden, false, 0});
    p.outputs = mlp.parts();
    p.add({mlp.x, &device.up, mlp.hidden, false, p.outputs - 1});
    return p;
  }
  RowProduct product_of(const Down& s) const {
    const Mlp& mlp = *s.mlp;
    RowProduct p = product_of(mlp, mlp.hidden);
    p.add({{elements(mlp, s.act), mlp.inter, nullptr}, &device_of(mlp).down, mlp.inter, false, 0});
    return p;
  }
  static Array elements(const Mlp& mlp, const void* data) {
    return {const_cast<void*>(data), mlp.dtype};
  }
  static RowOperand output_rows(const Mlp& mlp, const Array& d_y) {
    return {d_y, mlp.hidden, mlp.row_token};
  }

  template <class Place>
  void place_mlps(const Place& place) {
    routed_ = DeviceMlp(program_.routed, place);
    shared_ = DeviceMlp(program_.shared, place);
  }
  void multiply(const char* step, const Mlp& mlp, const RowProduct& product,
                const ProductOutput& output) const {
    const DecodedRows decoded(product, output, scratch_.decoded);
    if (op_) return decoded.is_used() ? decoded.launch(*op_) : row_product(*op_, product, output);
    const ProductKernel kernel = decoded.is_used() ? decoded.kernel() : kernel_of(product, output);
    if (decoded.is_used() && products_->text)
      append(*products_->text, decoding_kernel(name_of(step, mlp), decoded.experts()));
    describe(step, mlp, kernel, product.n, product.terms[0].k, product.terms[0].b);
  }
  void multiply(const char* step, const Mlp& mlp, const WeightProduct& product) const {
    if (op_) return weight_product(*op_, product);
    describe(step, mlp, kernel_of(product), product.n, product.k, nullptr);
  }
  std::string name_of(const char* step, const Mlp& mlp) const {
    return (&mlp == &program_.shared ? "shared_" : "") + std::string(step);
  }
  void describe(const char* step, const Mlp& mlp, const ProductKernel& of, int64_t n, int64_t k,
                const ExpertMatrix* weights) const {
    ++products_->count;
    products_->of_few_rows += of.by == ProductKernel::kFewRows;
    if (!products_->text) return;
    JsonObject kernel;
    kernel.add("step", name_of(step, mlp))
        .add("kernel", of.name)
        .add("tile", of.tile)
        .add("n", n)
        .add("k", k);
    if (weights) kernel.add("weights", stored_as(*weights));
    append(*products_->text, kernel);
  }

  const Op* const op_;
  Products* const products_;
  const Program& program_;
  const moec_dtype pre_;  // type of pre-activations
  const int multiprocessors_;
  const PathScratch scratch_;
  DeviceMlp routed_, shared_;
};

void visit_steps(const Program& program, const Runner& runner) {
  for (int i = runner.take_one_token(); i < program.num_steps; ++i)
    std::visit(runner, program.steps[size_t(i)]);
}

}  // namespace

Between PortablePath::between(const moec_experts_desc& desc) const {
  Between between = types(desc);
  between.keeps_pre = between.keeps_d_act = true;
  between.adds_bias_dots = true;
  between.dot_floats = between.input_dot_floats = [](int64_t) { return int64_t(1); };
  Arena arena;
  lay_out_scratch(desc, arena);
  between.scratch = arena.size().base;
  return between;
}

const char* PortablePath::run(const Program& program, moec_stream stream) const {
  const CudaBackend::Call call(backend_, stream);
  visit_steps(program, Runner(call.op, program, types(*program.desc).pre));
  call.op.count(0, program.flops);
  return nullptr;
}

const char* PortablePath::describe(const Program& program, std::string& text) const {
  Products products = {&text};
  visit_steps(program,
              Runner(program, types(*program.desc).pre, backend_.multiprocessors(), products));
  return nullptr;
}

bool PortablePath::has_only_few_rows(const Program& program) const {
  Products products;
  visit_steps(program,
              Runner(program, types(*program.desc).pre, backend_.multiprocessors(), products));
  return products.count > 0 && products.of_few_rows == products.count;
}

std::unique_ptr<const ExpertsPath> make_portable_path(const CudaBackend& backend, bool wide) {
  return std::make_unique<PortablePath>(PathCounter::kPortable, backend, wide);
}

}  // namespace moec::cuda
