/* SPDX-License-Identifier: Apache-2.0 */
/* moec/nccl.h: a moec_comm of a communicator of NCCL, in a header alone: the library knows no NCCL,
 * and this wants neither NCCL's header nor a link with it. It takes the functions of the libnccl
 * that the process has loaded, 2.18 or later. Before glibc 2.34 link with -ldl.
 *
 *   moec_comm* comm;
 *   moec_status status = moec_comm_from_nccl(context, nccl_comm, NULL, &comm);
 *
 * Calls are queued on the caller's stream and may be captured. The communicator stays the caller's:
 * it outlives the comm and the eps of it, and what else uses it keeps one order on all ranks. A
 * rank that died, or does not call, stops the streams of the others for good: moec_ep_poll says
 * E_TIMEOUT, and moec_comm_abort is ncclCommAbort, which frees them. It destroys the communicator,
 * too: ncclCommDestroy is not called after it.
 *
 * PEER takes windows of NCCL, 2.29 or later, where ranks reach each other's memory in no other way:
 * on hosts of one NVLink domain, or without CUDA IPC. ncclCommAbort takes them away, also from
 * kernels that still run: those of PEER end timeout_ms after the last call at most. */
#ifndef MOEC_NCCL_H
#define MOEC_NCCL_H
#if defined(__linux__) && !defined(_GNU_SOURCE) && !defined(RTLD_DEFAULT)
#define MOEC_NCCL_DEFAULT ((void*)0) /* RTLD_DEFAULT, which needs _GNU_SOURCE */
#else
#define MOEC_NCCL_DEFAULT RTLD_DEFAULT
#endif
#include <dlfcn.h>
#include <moec/moec.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

/* Functions of NCCL: a ncclComm_t is a void*, a stream as well, ncclResult_t and ncclDataType_t are
 * int. */
typedef struct moec_nccl_api {
  int (*count)(const void* comm, int* ranks);
  int (*user_rank)(const void* comm, int* rank);
  int (*cu_device)(const void* comm, int* device);
  int (*all_gather)(const void* send, void* recv, size_t count, int type, void* comm, void* stream);
  int (*send)(const void* send, size_t count, int type, int peer, void* comm, void* stream);
  int (*recv)(void* recv, size_t count, int type, int peer, void* comm, void* stream);
  int (*group_start)(void);
  int (*group_end)(void);
  int (*get_async_error)(void* comm, int* error);
  int (*abort)(void* comm); /* optional */
  /* optional, all or none: windows */
  int (*mem_alloc)(void** memory, size_t bytes);
  int (*mem_free)(void* memory);
  int (*window_register)(void* comm, void* memory, size_t bytes, void** window, int flags);
  int (*window_deregister)(void* comm, void* window);
  int (*peer_pointer)(void* window, size_t offset, int peer, void** pointer);
} moec_nccl_api;

typedef struct moec_nccl { /* behind the callbacks */
  moec_nccl_api api;
  void* comm; /* NULL after an abort, which ends its windows, too */
  int size;
} moec_nccl;

typedef struct moec_nccl_window {
  void *memory, *window; /* the latter a ncclWindow_t, NULL until it is open */
  size_t bytes;
} moec_nccl_window;

#define MOEC_NCCL_UINT8 1       /* ncclUint8 */
#define MOEC_NCCL_IN_PROGRESS 7 /* ncclInProgress */
#define MOEC_NCCL_REQUIRED 10   /* functions; those of windows come after them */

/* The functions of the libnccl that is loaded; -1: there is none. */
static inline int moec_nccl_find(moec_nccl_api* api) {
  static const char* const names[] = {
      "ncclCommCount", "ncclCommUserRank", "ncclCommCuDevice", "ncclAllGather",
      "ncclSend",      "ncclRecv",         "ncclGroupStart",   "ncclGroupEnd",
      "ncclCommGetAsyncError",             "ncclCommAbort",
      "ncclMemAlloc",  "ncclMemFree",      "ncclCommWindowRegister",
      "ncclCommWindowDeregister",          "ncclGetPeerDevicePointer"};
  void* const library = dlopen("libnccl.so.2", RTLD_LAZY | RTLD_NOLOAD);
  void* found[sizeof names / sizeof *names];
  size_t i, number = 0; /* of those in front of the first that is missing */
  for (i = 0; i < sizeof names / sizeof *names; ++i) {
    found[i] = dlsym(library ? library : MOEC_NCCL_DEFAULT, names[i]);
    if (found[i] && number == i) ++number;
  }
  if (library) dlclose(library); /* whoever loaded it keeps it */
  if (number < MOEC_NCCL_REQUIRED) return -1;
  if (number < sizeof names / sizeof *names)
    memset(found + MOEC_NCCL_REQUIRED, 0, sizeof found - MOEC_NCCL_REQUIRED * sizeof *found);
  memcpy(api, found, sizeof *api); /* a pointer each, in this order */
  return 0;
}

