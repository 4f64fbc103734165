/* SPDX-License-Identifier: Apache-2.0 */
/* A golden family in C, in memory that the library allocates on the context's device: y and every
 * gradient of qwen3_moe, on the CPU, or with MOEC_TEST_DEVICE=cuda on a GPU. Seen to fail with gate
 * and up exchanged. */
#include <math.h>
#include <moec/moec.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kTokens = 13, kHidden = 32, kInter = 24, kExperts = 8, kTopK = 3 };
static const double kTolerance = 2e-5;

static moec_context* context;
static moec_device_info device;
static char* content; /* of the safetensors file: 8 bytes of size, JSON, data */

static void check(moec_status status) {
  if (status >= 0) return;
  moec_error_info info;
  moec_struct_init(&info, sizeof info);
  (void)moec_last_error(&info);
  fprintf(stderr, "%s (%s)\n", info.message, moec_status_name(status));
  exit(1);
}

static void die(const char* what, const char* name) {
  fprintf(stderr, "%s %s\n", what, name);
  exit(1);
}

static void read_file(void) {
  const char* const folder = getenv("MOEC_GOLDEN_DIR");
  char path[1024];
  snprintf(path, sizeof path, "%s/qwen3_moe.safetensors",
           folder ? folder : MOEC_TESTS_DIR "/golden");
  FILE* const file = fopen(path, "rb");
  if (!file || fseek(file, 0, SEEK_END)) die("cannot read", path);
  const long size = ftell(file);
  rewind(file);
  content = calloc((size_t)size + 1, 1);
  if (!content || fread(content, 1, (size_t)size, file) != (size_t)size) die("cannot read", path);
  fclose(file);
}

/* The float32 values of a tensor of the file. */
static float* values_of(const char* name) {
  uint64_t header = 0;
  memcpy(&header, content, sizeof header);
  char key[64];
  snprintf(key, sizeof key, "\"%s\":{\"dtype\":\"F32\"", name);
  const char* const entry = strstr(content + 8, key);
  if (!entry) die("no tensor", name);
  const char* const offset = strstr(entry, "\"data_offsets\":[");
  return (float*)(void*)(content + 8 + header + strtoull(strchr(offset, '[') + 1, NULL, 10));
}

/* A copy of a host array on the context's device. */
static moec_tensor on_device(const float* data, int32_t ndim, int64_t n0, int64_t n1, int64_t n2) {
  const int64_t shape[] = {n0, n1, n2};
  moec_tensor host, out;
  moec_buffer memory;
  check(moec_tensor_make(&host, (void*)data, MOEC_F32, MOEC_CPU, 0, ndim, shape));
  check(moec_buffer_alloc(context, (uint64_t)moec_tensor_bytes(&host), &memory));
  check(moec_tensor_make(&out, memory.ptr, MOEC_F32, device.device_type, device.device_id, ndim,
                         shape));
  check(moec_tensor_copy(context, &host, &out, NULL));
  return out;
}

static moec_tensor input(const char* name, int32_t ndim, int64_t n0, int64_t n1, int64_t n2) {
  return on_device(values_of(name), ndim, n0, n1, n2);
}

/* NaN everywhere, so that what is not written shows. */
static moec_tensor output(int32_t ndim, int64_t n0, int64_t n1, int64_t n2) {
  const int64_t count = n0 * n1 * (ndim == 3 ? n2 : 1);
  float* const poison = malloc((size_t)count * sizeof *poison);
  if (!poison) die("no memory for", "an output");
  for (int64_t i = 0; i < count; ++i) poison[i] = NAN;
  const moec_tensor out = on_device(poison, ndim, n0, n1, n2);
  free(poison);
  return out;
}

static double norm(const double* values, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += values[i] * values[i];
  return sqrt(sum);
}

/* The worst row of ||got - ref|| / max(||ref row||, 0.01 of the largest row norm); the memory goes
 * back. Returns whether it is small. */
static int compare(const char* name, moec_tensor* got) {
  const int64_t count = moec_tensor_numel(got), columns = got->shape[got->ndim - 1];
  const float* const reference = values_of(name);
  float* const values = malloc((size_t)count * sizeof *values);
  if (!values) die("no memory for", name);
  moec_tensor host = *got;
  host.data = values;
  host.device_type = MOEC_CPU;
  host.device_id = 0;
  check(moec_tensor_copy(context, got, &host, NULL)); /* waits */
  double largest = 0, worst = 0, row[kHidden], difference[kHidden];
  for (int pass = 0; pass < 2; ++pass) {
    for (int64_t first = 0; first < count; first += columns) {
      for (int64_t i = 0; i < columns; ++i) {
        row[i] = reference[first + i];
        difference[i] = values[first + i] - row[i];
      }
      if (pass == 0) largest = fmax(largest, norm(row, columns));
      if (pass == 0) continue;
      const double error = norm(difference, columns) / fmax(norm(row, columns), 0.01 * largest);
      worst = error <= worst ? worst : error; /* a NaN stays */
      if (isnan(worst)) break;
    }
  }
  moec_buffer memory = {got->data, (uint64_t)count * sizeof *values};
  check(moec_buffer_free(context, &memory));
  free(values);
  printf("%s: worst row error %.1e\n", name, worst);
  return worst <= kTolerance;
}

