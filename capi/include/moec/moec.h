/* SPDX-License-Identifier: Apache-2.0 */
/* clang-format off */
/* moec: Mixture-of-Experts layers behind one stable C ABI.
 *
 * Conventions, for every function unless its own text says otherwise
 *   status    0 is success; a negative value is an error that moec_last_error() explains.
 *             On an error nothing has been written to outputs and nothing is queued; but where a
 *             thread pool (E_CALLBACK) or the device (E_CUDA) fails underway, outputs, accumulated
 *             gradients among them, are undefined.
 *   errors    Any call may return E_INVALID_ARG (NULL, a wrong handle, a value out of range),
 *             E_FORKED, E_OUT_OF_MEMORY and E_CUDA; one that takes a sized struct E_ABI; one that
 *             takes tensors E_SHAPE, E_DTYPE, E_LAYOUT, E_DEVICE, E_ALIAS and E_OVERFLOW; one that
 *             takes a plan, weights or a saved buffer E_INVALID_STATE and E_MISMATCH. The text of
 *             a function names what else it returns.
 *   handles   Opaque; freed in any order (children keep their parents alive); NULL may be freed.
 *             `const moec_x*` may be used by many threads at once, `moec_x*` by one at a time.
 *   structs   Those that start with `struct_size` are filled by moec_struct_init() and grow only
 *             at their tail; a zero field is its default. The others never change.
 *   tensors   An all-zero moec_tensor is "absent". Strides are in elements and must describe a
 *             compact row-major array (all zero means that). Pointers are element-aligned. Memory
 *             is of the context's device, or pinned or managed memory that the device reaches.
 *   stream    A cudaStream_t on CUDA, ignored on the CPU. The device must not be reset
 *             (cudaDeviceReset).
 *   work      A text that says "Queues" means: the work is done in the order of `stream`, and the
 *             call returns before that (on the CPU it is done then). "Host only" means: the call
 *             neither queues, nor waits for the device, nor allocates memory of it.
 *             Only `_sync` waits, and what gives memory of the device back: `_free`, `_trim`, calls
 *             for which scratch must grow; and moec_tensor_copy into pageable memory.
 *   scratch   A text that says "Takes scratch" means: memory that the context keeps for its calls,
 *             or the workspace of the call where one is given. It allocates only where no idle
 *             block is large enough (moec_context_reserve). E_WOULD_ALLOC: it would have to, and
 *             MOEC_CONTEXT_NO_ALLOC or a capture forbids it. E_WORKSPACE: a caller's buffer is too
 *             small.
 *   capture   Calls may be captured into a CUDA graph when the scratch that they need is there
 *             (after the same call once, moec_context_reserve, or with a caller's workspace).
 *             Scratch that a graph uses stays until the context is freed, and serves later calls on
 *             the captured stream, too: replay it on that stream, or in order with its calls. The
 *             handle of a stream that was destroyed may be another stream's later: make one call
 *             there, or reserve, before capturing on it.
 *   aliasing  An output may not overlap an input; y may be exactly the residual.
 *   letters   T tokens, H hidden, I intermediate, E experts, Z identity ("zero") experts, K experts
 *             per token, El experts of the plan's local range, P rows of a plan (one per routed
 *             (token, slot), plus padding). */
#ifndef MOEC_H
#define MOEC_H
#include <stddef.h>
#include <stdint.h>

#define MOEC_VERSION_MAJOR 0
#define MOEC_VERSION_MINOR 1
#define MOEC_VERSION_PATCH 0
#define MOEC_ABI_VERSION 0 /* the SONAME number; raised only by an ABI break */
#define MOEC_MAX_DIMS 6

#if defined(SWIG) || defined(MOEC_NO_ATTRIBUTES)
#define MOEC_API
#define MOEC_CHECK
#else
#define MOEC_API __attribute__((visibility("default")))
#define MOEC_CHECK __attribute__((warn_unused_result))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- scalars: no enum type ever appears in a signature or a field ---- */
typedef int32_t moec_status;
typedef uint32_t moec_dtype; /* DLPack's code | bits << 8 | lanes << 16 */
typedef void* moec_stream;

enum moec_status_code {
  MOEC_OK = 0,
  MOEC_S_NOT_READY = 1,      /* poll: work still in flight */
  MOEC_E_INVALID_ARG = -1,   /* NULL, out of range, conflicting values */
  MOEC_E_INVALID_STATE = -2, /* plan not built, weights not bound */
  MOEC_E_ABI = -3,           /* struct_size not understood by this library */
  MOEC_E_SHAPE = -4,         /* a tensor's shape does not fit */
  MOEC_E_DTYPE = -5,         /* a tensor's element type does not fit */
  MOEC_E_LAYOUT = -6,        /* strides that are not supported */
  MOEC_E_DEVICE = -7,        /* memory on another device than the context's */
  MOEC_E_UNSUPPORTED = -8,   /* legal request, not implemented here; the text says what is */
  MOEC_E_OUT_OF_MEMORY = -9,
  MOEC_E_WORKSPACE = -10,    /* a caller's buffer is smaller than the size query says */
  MOEC_E_NO_BACKEND = -11,   /* plug-in or device absent */
  MOEC_E_BACKEND_ABI = -12,  /* plug-in built for another library */
  MOEC_E_WOULD_SYNC = -13,   /* forbidden by stream capture: the call would wait */
  MOEC_E_WOULD_ALLOC = -14,  /* forbidden by the context's flags or by stream capture */
  MOEC_E_CUDA = -15,         /* the driver's error is native_code */
  MOEC_E_COMM = -16,         /* another rank failed, or the communicator is broken */
  MOEC_E_TIMEOUT = -17,      /* a communicator's callback reported that its deadline passed */
  MOEC_E_CALLBACK = -18,     /* a user callback returned non-zero: native_code */
  MOEC_E_FORKED = -19,       /* handle made before fork(), used in the child */
  MOEC_E_OVERFLOW = -20,     /* T*K, rows or bytes exceed the index type */
  MOEC_E_ALIAS = -21,        /* an output overlaps an input */
  MOEC_E_MISMATCH = -22,     /* plan, saved state or weights of another shape, type or range */
  MOEC_E_CORRUPT = -23,      /* a saved plan or packed file fails its checksum or version */
  MOEC_E_INTERNAL = -99
};

/* DLPack's own values */
enum moec_dtype_value {
  MOEC_F32 = 0x12002,
  MOEC_F16 = 0x11002,
  MOEC_BF16 = 0x11004,
  MOEC_F64 = 0x14002,
  MOEC_I8 = 0x10800,
  MOEC_U8 = 0x10801,
  MOEC_I32 = 0x12000,
  MOEC_I64 = 0x14000,
  MOEC_BOOL = 0x10806,
  MOEC_F8_E4M3 = 0x1080a, /* e4m3fn: no infinity */
  MOEC_F8_E5M2 = 0x1080c,
  MOEC_F8_E8M0 = 0x1080e /* powers of two: 2^(code - 127) */
};
/* DLPack's own values */
enum moec_device_type { MOEC_CPU = 1, MOEC_CUDA = 2, MOEC_CUDA_HOST = 3, MOEC_CUDA_MANAGED = 13 };

/* ---- frozen structs: their layout never changes; embedded by value ---- */
/* All-zero = absent; may start at any byte; lies where the device reaches it (E_DEVICE). */
typedef struct moec_buffer {
  void* ptr;
  uint64_t bytes;
} moec_buffer;

typedef struct moec_size { /* bytes for T tokens: base + T * per_token, exact */
  uint64_t base, per_token;
} moec_size;

typedef struct moec_tensor { /* 128 bytes; all-zero = absent */
  void* data;                /* base address in the device's space */
  uint64_t byte_offset;      /* added to data (DLPack's meaning) */
  int32_t device_type, device_id;
  moec_dtype dtype;
  int32_t ndim;
  int64_t shape[MOEC_MAX_DIMS];
  int64_t strides[MOEC_MAX_DIMS]; /* elements; all zero = compact row-major */
} moec_tensor;

typedef struct moec_activation { /* 32 bytes; parameters that a kind does not use must be 0 */
  uint32_t kind;                 /* moec_activation_kind */
  float alpha;                   /* GPTOSS, QUICK_GEGLU: 0 = 1.702 */
  float limit;                   /* GPTOSS: 0 = 7.0; CLAMP_SWIGLU, SWIGLU_CLAMP: > 0 */
  float offset;                  /* QUICK_GEGLU: added to up */
  float beta, linear_beta;       /* SITU: 0 = 4 and 0 = no bound on up */
  uint32_t reserved0, reserved1;
} moec_activation;

/* How the codes of a quantised matrix [N,K] become values; moec_scheme says which of these tensors
 * a scheme reads, the others are absent. Arrays of one tensor an expert have moec_matrix.count
 * entries, without the dimension E, and replace the stacked tensor of their name. Of one block the
 * extents may be left out. No value is read at bind. Gradients have none. */
typedef struct moec_quant {
  uint32_t struct_size, flags; /* moec_quant_flags */
  moec_tensor scales;       /* [E,N/block_n,K/block_k], rounded up; IN_OUT: [E,K/.., N/..] */
  moec_tensor scales2;      /* scales of the scales */
  moec_tensor zeros;        /* zero points: shape of scales, or packed */
  moec_tensor codebook;     /* [16] f32: the value of each code */
  moec_tensor scale_book;   /* [256] f32: the value of each u8 scale */
  moec_tensor scale_offset; /* [1] f32: added to the scales */
  moec_tensor group_index;  /* [E,K] i32: the block along K of each input (act-order). One that is
                             * no block counts as k / block_k */
  const moec_tensor *per_expert_scales, *per_expert_scales2, *per_expert_zeros;
  const moec_tensor *per_expert_scale_offset, *per_expert_group_index;
  int64_t block_n, block_k; /* values along N and K that share a scale; 0 = as the scheme says */
  int64_t scale_block;      /* scales that share an entry of scales2; 0 = as the scheme says */
} moec_quant;

/* One weight matrix of all experts, or its gradient; all-zero = absent. */
typedef struct moec_matrix {
  moec_tensor data; /* [E,N,K] (OUT_IN) or [E,K,N] (IN_OUT); y = x * W^T + bias; codes: the type
                     * and shape that the scheme says */
  moec_tensor bias;              /* [E,N], optional */
  const moec_tensor* per_expert; /* instead of data: `count` tensors [N,K] or [K,N]; array copied */
  const moec_tensor* per_expert_bias; /* instead of bias: `count` tensors [N]; array copied */
  int64_t count;                      /* E when a per_expert array is given, else 0 */
  const moec_quant* quant;            /* codes: their scales; NULL = plain values. Copied at bind */
} moec_matrix;

/* ---- opaque handles ---- */
typedef struct moec_context moec_context;
typedef struct moec_router moec_router;
typedef struct moec_plan moec_plan;
typedef struct moec_weights moec_weights;
typedef struct moec_adapters moec_adapters;
typedef struct moec_experts moec_experts;
typedef struct moec_layer moec_layer;
typedef struct moec_comm moec_comm;
typedef struct moec_ep moec_ep;

/* ================================ 1. version, errors, log ================================ */
enum moec_log_level {
  MOEC_LOG_TRACE = 0,
  MOEC_LOG_DEBUG = 1,
  MOEC_LOG_INFO = 2,
  MOEC_LOG_WARN = 3,
  MOEC_LOG_ERROR = 4,
  MOEC_LOG_OFF = 5
};
/* Called from any thread; must not call moec. `message` is NUL-terminated, `length` bytes long. */
typedef void (*moec_log_function)(void* user, int32_t level, const char* message, size_t length);

typedef struct moec_error_info {
  uint32_t struct_size, flags;
  int32_t code;        /* moec_status of the failing call */
  int32_t native_code; /* cudaError_t, errno or a callback's value; 0 if none */
  int32_t arg_index;   /* 1-based argument that is NULL or no such handle or struct; else 0 */
  uint32_t reserved0;
  char site[64];     /* entry point, NUL-terminated */
  char message[512]; /* what is wrong, both values, what would be right; NUL-terminated */
} moec_error_info;

