/* SPDX-License-Identifier: Apache-2.0 */
/* Trains the layer of train.c on several GPUs: each rank is a process with a GPU, a part of the
 * experts and of the tokens, and NCCL moves them. Rank 0 leaves NCCL's id in a new file.
 *
 *     cc train_nccl.c -o train_nccl $(pkg-config --cflags --libs moec) -I$CUDA/include \
 *       -L$CUDA/lib64 -lcudart -lnccl
 *     id=$(mktemp -u); for rank in 0 1; do ./train_nccl $rank 2 $id & done; wait
 *
 * Calls are queued on the stream they are given, here NULL; a copy to memory of the host waits. */
#include <cuda_runtime_api.h>
#include <moec/nccl.h>
#include <nccl.h>
#include <stdio.h>
#include <threads.h>

enum { kTokens = 64, kHidden = 32, kInter = 16, kExperts = 8, kTopK = 2, kSteps = 60 };
static const float kRate = 0.3f;
static moec_context* context;
static int gpu;

static void stop(const char* what) {
  fprintf(stderr, "%s\n", what);
  exit(1);
}

static void check(moec_status status) {
  if (status >= 0) return;
  moec_error_info info;
  moec_struct_init(&info, sizeof info);
  (void)moec_last_error(&info);
  stop(info.message[0] ? info.message : moec_status_name(status));
}

static void check_nccl(ncclResult_t status) {
  if (status != ncclSuccess) stop(ncclGetErrorString(status));
}

/* An array here and its copy on the GPU. */
typedef struct {
  float* values;
  size_t count;
  moec_tensor host, device;
} Array;

static Array array(int32_t ndim, int64_t n0, int64_t n1, int64_t n2) {
  const int64_t shape[] = {n0, n1, n2};
  Array out;
  out.count = (size_t)(n0 * (ndim > 1 ? n1 : 1) * (ndim > 2 ? n2 : 1));
  out.values = calloc(out.count, sizeof *out.values);
  moec_buffer memory;
  check(moec_buffer_alloc(context, out.count * sizeof *out.values, &memory));
  check(moec_tensor_make(&out.host, out.values, MOEC_F32, MOEC_CPU, 0, ndim, shape));
  check(moec_tensor_make(&out.device, memory.ptr, MOEC_F32, MOEC_CUDA, gpu, ndim, shape));
  return out;
}

static void upload(const Array* a) {
  check(moec_tensor_copy(context, &a->host, &a->device, NULL));
  check(moec_context_sync(context, NULL));
}

static void download(const Array* a) {
  check(moec_tensor_copy(context, &a->device, &a->host, NULL));
  check(moec_context_sync(context, NULL));
}

/* The part of `all` numbers, drawn alike on every rank, that begins at `first`. */
static void fill(const Array* part, size_t first, size_t all, float scale) {
  static uint32_t state = 1;
  for (size_t i = 0; i < all; ++i) {
    state = state * 1664525u + 1013904223u;
    if (i >= first && i - first < part->count)
      part->values[i - first] = scale * ((float)(state >> 8) / 8388608.0f - 1.0f);
  }
  upload(part);
}

/* NCCL's id, which rank 0 makes, by way of a file. */
static ncclUniqueId meet(int rank, const char* path) {
  ncclUniqueId id;
  char whole[4096];
  snprintf(whole, sizeof whole, "%s.part", path);
  if (rank == 0) {
    check_nccl(ncclGetUniqueId(&id));
    FILE* const file = fopen(whole, "wb");
    if (!file || fwrite(&id, sizeof id, 1, file) != 1 || fclose(file)) stop("no id was written");
    if (rename(whole, path)) stop("the file of the id cannot be renamed");
    return id;
  }
  const struct timespec pause = {0, 10000000};
  for (int tries = 0; tries < 6000; ++tries) {
    FILE* const file = fopen(path, "rb");
    if (file && fread(&id, sizeof id, 1, file) == 1 && !fclose(file)) return id;
    thrd_sleep(&pause, NULL);
  }
  stop("rank 0 has left no id in a minute");
  return id;
}

static moec_ep* make_ep(moec_comm* comm) {
  moec_ep_desc desc;
  moec_struct_init(&desc, sizeof desc);
  desc.hidden = kHidden;
  desc.max_tokens = kTokens;
  desc.num_experts = kExperts;
  desc.top_k = kTopK;
  desc.dtype = MOEC_F32;
  moec_ep* ep = NULL;
  check(moec_ep_create(comm, &desc, &ep));
  return ep;
}

static moec_layer* make_layer(moec_ep* ep) {
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
  experts.save = MOEC_SAVE_ALL;
  moec_layer_desc desc;
  moec_struct_init(&desc, sizeof desc);
  desc.router = &router;
  desc.experts = &experts;
  desc.ep = ep;
  moec_layer* layer = NULL;
  check(moec_layer_create(context, &desc, &layer));
  return layer;
}

static moec_weight_set matrices(const Array* gate_up, const Array* down) {
  moec_weight_set set;
  moec_struct_init(&set, sizeof set);
  set.gate_up.data = gate_up->device;
  set.down.data = down->device;
  return set;
}

