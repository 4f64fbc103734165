/* SPDX-License-Identifier: Apache-2.0 */
/* Trains the layer of train.c on several ranks: each has a part of the experts and of the tokens,
 * and the losses are those of one process.
 *
 *     mpicc train_mpi.c -o train_mpi $(pkg-config --cflags --libs moec) && mpirun -n 2 ./train_mpi
 *
 * What is new beside train.c: a comm, an ep, a layer with it, and sums over ranks of what all have,
 * the router's gate. */
#include <moec/mpi.h>
#include <stdio.h>
#include <stdlib.h>

enum { kTokens = 64, kHidden = 32, kInter = 16, kExperts = 8, kTopK = 2, kSteps = 60 };
static const float kRate = 0.3f;
static int experts_here, tokens_here; /* of this rank */

static float x[kTokens * kHidden], y[kTokens * kHidden], d_y[kTokens * kHidden];
static float gate[kExperts * kHidden], d_gate[kExperts * kHidden];
static float gate_up[kExperts * 2 * kInter * kHidden], d_gate_up[kExperts * 2 * kInter * kHidden];
static float down[kExperts * kHidden * kInter], d_down[kExperts * kHidden * kInter];

#define COUNT(array) (sizeof(array) / sizeof(array)[0])

static void check(moec_status status) {
  if (status >= 0) return;
  moec_error_info info;
  moec_struct_init(&info, sizeof info);
  (void)moec_last_error(&info);
  fprintf(stderr, "%s (%s)\n", info.message, moec_status_name(status));
  MPI_Abort(MPI_COMM_WORLD, 1);
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

static moec_weight_set matrices(float* gate_up_data, float* down_data) {
  moec_weight_set set;
  moec_struct_init(&set, sizeof set);
  set.gate_up.data = tensor(gate_up_data, 3, experts_here, 2 * kInter, kHidden);
  set.down.data = tensor(down_data, 3, experts_here, kHidden, kInter);
  return set;
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

static moec_layer* make_layer(const moec_context* context, moec_ep* ep) {
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

static moec_weights* make_weights(const moec_context* context, float* gate_up_here,
                                  float* down_here) {
  moec_weights_desc desc;
  moec_struct_init(&desc, sizeof desc);
  desc.num_experts = experts_here;
  desc.hidden = kHidden;
  desc.inter = kInter;
  desc.gate_layout = MOEC_GATE_THEN_UP;
  desc.dtype = MOEC_F32;
  moec_weights* weights = NULL;
  check(moec_weights_create(context, &desc, &weights));
  const moec_weight_set set = matrices(gate_up_here, down_here);
  check(moec_weights_bind(weights, &set));
  return weights;
}

/* The mean of (y - target)^2 over all tokens, target[t][h] = x[t][h + 1]; fills d_y. */
static float loss_of(moec_comm* comm, const float* x_here) {
  float sum = 0;
  for (int t = 0; t < tokens_here; ++t) {
    for (int h = 0; h < kHidden; ++h) {
      const float error = y[t * kHidden + h] - x_here[t * kHidden + (h + 1) % kHidden];
      sum += error * error;
      d_y[t * kHidden + h] = 2 * error / kTokens;
    }
  }
  const moec_tensor total = tensor(&sum, 1, 1, 0, 0);
  check(moec_comm_sum(comm, &total, NULL));
  return sum / (kTokens * kHidden);
}

static void descend(float* values, const float* gradient, size_t count) {
  for (size_t i = 0; i < count; ++i) values[i] -= kRate * gradient[i];
}

int main(int argc, char** argv) {
  int rank = 0, size = 0;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  fill(x, COUNT(x), 1.0f);
  fill(gate, COUNT(gate), 0.2f);
  fill(gate_up, COUNT(gate_up), 0.3f);
  fill(down, COUNT(down), 0.3f);

  moec_context* context = NULL;
  check(moec_context_create(NULL, &context));
  moec_comm* comm = NULL;
  check(moec_comm_from_mpi(context, MPI_COMM_WORLD, 60000, &comm));
  moec_ep* ep = make_ep(comm);
  moec_layer* layer = make_layer(context, ep);
  moec_ep_info info;
  moec_struct_init(&info, sizeof info);
  check(moec_ep_query(ep, &info));

  /* Every rank has drawn everything; its part begins there. */
  const int first_token = kTokens * rank / size;
  experts_here = info.expert_end - info.expert_begin;
  tokens_here = kTokens * (rank + 1) / size - first_token;
  float* const x_here = x + first_token * kHidden;
  float* const gate_up_here = gate_up + info.expert_begin * 2 * kInter * kHidden;
  float* const down_here = down + info.expert_begin * kHidden * kInter;
  moec_weights* weights = make_weights(context, gate_up_here, down_here);

  moec_experts_sizes sizes;
  moec_struct_init(&sizes, sizeof sizes);
  check(moec_layer_query(layer, &sizes));
  const size_t saved_bytes =
      (size_t)(sizes.saved.base + (uint64_t)tokens_here * sizes.saved.per_token);
  void* saved = malloc(saved_bytes);

  moec_layer_args args;
  moec_struct_init(&args, sizeof args);
  args.weights = weights;
  args.x = tensor(x_here, 2, tokens_here, kHidden, 0);
  args.gate_weight = tensor(gate, 2, kExperts, kHidden, 0);
  args.y = tensor(y, 2, tokens_here, kHidden, 0);
  args.saved = (moec_buffer){saved, saved_bytes};

  const moec_weight_set d_weights = matrices(d_gate_up, d_down);
  moec_layer_grad_args grads;
  moec_struct_init(&grads, sizeof grads);
  grads.forward = &args;
  grads.d_y = tensor(d_y, 2, tokens_here, kHidden, 0);
  grads.d_gate_weight = tensor(d_gate, 2, kExperts, kHidden, 0);
  grads.d_expert_weights = &d_weights;

  float first = 0, loss = 0;
  for (int step = 0; step < kSteps; ++step) {
    check(moec_layer_forward(layer, &args, NULL));
    loss = loss_of(comm, x_here);
    if (step == 0) first = loss;
    check(moec_layer_backward(layer, &grads, NULL));
    check(moec_comm_sum(comm, &grads.d_gate_weight, NULL));
    descend(gate, d_gate, COUNT(gate));
    descend(gate_up_here, d_gate_up, (size_t)(experts_here * 2 * kInter * kHidden));
    descend(down_here, d_down, (size_t)(experts_here * kHidden * kInter));
  }
  if (rank == 0) printf("loss %.4f -> %.4f in %d steps\n", (double)first, (double)loss, kSteps);

  moec_weights_free(weights);
  moec_layer_free(layer);
  moec_ep_free(ep);
  moec_comm_free(comm);
  moec_context_free(context);
  free(saved);
  MPI_Finalize();
  return loss < first / 2 ? 0 : 1;
}
