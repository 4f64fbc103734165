/* SPDX-License-Identifier: Apache-2.0 */
/* moec/mpi.h: a moec_comm of an MPI communicator, in a header alone: the library knows no MPI.
 * Compile it with the mpicc of your MPI, MPI 3 or later; in C++ with OMPI_SKIP_MPICXX or
 * MPICH_SKIP_MPICXX where its C++ bindings are not linked. Memory is the host's.
 *
 *   moec_comm* comm;
 *   moec_status status = moec_comm_from_mpi(context, MPI_COMM_WORLD, 60000, &comm);
 *
 * Calls are MPI's nonblocking collectives with a deadline. After E_TIMEOUT a collective may still
 * write to the ep's memory: keep comm and ep until the process ends, or MPI_Abort. Free the comm
 * before MPI_Finalize. The threads that call moec with it are those that MPI_Init_thread allows. */
#ifndef MOEC_MPI_H
#define MOEC_MPI_H
#include <limits.h>
#include <moec/moec.h>
#include <mpi.h>
#include <sched.h>
#include <stdlib.h>

#define MOEC_MPI_TYPES 4 /* row types that are kept */

typedef struct moec_mpi { /* behind the callbacks */
  MPI_Comm comm;
  int size, is_broken, next_type;
  double seconds;
  int* counts; /* [4,size]: what is sent and received, in units, and where */
  struct {
    uint64_t bytes;
    MPI_Datatype type;
  } types[MOEC_MPI_TYPES];
} moec_mpi;

/* Waits until the request is done or the deadline has passed. */
static inline int32_t moec_mpi_finish(moec_mpi* mpi, int status, MPI_Request* request) {
  const double begin = MPI_Wtime();
  int is_done = 0;
  while (status == MPI_SUCCESS) {
    status = MPI_Test(request, &is_done, MPI_STATUS_IGNORE);
    if (is_done || status != MPI_SUCCESS) break;
    if (MPI_Wtime() - begin > mpi->seconds) {
      mpi->is_broken = 1;
      return MOEC_E_TIMEOUT;
    }
    sched_yield(); /* ranks may be more than cores */
  }
  if (status == MPI_SUCCESS) return 0;
  mpi->is_broken = 1;
  return status > 0 ? status : 1;
}

/* A committed type of so many bytes, which need not fit an int; MPI_DATATYPE_NULL: it cannot be. */
static inline MPI_Datatype moec_mpi_type(moec_mpi* mpi, uint64_t bytes) {
  uint64_t whole = bytes;
  int i, inner = 1;
  MPI_Datatype chunk = MPI_BYTE, type = MPI_DATATYPE_NULL;
  for (i = 0; i < MOEC_MPI_TYPES; ++i)
    if (mpi->types[i].type != MPI_DATATYPE_NULL && mpi->types[i].bytes == bytes)
      return mpi->types[i].type;
  while (whole > INT_MAX && whole % 2 == 0 && inner < (1 << 30)) {
    whole /= 2;
    inner *= 2;
  }
  if (whole > INT_MAX) return MPI_DATATYPE_NULL;
  if (inner > 1 && MPI_Type_contiguous(inner, MPI_BYTE, &chunk) != MPI_SUCCESS)
    return MPI_DATATYPE_NULL;
  if (MPI_Type_contiguous((int)whole, chunk, &type) != MPI_SUCCESS) type = MPI_DATATYPE_NULL;
  if (inner > 1) MPI_Type_free(&chunk);
  if (type == MPI_DATATYPE_NULL || MPI_Type_commit(&type) != MPI_SUCCESS) return MPI_DATATYPE_NULL;
  i = mpi->next_type;
  mpi->next_type = (i + 1) % MOEC_MPI_TYPES;
  if (mpi->types[i].type != MPI_DATATYPE_NULL) MPI_Type_free(&mpi->types[i].type);
  mpi->types[i].bytes = bytes;
  mpi->types[i].type = type;
  return type;
}

static inline int32_t moec_mpi_all_gather(void* user, const void* send, void* recv, uint64_t bytes,
                                          moec_stream stream) {
  moec_mpi* const mpi = (moec_mpi*)user;
  const MPI_Datatype type = moec_mpi_type(mpi, bytes);
  MPI_Request request;
  (void)stream;
  if (type == MPI_DATATYPE_NULL) return MPI_ERR_TYPE;
  return moec_mpi_finish(
      mpi, MPI_Iallgather(send, 1, type, recv, 1, type, mpi->comm, &request), &request);
}

