/* SPDX-License-Identifier: Apache-2.0 */
/* A libnccl.so.2 whose functions only say which one they are: moec/nccl.h finds them by name. */
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