/* All of this section is host only. */
/* Version of the running library: major << 22 | minor << 12 | patch. */
MOEC_API uint32_t moec_version(void);
/* Static text such as "0.1.0". */
MOEC_API const char* moec_version_string(void);
/* MOEC_ABI_VERSION of the running library. */
MOEC_API uint32_t moec_abi_version(void);
/* Static JSON: compiler, instruction sets compiled in, build id, flags. */
MOEC_API const char* moec_build_info(void);
/* Static name such as "MOEC_E_SHAPE"; "MOEC_E_UNKNOWN" for other values; never NULL. */
MOEC_API const char* moec_status_name(moec_status status);
/* Copies this OS thread's last failure; code 0 and empty texts if there was none. It stays. */
MOEC_API moec_status moec_last_error(moec_error_info* out);
/* Zeroes `bytes` bytes and stores `bytes` in the leading struct_size. NULL, or bytes < 8, does
 * nothing. */
MOEC_API void moec_struct_init(void* sized_struct, size_t bytes);
/* Process-wide log sink; NULL: silence. Nothing below min_level (moec_log_level) is delivered. */
MOEC_API moec_status moec_set_log(moec_log_function sink, void* user, int32_t min_level);

/* ================================ 2. backends, devices, context ============================= */
enum moec_context_flags {
  MOEC_CONTEXT_NO_ALLOC = 1,     /* calls that would allocate scratch fail: E_WOULD_ALLOC */
  MOEC_CONTEXT_CHECK_INPUTS = 2, /* check the ids of moec_plan_from_topk (CUDA: deferred) */
  MOEC_CONTEXT_PROFILE = 4       /* fill the ns_* counters of moec_stats */
};
enum moec_math_mode {
  MOEC_MATH_DEFAULT = 0,
  MOEC_MATH_TF32 = 1 /* CUDA: products of fp32 in TF32 */
};

typedef struct moec_device_info {
  uint32_t struct_size, flags;
  int32_t device_type, device_id;
  int32_t compute_major, compute_minor; /* CUDA capability; 0 on the CPU */
  int32_t multiprocessors;              /* SMs; usable cores on the CPU */
  int32_t numa_node;                    /* -1 = unknown */
  uint64_t total_bytes, free_bytes;
  char name[128], backend[32], arch[64]; /* arch: instruction set in use, or sm_XX */
} moec_device_info;

/* Called on the calling thread; must not call moec. alloc returns NULL on failure. */
typedef struct moec_allocator {
  uint32_t struct_size, flags;
  void* user;
  void* (*alloc)(void* user, size_t bytes, size_t align, int32_t device_type, int32_t device_id,
                 moec_stream stream);
  /* stream: of the last use, or NULL: work on any stream may still use it. */
  void (*release)(void* user, void* pointer, size_t bytes, int32_t device_type, int32_t device_id,
                  moec_stream stream);
} moec_allocator;

typedef struct moec_thread_pool { /* run CPU work on the host framework's threads */
  uint32_t struct_size;
  int32_t num_threads; /* >= 1, how many bodies may run at once */
  void* user;
  /* Call body(arg, i) for each i in [0, n), in any order, from any threads; return 0 when all are
   * done. */
  int32_t (*parallel_for)(void* user, int64_t n, void (*body)(void* arg, int64_t i), void* arg);
} moec_thread_pool;

typedef struct moec_context_desc {
  uint32_t struct_size, flags;     /* moec_context_flags */
  int32_t device_type, device_id;  /* 0, 0 = the CPU */
  uint32_t math;                   /* moec_math_mode */
  int32_t num_threads;             /* CPU: 0 = affinity mask and cgroup quota */
  uint64_t workspace_limit;        /* bytes of scratch the context may hold; 0 = no limit */
  const moec_allocator* allocator; /* NULL = built in */
  const moec_thread_pool* pool;    /* NULL = built in; not with num_threads */
} moec_context_desc;

typedef struct moec_stats { /* host counters of a context; reading never waits */
  uint32_t struct_size, flags;
  uint64_t calls, kernel_launches;
  uint64_t allocs, host_syncs; /* both stay constant in steady state */
  uint64_t workspace_bytes, workspace_peak;
  uint64_t flops;                                     /* of real rows, never padding */
  uint64_t ns_route, ns_plan, ns_experts, ns_combine; /* with MOEC_CONTEXT_PROFILE */
  /* forwards and backwards of experts, by the path that ran them (moec_experts_describe). A graph
   * counts when it is captured */
  uint64_t path_cpu, path_portable, path_sm90, path_few_tokens;
  uint64_t path_fallbacks; /* of these, those that a better path was asked for and did not take */
  uint64_t ep_gather, ep_peer, ep_rows, ep_exact; /* dispatches and combines, by moec_ep_scheme */
  uint64_t path_few_rows; /* as path_cpu and its like: experts of codes that have few rows */
} moec_stats;

/* Loads one backend plug-in by path. Host only. E_NO_BACKEND: the file cannot be opened;
 * E_BACKEND_ABI: it is of another build. */
MOEC_API MOEC_CHECK moec_status moec_backend_load(const char* path);
/* Number of devices of a type (moec_device_type). Host only. 0 without a driver or plug-in: that is
 * no error, and moec_backend_describe says why. */
MOEC_API moec_status moec_device_count(int32_t device_type, int32_t* count);
/* JSON: `state` ("ready", "no_plugin", "other_build", "no_driver", "old_driver", "no_device" or
 * "failed") and `devices`; of CUDA also `why` there is none, the file of the `plugin`, the CUDA
 * versions that the `driver` serves and the plug-in `needs`, and whose code multiplies matrices
 * without experts (`dense_products`: where cuBLASLt was found). *need counts the final NUL; buffer
 * may be NULL. Host only; may wait while the driver starts. E_WORKSPACE: the buffer is too small;
 * *need is set. */
MOEC_API moec_status moec_backend_describe(int32_t device_type, char* buffer, uint64_t bytes,
                                           uint64_t* need);
/* What a device is, without a context on it. Host only. E_NO_BACKEND: there is no such device. */
MOEC_API moec_status moec_device_query(int32_t device_type, int32_t device_id,
                                       moec_device_info* out);
/* Makes a context on one device. desc may be NULL (the CPU, all defaults). May wait while the
 * driver starts. E_NO_BACKEND: no plug-in or no such device; E_UNSUPPORTED: a GPU before compute
 * capability 8.0. */
MOEC_API MOEC_CHECK moec_status moec_context_create(const moec_context_desc* desc,
                                                    moec_context** out);
/* Drops the caller's reference. The last one, of the caller or of an object made with the context,
 * gives its memory back, what is left of moec_buffer_alloc with it; that may wait. */
MOEC_API void moec_context_free(moec_context* context);
/* What the context's device is, with its free memory. Host only. */
MOEC_API moec_status moec_context_device(const moec_context* context, moec_device_info* out);
/* Holds at least `bytes` of scratch, so that later calls without a caller's workspace, one at a
 * time, do not allocate. Allocates, and replaces the largest idle scratch that is smaller.
 * E_OUT_OF_MEMORY: workspace_limit (nothing has changed), or the allocator refused; E_WOULD_ALLOC:
 * the stream is being captured. */
MOEC_API moec_status moec_context_reserve(const moec_context* context, uint64_t bytes,
                                          moec_stream stream);
/* Gives back the scratch that neither a call nor a captured graph uses. May wait. */
MOEC_API moec_status moec_context_trim(const moec_context* context);
/* *deferred: the status of device work that failed after its call had returned, or 0. No wait. */
MOEC_API moec_status moec_context_poll(const moec_context* context, moec_status* deferred);
/* Waits for the stream; returns a deferred error if there is one. E_WOULD_SYNC: the stream is being
 * captured. */
MOEC_API moec_status moec_context_sync(const moec_context* context, moec_stream stream);
/* Copies the counters. Host only. */
MOEC_API moec_status moec_context_stats(const moec_context* context, moec_stats* out);
/* Sets every counter but workspace_bytes and workspace_peak to 0. Host only. */
MOEC_API moec_status moec_context_stats_reset(const moec_context* context);

/* ================================ 3. tensors and memory ================================ */
/* Makes a compact view of `data`; shape has ndim entries. Host only. */
MOEC_API moec_status moec_tensor_make(moec_tensor* out, void* data, moec_dtype dtype,
                                      int32_t device_type, int32_t device_id, int32_t ndim,
                                      const int64_t* shape);
/* Borrows a DLTensor*. NULL strides and a byte_offset are understood. Host only. E_LAYOUT: one
 * element stands for all (strides 0, a broadcast number). */
MOEC_API moec_status moec_tensor_from_dlpack(const void* dl_tensor, moec_tensor* out);
/* Elements, or -1 on overflow, a negative extent or NULL. Host only. */
MOEC_API int64_t moec_tensor_numel(const moec_tensor* tensor);
/* Bytes of the elements, or -1 likewise. Host only. */
MOEC_API int64_t moec_tensor_bytes(const moec_tensor* tensor);
/* Checks dtype, dimensions, strides, alignment and device type. Host only. */
MOEC_API moec_status moec_tensor_check(const moec_tensor* tensor);
/* Allocates memory of the context's device for the caller, for use on any stream; its values are
 * undefined. It comes from the context's allocator (stream NULL), or from the backend, aligned to
 * 256 bytes on CUDA and 64 on the CPU; it counts as one of `allocs` and not towards
 * workspace_limit, and NO_ALLOC does not forbid it. bytes 0 gives an absent buffer. Queues nothing,
 * may be called during a capture, and may wait as cudaMalloc may. */
MOEC_API MOEC_CHECK moec_status moec_buffer_alloc(const moec_context* context, uint64_t bytes,
                                                  moec_buffer* out);
/* Gives a buffer of moec_buffer_alloc back, to the context that made it, and makes *buffer absent;
 * an absent one, or NULL, is left alone. No later work may use it; work that is queued already may,
 * because on CUDA the call waits for the device (an allocator decides for itself). E_INVALID_ARG:
 * not a buffer of this context, freed before, or of other bytes. */
MOEC_API moec_status moec_buffer_free(const moec_context* context, moec_buffer* buffer);
/* target = source, of one dtype and shape: into the device, out of it, or within either side. Each
 * is memory of the context's device or of the host; device_type says which: MOEC_CPU is pageable
 * memory, MOEC_CUDA_HOST pinned. Queues. On CUDA
 *   pageable source  has been read when the call returns; until then the call may wait for copies.
 *   pageable target  makes the call wait for the stream: it is complete when the call returns,
 *                    which counts as one of `host_syncs` and returns a deferred error.
 *   pinned memory    must stay, and stay as it is, until the stream has come to the copy.
 * E_WOULD_SYNC: the stream is being captured and either is pageable. */
MOEC_API moec_status moec_tensor_copy(const moec_context* context, const moec_tensor* source,
                                      const moec_tensor* target, moec_stream stream);
/* Sets every byte of a tensor on the context's device to 0. Queues. */
MOEC_API moec_status moec_tensor_zero(const moec_context* context, const moec_tensor* tensor,
                                      moec_stream stream);

