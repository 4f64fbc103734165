/* SPDX-License-Identifier: Apache-2.0 */
/* Captures a layer's forward into a CUDA graph, and replays it with other values of x: each replay
 * routes its tokens anew.
 *
 *     cc graph.c -o graph $(pkg-config --cflags --libs moec) -I$CUDA/include -L$CUDA/lib64 -lcudart
 *     ./graph
 *
 * A capture allocates nothing: the same call is made once before it, on the same stream. */
#include <cuda_runtime_api.h>
#include <moec/moec.h>
#include <stdio.h>
#include <stdlib.h>

enum { kTokens = 64, kHidden = 64, kInter = 128, kExperts = 8, kTopK = 2, kReplays = 3 };

static float x[kTokens * kHidden], y[2][kTokens * kHidden];
static moec_context* context;
static moec_layer* layer;

static void check(moec_status status) {
  if (status >= 0) return;
  moec_error_info info;
  moec_struct_init(&info, sizeof info);
  (void)moec_last_error(&info);
  fprintf(stderr, "%s (%s)\n", info.message, moec_status_name(status));
  exit(1);
}

static void check_cuda(cudaError_t status) {
  if (status == cudaSuccess) return;
  fprintf(stderr, "%s\n", cudaGetErrorString(status));
  exit(1);
}

static void fill(float* values, size_t count, float scale) {
  static uint32_t state = 1;
  for (size_t i = 0; i < count; ++i) {
    state = state * 1664525u + 1013904223u;
    values[i] = scale * ((float)(state >> 8) / 8388608.0f - 1.0f);
  }
}

static moec_tensor host(float* data, int32_t ndim, int64_t n0, int64_t n1, int64_t n2) {
  const int64_t shape[] = {n0, n1, n2};
  moec_tensor out;
  check(moec_tensor_make(&out, data, MOEC_F32, MOEC_CPU, 0, ndim, shape));
  return out;
}

/* Memory of the GPU, with the values of a tensor on the host. */
static moec_tensor on_gpu(const moec_tensor* values) {
  moec_buffer memory;
  check(moec_buffer_alloc(context, (uint64_t)moec_tensor_bytes(values), &memory));
  moec_tensor out = *values;
  out.data = memory.ptr;
  out.device_type = MOEC_CUDA;
  check(moec_tensor_copy(context, values, &out, NULL));
  return out;
}

static moec_tensor random_on_gpu(int32_t ndim, int64_t n0, int64_t n1, int64_t n2, float scale) {
  const size_t count = (size_t)(n0 * n1 * (n2 ? n2 : 1));
  float* values = malloc(count * sizeof *values);
  fill(values, count, scale);
  const moec_tensor from = host(values, ndim, n0, n1, n2);
  const moec_tensor out = on_gpu(&from);
  check(moec_context_sync(context, NULL));
  free(values);
  return out;
}

static moec_weights* make_weights(void) {
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
  set.gate_up.data = random_on_gpu(3, kExperts, 2 * kInter, kHidden, 0.3f);
  set.down.data = random_on_gpu(3, kExperts, kHidden, kInter, 0.3f);
  check(moec_weights_bind(weights, &set));
  return weights;
}

static void make_layer(void) {
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
  check(moec_layer_create(context, &desc, &layer));
}

int main(void) {
  moec_context_desc gpu;
  moec_struct_init(&gpu, sizeof gpu);
  gpu.device_type = MOEC_CUDA;
  check(moec_context_create(&gpu, &context));
  make_layer();

  moec_layer_args args;
  moec_struct_init(&args, sizeof args);
  args.weights = make_weights();
  args.x = random_on_gpu(2, kTokens, kHidden, 0, 1.0f);
  args.gate_weight = random_on_gpu(2, kExperts, kHidden, 0, 0.2f);
  args.y = random_on_gpu(2, kTokens, kHidden, 0, 0.0f);

  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t program;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  check(moec_layer_forward(layer, &args, stream)); /* takes the scratch that the graph will use */
  check(moec_context_sync(context, stream));
  check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  check(moec_layer_forward(layer, &args, stream));
  check_cuda(cudaStreamEndCapture(stream, &graph));
  check_cuda(cudaGraphInstantiate(&program, graph, 0));

  const moec_tensor new_x = host(x, 2, kTokens, kHidden, 0);
  int differ = 0;
  for (int replay = 0; replay < kReplays; ++replay) {
    fill(x, sizeof x / sizeof *x, 1.0f);
    check(moec_tensor_copy(context, &new_x, &args.x, stream));
    for (int eager = 0; eager < 2; ++eager) {
      if (eager) {
        check(moec_layer_forward(layer, &args, stream));
      } else {
        check_cuda(cudaGraphLaunch(program, stream));
      }
      const moec_tensor to = host(y[eager], 2, kTokens, kHidden, 0);
      check(moec_tensor_copy(context, &args.y, &to, stream)); /* waits: the memory is pageable */
    }
    for (int i = 0; i < kTokens * kHidden; ++i) differ += y[0][i] != y[1][i];
  }
  printf("%d replays, %d values differ from eager calls\n", kReplays, differ);

  check_cuda(cudaGraphExecDestroy(program));
  check_cuda(cudaGraphDestroy(graph));
  moec_weights_free((moec_weights*)args.weights);
  moec_layer_free(layer);
  moec_context_free(context); /* gives the memory of moec_buffer_alloc back */
  check_cuda(cudaStreamDestroy(stream));
  return differ ? 1 : 0;
}
