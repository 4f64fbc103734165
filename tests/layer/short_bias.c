/* SPDX-License-Identifier: Apache-2.0 */
/* Hands the library a bias that ends one element too soon. Only the sanitizer of addresses runs it,
 * and must say so: this program is compiled without it, and yet the library is searched. */
#include <moec/moec.h>
#include <stdio.h>
#include <stdlib.h>

enum { kExperts = 8 };

static void check(moec_status status) {
  if (status == MOEC_OK) return;
  fprintf(stderr, "%s\n", moec_status_name(status));
  exit(1);
}

static moec_tensor tensor_of(void* data, moec_dtype dtype) {
  const int64_t shape[] = {kExperts};
  moec_tensor out;
  check(moec_tensor_make(&out, data, dtype, MOEC_CPU, 0, 1, shape));
  return out;
}

int main(void) {
  moec_context* context;
  check(moec_context_create(NULL, &context));
  moec_router_desc desc;
  moec_struct_init(&desc, sizeof desc);
  desc.num_experts = kExperts;
  desc.top_k = 2;
  moec_router* router;
  check(moec_router_create(context, &desc, &router));
  int32_t loads[kExperts] = {3, 1, 4, 1, 5, 9, 2, 6};
  float* const values = calloc(kExperts - 1, sizeof *values);
  const moec_tensor counts = tensor_of(loads, MOEC_I32), bias = tensor_of(values, MOEC_F32);
  check(moec_router_bias_update(router, &counts, 0.5f, &bias, NULL));
  printf("nobody saw it\n");
  return 0;
}