/* ================================ 4. routers ================================ */
/* One descriptor for every model family; the steps run in this order (R0..R10):
 *   input transform and jitter of x; logits = x * Wr^T + bias; soft-cap; score; + selection bias;
 *   group limit; selection; weight rule; normalisation; scale; rounding.
 * A choice score of NaN is above +inf, in groups and expert choice, too; ties go to the lowest id.
 * So a slot that a NaN has taken holds a valid id, and its weight is NaN: y and every gradient
 * through it show what happened. As in PyTorch, one NaN or +inf among the logits makes the whole
 * softmax NaN; the sigmoid of +inf is 1. -inf is never selected, nor is anybody by a softmax of
 * nothing but -inf: such a slot gets id -1 and weight 0 (MOEC_FILL_ZERO makes every choice score
 * outside the best groups 0 before that, as Hugging Face does).
 * Ids in [0,E) are experts, [E,E+Z) identity experts (y += w * x), any other id means "no expert".
 * A token without any (token_mask 0, ids of -1) takes no part: what its x, logits and d_y hold, NaN
 * included, leaves no trace in the gradients of the router and of the routed experts. A shared
 * expert sees every token, masked or not.
 */
enum moec_router_input {
  MOEC_INPUT_PLAIN = 0,
  MOEC_INPUT_RMS_SCALED = 1 /* rms(x) * scale[H] / sqrt(H) */
};
enum moec_precision {
  MOEC_PREC_FP32 = 0, /* computed and kept in fp32 */
  MOEC_PREC_DATA = 1  /* rounded to data_dtype after the step */
};
enum moec_score {
  MOEC_SCORE_SOFTMAX = 0,
  MOEC_SCORE_SIGMOID = 1,
  MOEC_SCORE_SQRT_SOFTPLUS = 2,
  MOEC_SCORE_IDENTITY = 3
};
enum moec_select {
  MOEC_SELECT_TOPK = 0,
  MOEC_SELECT_GROUP_TOPK = 1,   /* only experts of the best `top_groups` of `num_groups` groups */
  MOEC_SELECT_TABLE = 2,        /* ids = table[token_ids[t]] */
  MOEC_SELECT_SPARSE_MIXER = 3, /* PhiMoE's evaluation rule; top_k must be 2 */
  MOEC_SELECT_GIVEN = 4,        /* ids from the caller (replay); weights computed as usual */
  MOEC_SELECT_ROUND_ROBIN = 5   /* slot k of token t: expert (t*K + k) mod E, so that all have as
                                 * many rows; weights as usual. For benchmarks; top_k <= E */
};
enum moec_group_fill { MOEC_FILL_NEG_INF = 0, MOEC_FILL_ZERO = 1 };
enum moec_weight_rule {
  MOEC_WEIGHT_SCORE = 0,            /* the score of the selected expert, without selection bias */
  MOEC_WEIGHT_SOFTMAX_SELECTED = 1, /* softmax over the K selected logits; 0 if all are -inf */
  MOEC_WEIGHT_SIGMOID_SELECTED = 2  /* sigmoid of the selected logit */
};
/* Where the divisor is exactly 0, so are the weights and their gradients. */
enum moec_norm {
  MOEC_NORM_NONE = 0,
  MOEC_NORM_SUM = 1,       /* w / (sum w + norm_eps) */
  MOEC_NORM_CLAMP_SUM = 2, /* w / max(sum w, norm_eps) */
  MOEC_NORM_P = 3          /* w / (sum |w|^p)^(1/p); norm_eps must be 0 */
};
enum moec_slot_order { MOEC_SLOT_BY_VALUE = 0, MOEC_SLOT_BY_EXPERT = 1 };
enum moec_router_flags {
  MOEC_ROUTER_LOGIT_BIAS = 1,       /* gate bias [E+Z] */
  MOEC_ROUTER_SELECT_BIAS = 2,      /* fp32 [E+Z] added to the scores for selection only */
  MOEC_ROUTER_PER_EXPERT_SCALE = 4, /* [E+Z] multiplied into the weights after normalisation */
  MOEC_ROUTER_NORM_IF_K_GT_1 = 8,   /* skip the normalisation when top_k is 1 */
  MOEC_ROUTER_JITTER_X = 16         /* jitter the x that the experts see, too (Hugging Face) */
};

typedef struct moec_router_desc {
  uint32_t struct_size, flags;     /* moec_router_flags */
  int32_t num_experts;             /* E >= 1 */
  int32_t num_zero_experts;        /* Z >= 0 */
  int32_t top_k;                   /* 1 <= K <= E+Z */
  uint32_t input;                  /* moec_router_input */
  float rms_eps;                   /* RMS_SCALED: 0 = 1e-6 */
  float jitter;                    /* multiply x by U(1-j,1+j); 0 = off; < 1 */
  uint32_t logit_precision;        /* moec_precision; DATA rounds the logits to data_dtype */
  float logit_softcap;             /* cap * tanh(z / cap); 0 = off */
  uint32_t score, score_precision; /* moec_score, moec_precision */
  uint32_t selection;              /* moec_select */
  int32_t num_groups, top_groups;  /* GROUP_TOPK: num_groups divides E+Z; >= 1 */
  int32_t group_top_m;             /* group score = sum of its m best; 0|1 = the best one */
  uint32_t group_fill;             /* moec_group_fill */
  float mixer_eps;                 /* SPARSE_MIXER threshold; > 0 */
  uint32_t weight_rule, norm;      /* moec_weight_rule, moec_norm */
  float norm_eps, norm_p;          /* norm_eps 0 = none; NORM_P: norm_p 0 = 1 */
  uint32_t norm_precision;         /* moec_precision of weight rule and normalisation */
  float scale;                     /* routed scaling factor; 0 = 1 */
  uint32_t weight_precision;       /* moec_precision of the result */
  uint32_t slot_order;             /* moec_slot_order */
  moec_dtype data_dtype;           /* dtype of PREC_DATA steps; 0 = fp32 */
  uint32_t reserved0;
  uint64_t seed; /* jitter: Philox4x32-10 key */
} moec_router_desc;

typedef struct moec_gate_args {
  uint32_t struct_size, flags;
  uint64_t rng_offset;     /* jitter counter of element (0,0); element (t,h) uses + t*H + h */
  moec_tensor x;           /* in  [T,H] f32|bf16|f16: the router's input */
  moec_tensor weight;      /* in  [E+Z,H] f32|bf16|f16 */
  moec_tensor bias;        /* in  [E+Z], with LOGIT_BIAS; dtype of weight or f32 */
  moec_tensor input_scale; /* in  [H], RMS_SCALED; dtype of weight or f32 */
  moec_tensor logits;      /* out [T,E+Z] f32; before the soft-cap */
  moec_tensor x_jittered; /* out [T,H], with jitter: optional, required with JITTER_X; dtype of x */
} moec_gate_args;

typedef struct moec_gate_grad_args {
  uint32_t struct_size, flags;        /* moec_grad_flags */
  uint64_t rng_offset;                /* as forward */
  moec_tensor x, weight, input_scale; /* in, as forward */
  moec_tensor d_logits;               /* in  [T,E+Z] f32 */
  moec_tensor d_x;                    /* out [T,H]; absent = skipped, as every output here */
  moec_tensor d_weight;               /* out [E+Z,H] */
  moec_tensor d_bias;                 /* out [E+Z] */
  moec_tensor d_input_scale;          /* out [H] */
  moec_tensor d_x_jittered;           /* in  [T,H], with jitter: optional gradient of x_jittered */
} moec_gate_grad_args;

enum moec_grad_flags {
  MOEC_GRAD_ACCUMULATE = 1,   /* parameter gradients are added to what is there, in its dtype */
  MOEC_GRAD_ACCUMULATE_X = 2, /* d_x is added to what is there */
  MOEC_GRAD_SKIP_IDLE = 4     /* gate: tokens whose row of d_logits is 0 leave no trace, even if
                               * their x is NaN. On CUDA that takes a copy of x. Always so on the
                               * CPU, with ids from the caller, and in a layer with a token_mask */
};

typedef struct moec_route_args {
  uint32_t struct_size, flags;
  moec_tensor logits;           /* in  [T,E+Z] f32|bf16|f16, before the soft-cap */
  moec_tensor select_bias;      /* in  [E+Z] f32, with SELECT_BIAS */
  moec_tensor per_expert_scale; /* in  [E+Z], with PER_EXPERT_SCALE; f32|bf16|f16 */
  moec_tensor token_mask;       /* in  [T] u8|bool, optional; 0 = routed nowhere */
  moec_tensor table, token_ids; /* in  [V,K], [T] i32|i64: SELECT_TABLE */
  moec_tensor given_ids;        /* in  [T,K] i32|i64: SELECT_GIVEN */
  moec_tensor expert_ids;       /* out [T,K] i32; -1 = none */
  moec_tensor routing_weights;  /* out [T,K] f32; 0 where the id is -1 */
  moec_tensor scores;           /* out [T,E+Z] f32, optional */
  moec_tensor counts; /* out [E+Z] i32|i64, optional: += selections per id; i32 saturates */
} moec_route_args;

typedef struct moec_route_grad_args {
  uint32_t struct_size, flags;          /* moec_grad_flags, for d_per_expert_scale */
  moec_tensor logits, per_expert_scale; /* in, as forward */
  moec_tensor expert_ids;               /* in  [T,K] i32|i64, from forward */
  moec_tensor d_routing_weights;        /* in  [T,K] f32 */
  moec_tensor d_logits_in;              /* in  [T,E+Z] f32, optional: added (auxiliary losses) */
  moec_tensor d_logits;                 /* out [T,E+Z] f32 */
  moec_tensor d_per_expert_scale;       /* out [E+Z], optional */
} moec_route_grad_args;

/* Makes a router, which never changes. Queues nothing. E_UNSUPPORTED names a legal combination
 * that is not implemented. */
MOEC_API MOEC_CHECK moec_status moec_router_create(const moec_context* context,
                                                   const moec_router_desc* desc, moec_router** out);
/* Drops the caller's reference. */
MOEC_API void moec_router_free(moec_router* router);
/* logits [T,E+Z] = transform(x [T,H]) * weight^T + bias, with fp32 accumulation. Queues; takes
 * scratch. */
MOEC_API moec_status moec_gate_forward(const moec_router* router, const moec_gate_args* args,
                                       moec_stream stream);
/* d_logits [T,E+Z] to the gradients of x, weight, bias and input_scale, each where it is given.
 * Queues; takes scratch. */
MOEC_API moec_status moec_gate_backward(const moec_router* router, const moec_gate_grad_args* args,
                                        moec_stream stream);
/* logits [T,E+Z] to expert ids and routing weights [T,K]. Queues; takes scratch. */
MOEC_API moec_status moec_route_forward(const moec_router* router, const moec_route_args* args,
                                        moec_stream stream);
/* d_routing_weights [T,K] to d_logits [T,E+Z]. Selection itself has no gradient. Queues; takes
 * scratch. */
MOEC_API moec_status moec_route_backward(const moec_router* router,
                                         const moec_route_grad_args* args, moec_stream stream);
/* Balances without an auxiliary loss: bias[e] += rate * sign(mean(counts) - counts[e]); sign(0) is
 * 0. counts [E+Z] i32|i64 (as from route_forward, all-reduced before if wanted), bias [E+Z] f32.
 * Queues. */
MOEC_API moec_status moec_router_bias_update(const moec_router* router, const moec_tensor* counts,
                                             float rate, const moec_tensor* bias,
                                             moec_stream stream);

