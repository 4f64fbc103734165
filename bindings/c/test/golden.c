/* SPDX-License-Identifier: Apache-2.0 */
/* Every layer of tests/golden/quant_cases.json from the bytes of its checkpoint: y, d_x and
 * d_routing_weights, with adapters in PEFT's storage the gradients of their factors, too; the
 * values of a quantised down bit for bit; and wrong scales and factors are refused. The argument is
 * the folder of the files. Shown once to fail: the scales of the experts in reverse order, the
 * scales of two adapters exchanged, and an expert-major B. */
#include <math.h>
#include <moec/moec.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { /* where an array lies in its file; begin 0: a number */
  int64_t begin;
  moec_dtype dtype;
  int32_t ndim;
  int64_t shape[MOEC_MAX_DIMS];
  float number;
} place;
typedef struct { /* one tensor, or a list of one an expert */
  int64_t count;
  int is_list;
  const place* places;
} array;
typedef struct {
  array data, bias, scales, scales2, zeros, codebook, scale_book, scale_offset, group_index;
  uint32_t flags;
  int64_t block_n, block_k;
} matrix;
typedef struct { /* as PEFT stores them: a [rE,K]; of b [N,rE] (e, n, j) is in column j E + e */
  place a, b;
} factors;
typedef struct {
  float scale;
  factors gate_up, down, d_gate_up, d_down;
} adapter;
typedef struct { /* with some adapters, or none */
  int32_t count;
  const adapter* adapters;
  place y, d_x, d_routing_weights;
} run;
typedef struct {
  const char* file;
  moec_experts_desc experts;
  moec_weights_desc weights;
  struct {
    matrix gate_up, gate, up, down;
  } matrices;
  int turned, num_runs;
  const run* runs;
  place x, d_y, ids, routing_weights, index, value; /* index.begin 0: no values */
} layer;
#include "golden_table.h"

static const char* current = "";

static void fail(const char* what) {
  fprintf(stderr, "golden: %s: %s\n", current, what);
  exit(1);
}

static const char* message(void) {
  static moec_error_info info;
  moec_struct_init(&info, sizeof info);
  (void)moec_last_error(&info);
  return info.message;
}

static void check(moec_status status) {
  if (status < 0) fail(message());
}

static void* room(size_t bytes) {
  void* out = calloc(1, bytes + 1);
  if (!out) fail("out of memory");
  return out;
}

static unsigned char* read_file(const char* folder, const char* name) {
  char path[4096];
  snprintf(path, sizeof path, "%s/%s.safetensors", folder, name);
  FILE* file = fopen(path, "rb");
  if (!file) fail(path);
  fseek(file, 0, SEEK_END);
  const long bytes = ftell(file);
  rewind(file);
  unsigned char* out = room((size_t)bytes);
  if (fread(out, 1, (size_t)bytes, file) != (size_t)bytes) fail("cannot be read");
  fclose(file);
  return out;
}

static moec_tensor tensor(unsigned char* file, const place* at) {
  moec_tensor out;
  void* data = at->begin ? (void*)(file + at->begin) : (void*)&at->number;
  check(moec_tensor_make(&out, data, at->dtype, MOEC_CPU, 0, at->ndim, at->shape));
  return out;
}

static moec_tensor floats(float** values, int32_t ndim, const int64_t* shape) {
  moec_tensor out;
  size_t count = 1;
  for (int32_t d = 0; d < ndim; ++d) count *= (size_t)shape[d];
  *values = room(count * sizeof **values);
  for (size_t i = 0; i < count; ++i) (*values)[i] = NAN;
  check(moec_tensor_make(&out, *values, MOEC_F32, MOEC_CPU, 0, ndim, shape));
  return out;
}

/* Gives one of the two fields its tensors, and *count the length of a list. */
static void give(unsigned char* file, const array* from, moec_tensor* stacked,
                 const moec_tensor** list, int64_t* count) {
  if (from->count && !from->is_list) *stacked = tensor(file, from->places);
  if (!from->is_list) return;
  if (!list) fail("one tensor serves all experts here");
  moec_tensor* tensors = room((size_t)from->count * sizeof *tensors);
  for (int64_t i = 0; i < from->count; ++i) tensors[i] = tensor(file, &from->places[i]);
  *list = tensors;
  *count = from->count;
}