int main(void) {
  read_file();
  const char* const wanted = getenv("MOEC_TEST_DEVICE");
  moec_context_desc where;
  moec_struct_init(&where, sizeof where);
  where.device_type = wanted && !strcmp(wanted, "cuda") ? MOEC_CUDA : MOEC_CPU;
  int32_t devices = 0;
  check(moec_device_count(where.device_type, &devices));
  if (!devices) return 77;
  check(moec_context_create(&where, &context));
  moec_struct_init(&device, sizeof device);
  check(moec_context_device(context, &device));

  moec_router_desc router;
  moec_struct_init(&router, sizeof router);
  router.num_experts = kExperts;
  router.top_k = kTopK;
  router.norm = MOEC_NORM_SUM;
  router.data_dtype = MOEC_F32;
  moec_experts_desc experts;
  moec_struct_init(&experts, sizeof experts);
  experts.hidden = kHidden;
  experts.inter = kInter;
  experts.num_experts = kExperts;
  experts.top_k = kTopK;
  experts.gate_layout = MOEC_GATE_THEN_UP;
  experts.dtype = MOEC_F32;
  experts.save = MOEC_SAVE_ALL;
  moec_layer_desc desc;
  moec_struct_init(&desc, sizeof desc);
  desc.router = &router;
  desc.experts = &experts;
  moec_layer* layer = NULL;
  check(moec_layer_create(context, &desc, &layer));

  moec_weights_desc form;
  moec_struct_init(&form, sizeof form);
  form.num_experts = kExperts;
  form.hidden = kHidden;
  form.inter = kInter;
  form.gate_layout = MOEC_GATE_THEN_UP;
  form.dtype = MOEC_F32;
  moec_weights* weights = NULL;
  check(moec_weights_create(context, &form, &weights));
  moec_weight_set set;
  moec_struct_init(&set, sizeof set);
  set.gate_up.data = input("p.experts.gate_up_proj", 3, kExperts, 2 * kInter, kHidden);
  set.down.data = input("p.experts.down_proj", 3, kExperts, kHidden, kInter);
  check(moec_weights_bind(weights, &set));

  moec_experts_sizes sizes;
  moec_struct_init(&sizes, sizeof sizes);
  check(moec_layer_query(layer, &sizes));
  moec_layer_args args;
  moec_struct_init(&args, sizeof args);
  args.weights = weights;
  args.x = input("x", 2, kTokens, kHidden, 0);
  args.gate_weight = input("p.gate.weight", 2, kExperts, kHidden, 0);
  args.y = output(2, kTokens, kHidden, 0);
  check(
      moec_buffer_alloc(context, sizes.saved.base + kTokens * sizes.saved.per_token, &args.saved));
  check(moec_layer_forward(layer, &args, NULL));

  moec_weight_set d_weights;
  moec_struct_init(&d_weights, sizeof d_weights);
  d_weights.gate_up.data = output(3, kExperts, 2 * kInter, kHidden);
  d_weights.down.data = output(3, kExperts, kHidden, kInter);
  moec_layer_grad_args grads;
  moec_struct_init(&grads, sizeof grads);
  grads.forward = &args;
  grads.d_y = input("dout", 2, kTokens, kHidden, 0);
  grads.d_x = output(2, kTokens, kHidden, 0);
  grads.d_gate_weight = output(2, kExperts, kHidden, 0);
  grads.d_expert_weights = &d_weights;
  check(moec_layer_backward(layer, &grads, NULL));

  int passed = compare("y", &args.y);
  passed &= compare("g.x", &grads.d_x);
  passed &= compare("g.gate.weight", &grads.d_gate_weight);
  passed &= compare("g.experts.gate_up_proj", &d_weights.gate_up.data);
  passed &= compare("g.experts.down_proj", &d_weights.down.data);
  moec_weights_free(weights);
  moec_layer_free(layer);
  moec_context_free(context); /* with the buffers that are left */
  free(content);
  printf("%d passed, %d failed on %s\n", passed, !passed, device.name);
  return !passed;
}