/* ================================ 5. auxiliary losses ================================ */
enum moec_loss_kind {
  MOEC_LOSS_BALANCE_MIXTRAL = 0,  /* E * sum_e f_e P_e over all layers' tokens; K of the softmax */
  MOEC_LOSS_BALANCE_SWITCH = 1,   /* E / (K T^2) * sum_e n_e sum_t p_te; Megatron's form */
  MOEC_LOSS_BALANCE_SEQUENCE = 2, /* SWITCH per sequence of seq_len tokens, their mean */
  MOEC_LOSS_Z = 3                 /* mean_t logsumexp(logits_t)^2 */
};
typedef struct moec_loss_args {
  uint32_t struct_size, kind; /* moec_loss_kind */
  int32_t top_k;              /* K of the balance losses; 1..E */
  float coefficient;          /* 0 = 1 */
  int64_t seq_len;            /* BALANCE_SEQUENCE: divides T */
  uint32_t score; /* SWITCH, SEQUENCE: moec_score but IDENTITY; all but SOFTMAX by their row sum */
  uint32_t flags;
  const moec_tensor* logits;   /* in  `count` tensors [T,E] f32|bf16|f16, one per layer */
  const moec_tensor* d_logits; /* out `count` tensors [T,E] f32 (backward): added to */
  int64_t count;               /* layers; 1 except MIXTRAL */
  moec_tensor counts;          /* in  [E] i32|i64, optional, SWITCH: n_e instead of counting */
  moec_tensor token_mask;      /* in  [T] u8|bool, optional: 0 = left out, in each layer */
  moec_tensor loss;            /* out [1] f32 (forward) */
  moec_tensor d_loss;          /* in  [1] f32 (backward); absent = 1 */
  moec_comm* comm; /* optional: the loss is of the tokens of all ranks, whose sums are added in rank
                    * order; each rank gets the same loss and the gradient of its own logits. Layers
                    * and options are equal on all; T may differ, counts are the rank's own.
                    * Collective; errors as moec_comm_sum */
} moec_loss_args;
/* loss [1] of the logits [T,E] of each layer. Queues; takes scratch of O(E) bytes, whatever T. */
MOEC_API moec_status moec_loss_forward(const moec_context* context, const moec_loss_args* args,
                                       moec_stream stream);
/* Adds the loss's gradient to d_logits [T,E] of each layer. Queues; takes scratch likewise. */
MOEC_API moec_status moec_loss_backward(const moec_context* context, const moec_loss_args* args,
                                        moec_stream stream);

/* ================================ 6. plans ================================ */
/* A plan is the routing of one batch, sorted by expert: rows of local expert e are
 * [group_offsets[e], group_offsets[e+1]), in token order, padded to `align`. */
enum moec_plan_kind {
  MOEC_PLAN_TOPK = 0,         /* from ids and routing weights [T,K], or from logits */
  MOEC_PLAN_EXPERT_CHOICE = 1 /* each expert takes its `capacity` best tokens from scores [T,E] */
};
enum moec_drop { MOEC_DROP_NONE = 0, MOEC_DROP_BY_POSITION = 1, MOEC_DROP_BY_WEIGHT = 2 };
enum moec_plan_field {
  MOEC_PLAN_COUNTS = 0,          /* [El] i32    routed rows of each local expert */
  MOEC_PLAN_GROUP_OFFSETS = 1,   /* [El+1] i32  exclusive prefix sum of padded counts */
  MOEC_PLAN_ROW_TOKEN = 2,       /* [P] i32     token of a row, -1 = padding */
  MOEC_PLAN_ROW_SLOT = 3,        /* [P] i32     which of the token's K choices, -1 = padding */
  MOEC_PLAN_ROW_WEIGHT = 4,      /* [P] f32     routing weight, 0 on padding */
  MOEC_PLAN_ASSIGNMENT_ROW = 5,  /* [T,K] i32   row; -1 = dropped, remote, identity, none */
  MOEC_PLAN_EXPERT_IDS = 6,      /* [T,K] i32   as given, others than [0,E+Z) as -1 */
  MOEC_PLAN_ROUTING_WEIGHTS = 7, /* [T,K] f32   as given */
  MOEC_PLAN_TOTALS = 8,          /* [4] i32     routed rows, P in use, dropped, largest group */
  MOEC_PLAN_TOKEN_OFFSETS = 9,   /* [T+1] i32   EXPERT_CHOICE: first entry in TOKEN_ROWS */
  MOEC_PLAN_TOKEN_ROWS = 10,     /* [El*capacity] i32  EXPERT_CHOICE: rows of tokens, by expert */
  MOEC_PLAN_ROW_ID_MAP = 11,     /* [T,2E+1] i32 TransformerEngine's mask map (export only) */
  MOEC_PLAN_INDEX_MAP = 12       /* [K*T] i32   TransformerEngine's index map (export only) */
};
typedef struct moec_plan_desc {
  uint32_t struct_size, flags;
  int64_t max_tokens;               /* bound on T; fixes every buffer size */
  int32_t num_experts;              /* E, all ranks together */
  int32_t num_zero_experts;         /* Z */
  int32_t top_k;                    /* K; EXPERT_CHOICE: 0 */
  uint32_t kind;                    /* moec_plan_kind */
  int32_t expert_begin, expert_end; /* local range; 0, 0 = all */
  int32_t align;         /* rows of each expert rounded up to it; 0|1 = none; power of two */
  uint32_t drop;         /* moec_drop; needs a capacity */
  int64_t capacity;      /* rows kept per expert; 0 = by capacity_factor or dropless */
  float capacity_factor; /* capacity = ceil(T*K/E * factor); 0 = off */
  uint32_t reserved0;
} moec_plan_desc;

/* Bytes of a plan's memory for max_tokens, building it included, and the bound of P. Host only. */
MOEC_API moec_status moec_plan_size(const moec_plan_desc* desc, uint64_t* bytes, int64_t* max_rows);
/* Makes a plan, which is not built yet. Queues nothing. memory NULL: the context allocates, this
 * once; else at least moec_plan_size bytes of the device, kept by the caller. E_WORKSPACE. */
MOEC_API MOEC_CHECK moec_status moec_plan_create(const moec_context* context,
                                                 const moec_plan_desc* desc,
                                                 const moec_buffer* memory, moec_plan** out);
/* Drops the caller's reference; the last one gives the plan's own memory back, which may wait. */
MOEC_API void moec_plan_free(moec_plan* plan);
/* Builds from expert_ids [T,K] i32|i64 and routing_weights [T,K] f32 (absent or NULL = 1). Queues.
 * Like the other four, it builds in place and takes no scratch, and one that fails while it builds
 * leaves a plan that is not built. */
MOEC_API moec_status moec_plan_from_topk(moec_plan* plan, const moec_tensor* expert_ids,
                                         const moec_tensor* routing_weights, moec_stream stream);
/* Routes logits [T,E+Z] and builds. Outputs of args may be absent. Queues; takes scratch. */
MOEC_API moec_status moec_plan_from_logits(moec_plan* plan, const moec_router* router,
                                           const moec_route_args* args, moec_stream stream);
/* Builds from routing_map [T,E] u8|bool|i32 (non-zero = routed; slots by ascending id) and probs
 * [T,E] f32 (absent or NULL = 1). Queues. E_OVERFLOW: more than top_k in a row (CUDA: deferred). */
MOEC_API moec_status moec_plan_from_map(moec_plan* plan, const moec_tensor* routing_map,
                                        const moec_tensor* probs, moec_stream stream);
enum moec_plan_rule {
  MOEC_PLAN_ROUND_ROBIN = 0, /* as MOEC_SELECT_ROUND_ROBIN */
  /* x [El,C,H] seen as [El*C,H]: the first C tokens are of the first local expert, the next C of
   * the next one. top_k 1; E_SHAPE: num_tokens is no multiple of El */
  MOEC_PLAN_EQUAL_COUNTS = 1
};
/* Builds from a rule (moec_plan_rule) for num_tokens tokens, and routing_weights [T,K] f32 (absent
 * or NULL = 1). Queues. */
MOEC_API moec_status moec_plan_from_rule(moec_plan* plan, uint32_t rule, int64_t num_tokens,
                                         const moec_tensor* routing_weights, moec_stream stream);
/* EXPERT_CHOICE: builds from scores [T,E] f32; token_mask [T] u8|bool (absent or NULL = all). NaN
 * is above +inf, -inf is never taken, and ties go to the lowest token. Queues. */
MOEC_API moec_status moec_plan_from_scores(moec_plan* plan, const moec_tensor* scores,
                                           const moec_tensor* token_mask, moec_stream stream);
/* Adopts a plan of num_tokens tokens that lies in the plan's memory already, written by an equal
 * desc. Host only. E_CORRUPT: on the CPU, there is none. */
MOEC_API moec_status moec_plan_attach(moec_plan* plan, int64_t num_tokens);
/* Borrows one array (moec_plan_field 0 to 10) on the device, until the plan is rebuilt or freed.
 * Host only. */
MOEC_API moec_status moec_plan_view(const moec_plan* plan, int32_t field, moec_tensor* out);
/* Copies a field to dst of its shape and type; on the CPU dst may be i64 for i32. Queues; takes
 * scratch for a map in i64. E_UNSUPPORTED: i64 on CUDA. */
MOEC_API moec_status moec_plan_export(const moec_plan* plan, int32_t field, const moec_tensor* dst,
                                      moec_stream stream);
/* Copies TOTALS to the host. Waits for the stream. */
MOEC_API moec_status moec_plan_totals_sync(const moec_plan* plan, int32_t totals[4],
                                           moec_stream stream);
/* Serialises the plan to host memory: versioned, checksummed, little-endian. buffer NULL: only
 * *need is set, and nothing waits; else waits for the stream. E_WORKSPACE: the buffer is too small;
 * *need is set. */
MOEC_API moec_status moec_plan_save_sync(const moec_plan* plan, void* buffer, uint64_t bytes,
                                         uint64_t* need, moec_stream stream);
/* Restores a saved plan bit for bit into a plan of an equal desc. Waits for the stream. E_CORRUPT:
 * the bytes are damaged or of another version; E_MISMATCH: they are of another desc. */
MOEC_API moec_status moec_plan_restore_sync(moec_plan* plan, const void* buffer, uint64_t bytes,
                                            moec_stream stream);

/* ================================ 7. permute, unpermute ================================ */
/* The plan is built, on the context's device. Each function queues and takes no scratch. */
typedef struct moec_permute_args {
  uint32_t struct_size, flags;
  const moec_plan* plan;
  moec_tensor x;          /* in  [T,H] f32|bf16|f16|i32|i8|u8|bool */
  moec_tensor x_scale;    /* in  [T,S], optional: block scales that travel with the rows */
  moec_tensor rows;       /* out [P,H] as x; padding rows are zero; P >= the plan's, a multiple of
                           * its align; the rest is zero */
  moec_tensor row_scale;  /* out [P,S] */
  moec_tensor row_weight; /* out [P] f32, optional; rows whose weight is exactly 0 are zero */
} moec_permute_args;
typedef struct moec_unpermute_args {
  uint32_t struct_size, flags;
  const moec_plan* plan;
  moec_tensor rows;            /* in  [P,H] f32|bf16|f16 */
  moec_tensor routing_weights; /* in  [T,K] f32, optional: merging weights; absent = 1 */
  moec_tensor residual;        /* in  [T,H], optional: added; may be y itself */
  moec_tensor y;               /* out [T,H] as rows; fp32 sum in slot order, one rounding */
} moec_unpermute_args;
typedef struct moec_permute_grad_args {
  uint32_t struct_size, flags;
  const moec_plan* plan;
  moec_tensor d_rows;            /* in  [P,H] */
  moec_tensor d_row_weight;      /* in  [P] f32, optional */
  moec_tensor d_x;               /* out [T,H]; fp32 sum in slot order, weight-0 rows included */
  moec_tensor d_routing_weights; /* out [T,K] f32, optional; 0 where not routed */
} moec_permute_grad_args;
typedef struct moec_unpermute_grad_args {
  uint32_t struct_size, flags;
  const moec_plan* plan;
  moec_tensor d_y;               /* in  [T,H] */
  moec_tensor rows;              /* in  [P,H], for d_routing_weights */
  moec_tensor routing_weights;   /* in  [T,K] f32, optional: as forward */
  moec_tensor d_rows;            /* out [P,H]; padding rows are zero */
  moec_tensor d_routing_weights; /* out [T,K] f32, optional; 0 where not routed */
} moec_unpermute_grad_args;
/* rows [P,H] = x [T,H] of each row's token, with x_scale beside it. Queues. */
MOEC_API moec_status moec_permute(const moec_context* context, const moec_permute_args* args,
                                  moec_stream stream);
