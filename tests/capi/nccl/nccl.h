/* SPDX-License-Identifier: Apache-2.0 */
/* What examples/c/train_nccl.c takes of NCCL's header, for compilers where that is not installed.
 * Nothing is linked with it. */
#ifndef MOEC_TESTS_NCCL_H
#define MOEC_TESTS_NCCL_H
typedef struct ncclComm* ncclComm_t;
typedef struct ncclUniqueId {
  char internal[128];
} ncclUniqueId;
typedef enum ncclResult_t { ncclSuccess = 0 } ncclResult_t;
const char* ncclGetErrorString(ncclResult_t result);
ncclResult_t ncclGetUniqueId(ncclUniqueId* id);
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank);
ncclResult_t ncclCommDestroy(ncclComm_t comm);
#endif
