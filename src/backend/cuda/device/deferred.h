// SPDX-License-Identifier: Apache-2.0
// What is wrong with routing data that only the device has read. Kernels write host memory; poll
// and synchronize report it once.
#pragma once

#include <cuda_runtime_api.h>

#include "backend/cuda/device/check.h"

namespace moec::cuda {

enum class Wrong : long long { kNothing = 0, kId, kMap, kRowIdMap };

struct WrongData {  // in host memory that the device writes
  volatile long long what;
  volatile long long token, slot, id, bound;
};

class Deferred {
 public:
  Deferred() {
    const RelaxedCapture relaxed;
    void* memory = nullptr;
    check(cudaHostAlloc(&memory, sizeof(WrongData), cudaHostAllocPortable | cudaHostAllocMapped),
          "host memory for errors of the device");
    data_ = static_cast<WrongData*>(memory);
    data_->what = 0;
  }
  ~Deferred() {
    const RelaxedCapture relaxed;
    cudaFreeHost(data_);
  }
  Deferred(const Deferred&) = delete;
  Deferred& operator=(const Deferred&) = delete;

  WrongData* data() const { return data_; }  // the same address on host and device
  // MOEC_OK or what went wrong, and forget it.
  moec_status poll() const { return status_of(take().what); }
  void raise() const {
    const Report d = take();
    const moec_status status = status_of(d.what);
    if (d.what == Wrong::kId)
      MOEC_FAIL(status, "expert_ids[%lld,%lld] is %lld; ids are -1 or in [0, %lld)", d.token,
                d.slot, d.id, d.bound);
    if (d.what == Wrong::kMap)
      MOEC_FAIL(status, "routing_map routes token %lld to more than top_k = %lld experts", d.token,
                d.bound);
    if (d.what == Wrong::kRowIdMap)
      MOEC_FAIL(status, "token %lld has more rows than the %lld experts that a row id map holds",
                d.token, d.bound);
  }

 private:
  struct Report {
    Wrong what;
    long long token, slot, id, bound;
  };
  // `what` is read once, and cleared only where it was set: the device may be writing it now.
  Report take() const {
    const Wrong what = Wrong(data_->what);
    if (what == Wrong::kNothing) return {};
    const Report report = {what, data_->token, data_->slot, data_->id, data_->bound};
    data_->what = 0;
    return report;
  }
  static moec_status status_of(Wrong what) {
    constexpr moec_status kStatus[] = {MOEC_OK, MOEC_E_INVALID_ARG, MOEC_E_OVERFLOW,
                                       MOEC_E_UNSUPPORTED};
    return kStatus[int(what)];
  }
  WrongData* data_;
};

}  // namespace moec::cuda