static inline int32_t moec_nccl_all_gather(void* user, const void* send, void* recv, uint64_t bytes,
                                           moec_stream stream) {
  const moec_nccl* const nccl = (const moec_nccl*)user;
  return nccl->api.all_gather(send, recv, (size_t)bytes, MOEC_NCCL_UINT8, nccl->comm, stream);
}

/* The parts of one other rank, of which those of no bytes are left out. */
static inline int moec_nccl_swap(const moec_nccl* nccl, int peer, const void* send, uint64_t sent,
                                 void* recv, uint64_t received, moec_stream stream) {
  int result = 0;
  if (sent)
    result = nccl->api.send(send, (size_t)sent, MOEC_NCCL_UINT8, peer, nccl->comm, stream);
  if (!result && received)
    result = nccl->api.recv(recv, (size_t)received, MOEC_NCCL_UINT8, peer, nccl->comm, stream);
  return result;
}

static inline int32_t moec_nccl_all_to_all(void* user, const void* send, void* recv, uint64_t bytes,
                                           moec_stream stream) {
  const moec_nccl* const nccl = (const moec_nccl*)user;
  int r, ended, result = nccl->api.group_start();
  if (result) return result;
  for (r = 0; r < nccl->size && !result; ++r)
    result = moec_nccl_swap(nccl, r, (const char*)send + (uint64_t)r * bytes, bytes,
                            (char*)recv + (uint64_t)r * bytes, bytes, stream);
  ended = nccl->api.group_end();
  return result ? result : ended;
}

static inline int32_t moec_nccl_all_to_all_v(void* user, const void* send,
                                             const uint64_t* send_bytes, const uint64_t* send_at,
                                             void* recv, const uint64_t* recv_bytes,
                                             const uint64_t* recv_at, uint64_t unit,
                                             moec_stream stream) {
  const moec_nccl* const nccl = (const moec_nccl*)user;
  int r, ended, result = nccl->api.group_start();
  (void)unit; /* NCCL counts bytes in 64 bits */
  if (result) return result;
  for (r = 0; r < nccl->size && !result; ++r)
    result = moec_nccl_swap(nccl, r, (const char*)send + send_at[r], send_bytes[r],
                            (char*)recv + recv_at[r], recv_bytes[r], stream);
  ended = nccl->api.group_end();
  return result ? result : ended;
}

static inline int32_t moec_nccl_poll(void* user) {
  const moec_nccl* const nccl = (const moec_nccl*)user;
  int error = 0;
  const int result = nccl->api.get_async_error(nccl->comm, &error);
  return result ? result : error == MOEC_NCCL_IN_PROGRESS ? 0 : error;
}

static inline int32_t moec_nccl_abort(void* user) {
  moec_nccl* const nccl = (moec_nccl*)user;
  void* const comm = nccl->comm;
  nccl->comm = NULL;
  return nccl->api.abort(comm);
}

/* ---- windows: 0, what NCCL returned, or -1 where it made none */
static inline int32_t moec_nccl_window_alloc(void* user, uint64_t bytes, void** window,
                                             void** memory) {
  const moec_nccl* const nccl = (const moec_nccl*)user;
  moec_nccl_window* const made = (moec_nccl_window*)calloc(1, sizeof *made);
  int result;
  if (!made) return -1;
  made->bytes = (size_t)bytes;
  result = nccl->api.mem_alloc(&made->memory, made->bytes);
  if (result) {
    free(made);
    return result;
  }
  *window = made;
  *memory = made->memory;
  return 0;
}

