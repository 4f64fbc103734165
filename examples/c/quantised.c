/* SPDX-License-Identifier: Apache-2.0 */
/* Makes 4-bit codes (NF4) of a set of experts, runs a layer on the codes, and says how far its
 * output is from that of the values before.
 *
 *     cc quantised.c -o quantised $(pkg-config --cflags --libs moec) -lm && ./quantised
 *
 * Codes of a checkpoint are bound likewise: moec_scheme in moec.h says which tensors they need. */
#include <math.h>
#include <moec/moec.h>
#include <stdio.h>
#include <stdlib.h>

enum { kTokens = 16, kHidden = 64, kInter = 96, kExperts = 8, kTopK = 2 };

static float x[kTokens * kHidden], gate[kExperts * kHidden], y[2][kTokens * kHidden];
static float gate_up[kExperts * 2 * kInter * kHidden], down[kExperts * kHidden * kInter];

static void check(moec_status status) {
  if (status >= 0) return;
  moec_error_info info;
  moec_struct_init(&info, sizeof info);
  (void)moec_last_error(&info);
  fprintf(stderr, "%s (%s)\n", info.message, moec_status_name(status));
  exit(1);
}

static void fill(float* values, size_t count, float scale) {
  static uint32_t state = 1;
  for (size_t i = 0; i < count; ++i) {
    state = state * 1664525u + 1013904223u;
    values[i] = scale * ((float)(state >> 8) / 8388608.0f - 1.0f);
  }
}

static moec_tensor tensor(float* data, int32_t ndim, int64_t n0, int64_t n1, int64_t n2) {
  const int64_t shape[] = {n0, n1, n2};
  moec_tensor out;
  check(moec_tensor_make(&out, data, MOEC_F32, MOEC_CPU, 0, ndim, shape));
  return out;
}

/* Memory for a tensor that has a type and a shape; an absent one stays absent. */
static uint64_t allocate(moec_tensor* out) {
  if (!out->dtype) return 0;
  out->device_type = MOEC_CPU;
  out->data = malloc((size_t)moec_tensor_bytes(out));
  return (uint64_t)moec_tensor_bytes(out);
}

/* NF4 codes of `source` [E,n,k], and `quant`, which reads them. */
static moec_tensor nf4(const moec_context* context, float* source, int64_t n, int64_t k,
                       moec_quant* quant, uint64_t* bytes) {
  moec_quantise_desc desc;
  moec_struct_init(&desc, sizeof desc);
  desc.kind = MOEC_QUANTISE_NF4;
  desc.dtype = MOEC_F32;
  desc.num_experts = kExperts;
  desc.out_features = n;
  desc.in_features = k;
  moec_quantise_info info;
  moec_struct_init(&info, sizeof info);
  moec_struct_init(quant, sizeof *quant);
  check(moec_quantise_query(context, &desc, &info, quant)); /* types and shapes */
  *bytes += allocate(&info.codes) + allocate(&quant->scales) + allocate(&quant->codebook);
  moec_quantise_args args;
  moec_struct_init(&args, sizeof args);
  args.desc = &desc;
  args.source = tensor(source, 3, kExperts, n, k);
  args.codes = info.codes;
  args.quant = quant;
  check(moec_quantise(context, &args, NULL));
  return info.codes;
}

static void forward(const moec_context* context, const moec_weight_set* set, uint32_t scheme,
                    float* out) {
  moec_weights_desc form;
  moec_struct_init(&form, sizeof form);
  form.num_experts = kExperts;
  form.hidden = kHidden;
  form.inter = kInter;
  form.gate_layout = MOEC_GATE_THEN_UP;
  form.dtype = MOEC_F32;
  form.gate_up_scheme = form.down_scheme = scheme;
  moec_weights* weights = NULL;
  check(moec_weights_create(context, &form, &weights));
  check(moec_weights_bind(weights, set));

  moec_router_desc router;
  moec_struct_init(&router, sizeof router);
  router.num_experts = kExperts;
  router.top_k = kTopK;
  router.norm = MOEC_NORM_SUM;
  moec_experts_desc experts;
  moec_struct_init(&experts, sizeof experts);
  experts.hidden = kHidden;
  experts.inter = kInter;
  experts.num_experts = kExperts;
  experts.top_k = kTopK;
  experts.gate_layout = MOEC_GATE_THEN_UP;
  experts.dtype = MOEC_F32;
  moec_layer_desc desc;
  moec_struct_init(&desc, sizeof desc);
  desc.router = &router;
  desc.experts = &experts;
  moec_layer* layer = NULL;
  check(moec_layer_create(context, &desc, &layer));

  moec_layer_args args;
  moec_struct_init(&args, sizeof args);
  args.weights = weights;
  args.x = tensor(x, 2, kTokens, kHidden, 0);
  args.gate_weight = tensor(gate, 2, kExperts, kHidden, 0);
  args.y = tensor(out, 2, kTokens, kHidden, 0);
  check(moec_layer_forward(layer, &args, NULL));
  moec_layer_free(layer);
  moec_weights_free(weights);
}

int main(void) {
  fill(x, sizeof x / sizeof *x, 1.0f);
  fill(gate, sizeof gate / sizeof *gate, 0.2f);
  fill(gate_up, sizeof gate_up / sizeof *gate_up, 0.3f);
  fill(down, sizeof down / sizeof *down, 0.3f);
  moec_context* context = NULL;
  check(moec_context_create(NULL, &context));

  moec_weight_set plain, coded;
  moec_struct_init(&plain, sizeof plain);
  plain.gate_up.data = tensor(gate_up, 3, kExperts, 2 * kInter, kHidden);
  plain.down.data = tensor(down, 3, kExperts, kHidden, kInter);
  forward(context, &plain, MOEC_SCHEME_NONE, y[0]);

  uint64_t bytes = 0;
  moec_quant gate_up_quant, down_quant;
  moec_struct_init(&coded, sizeof coded);
  coded.gate_up.data = nf4(context, gate_up, 2 * kInter, kHidden, &gate_up_quant, &bytes);
  coded.gate_up.quant = &gate_up_quant;
  coded.down.data = nf4(context, down, kHidden, kInter, &down_quant, &bytes);
  coded.down.quant = &down_quant;
  forward(context, &coded, MOEC_SCHEME_CODEBOOK4, y[1]);

  double distance = 0, size = 0;
  for (int i = 0; i < kTokens * kHidden; ++i) {
    distance += (double)(y[1][i] - y[0][i]) * (y[1][i] - y[0][i]);
    size += (double)y[0][i] * y[0][i];
  }
  const double error = sqrt(distance / size);
  printf("%zu KB as f32, %llu KB as NF4; y is off by %.0f %%\n",
         (sizeof gate_up + sizeof down) / 1000, (unsigned long long)(bytes / 1000), 100 * error);
  moec_context_free(context);
  return error > 0.01 && error < 0.25 ? 0 : 1;
}