static moec_weights* make_weights(const Array* gate_up, const Array* down) {
  moec_weights_desc desc;
  moec_struct_init(&desc, sizeof desc);
  desc.num_experts = (int32_t)(gate_up->count / (2 * kInter * kHidden));
  desc.hidden = kHidden;
  desc.inter = kInter;
  desc.gate_layout = MOEC_GATE_THEN_UP;
  desc.dtype = MOEC_F32;
  moec_weights* weights = NULL;
  check(moec_weights_create(context, &desc, &weights));
  const moec_weight_set set = matrices(gate_up, down);
  check(moec_weights_bind(weights, &set));
  return weights;
}

/* The mean of (y - target)^2 over all tokens, target[t][h] = x[t][h + 1]; fills d_y. */
static float loss_of(moec_comm* comm, const Array* x, const Array* y, const Array* d_y,
                     const Array* total) {
  total->values[0] = 0;
  download(y);
  for (size_t i = 0; i < y->count; ++i) {
    const size_t next = i % kHidden + 1 == kHidden ? i + 1 - kHidden : i + 1;
    const float error = y->values[i] - x->values[next];
    total->values[0] += error * error;
    d_y->values[i] = 2 * error / kTokens;
  }
  upload(d_y);
  upload(total);
  check(moec_comm_sum(comm, &total->device, NULL));
  download(total);
  return total->values[0] / (kTokens * kHidden);
}

static void descend(const Array* values, const Array* gradient) {
  download(gradient);
  for (size_t i = 0; i < values->count; ++i) values->values[i] -= kRate * gradient->values[i];
  upload(values);
}

int main(int argc, char** argv) {
  if (argc != 4) stop("usage: train_nccl RANK RANKS FILE");
  const int rank = atoi(argv[1]), size = atoi(argv[2]);
  gpu = rank;
  if (cudaSetDevice(gpu) != cudaSuccess) stop("this rank has no GPU");
  ncclComm_t nccl;
  check_nccl(ncclCommInitRank(&nccl, size, meet(rank, argv[3]), rank));

  moec_context_desc device;
  moec_struct_init(&device, sizeof device);
  device.device_type = MOEC_CUDA;
  device.device_id = gpu;
  check(moec_context_create(&device, &context));
  moec_comm* comm = NULL;
  check(moec_comm_from_nccl(context, nccl, NULL, &comm));
  moec_ep* ep = make_ep(comm);
  moec_layer* layer = make_layer(ep);
  moec_ep_info info;
  moec_struct_init(&info, sizeof info);
  check(moec_ep_query(ep, &info));

  const int first_token = kTokens * rank / size;
  const int tokens = kTokens * (rank + 1) / size - first_token;
  const int experts = info.expert_end - info.expert_begin;
  const Array x = array(2, tokens, kHidden, 0), y = array(2, tokens, kHidden, 0);
  const Array d_y = array(2, tokens, kHidden, 0), total = array(1, 1, 0, 0);
  const Array gate = array(2, kExperts, kHidden, 0), d_gate = array(2, kExperts, kHidden, 0);
  const Array gate_up = array(3, experts, 2 * kInter, kHidden);
  const Array d_gate_up = array(3, experts, 2 * kInter, kHidden);
  const Array down = array(3, experts, kHidden, kInter);
  const Array d_down = array(3, experts, kHidden, kInter);
  const size_t before = (size_t)info.expert_begin * kInter * kHidden;
  fill(&x, (size_t)first_token * kHidden, kTokens * kHidden, 1.0f);
  fill(&gate, 0, kExperts * kHidden, 0.2f);
  fill(&gate_up, 2 * before, kExperts * 2 * kInter * kHidden, 0.3f);
  fill(&down, before, kExperts * kHidden * kInter, 0.3f);
  moec_weights* weights = make_weights(&gate_up, &down);

  moec_experts_sizes sizes;
  moec_struct_init(&sizes, sizeof sizes);
  check(moec_layer_query(layer, &sizes));
  moec_layer_args args;
  moec_struct_init(&args, sizeof args);
  args.weights = weights;
  args.x = x.device;
  args.gate_weight = gate.device;
  args.y = y.device;
  check(moec_buffer_alloc(context, sizes.saved.base + (uint64_t)tokens * sizes.saved.per_token,
                          &args.saved));

  const moec_weight_set d_weights = matrices(&d_gate_up, &d_down);
  moec_layer_grad_args grads;
  moec_struct_init(&grads, sizeof grads);
  grads.forward = &args;
  grads.d_y = d_y.device;
  grads.d_gate_weight = d_gate.device;
  grads.d_expert_weights = &d_weights;

  float first = 0, loss = 0;
  for (int step = 0; step < kSteps; ++step) {
    check(moec_layer_forward(layer, &args, NULL));
    loss = loss_of(comm, &x, &y, &d_y, &total);
    if (step == 0) first = loss;
    check(moec_layer_backward(layer, &grads, NULL));
    check(moec_comm_sum(comm, &grads.d_gate_weight, NULL));
    descend(&gate, &d_gate);
    descend(&gate_up, &d_gate_up);
    descend(&down, &d_down);
  }
  if (rank == 0) printf("loss %.4f -> %.4f in %d steps\n", (double)first, (double)loss, kSteps);

  moec_weights_free(weights);
  moec_layer_free(layer);
  moec_ep_free(ep);
  moec_comm_free(comm);
  moec_context_free(context); /* gives the memory of moec_buffer_alloc back */
  check_nccl(ncclCommDestroy(nccl));
  return loss < first / 2 ? 0 : 1;
}