/* A communicator that does not block says that it is in progress. */
static inline int32_t moec_nccl_window_open(void* user, void* window, void** blocks) {
  const moec_nccl* const nccl = (const moec_nccl*)user;
  moec_nccl_window* const made = (moec_nccl_window*)window;
  int r, own = 0, asked = 0;
  int result = nccl->api.window_register(nccl->comm, made->memory, made->bytes, &made->window, 0);
  while (result == MOEC_NCCL_IN_PROGRESS && !asked) {
    sched_yield();
    asked = nccl->api.get_async_error(nccl->comm, &result);
  }
  if (asked || result) return asked ? asked : result;
  if (!made->window) return -1; /* the GPUs or the driver have no symmetric memory */
  result = nccl->api.user_rank(nccl->comm, &own);
  for (r = 0; r < nccl->size && !result; ++r)
    if (r == own)
      blocks[r] = made->memory;
    else
      result = nccl->api.peer_pointer(made->window, 0, r, &blocks[r]);
  return result;
}

static inline int32_t moec_nccl_window_close(void* user, void* window) {
  const moec_nccl* const nccl = (const moec_nccl*)user;
  moec_nccl_window* const made = (moec_nccl_window*)window;
  int freed, result = 0;
  if (made->window && nccl->comm) result = nccl->api.window_deregister(nccl->comm, made->window);
  freed = nccl->api.mem_free(made->memory);
  free(made);
  return result ? result : freed;
}

static inline void moec_nccl_fill(moec_nccl* nccl, moec_comm_callbacks* callbacks) {
  moec_struct_init(callbacks, sizeof *callbacks);
  callbacks->flags = MOEC_COMM_DEVICE | MOEC_COMM_CAPTURE;
  callbacks->user = nccl;
  callbacks->all_gather = moec_nccl_all_gather;
  callbacks->all_to_all = moec_nccl_all_to_all;
  callbacks->all_to_all_v = moec_nccl_all_to_all_v;
  callbacks->poll = moec_nccl_poll;
  if (nccl->api.abort) callbacks->abort = moec_nccl_abort;
  callbacks->release = free;
  if (!nccl->api.peer_pointer) return;
  callbacks->window_alloc = moec_nccl_window_alloc;
  callbacks->window_open = moec_nccl_window_open;
  callbacks->window_close = moec_nccl_window_close;
}

/* A comm of all ranks of `nccl_comm`, a ncclComm_t, whose GPU is the context's. api: NULL = that of
 * the libnccl which is loaded; else copied. Not collective; host only. E_UNSUPPORTED: no libnccl is
 * loaded, and api is NULL; E_COMM: NCCL failed; E_DEVICE: the communicator is of another GPU;
 * E_OUT_OF_MEMORY (moec_last_error knows of none of these); others as moec_comm_create. */
MOEC_CHECK static inline moec_status moec_comm_from_nccl(const moec_context* context,
                                                         void* nccl_comm, const moec_nccl_api* api,
                                                         moec_comm** out) {
  moec_comm_callbacks callbacks;
  moec_comm_desc desc;
  moec_device_info info;
  moec_status status;
  int rank = 0, device = 0;
  moec_nccl* nccl;
  moec_struct_init(&info, sizeof info);
  status = moec_context_device(context, &info);
  if (status != MOEC_OK) return status;
  if (!nccl_comm) return MOEC_E_INVALID_ARG;
  nccl = (moec_nccl*)calloc(1, sizeof *nccl);
  if (!nccl) return MOEC_E_OUT_OF_MEMORY;
  nccl->comm = nccl_comm;
  if (api)
    nccl->api = *api;
  else if (moec_nccl_find(&nccl->api))
    status = MOEC_E_UNSUPPORTED;
  if (status == MOEC_OK &&
      (nccl->api.count(nccl_comm, &nccl->size) || nccl->api.user_rank(nccl_comm, &rank) ||
       nccl->api.cu_device(nccl_comm, &device)))
    status = MOEC_E_COMM;
  if (status == MOEC_OK && (info.device_type != MOEC_CUDA || info.device_id != device))
    status = MOEC_E_DEVICE;
  if (status == MOEC_OK) {
    moec_nccl_fill(nccl, &callbacks);
    moec_struct_init(&desc, sizeof desc);
    desc.rank = rank;
    desc.size = nccl->size;
    status = moec_comm_create(context, &desc, &callbacks, out);
  }
  if (status != MOEC_OK) free(nccl);
  return status;
}
#endif /* MOEC_NCCL_H */