/* bf16 as f32 */
static moec_tensor widened(unsigned char* file, const place* at) {
  float* values;
  int64_t count = 1;
  for (int32_t d = 0; d < at->ndim; ++d) count *= at->shape[d];
  const moec_tensor out = floats(&values, at->ndim, at->shape);
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = (uint32_t)(file[at->begin + 2 * i] | file[at->begin + 2 * i + 1] << 8);
    const uint32_t wide = bits << 16;
    memcpy(&values[i], &wide, sizeof wide);
  }
  return out;
}

static moec_matrix read_matrix(unsigned char* file, const matrix* from) {
  moec_matrix out;
  memset(&out, 0, sizeof out);
  if (!from->data.count) return out;
  if (!from->scales.count) { /* plain */
    out.data = widened(file, from->data.places);
    return out;
  }
  moec_quant* quant = room(sizeof *quant);
  moec_struct_init(quant, sizeof *quant);
  quant->flags = from->flags;
  quant->block_n = from->block_n;
  quant->block_k = from->block_k;
  int64_t* count = &out.count;
  give(file, &from->data, &out.data, &out.per_expert, count);
  give(file, &from->scales, &quant->scales, &quant->per_expert_scales, count);
  give(file, &from->scales2, &quant->scales2, &quant->per_expert_scales2, count);
  give(file, &from->zeros, &quant->zeros, &quant->per_expert_zeros, count);
  give(file, &from->codebook, &quant->codebook, NULL, count);
  give(file, &from->scale_book, &quant->scale_book, NULL, count);
  give(file, &from->scale_offset, &quant->scale_offset, &quant->per_expert_scale_offset, count);
  give(file, &from->group_index, &quant->group_index, &quant->per_expert_group_index, count);
  if (from->bias.count) out.bias = widened(file, from->bias.places);
  out.quant = quant;
  return out;
}

static moec_weights* make_weights(const moec_context* context, const layer* c, moec_weight_set* set,
                                  unsigned char* file) {
  moec_weights_desc desc = c->weights;
  moec_struct_init(set, sizeof *set);
  desc.struct_size = sizeof desc;
  set->gate_up = read_matrix(file, &c->matrices.gate_up);
  set->gate = read_matrix(file, &c->matrices.gate);
  set->up = read_matrix(file, &c->matrices.up);
  set->down = read_matrix(file, &c->matrices.down);
  moec_weights* weights = NULL;
  check(moec_weights_create(context, &desc, &weights));
  return weights;
}

/* Fails unless each row of `got` is near that of the file: relative to its norm, or to a hundredth
 * of the largest. */
static void near(const char* what, const float* got, unsigned char* file, const place* at) {
  const int64_t rows = at->shape[0], columns = at->shape[1];
  const float* want = (const float*)(const void*)(file + at->begin);
  double* norms = room((size_t)rows * sizeof *norms);
  double largest = 0;
  for (int64_t i = 0; i < rows * columns; ++i) norms[i / columns] += (double)want[i] * want[i];
  for (int64_t r = 0; r < rows; ++r) largest = fmax(largest, sqrt(norms[r]));
  for (int64_t r = 0; r < rows; ++r) {
    double sum = 0;
    for (int64_t i = r * columns; i < (r + 1) * columns; ++i)
      sum += ((double)got[i] - want[i]) * ((double)got[i] - want[i]);
    const double error = sqrt(sum) / fmax(sqrt(norms[r]), 0.01 * largest);
    if (error <= kTolerance) continue;
    fprintf(stderr, "golden: %s: row error %g\n", what, error);
    fail("is not what its library gives");
  }
  free(norms);
}