/* y [T,H] = residual + sum of routing weight * row over each token's rows. Queues. */
MOEC_API moec_status moec_unpermute(const moec_context* context, const moec_unpermute_args* args,
                                    moec_stream stream);
/* d_rows [P,H] to d_x [T,H], the sum over each token's rows. Queues. */
MOEC_API moec_status moec_permute_backward(const moec_context* context,
                                           const moec_permute_grad_args* args, moec_stream stream);
/* d_y [T,H] to d_rows [P,H], and to d_routing_weights [T,K] where it is given. Queues. */
MOEC_API moec_status moec_unpermute_backward(const moec_context* context,
                                             const moec_unpermute_grad_args* args,
                                             moec_stream stream);

/* ================================ 8. expert weights ================================ */
enum moec_gate_layout {
  MOEC_GATE_SPLIT = 0,       /* gate [E,I,H] and up [E,I,H] are two matrices */
  MOEC_GATE_THEN_UP = 1,     /* gate_up [E,2I,H]: gate rows first */
  MOEC_UP_THEN_GATE = 2,     /* gate_up [E,2I,H]: up rows first */
  MOEC_GATE_INTERLEAVED = 3, /* gate_up [E,2I,H]: even rows gate, odd rows up */
  MOEC_GATE_NONE = 4         /* plain MLP: up [E,I,H] only */
};
enum moec_orientation { MOEC_OUT_IN = 0 /* [N,K] */, MOEC_IN_OUT = 1 /* [K,N] */ };
/* Quantised matrices are frozen: their gradient is refused. Element (n, k) is computed in fp32, in
 * the order of the formula, and rounded once to the dtype of the weights. [R,C] is [N,K] where the
 * orientation is OUT_IN, else [K,N]; q: a code, s and z: the scale and the zero point of its block.
 * Real: f32, f16 or bf16. Extents of packed tensors are rounded up. By: who writes such files.
 * Weights of dtype f32 beside x of f16 or bf16 are read rounded once to the dtype of x, with the
 * bits of a cast before the call; biases are added as they are, and gradients are f32. */
enum moec_scheme {
  MOEC_SCHEME_NONE = 0, /* plain f32, f16 or bf16 */
  /* i8 [E,R,C]; scales real; zeros i8, optional: (q - z) s. A block is a row of n, 1 x K. */
  MOEC_SCHEME_INT8 = 1, /* by compressed-tensors, LLM Compressor */
  /* e4m3 or e5m2 [E,R,C]; scales real, e8m0, or u8 that are e8m0: q s. A block is a row of n; else
   * N x K is one scale a matrix, 1 x 32 MXFP8, 128 x 128 DeepSeek's. Beside one row of scales there
   * may be a second one, which is not read. */
  MOEC_SCHEME_FP8 = 2, /* by compressed-tensors; DeepSeek's own 128 x 128 blocks; MXFP8 */
  /* bitsandbytes NF4, FP4: each stack, or each tensor of one expert, is one stream of its elements
   * in the order of [E,R,C], the first of two in the high nibble of a byte; a tensor of any type
   * and shape of that many bytes. A block is block_k (IN_OUT: block_n) elements of the stream, 32
   * to 4096, 0 = 64, whatever rows and experts it has parts of; scales real [blocks], codebook
   * [16]: codebook[q] s. Nested: scales u8, scale_book, scale_offset, scales2 f32 with an entry for
   * scale_block (0 = 256) scales: s = scale_book[u8] scales2 + scale_offset, rounded twice. */
  MOEC_SCHEME_CODEBOOK4 = 3, /* by bitsandbytes NF4 and FP4, with nested statistics or without */
  /* e2m1, u8 [E,R,C/2] or [E,R,C/32,16], low nibble first; scales u8 or e8m0, of 32 along C: q s */
  MOEC_SCHEME_MXFP4 = 4, /* by gpt-oss, compressed-tensors */
  /* e2m1, u8 [E,R,C/2], low nibble first; scales e4m3, of 16 along C; scales2 f32 [1] or [E], of a
   * gate_up also [E,2], first for gate: q (s scales2), with SCALES2_DIVIDES q (s / scales2) */
  MOEC_SCHEME_NVFP4 = 5, /* by modelopt, compressed-tensors */
  /* compressed-tensors: i32 [E,R,C/8], lowest bits first; scales real; zeros i32, optional (8),
   * likewise packed along N; group_index, optional: (q - z) s. A block is a row of n. */
  MOEC_SCHEME_INT4 = 6, /* by compressed-tensors (pack-quantized) */
  /* AWQ gemm, IN_OUT: i32 [E,K,N/8], of eight columns 0 2 4 6 1 3 5 7 from the lowest bits on;
   * scales real; zeros i32 [E,K/block_k,N/8] likewise: (q - z) s. A block is a column of n. */
  MOEC_SCHEME_AWQ = 7, /* by AutoAWQ, gemm version */
  /* GPTQ, IN_OUT: i32 [E,K/8,N], lowest bits first; scales real; zeros i32 [E,K/block_k,N/8];
   * group_index, optional: (q - (z + 1)) s. A block is a column of n. */
  MOEC_SCHEME_GPTQ = 8, /* by AutoGPTQ, GPTQModel: v1 files */
  MOEC_SCHEME_GPTQ_V2 = 9, /* the same: (q - z) s; by GPTQModel: v2 files */
  /* GGUF, OUT_IN: u8 [E,N,bytes], blocks along K that have their scales: no quant. K is a multiple
   * of 32, of Q4_K and Q6_K of 256. */
  MOEC_SCHEME_GGUF_Q8_0 = 10, /* by llama.cpp */
  MOEC_SCHEME_GGUF_Q4_0 = 11, /* by llama.cpp */
  MOEC_SCHEME_GGUF_Q4_K = 12, /* by llama.cpp */
  MOEC_SCHEME_GGUF_Q6_K = 13, /* by llama.cpp */
  MOEC_SCHEME_GGUF_MXFP4 = 14 /* by llama.cpp */
};
enum moec_quant_flags {
  MOEC_QUANT_SCALES2_DIVIDES = 1 /* NVFP4: scales2 are reciprocals (weight_global_scale) */
};
enum moec_weights_flags {
  MOEC_WEIGHTS_FROZEN = 1 /* values change only before moec_weights_refresh: may be packed */
};
typedef struct moec_weights_desc {
  uint32_t struct_size, flags;  /* moec_weights_flags */
  int32_t num_experts;          /* El; 1 for a shared expert */
  uint32_t gate_layout;         /* moec_gate_layout */
  int64_t hidden, inter;        /* H, I */
  uint32_t gate_up_orientation; /* moec_orientation of gate_up, gate and up */
  uint32_t down_orientation;
  moec_dtype dtype;                     /* f32, f16, bf16: of values, and what codes stand for */
  moec_dtype bias_dtype;                /* 0 = dtype; or f32 */
  uint32_t gate_up_scheme, down_scheme; /* moec_scheme */
} moec_weights_desc;

/* The matrices of a set of experts, or their gradients (same shapes; absent ones are skipped). */
typedef struct moec_weight_set {
  uint32_t struct_size, flags;
  moec_matrix gate_up; /* GATE_THEN_UP, UP_THEN_GATE, INTERLEAVED: N = 2I, K = H */
  moec_matrix gate;    /* SPLIT: N = I, K = H */
  moec_matrix up;      /* SPLIT, NONE: N = I, K = H */
  moec_matrix down;    /* N = H, K = I */
} moec_weight_set;

typedef struct moec_weights_info {
  uint32_t struct_size, flags;
  uint64_t packed_bytes; /* bytes of a packed copy here, of codes once they are bound or mapped;
                          * 0 = never packed, or not FROZEN */
  int32_t is_bound, is_packed, is_frozen;
  int32_t needs_source;   /* 0: after packing, the bound memory is not read any more */
  char packed_format[64]; /* names layout, type and schemes; "" if not packed */
} moec_weights_info;

/* Makes an empty set for any context on the same device. Queues nothing. E_UNSUPPORTED: a scheme
 * that is not implemented. */
MOEC_API MOEC_CHECK moec_status moec_weights_create(const moec_context* context,
                                                    const moec_weights_desc* desc,
                                                    moec_weights** out);
/* Drops the caller's reference; the last one gives a packed copy back, which may wait. */
MOEC_API void moec_weights_free(moec_weights* weights);
/* Borrows the matrices, shapes as in moec_weight_set: the caller keeps them alive and may change
 * their values unless FROZEN. Queues nothing; drops a packed copy, which may wait. */
MOEC_API moec_status moec_weights_bind(moec_weights* weights, const moec_weight_set* set);
/* What is bound and packed. Host only. */
MOEC_API moec_status moec_weights_query(const moec_weights* weights, moec_weights_info* out);
/* FROZEN only: makes the packed copy; on CUDA of codes alone, which kernels read as stacks. Queues.
 * memory NULL: the library allocates; else packed_bytes of the device, kept by the caller.
 * E_UNSUPPORTED: no packed form here; E_WORKSPACE; E_WOULD_ALLOC: a capture without memory. */
MOEC_API moec_status moec_weights_pack(moec_weights* weights, const moec_buffer* memory,
                                       moec_stream stream);
/* Reads the bound matrices of experts [first, first+count) into the packed copy again, after they
 * changed. Queues. */
MOEC_API moec_status moec_weights_refresh(moec_weights* weights, int32_t first, int32_t count,
                                          moec_stream stream);
enum moec_matrix_name {
  MOEC_MATRIX_GATE_UP = 0,
  MOEC_MATRIX_GATE = 1,
  MOEC_MATRIX_UP = 2,
  MOEC_MATRIX_DOWN = 3
};
/* Writes one expert's matrix as values to [N,K], where its orientation is IN_OUT to [K,N], of any
 * real type: those of moec_scheme in fp32, rounded once to that type. GATE_UP has its rows as they
 * are bound; GATE and UP are also parts of it. Queues. E_INVALID_STATE: not bound, or the source
 * was released; E_INVALID_ARG: the gate_layout has no such matrix; E_ALIAS: `to` overlaps the
 * weights. */
MOEC_API moec_status moec_weights_dequantise(const moec_weights* weights, uint32_t matrix,
                                             int32_t expert, const moec_tensor* to,
                                             moec_stream stream);
/* Packed weights need the caller's matrices no longer: forgets them. Host only. E_UNSUPPORTED:
 * needs_source is 1. */
MOEC_API moec_status moec_weights_release_source(moec_weights* weights);
/* Writes what was bound, bit for bit, to the tensors of `to`, which is like it in types, shapes and
 * blocks; also without the source. Queues. E_INVALID_STATE: nothing is packed; E_MISMATCH: `to` is
 * unlike what was bound; E_ALIAS: its tensors overlap. */
MOEC_API moec_status moec_weights_unpack(const moec_weights* weights, const moec_weight_set* to,
                                         moec_stream stream);
/* Writes the packed copy to a file, which takes the place of `path` whole (of a link, too). Waits
 * for the default stream and the disk. E_INVALID_STATE: nothing is packed. */
MOEC_API moec_status moec_weights_save_sync(const moec_weights* weights, const char* path);
/* Maps such a file as the packed copy: read-only, shared between processes; on CUDA copies it to
 * the device. Waits likewise. E_CORRUPT: the file is damaged; E_MISMATCH: it is of another desc or
 * packed_format; E_UNSUPPORTED: no packed form here. */
MOEC_API moec_status moec_weights_map_sync(moec_weights* weights, const char* path);