static inline int32_t moec_mpi_all_to_all(void* user, const void* send, void* recv, uint64_t bytes,
                                          moec_stream stream) {
  moec_mpi* const mpi = (moec_mpi*)user;
  const MPI_Datatype type = moec_mpi_type(mpi, bytes);
  MPI_Request request;
  (void)stream;
  if (type == MPI_DATATYPE_NULL) return MPI_ERR_TYPE;
  return moec_mpi_finish(
      mpi, MPI_Ialltoall(send, 1, type, recv, 1, type, mpi->comm, &request), &request);
}

static inline int32_t moec_mpi_all_to_all_v(void* user, const void* send,
                                            const uint64_t* send_bytes, const uint64_t* send_at,
                                            void* recv, const uint64_t* recv_bytes,
                                            const uint64_t* recv_at, uint64_t unit,
                                            moec_stream stream) {
  moec_mpi* const mpi = (moec_mpi*)user;
  const uint64_t* const from[4] = {send_bytes, send_at, recv_bytes, recv_at};
  const MPI_Datatype row = moec_mpi_type(mpi, unit);
  MPI_Request request;
  int *const counts = mpi->counts, size = mpi->size, i, r;
  (void)stream;
  if (row == MPI_DATATYPE_NULL) return MPI_ERR_TYPE;
  for (i = 0; i < 4; ++i)
    for (r = 0; r < size; ++r) {
      if (from[i][r] / unit > INT_MAX) return MPI_ERR_COUNT;
      counts[i * size + r] = (int)(from[i][r] / unit);
    }
  return moec_mpi_finish(
      mpi,
      MPI_Ialltoallv(send, counts, counts + size, row, recv, counts + 2 * size, counts + 3 * size,
                     row, mpi->comm, &request),
      &request);
}

static inline void moec_mpi_release(void* user) {
  moec_mpi* const mpi = (moec_mpi*)user;
  int i, is_over = 1;
  MPI_Finalized(&is_over);
  if (!is_over && !mpi->is_broken) { /* what is still on its way would be pulled from under MPI */
    for (i = 0; i < MOEC_MPI_TYPES; ++i)
      if (mpi->types[i].type != MPI_DATATYPE_NULL) MPI_Type_free(&mpi->types[i].type);
    MPI_Comm_free(&mpi->comm);
  }
  free(mpi->counts);
  free(mpi);
}

/* A comm of all ranks of `comm`, which is duplicated, so that no message meets another of the
 * caller's. timeout_ms: 0 = 600000. Collective over `comm`; waits. E_OUT_OF_MEMORY; E_COMM: MPI
 * failed (moec_last_error does not know of it); others as moec_comm_create. */
MOEC_CHECK static inline moec_status moec_comm_from_mpi(const moec_context* context, MPI_Comm comm,
                                                        uint32_t timeout_ms, moec_comm** out) {
  moec_comm_callbacks callbacks;
  moec_comm_desc desc;
  moec_status status;
  int i, rank = 0, size = 0;
  moec_mpi* mpi;
  if (MPI_Comm_rank(comm, &rank) != MPI_SUCCESS || MPI_Comm_size(comm, &size) != MPI_SUCCESS)
    return MOEC_E_COMM;
  mpi = (moec_mpi*)calloc(1, sizeof *mpi);
  if (!mpi) return MOEC_E_OUT_OF_MEMORY;
  mpi->size = size;
  mpi->seconds = (timeout_ms ? timeout_ms : 600000) / 1000.0;
  for (i = 0; i < MOEC_MPI_TYPES; ++i) mpi->types[i].type = MPI_DATATYPE_NULL;
  mpi->counts = (int*)malloc(4 * (size_t)size * sizeof(int));
  if (!mpi->counts) {
    free(mpi);
    return MOEC_E_OUT_OF_MEMORY;
  }
  if (MPI_Comm_dup(comm, &mpi->comm) != MPI_SUCCESS) {
    free(mpi->counts);
    free(mpi);
    return MOEC_E_COMM;
  }
  MPI_Comm_set_errhandler(mpi->comm, MPI_ERRORS_RETURN);
  moec_struct_init(&callbacks, sizeof callbacks);
  callbacks.user = mpi;
  callbacks.all_gather = moec_mpi_all_gather;
  callbacks.all_to_all = moec_mpi_all_to_all;
  callbacks.all_to_all_v = moec_mpi_all_to_all_v;
  callbacks.release = moec_mpi_release;
  moec_struct_init(&desc, sizeof desc);
  desc.rank = rank;
  desc.size = size;
  status = moec_comm_create(context, &desc, &callbacks, out);
  if (status != MOEC_OK) moec_mpi_release(mpi);
  return status;
}
#endif /* MOEC_MPI_H */