/* A and B of a file, or where their gradients go: values like those of the file, NAN. */
static moec_factors peft(unsigned char* file, const factors* at, int64_t experts, float scale,
                         float** d_a, float** d_b) {
  moec_factors out;
  memset(&out, 0, sizeof out);
  out.scale = scale;
  out.a = d_a ? floats(d_a, 2, at->a.shape) : tensor(file, &at->a);
  out.b = d_b ? floats(d_b, 2, at->b.shape) : tensor(file, &at->b);
  const int64_t rank = at->a.shape[0] / experts, in = at->a.shape[1], n = at->b.shape[0];
  const int64_t a[2][3] = {{experts, rank, in}, {rank * in, in, 1}};
  const int64_t b[2][3] = {{experts, n, rank}, {1, rank * experts, experts}};
  out.a.ndim = out.b.ndim = 3;
  memcpy(out.a.shape, a[0], sizeof a[0]);
  memcpy(out.a.strides, a[1], sizeof a[1]);
  memcpy(out.b.shape, b[0], sizeof b[0]);
  memcpy(out.b.strides, b[1], sizeof b[1]);
  return out;
}

typedef struct {
  moec_adapters* bound; /* NULL: none */
  moec_adapter list[2], d_list[2];
  float* grads[2][4]; /* of A and B of gate_up, and of down */
} bound_adapters;

static bound_adapters bind(const moec_context* context, const layer* c, const run* r,
                           unsigned char* file) {
  const int64_t experts = c->experts.num_experts;
  bound_adapters out;
  memset(&out, 0, sizeof out);
  if (!r->count) return out;
  if (r->count > 2) fail("more than two adapters");
  for (int32_t i = 0; i < r->count; ++i) {
    const adapter* one = &r->adapters[i];
    float** grads = out.grads[i];
    out.list[i].gate_up = peft(file, &one->gate_up, experts, one->scale, NULL, NULL);
    out.list[i].down = peft(file, &one->down, experts, one->scale, NULL, NULL);
    out.d_list[i].gate_up = peft(file, &one->d_gate_up, experts, 0, &grads[0], &grads[1]);
    out.d_list[i].down = peft(file, &one->d_down, experts, 0, &grads[2], &grads[3]);
  }
  moec_adapters_desc desc;
  moec_struct_init(&desc, sizeof desc);
  desc.num_experts = c->experts.num_experts;
  desc.gate_layout = c->experts.gate_layout;
  desc.hidden = c->experts.hidden;
  desc.inter = c->experts.inter;
  check(moec_adapters_create(context, &desc, &out.bound));
  moec_adapter wrong = out.list[0]; /* an A is no B */
  wrong.down.a = out.list[0].down.b;
  if (moec_adapters_bind(out.bound, &wrong, 1) == MOEC_OK) fail("wrong factors are taken");
  if (!strstr(message(), "list[0].down.a")) fail(message());
  check(moec_adapters_bind(out.bound, out.list, r->count));
  return out;
}

static void check_run(const moec_context* context, const layer* c, const run* r,
                      const moec_weights* weights, unsigned char* file) {
  moec_experts_desc desc = c->experts;
  desc.struct_size = sizeof desc;
  moec_experts* experts = NULL;
  check(moec_experts_create(context, &desc, &experts));
  const int64_t tokens = c->x.shape[0];
  moec_plan_desc bounds;
  moec_struct_init(&bounds, sizeof bounds);
  bounds.max_tokens = tokens;
  bounds.num_experts = desc.num_experts;
  bounds.top_k = desc.top_k;
  moec_plan* plan = NULL;
  check(moec_plan_create(context, &bounds, NULL, &plan));
  const moec_tensor ids = tensor(file, &c->ids), given = tensor(file, &c->routing_weights);
  check(moec_plan_from_topk(plan, &ids, &given, NULL));
  const bound_adapters with = bind(context, c, r, file);
  moec_experts_sizes sizes;
  moec_struct_init(&sizes, sizeof sizes);
  check(with.bound ? moec_experts_query_adapters(experts, with.bound, &sizes)
                   : moec_experts_query(experts, &sizes));
  const uint64_t bytes = sizes.saved.base + (uint64_t)tokens * sizes.saved.per_token;
  const moec_buffer saved = {room(bytes), bytes};
  float *y, *d_x, *d_weights;
  moec_experts_args args;
  moec_struct_init(&args, sizeof args);
  args.plan = plan;
  args.weights = weights;
  args.x = tensor(file, &c->x);
  args.y = floats(&y, 2, r->y.shape);
  args.saved = saved;
  args.adapters = with.bound;
  check(moec_experts_forward(experts, &args, NULL));
  moec_experts_grad_args grads;
  moec_struct_init(&grads, sizeof grads);
  grads.plan = plan;
  grads.weights = weights;
  grads.x = args.x;
  grads.d_y = tensor(file, &c->d_y);
  grads.saved = saved;
  grads.d_x = floats(&d_x, 2, r->d_x.shape);
  grads.d_routing_weights = floats(&d_weights, 2, r->d_routing_weights.shape);
  grads.adapters = with.bound;
  grads.d_adapters = with.bound ? with.d_list : NULL;
  check(moec_experts_backward(experts, &grads, NULL));
  near("y", y, file, &r->y);
  near("d_x", d_x, file, &r->d_x);
  near("d_routing_weights", d_weights, file, &r->d_routing_weights);
  for (int32_t i = 0; i < r->count; ++i) {
    const factors *gate_up = &r->adapters[i].d_gate_up, *down = &r->adapters[i].d_down;
    near("d_adapters.gate_up.a", with.grads[i][0], file, &gate_up->a);
    near("d_adapters.gate_up.b", with.grads[i][1], file, &gate_up->b);
    near("d_adapters.down.a", with.grads[i][2], file, &down->a);
    near("d_adapters.down.b", with.grads[i][3], file, &down->b);
  }
  if (with.bound) moec_adapters_free(with.bound);
  moec_plan_free(plan);
  moec_experts_free(experts);
}