/* ---- making quantised weights ---- */
enum moec_quantise_kind { /* the scheme, and whose bytes they are */
  MOEC_QUANTISE_INT8 = 0,  /* INT8 of compressed-tensors */
  MOEC_QUANTISE_INT4 = 1,  /* INT4 of compressed-tensors; block_k: a multiple of 8 or K, 0 = K */
  MOEC_QUANTISE_FP8 = 2,   /* FP8, e4m3; block_n x block_k, 0 = 1 x K */
  MOEC_QUANTISE_MXFP8 = 3, /* FP8, e4m3 with u8 scales, of compressed-tensors */
  MOEC_QUANTISE_MXFP4 = 4, /* MXFP4 of compressed-tensors; K is a multiple of 32 */
  MOEC_QUANTISE_NVFP4 = 5, /* NVFP4 of modelopt, scales2 [E]; K is a multiple of 16 */
  MOEC_QUANTISE_NF4 = 6,   /* CODEBOOK4 of bitsandbytes: the source is one stream; block_k (IN_OUT:
                            * block_n) is a power of two, 32 to 4096, 0 = 64 */
  MOEC_QUANTISE_FP4 = 7    /* the same with the codebook of its FP4 */
};
enum moec_quantise_flags {
  MOEC_QUANTISE_ASYMMETRIC = 1,     /* INT8, INT4: with zero points */
  MOEC_QUANTISE_NESTED = 2,         /* NF4, FP4: with nested scales */
  MOEC_QUANTISE_SCALES2_DIVIDES = 4 /* NVFP4: of compressed-tensors */
};
typedef struct moec_quantise_desc {
  uint32_t struct_size, flags;       /* moec_quantise_flags */
  uint32_t kind;                     /* moec_quantise_kind */
  uint32_t orientation;              /* moec_orientation of the source. NF4 and FP4 keep the order
                                      * of the source; other codes are OUT_IN */
  moec_dtype dtype;                  /* of the source: f32, f16, bf16 */
  moec_dtype scale_dtype;            /* INT8, INT4, FP8: dtype (0) or f32; the arithmetic is of
                                      * this type, too. Others: 0 */
  int64_t num_experts;               /* E */
  int64_t out_features, in_features; /* N, K */
  int64_t block_n, block_k;          /* 0, or as kind says */
} moec_quantise_desc;

typedef struct moec_quantise_info {
  uint32_t struct_size, flags;
  moec_tensor codes;          /* type and shape */
  uint64_t workspace;         /* bytes */
  uint32_t scheme, reserved0; /* moec_scheme that reads them */
} moec_quantise_info;

typedef struct moec_quantise_args {
  uint32_t struct_size, flags; /* flags: 0 */
  const moec_quantise_desc* desc;
  moec_tensor source;          /* in  [E,N,K]; IN_OUT: [E,K,N] */
  moec_tensor codes;           /* out */
  const moec_quant* quant;     /* out: its tensors, with memory. Codes are bound with it */
  moec_buffer workspace;       /* absent = the context's */
} moec_quantise_args;

/* What moec_quantise writes: scheme, type and shape of the codes and of each tensor of `quant`,
 * without memory, and the blocks and flags of `quant`. Host only. */
MOEC_API moec_status moec_quantise_query(const moec_context* context,
                                         const moec_quantise_desc* desc, moec_quantise_info* info,
                                         moec_quant* quant);
/* source [E,N,K] to codes and scales, with the bytes of the library that its kind names; of nested
 * u8 scales, one that lies between two may be the other. A scale of values of which one is NaN or
 * infinite is NaN, with the codes of 0; a mean or scales2 that it enters spoils all below it
 * likewise. Queues; takes scratch. */
MOEC_API moec_status moec_quantise(const moec_context* context, const moec_quantise_args* args,
                                   moec_stream stream);

/* ---- adapters: low-rank terms beside the matrices of experts (LoRA) ---- */
/* One term of one matrix [N,K] of every expert, or its gradients: y += scale * (x A^T) B^T;
 * all-zero = absent. Strides may be any that are not negative, those of gradients any with a place
 * for each element. f32, f16 or bf16, which the calls read rounded once to the dtype of x;
 * gradients are f32 or of the type of their factor. Gradients of an expert without rows are 0; of
 * one A for all experts they are summed in the order of the experts. */
typedef struct moec_factors {
  moec_tensor a;     /* [E,r,K], r 1 to 512; [1,r,K], or a stride of 0 along E: of all experts */
  moec_tensor b;     /* [E,N,r] */
  float scale;       /* alpha / r, or as it was trained: not 0. Of gradients: 0 */
  uint32_t reserved; /* 0 */
} moec_factors;

typedef struct moec_adapter { /* the terms of one adapter; those that it has none for are absent */
  moec_factors gate_up;  /* N = 2I, in the order of the adapters' gate_layout; K = H */
  moec_factors gate, up; /* N = I, K = H */
  moec_factors down;     /* N = H, K = I */
} moec_adapter;

typedef struct moec_adapters_desc {
  uint32_t struct_size, flags;
  int32_t num_experts;   /* El, as in the weights */
  uint32_t gate_layout;  /* of gate_up's N, need not be the weights'; SPLIT: no gate_up; NONE: up */
  int64_t hidden, inter; /* H, I */
} moec_adapters_desc;

/* Makes an empty set of adapters for any context on the same device. Host only. */
MOEC_API MOEC_CHECK moec_status moec_adapters_create(const moec_context* context,
                                                     const moec_adapters_desc* desc,
                                                     moec_adapters** out);
/* Drops the caller's reference. */
MOEC_API void moec_adapters_free(moec_adapters* adapters);
/* Borrows the factors of `count` adapters, 1 to 256, in the place of those that were bound before;
 * the structs are copied. The caller keeps the memory alive and may change its values. Calls add up
 * all of them. Host only. */
MOEC_API moec_status moec_adapters_bind(moec_adapters* adapters, const moec_adapter* list,
                                        int32_t count);
/* Adds scale B A of all that is bound to the bound matrices of plain weights: sums in fp32, one
 * rounding to the dtype of the weights (on CUDA one for each 16 adapters). unmerge subtracts it,
 * which gives the values before back only up to that rounding. A packed copy is not changed:
 * moec_weights_refresh reads the matrices again. Queues. E_UNSUPPORTED: quantised matrices
 * (moec_adapters_merge_copy); E_ALIAS: a matrix overlaps a factor. */
MOEC_API moec_status moec_adapters_merge(const moec_adapters* adapters, moec_weights* weights,
                                         moec_stream stream);
/* As moec_adapters_merge, with the sign turned. */
MOEC_API moec_status moec_adapters_unmerge(const moec_adapters* adapters, moec_weights* weights,
                                           moec_stream stream);
/* Merges into a copy of one matrix (moec_matrix_name) of all experts, plain or quantised, which
 * stays as it is: `values` [E,N,K], where its orientation is IN_OUT [E,K,N], of any real type, gets
 * what moec_weights_dequantise writes, and scale B A added as moec_adapters_merge adds it.
 * `quantised`: NULL, or where moec_quantise puts the codes of these values; its source is absent,
 * and its arrays may be those that the weights are bound to. Queues; takes the scratch of
 * moec_quantise. E_INVALID_ARG: no bound adapter has factors of the matrix; E_INVALID_STATE: not
 * bound, or the source was released; E_MISMATCH: quantised's orientation is another; E_ALIAS:
 * `values` overlaps the weights or a factor. */
MOEC_API moec_status moec_adapters_merge_copy(const moec_adapters* adapters,
                                              const moec_weights* weights, uint32_t matrix,
                                              const moec_tensor* values,
                                              const moec_quantise_args* quantised,
                                              moec_stream stream);

/* ================================ 9. experts ================================ */
enum moec_activation_kind { /* g = gate, u = up, s = sigmoid; a plain MLP has only u */
  MOEC_ACT_SWIGLU = 0,       /* g s(g) u */
  MOEC_ACT_GPTOSS = 1,       /* (min(max(u,-L),L) + 1) g' s(alpha g'), g' = min(g,L) */
  MOEC_ACT_CLAMP_SWIGLU = 2, /* silu(min(g,L)) clamp(u,-L,L) */
  MOEC_ACT_SWIGLU_CLAMP = 3, /* min(silu(g),L) clamp(u,-L,L) */
  MOEC_ACT_GEGLU_TANH = 4,
  MOEC_ACT_GEGLU_ERF = 5,
  MOEC_ACT_QUICK_GEGLU = 6,  /* g s(alpha g) (u + offset) */
  MOEC_ACT_SITU = 7,         /* beta tanh(g/beta) s(g) * lb tanh(u/lb) */
  MOEC_ACT_RELU2 = 8,        /* plain: max(u,0)^2 */
  MOEC_ACT_SILU = 9,         /* plain: u s(u) */
  MOEC_ACT_IDENTITY = 10     /* plain: u */
};
enum moec_weight_position {
  MOEC_WEIGHT_ON_OUTPUT = 0,     /* after the down projection and its bias */
  MOEC_WEIGHT_ON_ACTIVATION = 1, /* before the down projection; its bias is weighted separately */
  MOEC_WEIGHT_ON_INPUT = 2       /* x * w, rounded to the dtype of x, goes into the expert */
};
enum moec_combine {
  MOEC_COMBINE_FP32_SLOT = 0,   /* fp32 sum in slot order, one rounding */
  MOEC_COMBINE_FP32_EXPERT = 1, /* fp32 sum in ascending expert id, one rounding */
  MOEC_COMBINE_DATA_EXPERT = 2  /* ascending expert id, rounded to the data type after each add */
};
enum moec_act_rounding {
  MOEC_ACT_FP32_ONCE = 0, /* evaluated in fp32 from fp32 sums, rounded once */
  MOEC_ACT_PER_OP = 1     /* pre-activation and each step rounded to the data type (eager) */
};
enum moec_shared {
  MOEC_SHARED_NONE = 0,
  MOEC_SHARED_ADD = 1,
  MOEC_SHARED_SIGMOID_GATE = 2, /* routed + sigmoid(x . wg) * shared; wg [1,H] */
  MOEC_SHARED_SOFTMAX2 = 3      /* routed * c0 + shared * c1; c = softmax(x Wc^T + bc), Wc [2,H] */
};
enum moec_save {
  MOEC_SAVE_NONE = 0,   /* inference: nothing is saved, backward is refused */
  MOEC_SAVE_INPUT = 1,  /* backward recomputes everything from x */
  MOEC_SAVE_PREACT = 2, /* pre-activations kept, activation recomputed */
  MOEC_SAVE_ALL = 3     /* pre-activations, and what else spares backward work, kept */
};
enum moec_experts_desc_flags {
  /* Weights of codes are refused (E_MISMATCH; shared ones are not), and workspaces have no room for
   * the values of some experts' codes: up to 64 MiB less on CUDA. */
  MOEC_EXPERTS_PLAIN_WEIGHTS = 1
};
typedef struct moec_experts_desc {
  uint32_t struct_size, flags;      /* moec_experts_desc_flags */
  int64_t hidden, inter;            /* H, I */
  int64_t shared_inter;             /* Is; 0 without shared expert */
  int32_t num_experts;              /* E, all ranks together */
  int32_t num_zero_experts;         /* Z: ids in [E,E+Z) add w * x */
  int32_t top_k;                    /* K; 0 for EXPERT_CHOICE plans */
  int32_t expert_begin, expert_end; /* local range, as in the plan; 0, 0 = all */
  int32_t align;                    /* as in the plan */
  int64_t max_rows_base;            /* EXPERT_CHOICE: El * capacity; else 0 */
  uint32_t gate_layout;             /* only NONE or not: MOEC_GATE_NONE for a plain MLP */
  moec_dtype dtype;                 /* of x, y and residual: f32, f16, bf16 */
  moec_activation activation, shared_activation;
  uint32_t weight_position, combine, act_rounding, shared, save;
  float output_scale; /* of the routed sum; 0 = 1 */
} moec_experts_desc;

