// SPDX-License-Identifier: Apache-2.0
// Bytes of each sized struct in the release that brought it. An application may hand over that much
// or more; these numbers never change after the release, while the structs grow at their tail.
#pragma once

#include <moec/moec.h>

#include <cstddef>

namespace moec::capi {

template <class T>
inline constexpr size_t kFirstSize = 0;

#define MOEC_FIRST_SIZE(type, bytes)                  \
  template <>                                         \
  inline constexpr size_t kFirstSize<type> = (bytes); \
  static_assert(sizeof(type) >= (bytes) && sizeof(type) % 8 == 0 && (bytes) % 8 == 0)

MOEC_FIRST_SIZE(moec_error_info, 600);
MOEC_FIRST_SIZE(moec_device_info, 272);
MOEC_FIRST_SIZE(moec_allocator, 32);
MOEC_FIRST_SIZE(moec_thread_pool, 24);
MOEC_FIRST_SIZE(moec_context_desc, 48);
MOEC_FIRST_SIZE(moec_stats, 96);
MOEC_FIRST_SIZE(moec_router_desc, 120);
MOEC_FIRST_SIZE(moec_gate_args, 784);
MOEC_FIRST_SIZE(moec_gate_grad_args, 1168);
MOEC_FIRST_SIZE(moec_route_args, 1416);
MOEC_FIRST_SIZE(moec_route_grad_args, 904);
MOEC_FIRST_SIZE(moec_loss_args, 568);
MOEC_FIRST_SIZE(moec_plan_desc, 64);
MOEC_FIRST_SIZE(moec_permute_args, 656);
MOEC_FIRST_SIZE(moec_unpermute_args, 528);
MOEC_FIRST_SIZE(moec_permute_grad_args, 528);
MOEC_FIRST_SIZE(moec_unpermute_grad_args, 656);
MOEC_FIRST_SIZE(moec_weights_desc, 56);
MOEC_FIRST_SIZE(moec_quant, 968);
MOEC_FIRST_SIZE(moec_quantise_desc, 64);
MOEC_FIRST_SIZE(moec_quantise_info, 152);
MOEC_FIRST_SIZE(moec_quantise_args, 296);
MOEC_FIRST_SIZE(moec_weight_set, 1160);
MOEC_FIRST_SIZE(moec_weights_info, 96);
MOEC_FIRST_SIZE(moec_adapters_desc, 32);
MOEC_FIRST_SIZE(moec_experts_desc, 160);
MOEC_FIRST_SIZE(moec_experts_args, 832);
MOEC_FIRST_SIZE(moec_experts_grad_args, 1360);
MOEC_FIRST_SIZE(moec_experts_sizes, 56);
MOEC_FIRST_SIZE(moec_layer_desc, 40);
MOEC_FIRST_SIZE(moec_layer_args, 2624);
MOEC_FIRST_SIZE(moec_layer_grad_args, 1712);
MOEC_FIRST_SIZE(moec_comm_callbacks, 56);
MOEC_FIRST_SIZE(moec_comm_desc, 16);
MOEC_FIRST_SIZE(moec_ep_desc, 72);
MOEC_FIRST_SIZE(moec_ep_info, 40);
MOEC_FIRST_SIZE(moec_ep_args, 1560);
MOEC_FIRST_SIZE(moec_ep_state, 56);

#undef MOEC_FIRST_SIZE

}  // namespace moec::capi
