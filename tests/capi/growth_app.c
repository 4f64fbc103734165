/* SPDX-License-Identifier: Apache-2.0
 * An application of this release, and (compiled with the header that grow_header.py writes) one of
 * a later release, each run with the library of either: growth_app same|older|newer, which says
 * what the library is to this application.
 * Mutation noted: without the check of the tail in read_bytes() the later application's field is
 * lost silently, and this fails. */
#include <moec/moec.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { T = 3, H = 8, I = 16, E = 4, K = 2 };

static void expect(int condition, const char* what) {
  if (condition) return;
  moec_error_info info;
  moec_struct_init(&info, sizeof info);
  (void)moec_last_error(&info);
  printf("growth_app: %s; last error: %s\n", what, info.message);
  exit(1);
}

static moec_tensor tensor(void* data, int32_t ndim, int64_t a, int64_t b, int64_t c) {
  const int64_t shape[3] = {a, b, c};
  moec_tensor out;
  const moec_status status = moec_tensor_make(&out, data, MOEC_F32, MOEC_CPU, 0, ndim, shape);
  expect(status == MOEC_OK, "tensor_make");
  return out;
}

static float values(unsigned* state) {
  *state = *state * 1664525u + 1013904223u;
  return (float)(*state >> 8) / 16777216.0f - 0.5f;
}

static void fill(float* to, int count, unsigned seed) {
  for (int i = 0; i < count; ++i) to[i] = values(&seed);
}

/* A struct inside 64 KiB, so that any size up to the limit may be claimed. */
static union {
  uint64_t words[8192];
  moec_router_desc router;
  moec_stats stats;
} large;

static moec_status create_router(const moec_context* context, const moec_router_desc* desc) {
  moec_router* router = NULL;
  const moec_status status = moec_router_create(context, desc, &router);
  moec_router_free(router);
  return status;
}

static void test_inputs(const moec_context* context, const char* library) {
  moec_struct_init(&large, sizeof large);
  large.router.num_experts = E;
  large.router.top_k = K;
  expect(create_router(context, &large.router) == MOEC_OK, "a long struct with a zero tail");
  large.words[8191] = 1;
  expect(create_router(context, &large.router) == MOEC_E_ABI, "a non-zero tail is refused");
  large.words[8191] = 0;
  const uint32_t sizes[] = {0, 4, 8, sizeof(moec_router_desc) + 4, 65544, 0xffffffffu};
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; ++i) {
    large.router.struct_size = sizes[i];
    expect(create_router(context, &large.router) == MOEC_E_ABI, "a size without sense is refused");
  }
  memset(&large, 0xcd, sizeof large);
  expect(create_router(context, &large.router) == MOEC_E_ABI, "garbage is refused");
#if defined(MOEC_TEST_GROWTH)
  moec_struct_init(&large.router, sizeof large.router);
  large.router.num_experts = E;
  large.router.top_k = K;
  large.router.test_growth = 5;
  const moec_status wanted = strcmp(library, "older") == 0 ? MOEC_E_ABI : MOEC_OK;
  expect(create_router(context, &large.router) == wanted, "a field of a later release");
#else
  (void)library;
#endif
}

static void test_outputs(const moec_context* context) {
  memset(&large, 0xcd, sizeof large);
  large.stats.struct_size = sizeof(moec_stats);
  expect(moec_context_stats(context, &large.stats) == MOEC_OK, "stats");
  expect(large.stats.struct_size == sizeof(moec_stats), "struct_size stays the caller's");
  expect(large.stats.calls > 0 && large.stats.ns_combine == 0, "stats are written in full");
  const unsigned char* bytes = (const unsigned char*)&large;
  expect(bytes[sizeof(moec_stats)] == 0xcd, "nothing past the caller's struct is written");
#if defined(MOEC_TEST_GROWTH)
  expect(large.stats.test_growth == 0, "what the library does not know is zero");
#endif
  memset(&large, 0xcd, sizeof large);
  large.stats.struct_size = 1024;
  expect(moec_context_stats(context, &large.stats) == MOEC_OK, "stats of a far later release");
  expect(bytes[1023] == 0 && bytes[1024] == 0xcd, "zero up to the caller's size, and no further");
}