enum moec_experts_flags {
  /* Rows of y of tokens without a row in the plan (all their experts are remote or dropped) are not
   * written. Not with a residual, output_bias, a shared expert or identity experts. */
  MOEC_EXPERTS_SKIP_ABSENT = 1
};
typedef struct moec_experts_args {
  uint32_t struct_size, flags;        /* moec_experts_flags */
  const moec_plan* plan;
  const moec_weights* weights;
  const moec_weights* shared_weights; /* with a shared expert; one expert of width shared_inter */
  moec_tensor x;                      /* in  [T,H] */
  moec_tensor shared_gate;            /* in  [1,H] or [2,H]; dtype of x or f32 */
  moec_tensor shared_gate_bias;       /* in  [2], SOFTMAX2; dtype of x or f32 */
  moec_tensor output_bias;            /* in  [H], optional; dtype of x or f32 */
  moec_tensor residual;               /* in  [T,H], optional: added; may be y itself */
  moec_tensor y;                      /* out [T,H] */
  moec_buffer saved;                  /* out, unless SAVE_NONE; written in full. At an address that
                                       * is no multiple of 4 it takes scratch of its size besides
                                       * any workspace, in backward, too */
  moec_buffer workspace;              /* absent = the context's */
  const moec_adapters* adapters;      /* of the routed experts; NULL = none */
  moec_tensor adapter_ids;            /* in  [T] i32, optional: the only adapter of each token, an
                                       * index into what is bound; any other number = none */
} moec_experts_args;

typedef struct moec_experts_grad_args {
  uint32_t struct_size, flags; /* moec_grad_flags */
  const moec_plan* plan;
  const moec_weights *weights, *shared_weights;
  moec_tensor x, shared_gate, shared_gate_bias; /* in, as forward */
  moec_tensor d_y;                              /* in  [T,H] */
  moec_buffer saved;                            /* in */
  moec_tensor d_x;                              /* out [T,H]; absent = skipped, as each output */
  moec_tensor d_routing_weights;                /* out [T,K] f32; EXPERT_CHOICE: [P], one a row */
  /* out, in the layout of the bound weights; f32 or their dtype; NULL = frozen */
  const moec_weight_set *d_expert_weights, *d_shared_weights;
  moec_tensor d_shared_gate, d_shared_gate_bias, d_output_bias; /* out; f32 or dtype of x */
  moec_tensor d_residual;                                       /* out [T,H] */
  moec_buffer workspace;
  const moec_adapters* adapters;  /* in, as forward */
  moec_tensor adapter_ids;        /* in, as forward */
  const moec_adapter* d_adapters; /* out, optional: the gradients of as many adapters as are bound,
                                   * each factor where it is given */
} moec_experts_grad_args;

typedef struct moec_experts_sizes {
  uint32_t struct_size, flags;
  moec_size forward_workspace, backward_workspace, saved;
} moec_experts_sizes;

/* Makes experts, which never change; kernels are chosen here by device, type and shape, never by
 * timing. Queues nothing. E_UNSUPPORTED names a legal combination that is not implemented. */
MOEC_API MOEC_CHECK moec_status moec_experts_create(const moec_context* context,
                                                    const moec_experts_desc* desc,
                                                    moec_experts** out);
/* Drops the caller's reference. */
MOEC_API void moec_experts_free(moec_experts* experts);
/* Exact bytes for T tokens, whatever the routing. Host only. */
MOEC_API moec_status moec_experts_query(const moec_experts* experts, moec_experts_sizes* out);
/* The same for calls with adapters as they are bound now. Host only. */
MOEC_API moec_status moec_experts_query_adapters(const moec_experts* experts,
                                                 const moec_adapters* adapters,
                                                 moec_experts_sizes* out);
/* y [T,H] = residual + output_scale * sum_k w[t,k] expert(x[t]) + output_bias + shared(x[t]), of
 * the experts of the local range. Queues; takes scratch. E_WORKSPACE: `saved`, too. */
MOEC_API moec_status moec_experts_forward(const moec_experts* experts,
                                          const moec_experts_args* args, moec_stream stream);
/* d_y [T,H] and what forward saved to the gradients of x, routing weights, matrices and biases,
 * each where it is given. Queues; takes scratch. E_INVALID_STATE: desc.save is NONE; E_MISMATCH:
 * on the CPU, `saved` is of another call. */
MOEC_API moec_status moec_experts_backward(const moec_experts* experts,
                                           const moec_experts_grad_args* args, moec_stream stream);
/* JSON: for T tokens the kernels, their tiles, and bytes. *need counts the final NUL; buffer may be
 * NULL. Host only. E_WORKSPACE: the buffer is too small; *need is set. */
MOEC_API moec_status moec_experts_describe(const moec_experts* experts, const moec_weights* weights,
                                           int64_t num_tokens, char* buffer, uint64_t bytes,
                                           uint64_t* need);

/* ================================ 10. whole layer ================================ */
/* gate -> route -> plan -> experts in one call, with one saved buffer; descriptors are copied. */
typedef struct moec_layer_desc {
  uint32_t struct_size, flags;
  const moec_router_desc* router;
  const moec_experts_desc* experts; /* num_experts, num_zero_experts, top_k as in the router */
  uint32_t drop;                    /* moec_drop */
  float capacity_factor;            /* as in moec_plan_desc */
  int64_t capacity;
  moec_ep* ep; /* optional: the experts lie on the ep's ranks, section 11 */
} moec_layer_desc;

typedef struct moec_layer_args {
  uint32_t struct_size, flags;
  uint64_t rng_offset; /* as moec_gate_args */
  const moec_weights *weights, *shared_weights;
  moec_tensor x;        /* in  [T,H] */
  moec_tensor router_x; /* in  [T,Hr], optional: the router's input when it is not x; where Hr > H
                         * the call may take scratch of the context besides its workspace */
  moec_tensor gate_weight, gate_bias, input_scale;                  /* in, as moec_gate_args */
  moec_tensor select_bias, per_expert_scale, token_mask;            /* in, as moec_route_args */
  moec_tensor table, token_ids, given_ids;                          /* in, as moec_route_args */
  moec_tensor shared_gate, shared_gate_bias, output_bias, residual; /* in, as moec_experts_args */
  moec_tensor y;               /* out [T,H] */
  moec_tensor logits;          /* out [T,E+Z] f32, optional */
  moec_tensor expert_ids;      /* out [T,K] i32, optional */
  moec_tensor routing_weights; /* out [T,K] f32, optional */
  moec_tensor counts;          /* out [E+Z] i32|i64, optional: as moec_route_args */
  moec_buffer saved;           /* out, unless SAVE_NONE */
  moec_buffer workspace;       /* absent = the context's */
  int64_t bound;               /* with an ep: as in moec_ep_args; else 0 */
  const moec_adapters* adapters; /* as moec_experts_args */
  moec_tensor adapter_ids;       /* in, as moec_experts_args */
} moec_layer_args;

typedef struct moec_layer_grad_args {
  uint32_t struct_size, flags;    /* moec_grad_flags */
  const moec_layer_args* forward; /* the forward call's inputs and saved buffer; no outputs */
  moec_tensor d_y;                /* in  [T,H] */
  moec_tensor d_logits_in;        /* in  [T,E+Z] f32, optional: from auxiliary losses */
  moec_tensor d_x, d_router_x;    /* out [T,H], [T,Hr]; without router_x, d_x holds both */
  moec_tensor d_gate_weight, d_gate_bias, d_input_scale, d_per_expert_scale; /* out */
  const moec_weight_set *d_expert_weights, *d_shared_weights;                /* out */
  moec_tensor d_shared_gate, d_shared_gate_bias, d_output_bias, d_residual;  /* out */
  moec_tensor d_routing_weights; /* out [T,K] f32, optional */
  moec_buffer workspace;         /* absent = the context's */
  const moec_adapter* d_adapters; /* out, optional: as moec_experts_grad_args */
} moec_layer_grad_args;

/* Makes a router and experts in one, which never change. Queues nothing. E_UNSUPPORTED: as they. */
MOEC_API MOEC_CHECK moec_status moec_layer_create(const moec_context* context,
                                                  const moec_layer_desc* desc, moec_layer** out);
/* Drops the caller's reference. */
MOEC_API void moec_layer_free(moec_layer* layer);
/* Exact bytes for T tokens, plan and routing included, whatever the routing. Host only. */
MOEC_API moec_status moec_layer_query(const moec_layer* layer, moec_experts_sizes* out);
/* The same for calls with adapters as they are bound now. Host only. */
MOEC_API moec_status moec_layer_query_adapters(const moec_layer* layer,
                                               const moec_adapters* adapters,
                                               moec_experts_sizes* out);
/* y [T,H] from x [T,H]: moec_gate_forward, moec_route_forward, moec_plan_from_topk and
 * moec_experts_forward with one workspace. Queues; takes scratch. E_WORKSPACE: `saved`, too. */
MOEC_API moec_status moec_layer_forward(const moec_layer* layer, const moec_layer_args* args,
                                        moec_stream stream);
/* d_y [T,H] and what forward saved to every gradient that is given; the plan is built again.
 * Queues; takes scratch. E_INVALID_STATE: desc.experts.save is NONE; E_MISMATCH: on the CPU,
 * `saved` is of another call. */
MOEC_API moec_status moec_layer_backward(const moec_layer* layer, const moec_layer_grad_args* args,
                                         moec_stream stream);
/* As moec_experts_describe, with the bytes of the layer. */
MOEC_API moec_status moec_layer_describe(const moec_layer* layer, const moec_weights* weights,
                                         int64_t num_tokens, char* buffer, uint64_t bytes,
                                         uint64_t* need);

/* ================================ 11. expert parallelism ================================ */
/* N ranks share the E experts of a layer: rank r owns [b[r], b[r+1]). Each rank, a process or a
 * thread with its own context, has T tokens; T may differ and be 0. A token goes once to each rank
 * that owns one of its experts, as a guest; guests are in the order (rank, token). Experts write a
 * partial row for each; the token's own rank adds these in rank order, in fp32, from +0 on, and
 * rounds once. So schemes and transports give the same bits, but for rows that ROWS dropped.
 * All ranks make collective calls in one order. Where callbacks wait, ranks first compare what they
 * are about to do: all get E_MISMATCH, naming a rank, or E_COMM where one refused its arguments,
 * and the ep is as before. With MOEC_COMM_DEVICE all but moec_ep_create and a dispatch of EXACT
 * queue, and a refused rank queues nothing; the device compares: y is NaN, moec_ep_poll and the
 * next call say E_MISMATCH, and the ep is broken. Where dispatches or combines are queued and none
 * has ended for timeout_ms, both say E_TIMEOUT: a rank may be dead, and what waits for it on the
 * stream stays there until moec_comm_abort. After E_TIMEOUT, E_CALLBACK and another E_COMM comm and
 * ep are broken, and each later call gives that status. On CUDA with flags 0 rows pass through
 * memory of the host, and calls wait.
 * PEER: up to 16 ranks that reach each other's memory: threads of a process (GPUs: peer access),
 * processes of a host (CUDA IPC), else by windows of the comm. After moec_ep_create dispatch and
 * combine call no callback: each is one kernel, which may be captured and which waits on the device
 * for the other ranks, so that no rank's stream may wait for another's. What is refused or differs
 * is as with MOEC_COMM_DEVICE. A rank that does not come within timeout_ms breaks the ep of those
 * that wait: y is NaN, and the next call and moec_ep_poll say E_TIMEOUT. Views of a dispatch last
 * until its combine, and a second combine of it is E_INVALID_STATE. */
enum moec_comm_flags { /* 0: the callbacks take memory of the host, and wait */
  MOEC_COMM_DEVICE = 1, /* they take memory of the device, CUDA's, and queue on `stream` */
  MOEC_COMM_CAPTURE = 2 /* and may be captured */
};
/* Each returns 0, or MOEC_E_TIMEOUT where its deadline passed, or another value but 0 on failure.
 * They may not call moec. `send` and `recv` never overlap; bytes may be 0. */
