/* SPDX-License-Identifier: Apache-2.0 */
/* A libnccl.so.2 whose functions only say which one they are: moec/nccl.h finds them by name. With
 * BEFORE_WINDOWS it is as of 2.28, which cannot say where a peer's window is. */
#include <stddef.h>
#define EXPORT __attribute__((visibility("default")))
EXPORT int ncclCommCount(const void* comm, int* ranks);
EXPORT int ncclCommUserRank(const void* comm, int* rank);
EXPORT int ncclCommCuDevice(const void* comm, int* device);
EXPORT int ncclAllGather(const void* send, void* recv, size_t count, int type, void* comm,
                         void* on);
EXPORT int ncclSend(const void* send, size_t count, int type, int peer, void* comm, void* stream);
EXPORT int ncclRecv(void* recv, size_t count, int type, int peer, void* comm, void* stream);
EXPORT int ncclGroupStart(void);
EXPORT int ncclGroupEnd(void);
EXPORT int ncclCommGetAsyncError(void* comm, int* error);
EXPORT int ncclCommAbort(void* comm);
EXPORT int ncclMemAlloc(void** memory, size_t bytes);
EXPORT int ncclMemFree(void* memory);
EXPORT int ncclCommWindowRegister(void* comm, void* memory, size_t bytes, void** window, int flags);
EXPORT int ncclCommWindowDeregister(void* comm, void* window);

int ncclCommCount(const void* comm, int* ranks) {
  (void)comm, (void)ranks;
  return 101;
}
int ncclCommUserRank(const void* comm, int* rank) {
  (void)comm, (void)rank;
  return 102;
}
int ncclCommCuDevice(const void* comm, int* device) {
  (void)comm, (void)device;
  return 103;
}
int ncclAllGather(const void* send, void* recv, size_t count, int type, void* comm, void* on) {
  (void)send, (void)recv, (void)count, (void)type, (void)comm, (void)on;
  return 104;
}
int ncclSend(const void* send, size_t count, int type, int peer, void* comm, void* stream) {
  (void)send, (void)count, (void)type, (void)peer, (void)comm, (void)stream;
  return 105;
}
int ncclRecv(void* recv, size_t count, int type, int peer, void* comm, void* stream) {
  (void)recv, (void)count, (void)type, (void)peer, (void)comm, (void)stream;
  return 106;
}
int ncclGroupStart(void) {
  return 107;
}
int ncclGroupEnd(void) {
  return 108;
}
int ncclCommGetAsyncError(void* comm, int* error) {
  (void)comm, (void)error;
  return 109;
}
int ncclCommAbort(void* comm) {
  (void)comm;
  return 110;
}
int ncclMemAlloc(void** memory, size_t bytes) {
  (void)memory, (void)bytes;
  return 111;
}
int ncclMemFree(void* memory) {
  (void)memory;
  return 112;
}
int ncclCommWindowRegister(void* comm, void* memory, size_t bytes, void** window, int flags) {
  (void)comm, (void)memory, (void)bytes, (void)window, (void)flags;
  return 113;
}
int ncclCommWindowDeregister(void* comm, void* window) {
  (void)comm, (void)window;
  return 114;
}
#ifndef BEFORE_WINDOWS
EXPORT int ncclGetPeerDevicePointer(void* window, size_t offset, int peer, void** pointer);
int ncclGetPeerDevicePointer(void* window, size_t offset, int peer, void** pointer) {
  (void)window, (void)offset, (void)peer, (void)pointer;
  return 115;
}
#endif
