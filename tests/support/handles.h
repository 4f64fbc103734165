// SPDX-License-Identifier: Apache-2.0
// The C API from C++ tests: owners of handles, sized structs, statuses as exceptions.
#pragma once

#include <moec/moec.h>

#include <memory>
#include <stdexcept>
#include <string>

namespace moec::test {

template <typename Struct>
Struct sized() {
  Struct s;
  moec_struct_init(&s, sizeof(s));
  return s;
}

// moec_last_error of this thread as text.
std::string last_error();

class Failure : public std::runtime_error {
 public:
  explicit Failure(moec_status code) : std::runtime_error(last_error()), status(code) {}
  moec_status status;
};
inline void check(moec_status status) {
  if (status != MOEC_OK) throw Failure(status);
}

template <auto Free>
struct Deleter {
  template <typename T>
  void operator()(T* handle) const {
    Free(handle);
  }
};
using Context = std::unique_ptr<moec_context, Deleter<moec_context_free>>;
using Router = std::unique_ptr<moec_router, Deleter<moec_router_free>>;
using PlanHandle = std::unique_ptr<moec_plan, Deleter<moec_plan_free>>;
using Weights = std::unique_ptr<moec_weights, Deleter<moec_weights_free>>;
using Adapters = std::unique_ptr<moec_adapters, Deleter<moec_adapters_free>>;
using Experts = std::unique_ptr<moec_experts, Deleter<moec_experts_free>>;
using Comm = std::unique_ptr<moec_comm, Deleter<moec_comm_free>>;
using Ep = std::unique_ptr<moec_ep, Deleter<moec_ep_free>>;
using LayerHandle = std::unique_ptr<moec_layer, Deleter<moec_layer_free>>;

// make<Router>(moec_router_create, context, &desc): the handle, or a Failure.
template <typename Owner, typename Create, typename... Arguments>
Owner make(Create create, Arguments... arguments) {
  typename Owner::pointer handle = nullptr;
  check(create(arguments..., &handle));
  return Owner(handle);
}

// A context of the device under test, kept for the life of the program.
const moec_context* test_context(int num_threads = 0);

}  // namespace moec::test