static void test_layer(const moec_context* context) {
  static float x[T * H], gate[E * H], gate_up[E * 2 * I * H], down[E * H * I], y[T * H], d_x[T * H];
  fill(x, T * H, 1);
  fill(gate, E * H, 2);
  fill(gate_up, E * 2 * I * H, 3);
  fill(down, E * H * I, 4);
  moec_router_desc router;
  moec_experts_desc experts;
  moec_layer_desc desc;
  moec_weights_desc weights_desc;
  moec_weight_set set;
  moec_experts_sizes sizes;
  moec_layer_args args;
  moec_layer_grad_args grads;
  moec_struct_init(&router, sizeof router);
  moec_struct_init(&experts, sizeof experts);
  moec_struct_init(&desc, sizeof desc);
  moec_struct_init(&weights_desc, sizeof weights_desc);
  moec_struct_init(&set, sizeof set);
  moec_struct_init(&sizes, sizeof sizes);
  moec_struct_init(&args, sizeof args);
  moec_struct_init(&grads, sizeof grads);
  router.num_experts = experts.num_experts = weights_desc.num_experts = E;
  router.top_k = experts.top_k = K;
  experts.hidden = weights_desc.hidden = H;
  experts.inter = weights_desc.inter = I;
  experts.dtype = weights_desc.dtype = MOEC_F32;
  experts.save = MOEC_SAVE_ALL;
  weights_desc.gate_layout = MOEC_GATE_THEN_UP;
  desc.router = &router;
  desc.experts = &experts;
  set.gate_up.data = tensor(gate_up, 3, E, 2 * I, H);
  set.down.data = tensor(down, 3, E, H, I);
  moec_layer* layer = NULL;
  moec_weights* weights = NULL;
  expect(moec_layer_create(context, &desc, &layer) == MOEC_OK, "layer_create");
  expect(moec_weights_create(context, &weights_desc, &weights) == MOEC_OK, "weights_create");
  expect(moec_weights_bind(weights, &set) == MOEC_OK, "weights_bind");
  expect(moec_layer_query(layer, &sizes) == MOEC_OK, "layer_query");
  args.saved.bytes = sizes.saved.base + T * sizes.saved.per_token;
  args.saved.ptr = malloc((size_t)args.saved.bytes);
  args.weights = weights;
  args.x = tensor(x, 2, T, H, 0);
  args.gate_weight = tensor(gate, 2, E, H, 0);
  args.y = tensor(y, 2, T, H, 0);
  expect(moec_layer_forward(layer, &args, NULL) == MOEC_OK, "layer_forward");
  grads.forward = &args;
  grads.d_y = tensor(x, 2, T, H, 0);
  grads.d_x = tensor(d_x, 2, T, H, 0);
  expect(moec_layer_backward(layer, &grads, NULL) == MOEC_OK, "layer_backward");
  float sum = 0;
  for (int i = 0; i < T * H; ++i) sum += y[i] * y[i] + d_x[i] * d_x[i];
  expect(sum > 1e-6f && sum < 1e3f, "y and d_x have values");
  free(args.saved.ptr);
  moec_weights_free(weights);
  moec_layer_free(layer);
}

int main(int argc, char** argv) {
  expect(argc == 2, "usage: growth_app same|older|newer");
  moec_context* context = NULL;
  moec_context_desc desc;
  moec_struct_init(&desc, sizeof desc);
  expect(moec_context_create(&desc, &context) == MOEC_OK, "context_create");
  test_inputs(context, argv[1]);
  test_outputs(context);
  test_layer(context);
  moec_context_free(context);
  printf("growth_app: all passed with the %s library\n", argv[1]);
  return 0;
}