static void check_values(const layer* c, const moec_weights* weights, unsigned char* file) {
  const int in_out = c->weights.down_orientation == MOEC_IN_OUT;
  const int64_t rows = in_out ? c->weights.inter : c->weights.hidden;
  const int64_t columns = in_out ? c->weights.hidden : c->weights.inter, size = rows * columns;
  float** values = room((size_t)c->weights.num_experts * sizeof *values);
  for (int32_t e = 0; e < c->weights.num_experts; ++e) {
    const moec_tensor to = floats(&values[e], 2, (const int64_t[]){rows, columns});
    check(moec_weights_dequantise(weights, MOEC_MATRIX_DOWN, e, &to, NULL));
  }
  const int32_t* index = (const int32_t*)(const void*)(file + c->index.begin);
  const float* want = (const float*)(const void*)(file + c->value.begin);
  for (int64_t i = 0; i < c->index.shape[0]; ++i) {
    const int64_t e = index[i] / size, at = index[i] % size;
    const float* got = &values[e][c->turned ? at % rows * columns + at / rows : at];
    if (memcmp(got, &want[i], sizeof *got) != 0) fail("dequantised values are not the library's");
  }
}

static void refuse_wrong_scales(const layer* c, moec_weights* weights, moec_weight_set* set,
                                unsigned char* file) {
  moec_quant wrong = *set->down.quant;
  wrong.per_expert_scales = NULL;
  wrong.scales = tensor(file, &c->x);
  set->down.quant = &wrong;
  if (moec_weights_bind(weights, set) == MOEC_OK) fail("wrong scales are taken");
  if (!strstr(message(), "down.quant.scales")) fail(message());
}

int main(int argc, char** argv) {
  if (argc != 2) fail("usage: golden FOLDER");
  moec_context* context = NULL;
  check(moec_context_create(NULL, &context));
  const int count = (int)(sizeof kCases / sizeof *kCases);
  int with_adapters = 0;
  for (int i = 0; i < count; ++i) {
    const layer* c = &kCases[i];
    current = c->file;
    unsigned char* file = read_file(argv[1], c->file);
    moec_weight_set set;
    moec_weights* weights = make_weights(context, c, &set, file);
    check(moec_weights_bind(weights, &set));
    for (int r = 0; r < c->num_runs; ++r) {
      check_run(context, c, &c->runs[r], weights, file);
      with_adapters += c->runs[r].count > 0;
    }
    if (c->index.begin) check_values(c, weights, file);
    if (set.down.quant) refuse_wrong_scales(c, weights, &set, file);
    moec_weights_free(weights);
  }
  moec_context_free(context);
  printf("%d layers, %d runs with adapters: values and gradients\n", count, with_adapters);
  return count == 21 && with_adapters == 4 ? 0 : 1;
}