typedef struct moec_comm_callbacks {
  uint32_t struct_size, flags; /* moec_comm_flags */
  void* user;
  /* recv [N][bytes] = the `send` [bytes] of each rank. Required. */
  int32_t (*all_gather)(void* user, const void* send, void* recv, uint64_t bytes,
                        moec_stream stream);
  /* recv[r] = entry [this rank] of the `send` [N][bytes] of rank r. Required. */
  int32_t (*all_to_all)(void* user, const void* send, void* recv, uint64_t bytes,
                        moec_stream stream);
  /* The same, with send_bytes[r] at byte send_at[r] for rank r, and recv_bytes[r] from it. EXACT
   * needs it. `unit` divides all of them: counts in units stay small. */
  int32_t (*all_to_all_v)(void* user, const void* send, const uint64_t* send_bytes,
                          const uint64_t* send_at, void* recv, const uint64_t* recv_bytes,
                          const uint64_t* recv_at, uint64_t unit, moec_stream stream);
  int32_t (*poll)(void* user);  /* optional: 0 = well; never waits */
  void (*release)(void* user);  /* optional: once, when nothing uses the comm any more */
  /* optional, once, from any thread: what waits for another rank ends, on streams and in the other
   * callbacks, which fail; but for window_close none is called after it */
  int32_t (*abort)(void* user);
  /* optional, all or none: memory that all ranks reach. alloc's is of the current device; open is
   * collective: blocks [N] = where this rank reaches each one's, or NULL; close may follow abort */
  int32_t (*window_alloc)(void* user, uint64_t bytes, void** window, void** memory);
  int32_t (*window_open)(void* user, void* window, void** blocks);
  int32_t (*window_close)(void* user, void* window);
} moec_comm_callbacks;
typedef struct moec_comm_desc {
  uint32_t struct_size, flags; /* flags: 0 */
  int32_t rank, size;          /* 0 <= rank < size */
} moec_comm_desc;

enum moec_ep_scheme {
  MOEC_EP_AUTO = 0,
  MOEC_EP_GATHER = 1, /* every rank gets all tokens; partial rows come back in equal parts */
  MOEC_EP_PEER = 2,   /* ranks write to each other's memory; AUTO's, with a GPU for each rank */
  MOEC_EP_ROWS = 3,   /* equal parts of pair_rows rows: nobody counts, some may be empty */
  MOEC_EP_EXACT = 4   /* as many rows as there are: the host waits for their counts in dispatch */
};
enum moec_ep_flags {
  MOEC_EP_FORWARD_ONLY = 1 /* no x_beside, hence no backward of a layer: less memory */
};
enum moec_ep_overflow { /* ROWS: a pair of ranks that has more than pair_rows rows */
  MOEC_EP_REPORT = 0,        /* keeps the first; the others give zeros and are counted */
  MOEC_EP_DROP_BY_WEIGHT = 1 /* keeps those whose weights have the largest sum, then the first */
};
typedef struct moec_ep_desc { /* equal on all ranks */
  uint32_t struct_size, flags;  /* moec_ep_flags */
  int64_t hidden, max_tokens;   /* H; bound on T of one rank */
  int32_t num_experts;          /* E, of all ranks together */
  int32_t num_zero_experts;     /* Z; their ids stay at home */
  int32_t top_k;                /* K */
  uint32_t scheme;              /* moec_ep_scheme */
  moec_dtype dtype;             /* of x: f32, f16, bf16 */
  moec_dtype partial_dtype;     /* of partial rows: dtype (0) or f32 */
  const int32_t* expert_begin;  /* host [N+1], copied: 0 = b[0] < b[1] < .. = E; NULL = even */
  int64_t pair_rows;            /* ROWS: rows from one rank to another; 0 = max_tokens */
  uint32_t overflow;            /* moec_ep_overflow */
  float grad_scale;             /* layer: the gradients of experts and their biases are this much;
                                 * 0 = 1. 1/N beside the mean of DDP. d_y is scaled, and d_x back:
                                 * exact for powers of two, else a rounding more of each */
  uint32_t timeout_ms;          /* PEER: how long a rank waits for another; MOEC_COMM_DEVICE: how
                                 * long nothing that is queued may end; 0 = 600000 */
  int32_t max_blocks; /* PEER: most blocks of a kernel, up to 128; 0 = by the size of the call */
} moec_ep_desc;
typedef struct moec_ep_info {
  uint32_t struct_size, flags;
  uint32_t scheme;                  /* moec_ep_scheme in use */
  int32_t expert_begin, expert_end; /* of this rank */
  uint32_t reserved0;
  int64_t max_guests;               /* bound on the guests of a call */
  uint64_t memory;                  /* bytes of the device that the ep holds */
} moec_ep_info;
typedef struct moec_ep_args {
  uint32_t struct_size, flags; /* flags: moec_ep_call_flags */
  int64_t bound;               /* T of no rank is larger; equal on all; 0 = max_tokens */
  /* dispatch */
  moec_tensor x;               /* in  [T,H] */
  moec_tensor x_beside;        /* in  [T,H], optional, on all ranks or none: goes with x */
  moec_tensor expert_ids;      /* in  [T,K] i32|i64; others than [0,E) go nowhere */
  moec_tensor routing_weights; /* in  [T,K] f32, optional: absent = 1 */
  /* views of the ep's memory, until the next dispatch (PEER: until the combine); G guests */
  moec_tensor guests;          /* out [G,H] as x. Rows without an id may hold anything */
  moec_tensor guests_beside;   /* out [G,H], with x_beside */
  moec_tensor guest_ids;       /* out [G,K] i32; -1 = no expert of this rank */
  moec_tensor guest_weights;   /* out [G,K] f32 */
  moec_tensor partial;         /* out [G,H] partial_dtype; combine reads what the caller wrote */
  int64_t total_tokens;        /* out: T of all ranks; -1: PEER, or MOEC_COMM_DEVICE but EXACT */
  /* combine */
  moec_tensor d_guest_weights; /* in  [G,K] f32, optional, on all ranks or none */
  moec_tensor y;               /* out [T,H] dtype: the sum of partial rows; 0 without any */
  moec_tensor d_routing_weights; /* out [T,K] f32, with d_guest_weights; 0 where the id is no
                                  * expert, or the row was dropped */
} moec_ep_args;
enum moec_ep_call_flags {
  MOEC_EP_ADD = 1 /* combine: what y holds is added to the sum, in fp32, before it is rounded */
};
typedef struct moec_ep_state { /* since the ep was made; equal on all ranks but for the bytes */
  uint32_t struct_size, flags;
  moec_status status;         /* 0, or what broke the ep */
  uint32_t reserved0;
  uint64_t calls;             /* dispatch and combine */
  int64_t rows_needed;        /* ROWS, EXACT: the pair_rows that would have dropped nothing */
  int64_t rows_dropped;       /* ROWS: of all ranks, those of calls whose work is done */
  uint64_t bytes_sent, bytes_received; /* to and from other ranks; 0 with PEER */
  char message[256]; /* what broke the ep, naming the rank or the call; NUL-terminated */
} moec_ep_state;

/* Makes a communicator from callbacks, which are copied. Not collective; queues nothing; on CUDA it
 * allocates some memory of the device, this once. E_UNSUPPORTED: on the CPU MOEC_COMM_DEVICE.
 * moec/mpi.h and moec/nccl.h have callbacks for MPI and NCCL. */
MOEC_API MOEC_CHECK moec_status moec_comm_create(const moec_context* context,
                                                 const moec_comm_desc* desc,
                                                 const moec_comm_callbacks* callbacks,
                                                 moec_comm** out);
/* Drops the caller's reference; the last one calls `release`. Not collective. */
MOEC_API void moec_comm_free(moec_comm* comm);
/* Gives up the other ranks, of which one may be dead: calls `abort`, once. The comm and its eps are
 * broken then: E_COMM. For any thread, also while another one waits in a call of the comm. Not
 * collective. E_UNSUPPORTED: the callbacks have no abort; E_CALLBACK: it failed. */
MOEC_API moec_status moec_comm_abort(const moec_comm* comm);
/* in_out [any shape] f32|i32|i64 = the sum over all ranks, in rank order: counts for
 * moec_router_bias_update, gradients of what all share. Collective; takes scratch of N times its
 * bytes. With MOEC_COMM_DEVICE it is queued, and nothing is compared; else it waits for the stream.
 * E_MISMATCH and the others: as above. */
MOEC_API moec_status moec_comm_sum(moec_comm* comm, const moec_tensor* in_out, moec_stream stream);

/* Makes an ep. Collective; waits; allocates moec_ep_info.memory, this once: for PEER not with the
 * context's allocator. E_UNSUPPORTED: the scheme needs what the comm lacks, or a rank does not
 * reach another's memory. E_MISMATCH, E_COMM, E_TIMEOUT, E_CALLBACK: as above; E_COMM also where
 * another rank cannot allocate. */
MOEC_API MOEC_CHECK moec_status moec_ep_create(moec_comm* comm, const moec_ep_desc* desc,
                                               moec_ep** out);
/* Drops the caller's reference; the last one gives its memory back: with PEER it waits for the
 * device, and the memory stays until all ranks have freed theirs. Not collective. */
MOEC_API void moec_ep_free(moec_ep* ep);
/* Scheme, range, bytes. Host only. */
MOEC_API moec_status moec_ep_query(const moec_ep* ep, moec_ep_info* out);
/* JSON: the scheme and why, ranks, ranges, bytes, PEER's blocks for max_tokens. *need counts the
 * final NUL; buffer may be NULL. Host only. E_WORKSPACE: it is too small; *need is set. */
MOEC_API moec_status moec_ep_describe(const moec_ep* ep, char* buffer, uint64_t bytes,
                                      uint64_t* need);
/* Sends each token to the ranks of its experts, and sets the `out` views of args. Also the backward
 * of combine: x = d_y. Collective; allocates nothing. E_WOULD_SYNC: the stream is captured, with
 * EXACT or without MOEC_COMM_CAPTURE. E_MISMATCH, E_COMM, E_TIMEOUT, E_CALLBACK: as above. */
MOEC_API moec_status moec_ep_dispatch(moec_ep* ep, moec_ep_args* args, moec_stream stream);
/* Sends the partial rows of the last dispatch home: y [T,H] is their sum. Also the backward of
 * dispatch: y = d_x, and d_guest_weights [G,K] to d_routing_weights [T,K]. T is the dispatch's.
 * Collective; allocates nothing. E_INVALID_STATE: there was no dispatch. E_MISMATCH, E_COMM,
 * E_TIMEOUT, E_CALLBACK, E_WOULD_SYNC: as above. */
MOEC_API moec_status moec_ep_combine(moec_ep* ep, const moec_ep_args* args, moec_stream stream);
/* Counters, and whether the comm is well. Never waits. */
MOEC_API moec_status moec_ep_poll(const moec_ep* ep, moec_ep_state* out);
/* A layer with an ep (moec_layer_desc.ep) is called on all ranks alike: forward and backward are
 * collective, and are one call at a time of their ep, of which many layers may use one. Its
 * num_experts, num_zero_experts, top_k, hidden and dtype are those of the ep; its weights are the
 * experts of this rank, and experts.expert_begin and _end are their range or 0, 0. Router, routing
 * weights, shared expert, identity experts, residual and output bias work on the T tokens of the
 * rank; their part of y (of d_x) is rounded to dtype and added to the sum of partial rows. Capacity
 * and drops are of the tokens of all ranks, in rank order. Gradients of what all ranks hold are of
 * the rank's own tokens; those of its experts are of the tokens of all ranks. E_UNSUPPORTED:
 * SHARED_SOFTMAX2, COMBINE_DATA_EXPERT, and a partial_dtype other than dtype. Adapters are of the
 * rank's experts; adapter_ids are given on all ranks or none. Of an A that all experts have each
 * rank gets the gradient of its own experts: moec_comm_sum gives that of all. */

#ifdef __cplusplus
}
#endif
#endif /* MOEC_H */
