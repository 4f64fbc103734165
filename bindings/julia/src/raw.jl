# SPDX-License-Identifier: Apache-2.0
# Generated from moec.h by generate.py; do not edit.

const MOEC_VERSION_MAJOR = UInt32(0)
const MOEC_VERSION_MINOR = UInt32(1)
const MOEC_VERSION_PATCH = UInt32(0)
const MOEC_ABI_VERSION = UInt32(0)
const MOEC_MAX_DIMS = UInt32(6)
const MOEC_OK = Int32(0)
const MOEC_S_NOT_READY = Int32(1)
const MOEC_E_INVALID_ARG = Int32(-1)
const MOEC_E_INVALID_STATE = Int32(-2)
const MOEC_E_ABI = Int32(-3)
const MOEC_E_SHAPE = Int32(-4)
const MOEC_E_DTYPE = Int32(-5)
const MOEC_E_LAYOUT = Int32(-6)
const MOEC_E_DEVICE = Int32(-7)
const MOEC_E_UNSUPPORTED = Int32(-8)
const MOEC_E_OUT_OF_MEMORY = Int32(-9)
const MOEC_E_WORKSPACE = Int32(-10)
const MOEC_E_NO_BACKEND = Int32(-11)
const MOEC_E_BACKEND_ABI = Int32(-12)
const MOEC_E_WOULD_SYNC = Int32(-13)
const MOEC_E_WOULD_ALLOC = Int32(-14)
const MOEC_E_CUDA = Int32(-15)
const MOEC_E_COMM = Int32(-16)
const MOEC_E_TIMEOUT = Int32(-17)
const MOEC_E_CALLBACK = Int32(-18)
const MOEC_E_FORKED = Int32(-19)
const MOEC_E_OVERFLOW = Int32(-20)
const MOEC_E_ALIAS = Int32(-21)
const MOEC_E_MISMATCH = Int32(-22)
const MOEC_E_CORRUPT = Int32(-23)
const MOEC_E_INTERNAL = Int32(-99)
const MOEC_F32 = UInt32(73730)
const MOEC_F16 = UInt32(69634)
const MOEC_BF16 = UInt32(69636)
const MOEC_F64 = UInt32(81922)
const MOEC_I8 = UInt32(67584)
const MOEC_U8 = UInt32(67585)
const MOEC_I32 = UInt32(73728)
const MOEC_I64 = UInt32(81920)
const MOEC_BOOL = UInt32(67590)
const MOEC_F8_E4M3 = UInt32(67594)
const MOEC_F8_E5M2 = UInt32(67596)
const MOEC_F8_E8M0 = UInt32(67598)
const MOEC_CPU = UInt32(1)
const MOEC_CUDA = UInt32(2)
const MOEC_CUDA_HOST = UInt32(3)
const MOEC_CUDA_MANAGED = UInt32(13)
const MOEC_LOG_TRACE = UInt32(0)
const MOEC_LOG_DEBUG = UInt32(1)
const MOEC_LOG_INFO = UInt32(2)
const MOEC_LOG_WARN = UInt32(3)
const MOEC_LOG_ERROR = UInt32(4)
const MOEC_LOG_OFF = UInt32(5)
const MOEC_CONTEXT_NO_ALLOC = UInt32(1)
const MOEC_CONTEXT_CHECK_INPUTS = UInt32(2)
const MOEC_CONTEXT_PROFILE = UInt32(4)
const MOEC_MATH_DEFAULT = UInt32(0)
const MOEC_MATH_TF32 = UInt32(1)
const MOEC_INPUT_PLAIN = UInt32(0)
const MOEC_INPUT_RMS_SCALED = UInt32(1)
const MOEC_PREC_FP32 = UInt32(0)
const MOEC_PREC_DATA = UInt32(1)
const MOEC_SCORE_SOFTMAX = UInt32(0)
const MOEC_SCORE_SIGMOID = UInt32(1)
const MOEC_SCORE_SQRT_SOFTPLUS = UInt32(2)
const MOEC_SCORE_IDENTITY = UInt32(3)
const MOEC_SELECT_TOPK = UInt32(0)
const MOEC_SELECT_GROUP_TOPK = UInt32(1)
const MOEC_SELECT_TABLE = UInt32(2)
const MOEC_SELECT_SPARSE_MIXER = UInt32(3)
const MOEC_SELECT_GIVEN = UInt32(4)
const MOEC_SELECT_ROUND_ROBIN = UInt32(5)
const MOEC_FILL_NEG_INF = UInt32(0)
const MOEC_FILL_ZERO = UInt32(1)
const MOEC_WEIGHT_SCORE = UInt32(0)
const MOEC_WEIGHT_SOFTMAX_SELECTED = UInt32(1)
const MOEC_WEIGHT_SIGMOID_SELECTED = UInt32(2)
const MOEC_NORM_NONE = UInt32(0)
const MOEC_NORM_SUM = UInt32(1)
const MOEC_NORM_CLAMP_SUM = UInt32(2)
const MOEC_NORM_P = UInt32(3)
const MOEC_SLOT_BY_VALUE = UInt32(0)
const MOEC_SLOT_BY_EXPERT = UInt32(1)
const MOEC_ROUTER_LOGIT_BIAS = UInt32(1)
const MOEC_ROUTER_SELECT_BIAS = UInt32(2)
const MOEC_ROUTER_PER_EXPERT_SCALE = UInt32(4)
const MOEC_ROUTER_NORM_IF_K_GT_1 = UInt32(8)
const MOEC_ROUTER_JITTER_X = UInt32(16)
const MOEC_GRAD_ACCUMULATE = UInt32(1)
const MOEC_GRAD_ACCUMULATE_X = UInt32(2)
const MOEC_GRAD_SKIP_IDLE = UInt32(4)
const MOEC_LOSS_BALANCE_MIXTRAL = UInt32(0)
const MOEC_LOSS_BALANCE_SWITCH = UInt32(1)
const MOEC_LOSS_BALANCE_SEQUENCE = UInt32(2)
const MOEC_LOSS_Z = UInt32(3)
const MOEC_PLAN_TOPK = UInt32(0)
const MOEC_PLAN_EXPERT_CHOICE = UInt32(1)
const MOEC_DROP_NONE = UInt32(0)
const MOEC_DROP_BY_POSITION = UInt32(1)
const MOEC_DROP_BY_WEIGHT = UInt32(2)
const MOEC_PLAN_COUNTS = UInt32(0)
const MOEC_PLAN_GROUP_OFFSETS = UInt32(1)
const MOEC_PLAN_ROW_TOKEN = UInt32(2)
const MOEC_PLAN_ROW_SLOT = UInt32(3)
const MOEC_PLAN_ROW_WEIGHT = UInt32(4)
const MOEC_PLAN_ASSIGNMENT_ROW = UInt32(5)
const MOEC_PLAN_EXPERT_IDS = UInt32(6)
const MOEC_PLAN_ROUTING_WEIGHTS = UInt32(7)
const MOEC_PLAN_TOTALS = UInt32(8)
const MOEC_PLAN_TOKEN_OFFSETS = UInt32(9)
const MOEC_PLAN_TOKEN_ROWS = UInt32(10)
const MOEC_PLAN_ROW_ID_MAP = UInt32(11)
const MOEC_PLAN_INDEX_MAP = UInt32(12)
const MOEC_PLAN_ROUND_ROBIN = UInt32(0)
const MOEC_PLAN_EQUAL_COUNTS = UInt32(1)
const MOEC_GATE_SPLIT = UInt32(0)
const MOEC_GATE_THEN_UP = UInt32(1)
const MOEC_UP_THEN_GATE = UInt32(2)
const MOEC_GATE_INTERLEAVED = UInt32(3)
const MOEC_GATE_NONE = UInt32(4)
const MOEC_OUT_IN = UInt32(0)
const MOEC_IN_OUT = UInt32(1)
const MOEC_SCHEME_NONE = UInt32(0)
const MOEC_SCHEME_INT8 = UInt32(1)
const MOEC_SCHEME_FP8 = UInt32(2)
const MOEC_SCHEME_CODEBOOK4 = UInt32(3)
const MOEC_SCHEME_MXFP4 = UInt32(4)
const MOEC_SCHEME_NVFP4 = UInt32(5)
const MOEC_SCHEME_INT4 = UInt32(6)
const MOEC_SCHEME_AWQ = UInt32(7)
const MOEC_SCHEME_GPTQ = UInt32(8)
const MOEC_SCHEME_GPTQ_V2 = UInt32(9)
const MOEC_SCHEME_GGUF_Q8_0 = UInt32(10)
const MOEC_SCHEME_GGUF_Q4_0 = UInt32(11)
const MOEC_SCHEME_GGUF_Q4_K = UInt32(12)
const MOEC_SCHEME_GGUF_Q6_K = UInt32(13)
const MOEC_SCHEME_GGUF_MXFP4 = UInt32(14)
const MOEC_QUANT_SCALES2_DIVIDES = UInt32(1)
const MOEC_WEIGHTS_FROZEN = UInt32(1)
const MOEC_MATRIX_GATE_UP = UInt32(0)
const MOEC_MATRIX_GATE = UInt32(1)
const MOEC_MATRIX_UP = UInt32(2)
const MOEC_MATRIX_DOWN = UInt32(3)
const MOEC_QUANTISE_INT8 = UInt32(0)
const MOEC_QUANTISE_INT4 = UInt32(1)
const MOEC_QUANTISE_FP8 = UInt32(2)
const MOEC_QUANTISE_MXFP8 = UInt32(3)
const MOEC_QUANTISE_MXFP4 = UInt32(4)
const MOEC_QUANTISE_NVFP4 = UInt32(5)
const MOEC_QUANTISE_NF4 = UInt32(6)
const MOEC_QUANTISE_FP4 = UInt32(7)
const MOEC_QUANTISE_ASYMMETRIC = UInt32(1)
const MOEC_QUANTISE_NESTED = UInt32(2)
const MOEC_QUANTISE_SCALES2_DIVIDES = UInt32(4)
const MOEC_ACT_SWIGLU = UInt32(0)
const MOEC_ACT_GPTOSS = UInt32(1)
const MOEC_ACT_CLAMP_SWIGLU = UInt32(2)
const MOEC_ACT_SWIGLU_CLAMP = UInt32(3)
const MOEC_ACT_GEGLU_TANH = UInt32(4)
const MOEC_ACT_GEGLU_ERF = UInt32(5)
const MOEC_ACT_QUICK_GEGLU = UInt32(6)
const MOEC_ACT_SITU = UInt32(7)
const MOEC_ACT_RELU2 = UInt32(8)
const MOEC_ACT_SILU = UInt32(9)
const MOEC_ACT_IDENTITY = UInt32(10)
const MOEC_WEIGHT_ON_OUTPUT = UInt32(0)
const MOEC_WEIGHT_ON_ACTIVATION = UInt32(1)
const MOEC_WEIGHT_ON_INPUT = UInt32(2)
const MOEC_COMBINE_FP32_SLOT = UInt32(0)
const MOEC_COMBINE_FP32_EXPERT = UInt32(1)
const MOEC_COMBINE_DATA_EXPERT = UInt32(2)
const MOEC_ACT_FP32_ONCE = UInt32(0)
const MOEC_ACT_PER_OP = UInt32(1)
const MOEC_SHARED_NONE = UInt32(0)
const MOEC_SHARED_ADD = UInt32(1)
const MOEC_SHARED_SIGMOID_GATE = UInt32(2)
const MOEC_SHARED_SOFTMAX2 = UInt32(3)
const MOEC_SAVE_NONE = UInt32(0)
const MOEC_SAVE_INPUT = UInt32(1)
const MOEC_SAVE_PREACT = UInt32(2)
const MOEC_SAVE_ALL = UInt32(3)
const MOEC_EXPERTS_PLAIN_WEIGHTS = UInt32(1)
const MOEC_EXPERTS_SKIP_ABSENT = UInt32(1)
const MOEC_COMM_DEVICE = UInt32(1)
const MOEC_COMM_CAPTURE = UInt32(2)
const MOEC_EP_AUTO = UInt32(0)
const MOEC_EP_GATHER = UInt32(1)
const MOEC_EP_PEER = UInt32(2)
const MOEC_EP_ROWS = UInt32(3)
const MOEC_EP_EXACT = UInt32(4)
const MOEC_EP_FORWARD_ONLY = UInt32(1)
const MOEC_EP_REPORT = UInt32(0)
const MOEC_EP_DROP_BY_WEIGHT = UInt32(1)
const MOEC_EP_ADD = UInt32(1)

struct moec_context end
struct moec_router end
struct moec_plan end
struct moec_weights end
struct moec_adapters end
struct moec_experts end
struct moec_layer end
struct moec_comm end
struct moec_ep end

"All-zero = absent; may start at any byte; lies where the device reaches it (E_DEVICE)."
struct moec_buffer
    ptr::Ptr{Cvoid}
    bytes::UInt64
end
moec_buffer(;
    ptr = C_NULL,
    bytes = UInt64(0),
) = moec_buffer(ptr, bytes)

struct moec_size
    base::UInt64
    per_token::UInt64
end
moec_size(;
    base = UInt64(0),
    per_token = UInt64(0),
) = moec_size(base, per_token)

"""
Fields of `moec_tensor`:
- `data`: base address in the device's space
- `byte_offset`: added to data (DLPack's meaning)
- `strides`: elements; all zero = compact row-major
"""
struct moec_tensor
    data::Ptr{Cvoid}
    byte_offset::UInt64
    device_type::Int32
    device_id::Int32
    dtype::UInt32
    ndim::Int32
    shape::NTuple{6,Int64}
    strides::NTuple{6,Int64}
end
moec_tensor(;
    data = C_NULL,
    byte_offset = UInt64(0),
    device_type = Int32(0),
    device_id = Int32(0),
    dtype = UInt32(0),
    ndim = Int32(0),
    shape = ntuple(_ -> Int64(0), 6),
    strides = ntuple(_ -> Int64(0), 6),
) = moec_tensor(data, byte_offset, device_type, device_id, dtype, ndim, shape, strides)

"""
Fields of `moec_activation`:
- `kind`: moec_activation_kind
- `alpha`: GPTOSS, QUICK_GEGLU: 0 = 1.702
- `limit`: GPTOSS: 0 = 7.0; CLAMP_SWIGLU, SWIGLU_CLAMP: > 0
- `offset`: QUICK_GEGLU: added to up
- `beta`: SITU: 0 = 4 and 0 = no bound on up
- `linear_beta`: SITU: 0 = 4 and 0 = no bound on up
"""
struct moec_activation
    kind::UInt32
    alpha::Float32
    limit::Float32
    offset::Float32
    beta::Float32
    linear_beta::Float32
    reserved0::UInt32
    reserved1::UInt32
end
moec_activation(;
    kind = UInt32(0),
    alpha = Float32(0),
    limit = Float32(0),
    offset = Float32(0),
    beta = Float32(0),
    linear_beta = Float32(0),
    reserved0 = UInt32(0),
    reserved1 = UInt32(0),
) = moec_activation(kind, alpha, limit, offset, beta, linear_beta, reserved0, reserved1)

"""
How the codes of a quantised matrix [N,K] become values; moec_scheme says which of these tensors a scheme reads, the others are absent. Arrays of one tensor an expert have moec_matrix.count entries, without the dimension E, and replace the stacked tensor of their name. Of one block the extents may be left out. No value is read at bind. Gradients have none.

- `flags`: moec_quant_flags
- `scales`: `[E,N/block_n,K/block_k]`, rounded up; IN_OUT: `[E,K/.., N/..]`
- `scales2`: scales of the scales
- `zeros`: zero points: shape of scales, or packed
- `codebook`: `[16]` f32: the value of each code
- `scale_book`: `[256]` f32: the value of each u8 scale
- `scale_offset`: `[1]` f32: added to the scales
- `group_index`: `[E,K]` i32: the block along K of each input (act-order). One that is no block counts as k / block_k
- `block_n`: values along N and K that share a scale; 0 = as the scheme says
- `block_k`: values along N and K that share a scale; 0 = as the scheme says
- `scale_block`: scales that share an entry of scales2; 0 = as the scheme says
"""
struct moec_quant
    struct_size::UInt32
    flags::UInt32
    scales::moec_tensor
    scales2::moec_tensor
    zeros::moec_tensor
    codebook::moec_tensor
    scale_book::moec_tensor
    scale_offset::moec_tensor
    group_index::moec_tensor
    per_expert_scales::Ptr{moec_tensor}
    per_expert_scales2::Ptr{moec_tensor}
    per_expert_zeros::Ptr{moec_tensor}
    per_expert_scale_offset::Ptr{moec_tensor}
    per_expert_group_index::Ptr{moec_tensor}
    block_n::Int64
    block_k::Int64
    scale_block::Int64
end
moec_quant(;
    struct_size = UInt32(968),
    flags = UInt32(0),
    scales = moec_tensor(),
    scales2 = moec_tensor(),
    zeros = moec_tensor(),
    codebook = moec_tensor(),
    scale_book = moec_tensor(),
    scale_offset = moec_tensor(),
    group_index = moec_tensor(),
    per_expert_scales = C_NULL,
    per_expert_scales2 = C_NULL,
    per_expert_zeros = C_NULL,
    per_expert_scale_offset = C_NULL,
    per_expert_group_index = C_NULL,
    block_n = Int64(0),
    block_k = Int64(0),
    scale_block = Int64(0),
) = moec_quant(struct_size, flags, scales, scales2, zeros, codebook, scale_book, scale_offset, group_index, per_expert_scales, per_expert_scales2, per_expert_zeros, per_expert_scale_offset, per_expert_group_index, block_n, block_k, scale_block)

"""
One weight matrix of all experts, or its gradient; all-zero = absent.

- `data`: `[E,N,K]` (OUT_IN) or `[E,K,N]` (IN_OUT); y = x * W^T + bias; codes: the type and shape that the scheme says
- `bias`: `[E,N]`, optional
- `per_expert`: instead of data: `count` tensors `[N,K]` or `[K,N]`; array copied
- `per_expert_bias`: instead of bias: `count` tensors `[N]`; array copied
- `count`: E when a per_expert array is given, else 0
- `quant`: codes: their scales; NULL = plain values. Copied at bind
"""
struct moec_matrix
    data::moec_tensor
    bias::moec_tensor
    per_expert::Ptr{moec_tensor}
    per_expert_bias::Ptr{moec_tensor}
    count::Int64
    quant::Ptr{moec_quant}
end
moec_matrix(;
    data = moec_tensor(),
    bias = moec_tensor(),
    per_expert = C_NULL,
    per_expert_bias = C_NULL,
    count = Int64(0),
    quant = C_NULL,
) = moec_matrix(data, bias, per_expert, per_expert_bias, count, quant)

"""
Fields of `moec_error_info`:
- `code`: moec_status of the failing call
- `native_code`: cudaError_t, errno or a callback's value; 0 if none
- `arg_index`: 1-based argument that is NULL or no such handle or struct; else 0
- `site`: entry point, NUL-terminated
- `message`: what is wrong, both values, what would be right; NUL-terminated
"""
struct moec_error_info
    struct_size::UInt32
    flags::UInt32
    code::Int32
    native_code::Int32
    arg_index::Int32
    reserved0::UInt32
    site::NTuple{64,UInt8}
    message::NTuple{512,UInt8}
end
moec_error_info(;
    struct_size = UInt32(600),
    flags = UInt32(0),
    code = Int32(0),
    native_code = Int32(0),
    arg_index = Int32(0),
    reserved0 = UInt32(0),
    site = ntuple(_ -> UInt8(0), 64),
    message = ntuple(_ -> UInt8(0), 512),
) = moec_error_info(struct_size, flags, code, native_code, arg_index, reserved0, site, message)

"""
Fields of `moec_device_info`:
- `compute_major`: CUDA capability; 0 on the CPU
- `compute_minor`: CUDA capability; 0 on the CPU
- `multiprocessors`: SMs; usable cores on the CPU
- `numa_node`: -1 = unknown
- `name`: arch: instruction set in use, or sm_XX
- `backend`: arch: instruction set in use, or sm_XX
- `arch`: arch: instruction set in use, or sm_XX
"""
struct moec_device_info
    struct_size::UInt32
    flags::UInt32
    device_type::Int32
    device_id::Int32
    compute_major::Int32
    compute_minor::Int32
    multiprocessors::Int32
    numa_node::Int32
    total_bytes::UInt64
    free_bytes::UInt64
    name::NTuple{128,UInt8}
    backend::NTuple{32,UInt8}
    arch::NTuple{64,UInt8}
end
moec_device_info(;
    struct_size = UInt32(272),
    flags = UInt32(0),
    device_type = Int32(0),
    device_id = Int32(0),
    compute_major = Int32(0),
    compute_minor = Int32(0),
    multiprocessors = Int32(0),
    numa_node = Int32(0),
    total_bytes = UInt64(0),
    free_bytes = UInt64(0),
    name = ntuple(_ -> UInt8(0), 128),
    backend = ntuple(_ -> UInt8(0), 32),
    arch = ntuple(_ -> UInt8(0), 64),
) = moec_device_info(struct_size, flags, device_type, device_id, compute_major, compute_minor, multiprocessors, numa_node, total_bytes, free_bytes, name, backend, arch)

"""
Called on the calling thread; must not call moec. alloc returns NULL on failure.

- `release`: stream: of the last use, or NULL: work on any stream may still use it.
"""
struct moec_allocator
    struct_size::UInt32
    flags::UInt32
    user::Ptr{Cvoid}
    alloc::Ptr{Cvoid}
    release::Ptr{Cvoid}
end
moec_allocator(;
    struct_size = UInt32(32),
    flags = UInt32(0),
    user = C_NULL,
    alloc = C_NULL,
    release = C_NULL,
) = moec_allocator(struct_size, flags, user, alloc, release)

"""
Fields of `moec_thread_pool`:
- `num_threads`: >= 1, how many bodies may run at once
- `parallel_for`: Call body(arg, i) for each i in [0, n), in any order, from any threads; return 0 when all are done.
"""
struct moec_thread_pool
    struct_size::UInt32
    num_threads::Int32
    user::Ptr{Cvoid}
    parallel_for::Ptr{Cvoid}
end
moec_thread_pool(;
    struct_size = UInt32(24),
    num_threads = Int32(0),
    user = C_NULL,
    parallel_for = C_NULL,
) = moec_thread_pool(struct_size, num_threads, user, parallel_for)

"""
Fields of `moec_context_desc`:
- `flags`: moec_context_flags
- `device_type`: 0, 0 = the CPU
- `device_id`: 0, 0 = the CPU
- `math`: moec_math_mode
- `num_threads`: CPU: 0 = affinity mask and cgroup quota
- `workspace_limit`: bytes of scratch the context may hold; 0 = no limit
- `allocator`: NULL = built in
- `pool`: NULL = built in; not with num_threads
"""
struct moec_context_desc
    struct_size::UInt32
    flags::UInt32
    device_type::Int32
    device_id::Int32
    math::UInt32
    num_threads::Int32
    workspace_limit::UInt64
    allocator::Ptr{moec_allocator}
    pool::Ptr{moec_thread_pool}
end
moec_context_desc(;
    struct_size = UInt32(48),
    flags = UInt32(0),
    device_type = Int32(0),
    device_id = Int32(0),
    math = UInt32(0),
    num_threads = Int32(0),
    workspace_limit = UInt64(0),
    allocator = C_NULL,
    pool = C_NULL,
) = moec_context_desc(struct_size, flags, device_type, device_id, math, num_threads, workspace_limit, allocator, pool)

"""
Fields of `moec_stats`:
- `allocs`: both stay constant in steady state
- `host_syncs`: both stay constant in steady state
- `flops`: of real rows, never padding
- `ns_route`: with MOEC_CONTEXT_PROFILE
- `ns_plan`: with MOEC_CONTEXT_PROFILE
- `ns_experts`: with MOEC_CONTEXT_PROFILE
- `ns_combine`: with MOEC_CONTEXT_PROFILE
- `path_cpu`: forwards and backwards of experts, by the path that ran them (moec_experts_describe). A graph counts when it is captured
- `path_portable`: forwards and backwards of experts, by the path that ran them (moec_experts_describe). A graph counts when it is captured
- `path_sm90`: forwards and backwards of experts, by the path that ran them (moec_experts_describe). A graph counts when it is captured
- `path_few_tokens`: forwards and backwards of experts, by the path that ran them (moec_experts_describe). A graph counts when it is captured
- `path_fallbacks`: of these, those that a better path was asked for and did not take
- `ep_gather`: dispatches and combines, by moec_ep_scheme
- `ep_peer`: dispatches and combines, by moec_ep_scheme
- `ep_rows`: dispatches and combines, by moec_ep_scheme
- `ep_exact`: dispatches and combines, by moec_ep_scheme
- `path_few_rows`: as path_cpu and its like: experts of codes that have few rows
"""
struct moec_stats
    struct_size::UInt32
    flags::UInt32
    calls::UInt64
    kernel_launches::UInt64
    allocs::UInt64
    host_syncs::UInt64
    workspace_bytes::UInt64
    workspace_peak::UInt64
    flops::UInt64
    ns_route::UInt64
    ns_plan::UInt64
    ns_experts::UInt64
    ns_combine::UInt64
    path_cpu::UInt64
    path_portable::UInt64
    path_sm90::UInt64
    path_few_tokens::UInt64
    path_fallbacks::UInt64
    ep_gather::UInt64
    ep_peer::UInt64
    ep_rows::UInt64
    ep_exact::UInt64
    path_few_rows::UInt64
end
moec_stats(;
    struct_size = UInt32(176),
    flags = UInt32(0),
    calls = UInt64(0),
    kernel_launches = UInt64(0),
    allocs = UInt64(0),
    host_syncs = UInt64(0),
    workspace_bytes = UInt64(0),
    workspace_peak = UInt64(0),
    flops = UInt64(0),
    ns_route = UInt64(0),
    ns_plan = UInt64(0),
    ns_experts = UInt64(0),
    ns_combine = UInt64(0),
    path_cpu = UInt64(0),
    path_portable = UInt64(0),
    path_sm90 = UInt64(0),
    path_few_tokens = UInt64(0),
    path_fallbacks = UInt64(0),
    ep_gather = UInt64(0),
    ep_peer = UInt64(0),
    ep_rows = UInt64(0),
    ep_exact = UInt64(0),
    path_few_rows = UInt64(0),
) = moec_stats(struct_size, flags, calls, kernel_launches, allocs, host_syncs, workspace_bytes, workspace_peak, flops, ns_route, ns_plan, ns_experts, ns_combine, path_cpu, path_portable, path_sm90, path_few_tokens, path_fallbacks, ep_gather, ep_peer, ep_rows, ep_exact, path_few_rows)

"""
Fields of `moec_router_desc`:
- `flags`: moec_router_flags
- `num_experts`: E >= 1
- `num_zero_experts`: Z >= 0
- `top_k`: 1 <= K <= E+Z
- `input`: moec_router_input
- `rms_eps`: RMS_SCALED: 0 = 1e-6
- `jitter`: multiply x by U(1-j,1+j); 0 = off; < 1
- `logit_precision`: moec_precision; DATA rounds the logits to data_dtype
- `logit_softcap`: cap * tanh(z / cap); 0 = off
- `score`: moec_score
- `score_precision`: moec_precision
- `selection`: moec_select
- `num_groups`: GROUP_TOPK: num_groups divides E+Z; >= 1
- `top_groups`: GROUP_TOPK: num_groups divides E+Z; >= 1
- `group_top_m`: group score = sum of its m best; 0|1 = the best one
- `group_fill`: moec_group_fill
- `mixer_eps`: SPARSE_MIXER threshold; > 0
- `weight_rule`: moec_weight_rule
- `norm`: moec_norm
- `norm_eps`: norm_eps 0 = none; NORM_P: norm_p 0 = 1
- `norm_p`: norm_eps 0 = none; NORM_P: norm_p 0 = 1
- `norm_precision`: moec_precision of weight rule and normalisation
- `scale`: routed scaling factor; 0 = 1
- `weight_precision`: moec_precision of the result
- `slot_order`: moec_slot_order
- `data_dtype`: dtype of PREC_DATA steps; 0 = fp32
- `seed`: jitter: Philox4x32-10 key
"""
struct moec_router_desc
    struct_size::UInt32
    flags::UInt32
    num_experts::Int32
    num_zero_experts::Int32
    top_k::Int32
    input::UInt32
    rms_eps::Float32
    jitter::Float32
    logit_precision::UInt32
    logit_softcap::Float32
    score::UInt32
    score_precision::UInt32
    selection::UInt32
    num_groups::Int32
    top_groups::Int32
    group_top_m::Int32
    group_fill::UInt32
    mixer_eps::Float32
    weight_rule::UInt32
    norm::UInt32
    norm_eps::Float32
    norm_p::Float32
    norm_precision::UInt32
    scale::Float32
    weight_precision::UInt32
    slot_order::UInt32
    data_dtype::UInt32
    reserved0::UInt32
    seed::UInt64
end
moec_router_desc(;
    struct_size = UInt32(120),
    flags = UInt32(0),
    num_experts = Int32(0),
    num_zero_experts = Int32(0),
    top_k = Int32(0),
    input = UInt32(0),
    rms_eps = Float32(0),
    jitter = Float32(0),
    logit_precision = UInt32(0),
    logit_softcap = Float32(0),
    score = UInt32(0),
    score_precision = UInt32(0),
    selection = UInt32(0),
    num_groups = Int32(0),
    top_groups = Int32(0),
    group_top_m = Int32(0),
    group_fill = UInt32(0),
    mixer_eps = Float32(0),
    weight_rule = UInt32(0),
    norm = UInt32(0),
    norm_eps = Float32(0),
    norm_p = Float32(0),
    norm_precision = UInt32(0),
    scale = Float32(0),
    weight_precision = UInt32(0),
    slot_order = UInt32(0),
    data_dtype = UInt32(0),
    reserved0 = UInt32(0),
    seed = UInt64(0),
) = moec_router_desc(struct_size, flags, num_experts, num_zero_experts, top_k, input, rms_eps, jitter, logit_precision, logit_softcap, score, score_precision, selection, num_groups, top_groups, group_top_m, group_fill, mixer_eps, weight_rule, norm, norm_eps, norm_p, norm_precision, scale, weight_precision, slot_order, data_dtype, reserved0, seed)

"""
Fields of `moec_gate_args`:
- `rng_offset`: jitter counter of element (0,0); element (t,h) uses + t*H + h
- `x`: in `[T,H]` f32|bf16|f16: the router's input
- `weight`: in `[E+Z,H]` f32|bf16|f16
- `bias`: in `[E+Z]`, with LOGIT_BIAS; dtype of weight or f32
- `input_scale`: in `[H]`, RMS_SCALED; dtype of weight or f32
- `logits`: out `[T,E+Z]` f32; before the soft-cap
- `x_jittered`: out `[T,H]`, with jitter: optional, required with JITTER_X; dtype of x
"""
struct moec_gate_args
    struct_size::UInt32
    flags::UInt32
    rng_offset::UInt64
    x::moec_tensor
    weight::moec_tensor
    bias::moec_tensor
    input_scale::moec_tensor
    logits::moec_tensor
    x_jittered::moec_tensor
end
moec_gate_args(;
    struct_size = UInt32(784),
    flags = UInt32(0),
    rng_offset = UInt64(0),
    x = moec_tensor(),
    weight = moec_tensor(),
    bias = moec_tensor(),
    input_scale = moec_tensor(),
    logits = moec_tensor(),
    x_jittered = moec_tensor(),
) = moec_gate_args(struct_size, flags, rng_offset, x, weight, bias, input_scale, logits, x_jittered)

"""
Fields of `moec_gate_grad_args`:
- `flags`: moec_grad_flags
- `rng_offset`: jitter counter of element (0,0); element (t,h) uses + t*H + h
- `x`: in `[T,H]` f32|bf16|f16: the router's input
- `weight`: in `[E+Z,H]` f32|bf16|f16
- `input_scale`: in `[H]`, RMS_SCALED; dtype of weight or f32
- `d_logits`: in `[T,E+Z]` f32
- `d_x`: out `[T,H]`; absent = skipped, as every output here
- `d_weight`: out `[E+Z,H]`
- `d_bias`: out `[E+Z]`
- `d_input_scale`: out `[H]`
- `d_x_jittered`: in `[T,H]`, with jitter: optional gradient of x_jittered
"""
struct moec_gate_grad_args
    struct_size::UInt32
    flags::UInt32
    rng_offset::UInt64
    x::moec_tensor
    weight::moec_tensor
    input_scale::moec_tensor
    d_logits::moec_tensor
    d_x::moec_tensor
    d_weight::moec_tensor
    d_bias::moec_tensor
    d_input_scale::moec_tensor
    d_x_jittered::moec_tensor
end
moec_gate_grad_args(;
    struct_size = UInt32(1168),
    flags = UInt32(0),
    rng_offset = UInt64(0),
    x = moec_tensor(),
    weight = moec_tensor(),
    input_scale = moec_tensor(),
    d_logits = moec_tensor(),
    d_x = moec_tensor(),
    d_weight = moec_tensor(),
    d_bias = moec_tensor(),
    d_input_scale = moec_tensor(),
    d_x_jittered = moec_tensor(),
) = moec_gate_grad_args(struct_size, flags, rng_offset, x, weight, input_scale, d_logits, d_x, d_weight, d_bias, d_input_scale, d_x_jittered)

"""
Fields of `moec_route_args`:
- `logits`: in `[T,E+Z]` f32|bf16|f16, before the soft-cap
- `select_bias`: in `[E+Z]` f32, with SELECT_BIAS
- `per_expert_scale`: in `[E+Z]`, with PER_EXPERT_SCALE; f32|bf16|f16
- `token_mask`: in `[T]` u8|bool, optional; 0 = routed nowhere
- `table`: in `[V,K]` i32|i64: SELECT_TABLE
- `token_ids`: in `[T]` i32|i64: SELECT_TABLE
- `given_ids`: in `[T,K]` i32|i64: SELECT_GIVEN
- `expert_ids`: out `[T,K]` i32; -1 = none
- `routing_weights`: out `[T,K]` f32; 0 where the id is -1
- `scores`: out `[T,E+Z]` f32, optional
- `counts`: out `[E+Z]` i32|i64, optional: += selections per id; i32 saturates
"""
struct moec_route_args
    struct_size::UInt32
    flags::UInt32
    logits::moec_tensor
    select_bias::moec_tensor
    per_expert_scale::moec_tensor
    token_mask::moec_tensor
    table::moec_tensor
    token_ids::moec_tensor
    given_ids::moec_tensor
    expert_ids::moec_tensor
    routing_weights::moec_tensor
    scores::moec_tensor
    counts::moec_tensor
end
moec_route_args(;
    struct_size = UInt32(1416),
    flags = UInt32(0),
    logits = moec_tensor(),
    select_bias = moec_tensor(),
    per_expert_scale = moec_tensor(),
    token_mask = moec_tensor(),
    table = moec_tensor(),
    token_ids = moec_tensor(),
    given_ids = moec_tensor(),
    expert_ids = moec_tensor(),
    routing_weights = moec_tensor(),
    scores = moec_tensor(),
    counts = moec_tensor(),
) = moec_route_args(struct_size, flags, logits, select_bias, per_expert_scale, token_mask, table, token_ids, given_ids, expert_ids, routing_weights, scores, counts)

"""
Fields of `moec_route_grad_args`:
- `flags`: moec_grad_flags, for d_per_expert_scale
- `logits`: in `[T,E+Z]` f32|bf16|f16, before the soft-cap
- `per_expert_scale`: in `[E+Z]`, with PER_EXPERT_SCALE; f32|bf16|f16
- `expert_ids`: in `[T,K]` i32|i64, from forward
- `d_routing_weights`: in `[T,K]` f32
- `d_logits_in`: in `[T,E+Z]` f32, optional: added (auxiliary losses)
- `d_logits`: out `[T,E+Z]` f32
- `d_per_expert_scale`: out `[E+Z]`, optional
"""
struct moec_route_grad_args
    struct_size::UInt32
    flags::UInt32
    logits::moec_tensor
    per_expert_scale::moec_tensor
    expert_ids::moec_tensor
    d_routing_weights::moec_tensor
    d_logits_in::moec_tensor
    d_logits::moec_tensor
    d_per_expert_scale::moec_tensor
end
moec_route_grad_args(;
    struct_size = UInt32(904),
    flags = UInt32(0),
    logits = moec_tensor(),
    per_expert_scale = moec_tensor(),
    expert_ids = moec_tensor(),
    d_routing_weights = moec_tensor(),
    d_logits_in = moec_tensor(),
    d_logits = moec_tensor(),
    d_per_expert_scale = moec_tensor(),
) = moec_route_grad_args(struct_size, flags, logits, per_expert_scale, expert_ids, d_routing_weights, d_logits_in, d_logits, d_per_expert_scale)

"""
Fields of `moec_loss_args`:
- `kind`: moec_loss_kind
- `top_k`: K of the balance losses; 1..E
- `coefficient`: 0 = 1
- `seq_len`: BALANCE_SEQUENCE: divides T
- `score`: SWITCH, SEQUENCE: moec_score but IDENTITY; all but SOFTMAX by their row sum
- `logits`: in, `count` tensors `[T,E]` f32|bf16|f16, one per layer
- `d_logits`: out, `count` tensors `[T,E]` f32 (backward): added to
- `count`: layers; 1 except MIXTRAL
- `counts`: in `[E]` i32|i64, optional, SWITCH: n_e instead of counting
- `token_mask`: in `[T]` u8|bool, optional: 0 = left out, in each layer
- `loss`: out `[1]` f32 (forward)
- `d_loss`: in `[1]` f32 (backward); absent = 1
- `comm`: optional: the loss is of the tokens of all ranks, whose sums are added in rank order; each rank gets the same loss and the gradient of its own logits. Layers and options are equal on all; T may differ, counts are the rank's own. Collective; errors as moec_comm_sum
"""
struct moec_loss_args
    struct_size::UInt32
    kind::UInt32
    top_k::Int32
    coefficient::Float32
    seq_len::Int64
    score::UInt32
    flags::UInt32
    logits::Ptr{moec_tensor}
    d_logits::Ptr{moec_tensor}
    count::Int64
    counts::moec_tensor
    token_mask::moec_tensor
    loss::moec_tensor
    d_loss::moec_tensor
    comm::Ptr{moec_comm}
end
moec_loss_args(;
    struct_size = UInt32(576),
    kind = UInt32(0),
    top_k = Int32(0),
    coefficient = Float32(0),
    seq_len = Int64(0),
    score = UInt32(0),
    flags = UInt32(0),
    logits = C_NULL,
    d_logits = C_NULL,
    count = Int64(0),
    counts = moec_tensor(),
    token_mask = moec_tensor(),
    loss = moec_tensor(),
    d_loss = moec_tensor(),
    comm = C_NULL,
) = moec_loss_args(struct_size, kind, top_k, coefficient, seq_len, score, flags, logits, d_logits, count, counts, token_mask, loss, d_loss, comm)

"""
Fields of `moec_plan_desc`:
- `max_tokens`: bound on T; fixes every buffer size
- `num_experts`: E, all ranks together
- `num_zero_experts`: Z
- `top_k`: K; EXPERT_CHOICE: 0
- `kind`: moec_plan_kind
- `expert_begin`: local range; 0, 0 = all
- `expert_end`: local range; 0, 0 = all
- `align`: rows of each expert rounded up to it; 0|1 = none; power of two
- `drop`: moec_drop; needs a capacity
- `capacity`: rows kept per expert; 0 = by capacity_factor or dropless
- `capacity_factor`: capacity = ceil(T*K/E * factor); 0 = off
"""
struct moec_plan_desc
    struct_size::UInt32
    flags::UInt32
    max_tokens::Int64
    num_experts::Int32
    num_zero_experts::Int32
    top_k::Int32
    kind::UInt32
    expert_begin::Int32
    expert_end::Int32
    align::Int32
    drop::UInt32
    capacity::Int64
    capacity_factor::Float32
    reserved0::UInt32
end
moec_plan_desc(;
    struct_size = UInt32(64),
    flags = UInt32(0),
    max_tokens = Int64(0),
    num_experts = Int32(0),
    num_zero_experts = Int32(0),
    top_k = Int32(0),
    kind = UInt32(0),
    expert_begin = Int32(0),
    expert_end = Int32(0),
    align = Int32(0),
    drop = UInt32(0),
    capacity = Int64(0),
    capacity_factor = Float32(0),
    reserved0 = UInt32(0),
) = moec_plan_desc(struct_size, flags, max_tokens, num_experts, num_zero_experts, top_k, kind, expert_begin, expert_end, align, drop, capacity, capacity_factor, reserved0)

"""
The plan is built, on the context's device. Each function queues and takes no scratch.

- `x`: in `[T,H]` f32|bf16|f16|i32|i8|u8|bool
- `x_scale`: in `[T,S]`, optional: block scales that travel with the rows
- `rows`: out `[P,H]` as x; padding rows are zero; P >= the plan's, a multiple of its align; the rest is zero
- `row_scale`: out `[P,S]`
- `row_weight`: out `[P]` f32, optional; rows whose weight is exactly 0 are zero
"""
struct moec_permute_args
    struct_size::UInt32
    flags::UInt32
    plan::Ptr{moec_plan}
    x::moec_tensor
    x_scale::moec_tensor
    rows::moec_tensor
    row_scale::moec_tensor
    row_weight::moec_tensor
end
moec_permute_args(;
    struct_size = UInt32(656),
    flags = UInt32(0),
    plan = C_NULL,
    x = moec_tensor(),
    x_scale = moec_tensor(),
    rows = moec_tensor(),
    row_scale = moec_tensor(),
    row_weight = moec_tensor(),
) = moec_permute_args(struct_size, flags, plan, x, x_scale, rows, row_scale, row_weight)

"""
Fields of `moec_unpermute_args`:
- `rows`: in `[P,H]` f32|bf16|f16
- `routing_weights`: in `[T,K]` f32, optional: merging weights; absent = 1
- `residual`: in `[T,H]`, optional: added; may be y itself
- `y`: out `[T,H]` as rows; fp32 sum in slot order, one rounding
"""
struct moec_unpermute_args
    struct_size::UInt32
    flags::UInt32
    plan::Ptr{moec_plan}
    rows::moec_tensor
    routing_weights::moec_tensor
    residual::moec_tensor
    y::moec_tensor
end
moec_unpermute_args(;
    struct_size = UInt32(528),
    flags = UInt32(0),
    plan = C_NULL,
    rows = moec_tensor(),
    routing_weights = moec_tensor(),
    residual = moec_tensor(),
    y = moec_tensor(),
) = moec_unpermute_args(struct_size, flags, plan, rows, routing_weights, residual, y)

"""
Fields of `moec_permute_grad_args`:
- `d_rows`: in `[P,H]`
- `d_row_weight`: in `[P]` f32, optional
- `d_x`: out `[T,H]`; fp32 sum in slot order, weight-0 rows included
- `d_routing_weights`: out `[T,K]` f32, optional; 0 where not routed
"""
struct moec_permute_grad_args
    struct_size::UInt32
    flags::UInt32
    plan::Ptr{moec_plan}
    d_rows::moec_tensor
    d_row_weight::moec_tensor
    d_x::moec_tensor
    d_routing_weights::moec_tensor
end
moec_permute_grad_args(;
    struct_size = UInt32(528),
    flags = UInt32(0),
    plan = C_NULL,
    d_rows = moec_tensor(),
    d_row_weight = moec_tensor(),
    d_x = moec_tensor(),
    d_routing_weights = moec_tensor(),
) = moec_permute_grad_args(struct_size, flags, plan, d_rows, d_row_weight, d_x, d_routing_weights)

"""
Fields of `moec_unpermute_grad_args`:
- `d_y`: in `[T,H]`
- `rows`: in `[P,H]`, for d_routing_weights
- `routing_weights`: in `[T,K]` f32, optional: as forward
- `d_rows`: out `[P,H]`; padding rows are zero
- `d_routing_weights`: out `[T,K]` f32, optional; 0 where not routed
"""
struct moec_unpermute_grad_args
    struct_size::UInt32
    flags::UInt32
    plan::Ptr{moec_plan}
    d_y::moec_tensor
    rows::moec_tensor
    routing_weights::moec_tensor
    d_rows::moec_tensor
    d_routing_weights::moec_tensor
end
moec_unpermute_grad_args(;
    struct_size = UInt32(656),
    flags = UInt32(0),
    plan = C_NULL,
    d_y = moec_tensor(),
    rows = moec_tensor(),
    routing_weights = moec_tensor(),
    d_rows = moec_tensor(),
    d_routing_weights = moec_tensor(),
) = moec_unpermute_grad_args(struct_size, flags, plan, d_y, rows, routing_weights, d_rows, d_routing_weights)

"""
Fields of `moec_weights_desc`:
- `flags`: moec_weights_flags
- `num_experts`: El; 1 for a shared expert
- `gate_layout`: moec_gate_layout
- `hidden`: H
- `inter`: I
- `gate_up_orientation`: moec_orientation of gate_up, gate and up
- `dtype`: f32, f16, bf16: of values, and what codes stand for
- `bias_dtype`: 0 = dtype; or f32
- `gate_up_scheme`: moec_scheme
- `down_scheme`: moec_scheme
"""
struct moec_weights_desc
    struct_size::UInt32
    flags::UInt32
    num_experts::Int32
    gate_layout::UInt32
    hidden::Int64
    inter::Int64
    gate_up_orientation::UInt32
    down_orientation::UInt32
    dtype::UInt32
    bias_dtype::UInt32
    gate_up_scheme::UInt32
    down_scheme::UInt32
end
moec_weights_desc(;
    struct_size = UInt32(56),
    flags = UInt32(0),
    num_experts = Int32(0),
    gate_layout = UInt32(0),
    hidden = Int64(0),
    inter = Int64(0),
    gate_up_orientation = UInt32(0),
    down_orientation = UInt32(0),
    dtype = UInt32(0),
    bias_dtype = UInt32(0),
    gate_up_scheme = UInt32(0),
    down_scheme = UInt32(0),
) = moec_weights_desc(struct_size, flags, num_experts, gate_layout, hidden, inter, gate_up_orientation, down_orientation, dtype, bias_dtype, gate_up_scheme, down_scheme)

"""
The matrices of a set of experts, or their gradients (same shapes; absent ones are skipped).

- `gate_up`: GATE_THEN_UP, UP_THEN_GATE, INTERLEAVED: N = 2I, K = H
- `gate`: SPLIT: N = I, K = H
- `up`: SPLIT, NONE: N = I, K = H
- `down`: N = H, K = I
"""
struct moec_weight_set
    struct_size::UInt32
    flags::UInt32
    gate_up::moec_matrix
    gate::moec_matrix
    up::moec_matrix
    down::moec_matrix
end
moec_weight_set(;
    struct_size = UInt32(1160),
    flags = UInt32(0),
    gate_up = moec_matrix(),
    gate = moec_matrix(),
    up = moec_matrix(),
    down = moec_matrix(),
) = moec_weight_set(struct_size, flags, gate_up, gate, up, down)

"""
Fields of `moec_weights_info`:
- `packed_bytes`: bytes of a packed copy here, of codes once they are bound or mapped; 0 = never packed, or not FROZEN
- `needs_source`: 0: after packing, the bound memory is not read any more
- `packed_format`: names layout, type and schemes; \"\" if not packed
"""
struct moec_weights_info
    struct_size::UInt32
    flags::UInt32
    packed_bytes::UInt64
    is_bound::Int32
    is_packed::Int32
    is_frozen::Int32
    needs_source::Int32
    packed_format::NTuple{64,UInt8}
end
moec_weights_info(;
    struct_size = UInt32(96),
    flags = UInt32(0),
    packed_bytes = UInt64(0),
    is_bound = Int32(0),
    is_packed = Int32(0),
    is_frozen = Int32(0),
    needs_source = Int32(0),
    packed_format = ntuple(_ -> UInt8(0), 64),
) = moec_weights_info(struct_size, flags, packed_bytes, is_bound, is_packed, is_frozen, needs_source, packed_format)

"""
Fields of `moec_quantise_desc`:
- `flags`: moec_quantise_flags
- `kind`: moec_quantise_kind
- `orientation`: moec_orientation of the source. NF4 and FP4 keep the order of the source; other codes are OUT_IN
- `dtype`: of the source: f32, f16, bf16
- `scale_dtype`: INT8, INT4, FP8: dtype (0) or f32; the arithmetic is of this type, too. Others: 0
- `num_experts`: E
- `out_features`: N
- `in_features`: K
- `block_n`: 0, or as kind says
- `block_k`: 0, or as kind says
"""
struct moec_quantise_desc
    struct_size::UInt32
    flags::UInt32
    kind::UInt32
    orientation::UInt32
    dtype::UInt32
    scale_dtype::UInt32
    num_experts::Int64
    out_features::Int64
    in_features::Int64
    block_n::Int64
    block_k::Int64
end
moec_quantise_desc(;
    struct_size = UInt32(64),
    flags = UInt32(0),
    kind = UInt32(0),
    orientation = UInt32(0),
    dtype = UInt32(0),
    scale_dtype = UInt32(0),
    num_experts = Int64(0),
    out_features = Int64(0),
    in_features = Int64(0),
    block_n = Int64(0),
    block_k = Int64(0),
) = moec_quantise_desc(struct_size, flags, kind, orientation, dtype, scale_dtype, num_experts, out_features, in_features, block_n, block_k)

"""
Fields of `moec_quantise_info`:
- `codes`: type and shape
- `workspace`: bytes
- `scheme`: moec_scheme that reads them
- `reserved0`: moec_scheme that reads them
"""
struct moec_quantise_info
    struct_size::UInt32
    flags::UInt32
    codes::moec_tensor
    workspace::UInt64
    scheme::UInt32
    reserved0::UInt32
end
moec_quantise_info(;
    struct_size = UInt32(152),
    flags = UInt32(0),
    codes = moec_tensor(),
    workspace = UInt64(0),
    scheme = UInt32(0),
    reserved0 = UInt32(0),
) = moec_quantise_info(struct_size, flags, codes, workspace, scheme, reserved0)

"""
Fields of `moec_quantise_args`:
- `flags`: flags: 0
- `source`: in `[E,N,K]`; IN_OUT: `[E,K,N]`
- `codes`: out
- `quant`: out: its tensors, with memory. Codes are bound with it
- `workspace`: absent = the context's
"""
struct moec_quantise_args
    struct_size::UInt32
    flags::UInt32
    desc::Ptr{moec_quantise_desc}
    source::moec_tensor
    codes::moec_tensor
    quant::Ptr{moec_quant}
    workspace::moec_buffer
end
moec_quantise_args(;
    struct_size = UInt32(296),
    flags = UInt32(0),
    desc = C_NULL,
    source = moec_tensor(),
    codes = moec_tensor(),
    quant = C_NULL,
    workspace = moec_buffer(),
) = moec_quantise_args(struct_size, flags, desc, source, codes, quant, workspace)

"""
One term of one matrix [N,K] of every expert, or its gradients: y += scale * (x A^T) B^T; all-zero = absent. Strides may be any that are not negative, those of gradients any with a place for each element. f32, f16 or bf16, which the calls read rounded once to the dtype of x; gradients are f32 or of the type of their factor. Gradients of an expert without rows are 0; of one A for all experts they are summed in the order of the experts.

- `a`: `[E,r,K]`, r 1 to 512; `[1,r,K]`, or a stride of 0 along E: of all experts
- `b`: `[E,N,r]`
- `scale`: alpha / r, or as it was trained: not 0. Of gradients: 0
- `reserved`: 0
"""
struct moec_factors
    a::moec_tensor
    b::moec_tensor
    scale::Float32
    reserved::UInt32
end
moec_factors(;
    a = moec_tensor(),
    b = moec_tensor(),
    scale = Float32(0),
    reserved = UInt32(0),
) = moec_factors(a, b, scale, reserved)

"""
Fields of `moec_adapter`:
- `gate_up`: N = 2I, in the order of the adapters' gate_layout; K = H
- `gate`: N = I, K = H
- `up`: N = I, K = H
- `down`: N = H, K = I
"""
struct moec_adapter
    gate_up::moec_factors
    gate::moec_factors
    up::moec_factors
    down::moec_factors
end
moec_adapter(;
    gate_up = moec_factors(),
    gate = moec_factors(),
    up = moec_factors(),
    down = moec_factors(),
) = moec_adapter(gate_up, gate, up, down)

"""
Fields of `moec_adapters_desc`:
- `num_experts`: El, as in the weights
- `gate_layout`: of gate_up's N, need not be the weights'; SPLIT: no gate_up; NONE: up
- `hidden`: H
- `inter`: I
"""
struct moec_adapters_desc
    struct_size::UInt32
    flags::UInt32
    num_experts::Int32
    gate_layout::UInt32
    hidden::Int64
    inter::Int64
end
moec_adapters_desc(;
    struct_size = UInt32(32),
    flags = UInt32(0),
    num_experts = Int32(0),
    gate_layout = UInt32(0),
    hidden = Int64(0),
    inter = Int64(0),
) = moec_adapters_desc(struct_size, flags, num_experts, gate_layout, hidden, inter)

"""
Fields of `moec_experts_desc`:
- `flags`: moec_experts_desc_flags
- `hidden`: H
- `inter`: I
- `shared_inter`: Is; 0 without shared expert
- `num_experts`: E, all ranks together
- `num_zero_experts`: Z: ids in [E,E+Z) add w * x
- `top_k`: K; 0 for EXPERT_CHOICE plans
- `expert_begin`: local range, as in the plan; 0, 0 = all
- `expert_end`: local range, as in the plan; 0, 0 = all
- `align`: as in the plan
- `max_rows_base`: EXPERT_CHOICE: El * capacity; else 0
- `gate_layout`: only NONE or not: MOEC_GATE_NONE for a plain MLP
- `dtype`: of x, y and residual: f32, f16, bf16
- `output_scale`: of the routed sum; 0 = 1
"""
struct moec_experts_desc
    struct_size::UInt32
    flags::UInt32
    hidden::Int64
    inter::Int64
    shared_inter::Int64
    num_experts::Int32
    num_zero_experts::Int32
    top_k::Int32
    expert_begin::Int32
    expert_end::Int32
    align::Int32
    max_rows_base::Int64
    gate_layout::UInt32
    dtype::UInt32
    activation::moec_activation
    shared_activation::moec_activation
    weight_position::UInt32
    combine::UInt32
    act_rounding::UInt32
    shared::UInt32
    save::UInt32
    output_scale::Float32
end
moec_experts_desc(;
    struct_size = UInt32(160),
    flags = UInt32(0),
    hidden = Int64(0),
    inter = Int64(0),
    shared_inter = Int64(0),
    num_experts = Int32(0),
    num_zero_experts = Int32(0),
    top_k = Int32(0),
    expert_begin = Int32(0),
    expert_end = Int32(0),
    align = Int32(0),
    max_rows_base = Int64(0),
    gate_layout = UInt32(0),
    dtype = UInt32(0),
    activation = moec_activation(),
    shared_activation = moec_activation(),
    weight_position = UInt32(0),
    combine = UInt32(0),
    act_rounding = UInt32(0),
    shared = UInt32(0),
    save = UInt32(0),
    output_scale = Float32(0),
) = moec_experts_desc(struct_size, flags, hidden, inter, shared_inter, num_experts, num_zero_experts, top_k, expert_begin, expert_end, align, max_rows_base, gate_layout, dtype, activation, shared_activation, weight_position, combine, act_rounding, shared, save, output_scale)

"""
Fields of `moec_experts_args`:
- `flags`: moec_experts_flags
- `shared_weights`: with a shared expert; one expert of width shared_inter
- `x`: in `[T,H]`
- `shared_gate`: in `[1,H]` or `[2,H]`; dtype of x or f32
- `shared_gate_bias`: in `[2]`, SOFTMAX2; dtype of x or f32
- `output_bias`: in `[H]`, optional; dtype of x or f32
- `residual`: in `[T,H]`, optional: added; may be y itself
- `y`: out `[T,H]`
- `saved`: out, unless SAVE_NONE; written in full. At an address that is no multiple of 4 it takes scratch of its size besides any workspace, in backward, too
- `workspace`: absent = the context's
- `adapters`: of the routed experts; NULL = none
- `adapter_ids`: in `[T]` i32, optional: the only adapter of each token, an index into what is bound; any other number = none
"""
struct moec_experts_args
    struct_size::UInt32
    flags::UInt32
    plan::Ptr{moec_plan}
    weights::Ptr{moec_weights}
    shared_weights::Ptr{moec_weights}
    x::moec_tensor
    shared_gate::moec_tensor
    shared_gate_bias::moec_tensor
    output_bias::moec_tensor
    residual::moec_tensor
    y::moec_tensor
    saved::moec_buffer
    workspace::moec_buffer
    adapters::Ptr{moec_adapters}
    adapter_ids::moec_tensor
end
moec_experts_args(;
    struct_size = UInt32(968),
    flags = UInt32(0),
    plan = C_NULL,
    weights = C_NULL,
    shared_weights = C_NULL,
    x = moec_tensor(),
    shared_gate = moec_tensor(),
    shared_gate_bias = moec_tensor(),
    output_bias = moec_tensor(),
    residual = moec_tensor(),
    y = moec_tensor(),
    saved = moec_buffer(),
    workspace = moec_buffer(),
    adapters = C_NULL,
    adapter_ids = moec_tensor(),
) = moec_experts_args(struct_size, flags, plan, weights, shared_weights, x, shared_gate, shared_gate_bias, output_bias, residual, y, saved, workspace, adapters, adapter_ids)

"""
Fields of `moec_experts_grad_args`:
- `flags`: moec_grad_flags
- `x`: in `[T,H]`
- `shared_gate`: in `[1,H]` or `[2,H]`; dtype of x or f32
- `shared_gate_bias`: in `[2]`, SOFTMAX2; dtype of x or f32
- `d_y`: in `[T,H]`
- `saved`: in
- `d_x`: out `[T,H]`; absent = skipped, as each output
- `d_routing_weights`: out `[T,K]` f32; EXPERT_CHOICE: `[P]`, one a row
- `d_expert_weights`: out, in the layout of the bound weights; f32 or their dtype; NULL = frozen
- `d_shared_weights`: out, in the layout of the bound weights; f32 or their dtype; NULL = frozen
- `d_shared_gate`: out, f32 or dtype of x
- `d_shared_gate_bias`: out, f32 or dtype of x
- `d_output_bias`: out, f32 or dtype of x
- `d_residual`: out `[T,H]`
- `adapters`: in, as forward
- `adapter_ids`: in `[T]` i32, optional: the only adapter of each token, an index into what is bound; any other number = none
- `d_adapters`: out, optional: the gradients of as many adapters as are bound, each factor where it is given
"""
struct moec_experts_grad_args
    struct_size::UInt32
    flags::UInt32
    plan::Ptr{moec_plan}
    weights::Ptr{moec_weights}
    shared_weights::Ptr{moec_weights}
    x::moec_tensor
    shared_gate::moec_tensor
    shared_gate_bias::moec_tensor
    d_y::moec_tensor
    saved::moec_buffer
    d_x::moec_tensor
    d_routing_weights::moec_tensor
    d_expert_weights::Ptr{moec_weight_set}
    d_shared_weights::Ptr{moec_weight_set}
    d_shared_gate::moec_tensor
    d_shared_gate_bias::moec_tensor
    d_output_bias::moec_tensor
    d_residual::moec_tensor
    workspace::moec_buffer
    adapters::Ptr{moec_adapters}
    adapter_ids::moec_tensor
    d_adapters::Ptr{moec_adapter}
end
moec_experts_grad_args(;
    struct_size = UInt32(1504),
    flags = UInt32(0),
    plan = C_NULL,
    weights = C_NULL,
    shared_weights = C_NULL,
    x = moec_tensor(),
    shared_gate = moec_tensor(),
    shared_gate_bias = moec_tensor(),
    d_y = moec_tensor(),
    saved = moec_buffer(),
    d_x = moec_tensor(),
    d_routing_weights = moec_tensor(),
    d_expert_weights = C_NULL,
    d_shared_weights = C_NULL,
    d_shared_gate = moec_tensor(),
    d_shared_gate_bias = moec_tensor(),
    d_output_bias = moec_tensor(),
    d_residual = moec_tensor(),
    workspace = moec_buffer(),
    adapters = C_NULL,
    adapter_ids = moec_tensor(),
    d_adapters = C_NULL,
) = moec_experts_grad_args(struct_size, flags, plan, weights, shared_weights, x, shared_gate, shared_gate_bias, d_y, saved, d_x, d_routing_weights, d_expert_weights, d_shared_weights, d_shared_gate, d_shared_gate_bias, d_output_bias, d_residual, workspace, adapters, adapter_ids, d_adapters)

struct moec_experts_sizes
    struct_size::UInt32
    flags::UInt32
    forward_workspace::moec_size
    backward_workspace::moec_size
    saved::moec_size
end
moec_experts_sizes(;
    struct_size = UInt32(56),
    flags = UInt32(0),
    forward_workspace = moec_size(),
    backward_workspace = moec_size(),
    saved = moec_size(),
) = moec_experts_sizes(struct_size, flags, forward_workspace, backward_workspace, saved)

"""
gate -> route -> plan -> experts in one call, with one saved buffer; descriptors are copied.

- `experts`: num_experts, num_zero_experts, top_k as in the router
- `drop`: moec_drop
- `capacity_factor`: as in moec_plan_desc
- `ep`: optional: the experts lie on the ep's ranks, section 11
"""
struct moec_layer_desc
    struct_size::UInt32
    flags::UInt32
    router::Ptr{moec_router_desc}
    experts::Ptr{moec_experts_desc}
    drop::UInt32
    capacity_factor::Float32
    capacity::Int64
    ep::Ptr{moec_ep}
end
moec_layer_desc(;
    struct_size = UInt32(48),
    flags = UInt32(0),
    router = C_NULL,
    experts = C_NULL,
    drop = UInt32(0),
    capacity_factor = Float32(0),
    capacity = Int64(0),
    ep = C_NULL,
) = moec_layer_desc(struct_size, flags, router, experts, drop, capacity_factor, capacity, ep)

"""
Fields of `moec_layer_args`:
- `rng_offset`: jitter counter of element (0,0); element (t,h) uses + t*H + h
- `x`: in `[T,H]`
- `router_x`: in `[T,Hr]`, optional: the router's input when it is not x; where Hr > H the call may take scratch of the context besides its workspace
- `gate_weight`: in `[E+Z,H]` f32|bf16|f16
- `gate_bias`: in `[E+Z]`, with LOGIT_BIAS; dtype of weight or f32
- `input_scale`: in `[H]`, RMS_SCALED; dtype of weight or f32
- `select_bias`: in `[E+Z]` f32, with SELECT_BIAS
- `per_expert_scale`: in `[E+Z]`, with PER_EXPERT_SCALE; f32|bf16|f16
- `token_mask`: in `[T]` u8|bool, optional; 0 = routed nowhere
- `table`: in `[V,K]` i32|i64: SELECT_TABLE
- `token_ids`: in `[T]` i32|i64: SELECT_TABLE
- `given_ids`: in `[T,K]` i32|i64: SELECT_GIVEN
- `shared_gate`: in `[1,H]` or `[2,H]`; dtype of x or f32
- `shared_gate_bias`: in `[2]`, SOFTMAX2; dtype of x or f32
- `output_bias`: in `[H]`, optional; dtype of x or f32
- `residual`: in `[T,H]`, optional: added; may be y itself
- `y`: out `[T,H]`
- `logits`: out `[T,E+Z]` f32, optional
- `expert_ids`: out `[T,K]` i32, optional
- `routing_weights`: out `[T,K]` f32, optional
- `counts`: out `[E+Z]` i32|i64, optional: as moec_route_args
- `saved`: out, unless SAVE_NONE
- `workspace`: absent = the context's
- `bound`: with an ep: as in moec_ep_args; else 0
- `adapters`: of the routed experts; NULL = none
- `adapter_ids`: in `[T]` i32, optional: the only adapter of each token, an index into what is bound; any other number = none
"""
struct moec_layer_args
    struct_size::UInt32
    flags::UInt32
    rng_offset::UInt64
    weights::Ptr{moec_weights}
    shared_weights::Ptr{moec_weights}
    x::moec_tensor
    router_x::moec_tensor
    gate_weight::moec_tensor
    gate_bias::moec_tensor
    input_scale::moec_tensor
    select_bias::moec_tensor
    per_expert_scale::moec_tensor
    token_mask::moec_tensor
    table::moec_tensor
    token_ids::moec_tensor
    given_ids::moec_tensor
    shared_gate::moec_tensor
    shared_gate_bias::moec_tensor
    output_bias::moec_tensor
    residual::moec_tensor
    y::moec_tensor
    logits::moec_tensor
    expert_ids::moec_tensor
    routing_weights::moec_tensor
    counts::moec_tensor
    saved::moec_buffer
    workspace::moec_buffer
    bound::Int64
    adapters::Ptr{moec_adapters}
    adapter_ids::moec_tensor
end
moec_layer_args(;
    struct_size = UInt32(2768),
    flags = UInt32(0),
    rng_offset = UInt64(0),
    weights = C_NULL,
    shared_weights = C_NULL,
    x = moec_tensor(),
    router_x = moec_tensor(),
    gate_weight = moec_tensor(),
    gate_bias = moec_tensor(),
    input_scale = moec_tensor(),
    select_bias = moec_tensor(),
    per_expert_scale = moec_tensor(),
    token_mask = moec_tensor(),
    table = moec_tensor(),
    token_ids = moec_tensor(),
    given_ids = moec_tensor(),
    shared_gate = moec_tensor(),
    shared_gate_bias = moec_tensor(),
    output_bias = moec_tensor(),
    residual = moec_tensor(),
    y = moec_tensor(),
    logits = moec_tensor(),
    expert_ids = moec_tensor(),
    routing_weights = moec_tensor(),
    counts = moec_tensor(),
    saved = moec_buffer(),
    workspace = moec_buffer(),
    bound = Int64(0),
    adapters = C_NULL,
    adapter_ids = moec_tensor(),
) = moec_layer_args(struct_size, flags, rng_offset, weights, shared_weights, x, router_x, gate_weight, gate_bias, input_scale, select_bias, per_expert_scale, token_mask, table, token_ids, given_ids, shared_gate, shared_gate_bias, output_bias, residual, y, logits, expert_ids, routing_weights, counts, saved, workspace, bound, adapters, adapter_ids)

"""
Fields of `moec_layer_grad_args`:
- `flags`: moec_grad_flags
- `forward`: the forward call's inputs and saved buffer; no outputs
- `d_y`: in `[T,H]`
- `d_logits_in`: in `[T,E+Z]` f32, optional: from auxiliary losses
- `d_x`: out `[T,H]`; without router_x, d_x holds both
- `d_router_x`: out `[T,Hr]`; without router_x, d_x holds both
- `d_gate_weight`: out
- `d_gate_bias`: out
- `d_input_scale`: out
- `d_per_expert_scale`: out
- `d_expert_weights`: out
- `d_shared_weights`: out
- `d_shared_gate`: out
- `d_shared_gate_bias`: out
- `d_output_bias`: out
- `d_residual`: out
- `d_routing_weights`: out `[T,K]` f32, optional
- `workspace`: absent = the context's
- `d_adapters`: out, optional: as moec_experts_grad_args
"""
struct moec_layer_grad_args
    struct_size::UInt32
    flags::UInt32
    forward::Ptr{moec_layer_args}
    d_y::moec_tensor
    d_logits_in::moec_tensor
    d_x::moec_tensor
    d_router_x::moec_tensor
    d_gate_weight::moec_tensor
    d_gate_bias::moec_tensor
    d_input_scale::moec_tensor
    d_per_expert_scale::moec_tensor
    d_expert_weights::Ptr{moec_weight_set}
    d_shared_weights::Ptr{moec_weight_set}
    d_shared_gate::moec_tensor
    d_shared_gate_bias::moec_tensor
    d_output_bias::moec_tensor
    d_residual::moec_tensor
    d_routing_weights::moec_tensor
    workspace::moec_buffer
    d_adapters::Ptr{moec_adapter}
end
moec_layer_grad_args(;
    struct_size = UInt32(1720),
    flags = UInt32(0),
    forward = C_NULL,
    d_y = moec_tensor(),
    d_logits_in = moec_tensor(),
    d_x = moec_tensor(),
    d_router_x = moec_tensor(),
    d_gate_weight = moec_tensor(),
    d_gate_bias = moec_tensor(),
    d_input_scale = moec_tensor(),
    d_per_expert_scale = moec_tensor(),
    d_expert_weights = C_NULL,
    d_shared_weights = C_NULL,
    d_shared_gate = moec_tensor(),
    d_shared_gate_bias = moec_tensor(),
    d_output_bias = moec_tensor(),
    d_residual = moec_tensor(),
    d_routing_weights = moec_tensor(),
    workspace = moec_buffer(),
    d_adapters = C_NULL,
) = moec_layer_grad_args(struct_size, flags, forward, d_y, d_logits_in, d_x, d_router_x, d_gate_weight, d_gate_bias, d_input_scale, d_per_expert_scale, d_expert_weights, d_shared_weights, d_shared_gate, d_shared_gate_bias, d_output_bias, d_residual, d_routing_weights, workspace, d_adapters)

"""
Each returns 0, or MOEC_E_TIMEOUT where its deadline passed, or another value but 0 on failure. They may not call moec. `send` and `recv` never overlap; bytes may be 0.

- `flags`: moec_comm_flags
- `all_gather`: recv `[N]``[bytes]` = the `send` `[bytes]` of each rank. Required.
- `all_to_all`: recv`[r]` = entry `[this rank]` of the `send` `[N]``[bytes]` of rank r. Required.
- `all_to_all_v`: The same, with send_bytes`[r]` at byte send_at`[r]` for rank r, and recv_bytes`[r]` from it. EXACT needs it. `unit` divides all of them: counts in units stay small.
- `poll`: optional: 0 = well; never waits
- `release`: optional: once, when nothing uses the comm any more
- `abort`: optional, once, from any thread: what waits for another rank ends, on streams and in the other callbacks, which fail; but for window_close none is called after it
- `window_alloc`: optional, all or none: memory that all ranks reach. alloc's is of the current device; open is collective: blocks `[N]` = where this rank reaches each one's, or NULL; close may follow abort
"""
struct moec_comm_callbacks
    struct_size::UInt32
    flags::UInt32
    user::Ptr{Cvoid}
    all_gather::Ptr{Cvoid}
    all_to_all::Ptr{Cvoid}
    all_to_all_v::Ptr{Cvoid}
    poll::Ptr{Cvoid}
    release::Ptr{Cvoid}
    abort::Ptr{Cvoid}
    window_alloc::Ptr{Cvoid}
    window_open::Ptr{Cvoid}
    window_close::Ptr{Cvoid}
end
moec_comm_callbacks(;
    struct_size = UInt32(88),
    flags = UInt32(0),
    user = C_NULL,
    all_gather = C_NULL,
    all_to_all = C_NULL,
    all_to_all_v = C_NULL,
    poll = C_NULL,
    release = C_NULL,
    abort = C_NULL,
    window_alloc = C_NULL,
    window_open = C_NULL,
    window_close = C_NULL,
) = moec_comm_callbacks(struct_size, flags, user, all_gather, all_to_all, all_to_all_v, poll, release, abort, window_alloc, window_open, window_close)

"""
Fields of `moec_comm_desc`:
- `flags`: flags: 0
- `rank`: 0 <= rank < size
- `size`: 0 <= rank < size
"""
struct moec_comm_desc
    struct_size::UInt32
    flags::UInt32
    rank::Int32
    size::Int32
end
moec_comm_desc(;
    struct_size = UInt32(16),
    flags = UInt32(0),
    rank = Int32(0),
    size = Int32(0),
) = moec_comm_desc(struct_size, flags, rank, size)

"""
Fields of `moec_ep_desc`:
- `flags`: moec_ep_flags
- `hidden`: H; bound on T of one rank
- `max_tokens`: H; bound on T of one rank
- `num_experts`: E, of all ranks together
- `num_zero_experts`: Z; their ids stay at home
- `top_k`: K
- `scheme`: moec_ep_scheme
- `dtype`: of x: f32, f16, bf16
- `partial_dtype`: of partial rows: dtype (0) or f32
- `expert_begin`: host `[N+1]`, copied: 0 = b`[0]` < b`[1]` < .. = E; NULL = even
- `pair_rows`: ROWS: rows from one rank to another; 0 = max_tokens
- `overflow`: moec_ep_overflow
- `grad_scale`: layer: the gradients of experts and their biases are this much; 0 = 1. 1/N beside the mean of DDP. d_y is scaled, and d_x back: exact for powers of two, else a rounding more of each
- `timeout_ms`: PEER: how long a rank waits for another; MOEC_COMM_DEVICE: how long nothing that is queued may end; 0 = 600000
- `max_blocks`: PEER: most blocks of a kernel, up to 128; 0 = by the size of the call
"""
struct moec_ep_desc
    struct_size::UInt32
    flags::UInt32
    hidden::Int64
    max_tokens::Int64
    num_experts::Int32
    num_zero_experts::Int32
    top_k::Int32
    scheme::UInt32
    dtype::UInt32
    partial_dtype::UInt32
    expert_begin::Ptr{Int32}
    pair_rows::Int64
    overflow::UInt32
    grad_scale::Float32
    timeout_ms::UInt32
    max_blocks::Int32
end
moec_ep_desc(;
    struct_size = UInt32(80),
    flags = UInt32(0),
    hidden = Int64(0),
    max_tokens = Int64(0),
    num_experts = Int32(0),
    num_zero_experts = Int32(0),
    top_k = Int32(0),
    scheme = UInt32(0),
    dtype = UInt32(0),
    partial_dtype = UInt32(0),
    expert_begin = C_NULL,
    pair_rows = Int64(0),
    overflow = UInt32(0),
    grad_scale = Float32(0),
    timeout_ms = UInt32(0),
    max_blocks = Int32(0),
) = moec_ep_desc(struct_size, flags, hidden, max_tokens, num_experts, num_zero_experts, top_k, scheme, dtype, partial_dtype, expert_begin, pair_rows, overflow, grad_scale, timeout_ms, max_blocks)

"""
Fields of `moec_ep_info`:
- `scheme`: moec_ep_scheme in use
- `expert_begin`: of this rank
- `expert_end`: of this rank
- `max_guests`: bound on the guests of a call
- `memory`: bytes of the device that the ep holds
"""
struct moec_ep_info
    struct_size::UInt32
    flags::UInt32
    scheme::UInt32
    expert_begin::Int32
    expert_end::Int32
    reserved0::UInt32
    max_guests::Int64
    memory::UInt64
end
moec_ep_info(;
    struct_size = UInt32(40),
    flags = UInt32(0),
    scheme = UInt32(0),
    expert_begin = Int32(0),
    expert_end = Int32(0),
    reserved0 = UInt32(0),
    max_guests = Int64(0),
    memory = UInt64(0),
) = moec_ep_info(struct_size, flags, scheme, expert_begin, expert_end, reserved0, max_guests, memory)

"""
Fields of `moec_ep_args`:
- `flags`: flags: moec_ep_call_flags
- `bound`: T of no rank is larger; equal on all; 0 = max_tokens
- `x`: in `[T,H]`
- `x_beside`: in `[T,H]`, optional, on all ranks or none: goes with x
- `expert_ids`: in `[T,K]` i32|i64; others than [0,E) go nowhere
- `routing_weights`: in `[T,K]` f32, optional: absent = 1
- `guests`: out `[G,H]` as x. Rows without an id may hold anything
- `guests_beside`: out `[G,H]`, with x_beside
- `guest_ids`: out `[G,K]` i32; -1 = no expert of this rank
- `guest_weights`: out `[G,K]` f32
- `partial`: out `[G,H]` partial_dtype; combine reads what the caller wrote
- `total_tokens`: out: T of all ranks; -1: PEER, or MOEC_COMM_DEVICE but EXACT
- `d_guest_weights`: in `[G,K]` f32, optional, on all ranks or none
- `y`: out `[T,H]` dtype: the sum of partial rows; 0 without any
- `d_routing_weights`: out `[T,K]` f32, with d_guest_weights; 0 where the id is no expert, or the row was dropped
"""
struct moec_ep_args
    struct_size::UInt32
    flags::UInt32
    bound::Int64
    x::moec_tensor
    x_beside::moec_tensor
    expert_ids::moec_tensor
    routing_weights::moec_tensor
    guests::moec_tensor
    guests_beside::moec_tensor
    guest_ids::moec_tensor
    guest_weights::moec_tensor
    partial::moec_tensor
    total_tokens::Int64
    d_guest_weights::moec_tensor
    y::moec_tensor
    d_routing_weights::moec_tensor
end
moec_ep_args(;
    struct_size = UInt32(1560),
    flags = UInt32(0),
    bound = Int64(0),
    x = moec_tensor(),
    x_beside = moec_tensor(),
    expert_ids = moec_tensor(),
    routing_weights = moec_tensor(),
    guests = moec_tensor(),
    guests_beside = moec_tensor(),
    guest_ids = moec_tensor(),
    guest_weights = moec_tensor(),
    partial = moec_tensor(),
    total_tokens = Int64(0),
    d_guest_weights = moec_tensor(),
    y = moec_tensor(),
    d_routing_weights = moec_tensor(),
) = moec_ep_args(struct_size, flags, bound, x, x_beside, expert_ids, routing_weights, guests, guests_beside, guest_ids, guest_weights, partial, total_tokens, d_guest_weights, y, d_routing_weights)

"""
Fields of `moec_ep_state`:
- `status`: 0, or what broke the ep
- `calls`: dispatch and combine
- `rows_needed`: ROWS, EXACT: the pair_rows that would have dropped nothing
- `rows_dropped`: ROWS: of all ranks, those of calls whose work is done
- `bytes_sent`: to and from other ranks; 0 with PEER
- `bytes_received`: to and from other ranks; 0 with PEER
- `message`: what broke the ep, naming the rank or the call; NUL-terminated
"""
struct moec_ep_state
    struct_size::UInt32
    flags::UInt32
    status::Int32
    reserved0::UInt32
    calls::UInt64
    rows_needed::Int64
    rows_dropped::Int64
    bytes_sent::UInt64
    bytes_received::UInt64
    message::NTuple{256,UInt8}
end
moec_ep_state(;
    struct_size = UInt32(312),
    flags = UInt32(0),
    status = Int32(0),
    reserved0 = UInt32(0),
    calls = UInt64(0),
    rows_needed = Int64(0),
    rows_dropped = Int64(0),
    bytes_sent = UInt64(0),
    bytes_received = UInt64(0),
    message = ntuple(_ -> UInt8(0), 256),
) = moec_ep_state(struct_size, flags, status, reserved0, calls, rows_needed, rows_dropped, bytes_sent, bytes_received, message)

# (struct, bytes, field offsets) as the C compiler lays them out; asserted by the tests
const LAYOUT = (
    (moec_buffer, 16, (0, 8,)),
    (moec_size, 16, (0, 8,)),
    (moec_tensor, 128, (0, 8, 16, 20, 24, 28, 32, 80,)),
    (moec_activation, 32, (0, 4, 8, 12, 16, 20, 24, 28,)),
    (moec_quant, 968, (0, 4, 8, 136, 264, 392, 520, 648, 776, 904, 912, 920, 928, 936, 944, 952, 960,)),
    (moec_matrix, 288, (0, 128, 256, 264, 272, 280,)),
    (moec_error_info, 600, (0, 4, 8, 12, 16, 20, 24, 88,)),
    (moec_device_info, 272, (0, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 176, 208,)),
    (moec_allocator, 32, (0, 4, 8, 16, 24,)),
    (moec_thread_pool, 24, (0, 4, 8, 16,)),
    (moec_context_desc, 48, (0, 4, 8, 12, 16, 20, 24, 32, 40,)),
    (moec_stats, 176, (0, 4, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120, 128, 136, 144, 152, 160, 168,)),
    (moec_router_desc, 120, (0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60, 64, 68, 72, 76, 80, 84, 88, 92, 96, 100, 104, 108, 112,)),
    (moec_gate_args, 784, (0, 4, 8, 16, 144, 272, 400, 528, 656,)),
    (moec_gate_grad_args, 1168, (0, 4, 8, 16, 144, 272, 400, 528, 656, 784, 912, 1040,)),
    (moec_route_args, 1416, (0, 4, 8, 136, 264, 392, 520, 648, 776, 904, 1032, 1160, 1288,)),
    (moec_route_grad_args, 904, (0, 4, 8, 136, 264, 392, 520, 648, 776,)),
    (moec_loss_args, 576, (0, 4, 8, 12, 16, 24, 28, 32, 40, 48, 56, 184, 312, 440, 568,)),
    (moec_plan_desc, 64, (0, 4, 8, 16, 20, 24, 28, 32, 36, 40, 44, 48, 56, 60,)),
    (moec_permute_args, 656, (0, 4, 8, 16, 144, 272, 400, 528,)),
    (moec_unpermute_args, 528, (0, 4, 8, 16, 144, 272, 400,)),
    (moec_permute_grad_args, 528, (0, 4, 8, 16, 144, 272, 400,)),
    (moec_unpermute_grad_args, 656, (0, 4, 8, 16, 144, 272, 400, 528,)),
    (moec_weights_desc, 56, (0, 4, 8, 12, 16, 24, 32, 36, 40, 44, 48, 52,)),
    (moec_weight_set, 1160, (0, 4, 8, 296, 584, 872,)),
    (moec_weights_info, 96, (0, 4, 8, 16, 20, 24, 28, 32,)),
    (moec_quantise_desc, 64, (0, 4, 8, 12, 16, 20, 24, 32, 40, 48, 56,)),
    (moec_quantise_info, 152, (0, 4, 8, 136, 144, 148,)),
    (moec_quantise_args, 296, (0, 4, 8, 16, 144, 272, 280,)),
    (moec_factors, 264, (0, 128, 256, 260,)),
    (moec_adapter, 1056, (0, 264, 528, 792,)),
    (moec_adapters_desc, 32, (0, 4, 8, 12, 16, 24,)),
    (moec_experts_desc, 160, (0, 4, 8, 16, 24, 32, 36, 40, 44, 48, 52, 56, 64, 68, 72, 104, 136, 140, 144, 148, 152, 156,)),
    (moec_experts_args, 968, (0, 4, 8, 16, 24, 32, 160, 288, 416, 544, 672, 800, 816, 832, 840,)),
    (moec_experts_grad_args, 1504, (0, 4, 8, 16, 24, 32, 160, 288, 416, 544, 560, 688, 816, 824, 832, 960, 1088, 1216, 1344, 1360, 1368, 1496,)),
    (moec_experts_sizes, 56, (0, 4, 8, 24, 40,)),
    (moec_layer_desc, 48, (0, 4, 8, 16, 24, 28, 32, 40,)),
    (moec_layer_args, 2768, (0, 4, 8, 16, 24, 32, 160, 288, 416, 544, 672, 800, 928, 1056, 1184, 1312, 1440, 1568, 1696, 1824, 1952, 2080, 2208, 2336, 2464, 2592, 2608, 2624, 2632, 2640,)),
    (moec_layer_grad_args, 1720, (0, 4, 8, 16, 144, 272, 400, 528, 656, 784, 912, 1040, 1048, 1056, 1184, 1312, 1440, 1568, 1696, 1712,)),
    (moec_comm_callbacks, 88, (0, 4, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80,)),
    (moec_comm_desc, 16, (0, 4, 8, 12,)),
    (moec_ep_desc, 80, (0, 4, 8, 16, 24, 28, 32, 36, 40, 44, 48, 56, 64, 68, 72, 76,)),
    (moec_ep_info, 40, (0, 4, 8, 12, 16, 20, 24, 32,)),
    (moec_ep_args, 1560, (0, 4, 8, 16, 144, 272, 400, 528, 656, 784, 912, 1040, 1168, 1176, 1304, 1432,)),
    (moec_ep_state, 312, (0, 4, 8, 12, 16, 24, 32, 40, 48, 56,)),
)

"Version of the running library: major << 22 | minor << 12 | patch."
moec_version() =
    @ccall LIB.moec_version()::UInt32

"Static text such as \"0.1.0\"."
moec_version_string() =
    @ccall LIB.moec_version_string()::Ptr{UInt8}

"MOEC_ABI_VERSION of the running library."
moec_abi_version() =
    @ccall LIB.moec_abi_version()::UInt32

"Static JSON: compiler, instruction sets compiled in, build id, flags."
moec_build_info() =
    @ccall LIB.moec_build_info()::Ptr{UInt8}

"Static name such as \"MOEC_E_SHAPE\"; \"MOEC_E_UNKNOWN\" for other values; never NULL."
moec_status_name(status) =
    @ccall LIB.moec_status_name(status::Int32)::Ptr{UInt8}

"Copies this OS thread's last failure; code 0 and empty texts if there was none. It stays."
moec_last_error(out) =
    @ccall LIB.moec_last_error(out::Ptr{moec_error_info})::Int32

"Zeroes `bytes` bytes and stores `bytes` in the leading struct_size. NULL, or bytes < 8, does nothing."
moec_struct_init(sized_struct, bytes) =
    @ccall LIB.moec_struct_init(sized_struct::Ptr{Cvoid}, bytes::UInt64)::Cvoid

"Process-wide log sink; NULL: silence. Nothing below min_level (moec_log_level) is delivered."
moec_set_log(sink, user, min_level) =
    @ccall LIB.moec_set_log(sink::Ptr{Cvoid}, user::Ptr{Cvoid}, min_level::Int32)::Int32

"Loads one backend plug-in by path. Host only. E_NO_BACKEND: the file cannot be opened; E_BACKEND_ABI: it is of another build."
moec_backend_load(path) =
    @ccall LIB.moec_backend_load(path::Ptr{UInt8})::Int32

"Number of devices of a type (moec_device_type). Host only. 0 without a driver or plug-in: that is no error, and moec_backend_describe says why."
moec_device_count(device_type, count) =
    @ccall LIB.moec_device_count(device_type::Int32, count::Ptr{Int32})::Int32

"JSON: `state` (\"ready\", \"no_plugin\", \"other_build\", \"no_driver\", \"old_driver\", \"no_device\" or \"failed\") and `devices`; of CUDA also `why` there is none, the file of the `plugin`, the CUDA versions that the `driver` serves and the plug-in `needs`, and whose code multiplies matrices without experts (`dense_products`: where cuBLASLt was found). *need counts the final NUL; buffer may be NULL. Host only; may wait while the driver starts. E_WORKSPACE: the buffer is too small; *need is set."
moec_backend_describe(device_type, buffer, bytes, need) =
    @ccall LIB.moec_backend_describe(device_type::Int32, buffer::Ptr{UInt8}, bytes::UInt64, need::Ptr{UInt64})::Int32

"What a device is, without a context on it. Host only. E_NO_BACKEND: there is no such device."
moec_device_query(device_type, device_id, out) =
    @ccall LIB.moec_device_query(device_type::Int32, device_id::Int32, out::Ptr{moec_device_info})::Int32

"Makes a context on one device. desc may be NULL (the CPU, all defaults). May wait while the driver starts. E_NO_BACKEND: no plug-in or no such device; E_UNSUPPORTED: a GPU before compute capability 8.0."
moec_context_create(desc, out) =
    @ccall LIB.moec_context_create(desc::Ptr{moec_context_desc}, out::Ptr{Ptr{moec_context}})::Int32

"Drops the caller's reference. The last one, of the caller or of an object made with the context, gives its memory back, what is left of moec_buffer_alloc with it; that may wait."
moec_context_free(context) =
    @ccall LIB.moec_context_free(context::Ptr{moec_context})::Cvoid

"What the context's device is, with its free memory. Host only."
moec_context_device(context, out) =
    @ccall LIB.moec_context_device(context::Ptr{moec_context}, out::Ptr{moec_device_info})::Int32

"Holds at least `bytes` of scratch, so that later calls without a caller's workspace, one at a time, do not allocate. Allocates, and replaces the largest idle scratch that is smaller. E_OUT_OF_MEMORY: workspace_limit (nothing has changed), or the allocator refused; E_WOULD_ALLOC: the stream is being captured."
moec_context_reserve(context, bytes, stream) =
    @ccall LIB.moec_context_reserve(context::Ptr{moec_context}, bytes::UInt64, stream::Ptr{Cvoid})::Int32

"Gives back the scratch that neither a call nor a captured graph uses. May wait."
moec_context_trim(context) =
    @ccall LIB.moec_context_trim(context::Ptr{moec_context})::Int32

"*deferred: the status of device work that failed after its call had returned, or 0. No wait."
moec_context_poll(context, deferred) =
    @ccall LIB.moec_context_poll(context::Ptr{moec_context}, deferred::Ptr{Int32})::Int32

"Waits for the stream; returns a deferred error if there is one. E_WOULD_SYNC: the stream is being captured."
moec_context_sync(context, stream) =
    @ccall LIB.moec_context_sync(context::Ptr{moec_context}, stream::Ptr{Cvoid})::Int32

"Copies the counters. Host only."
moec_context_stats(context, out) =
    @ccall LIB.moec_context_stats(context::Ptr{moec_context}, out::Ptr{moec_stats})::Int32

"Sets every counter but workspace_bytes and workspace_peak to 0. Host only."
moec_context_stats_reset(context) =
    @ccall LIB.moec_context_stats_reset(context::Ptr{moec_context})::Int32

"Makes a compact view of `data`; shape has ndim entries. Host only."
moec_tensor_make(out, data, dtype, device_type, device_id, ndim, shape) =
    @ccall LIB.moec_tensor_make(out::Ptr{moec_tensor}, data::Ptr{Cvoid}, dtype::UInt32, device_type::Int32, device_id::Int32, ndim::Int32, shape::Ptr{Int64})::Int32

"Borrows a DLTensor*. NULL strides and a byte_offset are understood. Host only. E_LAYOUT: one element stands for all (strides 0, a broadcast number)."
moec_tensor_from_dlpack(dl_tensor, out) =
    @ccall LIB.moec_tensor_from_dlpack(dl_tensor::Ptr{Cvoid}, out::Ptr{moec_tensor})::Int32

"Elements, or -1 on overflow, a negative extent or NULL. Host only."
moec_tensor_numel(tensor) =
    @ccall LIB.moec_tensor_numel(tensor::Ptr{moec_tensor})::Int64

"Bytes of the elements, or -1 likewise. Host only."
moec_tensor_bytes(tensor) =
    @ccall LIB.moec_tensor_bytes(tensor::Ptr{moec_tensor})::Int64

"Checks dtype, dimensions, strides, alignment and device type. Host only."
moec_tensor_check(tensor) =
    @ccall LIB.moec_tensor_check(tensor::Ptr{moec_tensor})::Int32

"Allocates memory of the context's device for the caller, for use on any stream; its values are undefined. It comes from the context's allocator (stream NULL), or from the backend, aligned to 256 bytes on CUDA and 64 on the CPU; it counts as one of `allocs` and not towards workspace_limit, and NO_ALLOC does not forbid it. bytes 0 gives an absent buffer. Queues nothing, may be called during a capture, and may wait as cudaMalloc may."
moec_buffer_alloc(context, bytes, out) =
    @ccall LIB.moec_buffer_alloc(context::Ptr{moec_context}, bytes::UInt64, out::Ptr{moec_buffer})::Int32

"Gives a buffer of moec_buffer_alloc back, to the context that made it, and makes *buffer absent; an absent one, or NULL, is left alone. No later work may use it; work that is queued already may, because on CUDA the call waits for the device (an allocator decides for itself). E_INVALID_ARG: not a buffer of this context, freed before, or of other bytes."
moec_buffer_free(context, buffer) =
    @ccall LIB.moec_buffer_free(context::Ptr{moec_context}, buffer::Ptr{moec_buffer})::Int32

"target = source, of one dtype and shape: into the device, out of it, or within either side. Each is memory of the context's device or of the host; device_type says which: MOEC_CPU is pageable memory, MOEC_CUDA_HOST pinned. Queues. On CUDA pageable source has been read when the call returns; until then the call may wait for copies. pageable target makes the call wait for the stream: it is complete when the call returns, which counts as one of `host_syncs` and returns a deferred error. pinned memory must stay, and stay as it is, until the stream has come to the copy. E_WOULD_SYNC: the stream is being captured and either is pageable."
moec_tensor_copy(context, source, target, stream) =
    @ccall LIB.moec_tensor_copy(context::Ptr{moec_context}, source::Ptr{moec_tensor}, target::Ptr{moec_tensor}, stream::Ptr{Cvoid})::Int32

"Sets every byte of a tensor on the context's device to 0. Queues."
moec_tensor_zero(context, tensor, stream) =
    @ccall LIB.moec_tensor_zero(context::Ptr{moec_context}, tensor::Ptr{moec_tensor}, stream::Ptr{Cvoid})::Int32

"Makes a router, which never changes. Queues nothing. E_UNSUPPORTED names a legal combination that is not implemented."
moec_router_create(context, desc, out) =
    @ccall LIB.moec_router_create(context::Ptr{moec_context}, desc::Ptr{moec_router_desc}, out::Ptr{Ptr{moec_router}})::Int32

"Drops the caller's reference."
moec_router_free(router) =
    @ccall LIB.moec_router_free(router::Ptr{moec_router})::Cvoid

"logits [T,E+Z] = transform(x [T,H]) * weight^T + bias, with fp32 accumulation. Queues; takes scratch."
moec_gate_forward(router, args, stream) =
    @ccall LIB.moec_gate_forward(router::Ptr{moec_router}, args::Ptr{moec_gate_args}, stream::Ptr{Cvoid})::Int32

"d_logits [T,E+Z] to the gradients of x, weight, bias and input_scale, each where it is given. Queues; takes scratch."
moec_gate_backward(router, args, stream) =
    @ccall LIB.moec_gate_backward(router::Ptr{moec_router}, args::Ptr{moec_gate_grad_args}, stream::Ptr{Cvoid})::Int32

"logits [T,E+Z] to expert ids and routing weights [T,K]. Queues; takes scratch."
moec_route_forward(router, args, stream) =
    @ccall LIB.moec_route_forward(router::Ptr{moec_router}, args::Ptr{moec_route_args}, stream::Ptr{Cvoid})::Int32

"d_routing_weights [T,K] to d_logits [T,E+Z]. Selection itself has no gradient. Queues; takes scratch."
moec_route_backward(router, args, stream) =
    @ccall LIB.moec_route_backward(router::Ptr{moec_router}, args::Ptr{moec_route_grad_args}, stream::Ptr{Cvoid})::Int32

"Balances without an auxiliary loss: bias[e] += rate * sign(mean(counts) - counts[e]); sign(0) is 0. counts [E+Z] i32|i64 (as from route_forward, all-reduced before if wanted), bias [E+Z] f32. Queues."
moec_router_bias_update(router, counts, rate, bias, stream) =
    @ccall LIB.moec_router_bias_update(router::Ptr{moec_router}, counts::Ptr{moec_tensor}, rate::Float32, bias::Ptr{moec_tensor}, stream::Ptr{Cvoid})::Int32

"loss [1] of the logits [T,E] of each layer. Queues; takes scratch of O(E) bytes, whatever T."
moec_loss_forward(context, args, stream) =
    @ccall LIB.moec_loss_forward(context::Ptr{moec_context}, args::Ptr{moec_loss_args}, stream::Ptr{Cvoid})::Int32

"Adds the loss's gradient to d_logits [T,E] of each layer. Queues; takes scratch likewise."
moec_loss_backward(context, args, stream) =
    @ccall LIB.moec_loss_backward(context::Ptr{moec_context}, args::Ptr{moec_loss_args}, stream::Ptr{Cvoid})::Int32

"Bytes of a plan's memory for max_tokens, building it included, and the bound of P. Host only."
moec_plan_size(desc, bytes, max_rows) =
    @ccall LIB.moec_plan_size(desc::Ptr{moec_plan_desc}, bytes::Ptr{UInt64}, max_rows::Ptr{Int64})::Int32

"Makes a plan, which is not built yet. Queues nothing. memory NULL: the context allocates, this once; else at least moec_plan_size bytes of the device, kept by the caller. E_WORKSPACE."
moec_plan_create(context, desc, memory, out) =
    @ccall LIB.moec_plan_create(context::Ptr{moec_context}, desc::Ptr{moec_plan_desc}, memory::Ptr{moec_buffer}, out::Ptr{Ptr{moec_plan}})::Int32

"Drops the caller's reference; the last one gives the plan's own memory back, which may wait."
moec_plan_free(plan) =
    @ccall LIB.moec_plan_free(plan::Ptr{moec_plan})::Cvoid

"Builds from expert_ids [T,K] i32|i64 and routing_weights [T,K] f32 (absent or NULL = 1). Queues. Like the other four, it builds in place and takes no scratch, and one that fails while it builds leaves a plan that is not built."
moec_plan_from_topk(plan, expert_ids, routing_weights, stream) =
    @ccall LIB.moec_plan_from_topk(plan::Ptr{moec_plan}, expert_ids::Ptr{moec_tensor}, routing_weights::Ptr{moec_tensor}, stream::Ptr{Cvoid})::Int32

"Routes logits [T,E+Z] and builds. Outputs of args may be absent. Queues; takes scratch."
moec_plan_from_logits(plan, router, args, stream) =
    @ccall LIB.moec_plan_from_logits(plan::Ptr{moec_plan}, router::Ptr{moec_router}, args::Ptr{moec_route_args}, stream::Ptr{Cvoid})::Int32

"Builds from routing_map [T,E] u8|bool|i32 (non-zero = routed; slots by ascending id) and probs [T,E] f32 (absent or NULL = 1). Queues. E_OVERFLOW: more than top_k in a row (CUDA: deferred)."
moec_plan_from_map(plan, routing_map, probs, stream) =
    @ccall LIB.moec_plan_from_map(plan::Ptr{moec_plan}, routing_map::Ptr{moec_tensor}, probs::Ptr{moec_tensor}, stream::Ptr{Cvoid})::Int32

"Builds from a rule (moec_plan_rule) for num_tokens tokens, and routing_weights [T,K] f32 (absent or NULL = 1). Queues."
moec_plan_from_rule(plan, rule, num_tokens, routing_weights, stream) =
    @ccall LIB.moec_plan_from_rule(plan::Ptr{moec_plan}, rule::UInt32, num_tokens::Int64, routing_weights::Ptr{moec_tensor}, stream::Ptr{Cvoid})::Int32

"EXPERT_CHOICE: builds from scores [T,E] f32; token_mask [T] u8|bool (absent or NULL = all). NaN is above +inf, -inf is never taken, and ties go to the lowest token. Queues."
moec_plan_from_scores(plan, scores, token_mask, stream) =
    @ccall LIB.moec_plan_from_scores(plan::Ptr{moec_plan}, scores::Ptr{moec_tensor}, token_mask::Ptr{moec_tensor}, stream::Ptr{Cvoid})::Int32

"Adopts a plan of num_tokens tokens that lies in the plan's memory already, written by an equal desc. Host only. E_CORRUPT: on the CPU, there is none."
moec_plan_attach(plan, num_tokens) =
    @ccall LIB.moec_plan_attach(plan::Ptr{moec_plan}, num_tokens::Int64)::Int32

"Borrows one array (moec_plan_field 0 to 10) on the device, until the plan is rebuilt or freed. Host only."
moec_plan_view(plan, field, out) =
    @ccall LIB.moec_plan_view(plan::Ptr{moec_plan}, field::Int32, out::Ptr{moec_tensor})::Int32

"Copies a field to dst of its shape and type; on the CPU dst may be i64 for i32. Queues; takes scratch for a map in i64. E_UNSUPPORTED: i64 on CUDA."
moec_plan_export(plan, field, dst, stream) =
    @ccall LIB.moec_plan_export(plan::Ptr{moec_plan}, field::Int32, dst::Ptr{moec_tensor}, stream::Ptr{Cvoid})::Int32

"Copies TOTALS to the host. Waits for the stream."
moec_plan_totals_sync(plan, totals, stream) =
    @ccall LIB.moec_plan_totals_sync(plan::Ptr{moec_plan}, totals::Ptr{Int32}, stream::Ptr{Cvoid})::Int32

"Serialises the plan to host memory: versioned, checksummed, little-endian. buffer NULL: only *need is set, and nothing waits; else waits for the stream. E_WORKSPACE: the buffer is too small; *need is set."
moec_plan_save_sync(plan, buffer, bytes, need, stream) =
    @ccall LIB.moec_plan_save_sync(plan::Ptr{moec_plan}, buffer::Ptr{Cvoid}, bytes::UInt64, need::Ptr{UInt64}, stream::Ptr{Cvoid})::Int32

"Restores a saved plan bit for bit into a plan of an equal desc. Waits for the stream. E_CORRUPT: the bytes are damaged or of another version; E_MISMATCH: they are of another desc."
moec_plan_restore_sync(plan, buffer, bytes, stream) =
    @ccall LIB.moec_plan_restore_sync(plan::Ptr{moec_plan}, buffer::Ptr{Cvoid}, bytes::UInt64, stream::Ptr{Cvoid})::Int32

"rows [P,H] = x [T,H] of each row's token, with x_scale beside it. Queues."
moec_permute(context, args, stream) =
    @ccall LIB.moec_permute(context::Ptr{moec_context}, args::Ptr{moec_permute_args}, stream::Ptr{Cvoid})::Int32

"y [T,H] = residual + sum of routing weight * row over each token's rows. Queues."
moec_unpermute(context, args, stream) =
    @ccall LIB.moec_unpermute(context::Ptr{moec_context}, args::Ptr{moec_unpermute_args}, stream::Ptr{Cvoid})::Int32

"d_rows [P,H] to d_x [T,H], the sum over each token's rows. Queues."
moec_permute_backward(context, args, stream) =
    @ccall LIB.moec_permute_backward(context::Ptr{moec_context}, args::Ptr{moec_permute_grad_args}, stream::Ptr{Cvoid})::Int32

"d_y [T,H] to d_rows [P,H], and to d_routing_weights [T,K] where it is given. Queues."
moec_unpermute_backward(context, args, stream) =
    @ccall LIB.moec_unpermute_backward(context::Ptr{moec_context}, args::Ptr{moec_unpermute_grad_args}, stream::Ptr{Cvoid})::Int32

"Makes an empty set for any context on the same device. Queues nothing. E_UNSUPPORTED: a scheme that is not implemented."
moec_weights_create(context, desc, out) =
    @ccall LIB.moec_weights_create(context::Ptr{moec_context}, desc::Ptr{moec_weights_desc}, out::Ptr{Ptr{moec_weights}})::Int32

"Drops the caller's reference; the last one gives a packed copy back, which may wait."
moec_weights_free(weights) =
    @ccall LIB.moec_weights_free(weights::Ptr{moec_weights})::Cvoid

"Borrows the matrices, shapes as in moec_weight_set: the caller keeps them alive and may change their values unless FROZEN. Queues nothing; drops a packed copy, which may wait."
moec_weights_bind(weights, set) =
    @ccall LIB.moec_weights_bind(weights::Ptr{moec_weights}, set::Ptr{moec_weight_set})::Int32

"What is bound and packed. Host only."
moec_weights_query(weights, out) =
    @ccall LIB.moec_weights_query(weights::Ptr{moec_weights}, out::Ptr{moec_weights_info})::Int32

"FROZEN only: makes the packed copy; on CUDA of codes alone, which kernels read as stacks. Queues. memory NULL: the library allocates; else packed_bytes of the device, kept by the caller. E_UNSUPPORTED: no packed form here; E_WORKSPACE; E_WOULD_ALLOC: a capture without memory."
moec_weights_pack(weights, memory, stream) =
    @ccall LIB.moec_weights_pack(weights::Ptr{moec_weights}, memory::Ptr{moec_buffer}, stream::Ptr{Cvoid})::Int32

"Reads the bound matrices of experts [first, first+count) into the packed copy again, after they changed. Queues."
moec_weights_refresh(weights, first, count, stream) =
    @ccall LIB.moec_weights_refresh(weights::Ptr{moec_weights}, first::Int32, count::Int32, stream::Ptr{Cvoid})::Int32

"Writes one expert's matrix as values to [N,K], where its orientation is IN_OUT to [K,N], of any real type: those of moec_scheme in fp32, rounded once to that type. GATE_UP has its rows as they are bound; GATE and UP are also parts of it. Queues. E_INVALID_STATE: not bound, or the source was released; E_INVALID_ARG: the gate_layout has no such matrix; E_ALIAS: `to` overlaps the weights."
moec_weights_dequantise(weights, matrix, expert, to, stream) =
    @ccall LIB.moec_weights_dequantise(weights::Ptr{moec_weights}, matrix::UInt32, expert::Int32, to::Ptr{moec_tensor}, stream::Ptr{Cvoid})::Int32

"Packed weights need the caller's matrices no longer: forgets them. Host only. E_UNSUPPORTED: needs_source is 1."
moec_weights_release_source(weights) =
    @ccall LIB.moec_weights_release_source(weights::Ptr{moec_weights})::Int32

"Writes what was bound, bit for bit, to the tensors of `to`, which is like it in types, shapes and blocks; also without the source. Queues. E_INVALID_STATE: nothing is packed; E_MISMATCH: `to` is unlike what was bound; E_ALIAS: its tensors overlap."
moec_weights_unpack(weights, to, stream) =
    @ccall LIB.moec_weights_unpack(weights::Ptr{moec_weights}, to::Ptr{moec_weight_set}, stream::Ptr{Cvoid})::Int32

"Writes the packed copy to a file, which takes the place of `path` whole (of a link, too). Waits for the default stream and the disk. E_INVALID_STATE: nothing is packed."
moec_weights_save_sync(weights, path) =
    @ccall LIB.moec_weights_save_sync(weights::Ptr{moec_weights}, path::Ptr{UInt8})::Int32

"Maps such a file as the packed copy: read-only, shared between processes; on CUDA copies it to the device. Waits likewise. E_CORRUPT: the file is damaged; E_MISMATCH: it is of another desc or packed_format; E_UNSUPPORTED: no packed form here."
moec_weights_map_sync(weights, path) =
    @ccall LIB.moec_weights_map_sync(weights::Ptr{moec_weights}, path::Ptr{UInt8})::Int32

"What moec_quantise writes: scheme, type and shape of the codes and of each tensor of `quant`, without memory, and the blocks and flags of `quant`. Host only."
moec_quantise_query(context, desc, info, quant) =
    @ccall LIB.moec_quantise_query(context::Ptr{moec_context}, desc::Ptr{moec_quantise_desc}, info::Ptr{moec_quantise_info}, quant::Ptr{moec_quant})::Int32

"source [E,N,K] to codes and scales, with the bytes of the library that its kind names; of nested u8 scales, one that lies between two may be the other. A scale of values of which one is NaN or infinite is NaN, with the codes of 0; a mean or scales2 that it enters spoils all below it likewise. Queues; takes scratch."
moec_quantise(context, args, stream) =
    @ccall LIB.moec_quantise(context::Ptr{moec_context}, args::Ptr{moec_quantise_args}, stream::Ptr{Cvoid})::Int32

"Makes an empty set of adapters for any context on the same device. Host only."
moec_adapters_create(context, desc, out) =
    @ccall LIB.moec_adapters_create(context::Ptr{moec_context}, desc::Ptr{moec_adapters_desc}, out::Ptr{Ptr{moec_adapters}})::Int32

"Drops the caller's reference."
moec_adapters_free(adapters) =
    @ccall LIB.moec_adapters_free(adapters::Ptr{moec_adapters})::Cvoid

"Borrows the factors of `count` adapters, 1 to 256, in the place of those that were bound before; the structs are copied. The caller keeps the memory alive and may change its values. Calls add up all of them. Host only."
moec_adapters_bind(adapters, list, count) =
    @ccall LIB.moec_adapters_bind(adapters::Ptr{moec_adapters}, list::Ptr{moec_adapter}, count::Int32)::Int32

"Adds scale B A of all that is bound to the bound matrices of plain weights: sums in fp32, one rounding to the dtype of the weights (on CUDA one for each 16 adapters). unmerge subtracts it, which gives the values before back only up to that rounding. A packed copy is not changed: moec_weights_refresh reads the matrices again. Queues. E_UNSUPPORTED: quantised matrices (moec_adapters_merge_copy); E_ALIAS: a matrix overlaps a factor."
moec_adapters_merge(adapters, weights, stream) =
    @ccall LIB.moec_adapters_merge(adapters::Ptr{moec_adapters}, weights::Ptr{moec_weights}, stream::Ptr{Cvoid})::Int32

"As moec_adapters_merge, with the sign turned."
moec_adapters_unmerge(adapters, weights, stream) =
    @ccall LIB.moec_adapters_unmerge(adapters::Ptr{moec_adapters}, weights::Ptr{moec_weights}, stream::Ptr{Cvoid})::Int32

"Merges into a copy of one matrix (moec_matrix_name) of all experts, plain or quantised, which stays as it is: `values` [E,N,K], where its orientation is IN_OUT [E,K,N], of any real type, gets what moec_weights_dequantise writes, and scale B A added as moec_adapters_merge adds it. `quantised`: NULL, or where moec_quantise puts the codes of these values; its source is absent, and its arrays may be those that the weights are bound to. Queues; takes the scratch of moec_quantise. E_INVALID_ARG: no bound adapter has factors of the matrix; E_INVALID_STATE: not bound, or the source was released; E_MISMATCH: quantised's orientation is another; E_ALIAS: `values` overlaps the weights or a factor."
moec_adapters_merge_copy(adapters, weights, matrix, values, quantised, stream) =
    @ccall LIB.moec_adapters_merge_copy(adapters::Ptr{moec_adapters}, weights::Ptr{moec_weights}, matrix::UInt32, values::Ptr{moec_tensor}, quantised::Ptr{moec_quantise_args}, stream::Ptr{Cvoid})::Int32

"Makes experts, which never change; kernels are chosen here by device, type and shape, never by timing. Queues nothing. E_UNSUPPORTED names a legal combination that is not implemented."
moec_experts_create(context, desc, out) =
    @ccall LIB.moec_experts_create(context::Ptr{moec_context}, desc::Ptr{moec_experts_desc}, out::Ptr{Ptr{moec_experts}})::Int32

"Drops the caller's reference."
moec_experts_free(experts) =
    @ccall LIB.moec_experts_free(experts::Ptr{moec_experts})::Cvoid

"Exact bytes for T tokens, whatever the routing. Host only."
moec_experts_query(experts, out) =
    @ccall LIB.moec_experts_query(experts::Ptr{moec_experts}, out::Ptr{moec_experts_sizes})::Int32

"The same for calls with adapters as they are bound now. Host only."
moec_experts_query_adapters(experts, adapters, out) =
    @ccall LIB.moec_experts_query_adapters(experts::Ptr{moec_experts}, adapters::Ptr{moec_adapters}, out::Ptr{moec_experts_sizes})::Int32

"y [T,H] = residual + output_scale * sum_k w[t,k] expert(x[t]) + output_bias + shared(x[t]), of the experts of the local range. Queues; takes scratch. E_WORKSPACE: `saved`, too."
moec_experts_forward(experts, args, stream) =
    @ccall LIB.moec_experts_forward(experts::Ptr{moec_experts}, args::Ptr{moec_experts_args}, stream::Ptr{Cvoid})::Int32

"d_y [T,H] and what forward saved to the gradients of x, routing weights, matrices and biases, each where it is given. Queues; takes scratch. E_INVALID_STATE: desc.save is NONE; E_MISMATCH: on the CPU, `saved` is of another call."
moec_experts_backward(experts, args, stream) =
    @ccall LIB.moec_experts_backward(experts::Ptr{moec_experts}, args::Ptr{moec_experts_grad_args}, stream::Ptr{Cvoid})::Int32

"JSON: for T tokens the kernels, their tiles, and bytes. *need counts the final NUL; buffer may be NULL. Host only. E_WORKSPACE: the buffer is too small; *need is set."
moec_experts_describe(experts, weights, num_tokens, buffer, bytes, need) =
    @ccall LIB.moec_experts_describe(experts::Ptr{moec_experts}, weights::Ptr{moec_weights}, num_tokens::Int64, buffer::Ptr{UInt8}, bytes::UInt64, need::Ptr{UInt64})::Int32

"Makes a router and experts in one, which never change. Queues nothing. E_UNSUPPORTED: as they."
moec_layer_create(context, desc, out) =
    @ccall LIB.moec_layer_create(context::Ptr{moec_context}, desc::Ptr{moec_layer_desc}, out::Ptr{Ptr{moec_layer}})::Int32

"Drops the caller's reference."
moec_layer_free(layer) =
    @ccall LIB.moec_layer_free(layer::Ptr{moec_layer})::Cvoid

"Exact bytes for T tokens, plan and routing included, whatever the routing. Host only."
moec_layer_query(layer, out) =
    @ccall LIB.moec_layer_query(layer::Ptr{moec_layer}, out::Ptr{moec_experts_sizes})::Int32

"The same for calls with adapters as they are bound now. Host only."
moec_layer_query_adapters(layer, adapters, out) =
    @ccall LIB.moec_layer_query_adapters(layer::Ptr{moec_layer}, adapters::Ptr{moec_adapters}, out::Ptr{moec_experts_sizes})::Int32

"y [T,H] from x [T,H]: moec_gate_forward, moec_route_forward, moec_plan_from_topk and moec_experts_forward with one workspace. Queues; takes scratch. E_WORKSPACE: `saved`, too."
moec_layer_forward(layer, args, stream) =
    @ccall LIB.moec_layer_forward(layer::Ptr{moec_layer}, args::Ptr{moec_layer_args}, stream::Ptr{Cvoid})::Int32

"d_y [T,H] and what forward saved to every gradient that is given; the plan is built again. Queues; takes scratch. E_INVALID_STATE: desc.experts.save is NONE; E_MISMATCH: on the CPU, `saved` is of another call."
moec_layer_backward(layer, args, stream) =
    @ccall LIB.moec_layer_backward(layer::Ptr{moec_layer}, args::Ptr{moec_layer_grad_args}, stream::Ptr{Cvoid})::Int32

"As moec_experts_describe, with the bytes of the layer."
moec_layer_describe(layer, weights, num_tokens, buffer, bytes, need) =
    @ccall LIB.moec_layer_describe(layer::Ptr{moec_layer}, weights::Ptr{moec_weights}, num_tokens::Int64, buffer::Ptr{UInt8}, bytes::UInt64, need::Ptr{UInt64})::Int32

"Makes a communicator from callbacks, which are copied. Not collective; queues nothing; on CUDA it allocates some memory of the device, this once. E_UNSUPPORTED: on the CPU MOEC_COMM_DEVICE. moec/mpi.h and moec/nccl.h have callbacks for MPI and NCCL."
moec_comm_create(context, desc, callbacks, out) =
    @ccall LIB.moec_comm_create(context::Ptr{moec_context}, desc::Ptr{moec_comm_desc}, callbacks::Ptr{moec_comm_callbacks}, out::Ptr{Ptr{moec_comm}})::Int32

"Drops the caller's reference; the last one calls `release`. Not collective."
moec_comm_free(comm) =
    @ccall LIB.moec_comm_free(comm::Ptr{moec_comm})::Cvoid

"Gives up the other ranks, of which one may be dead: calls `abort`, once. The comm and its eps are broken then: E_COMM. For any thread, also while another one waits in a call of the comm. Not collective. E_UNSUPPORTED: the callbacks have no abort; E_CALLBACK: it failed."
moec_comm_abort(comm) =
    @ccall LIB.moec_comm_abort(comm::Ptr{moec_comm})::Int32

"in_out [any shape] f32|i32|i64 = the sum over all ranks, in rank order: counts for moec_router_bias_update, gradients of what all share. Collective; takes scratch of N times its bytes. With MOEC_COMM_DEVICE it is queued, and nothing is compared; else it waits for the stream. E_MISMATCH and the others: as above."
moec_comm_sum(comm, in_out, stream) =
    @ccall LIB.moec_comm_sum(comm::Ptr{moec_comm}, in_out::Ptr{moec_tensor}, stream::Ptr{Cvoid})::Int32

"Makes an ep. Collective; waits; allocates moec_ep_info.memory, this once: for PEER not with the context's allocator. E_UNSUPPORTED: the scheme needs what the comm lacks, or a rank does not reach another's memory. E_MISMATCH, E_COMM, E_TIMEOUT, E_CALLBACK: as above; E_COMM also where another rank cannot allocate."
moec_ep_create(comm, desc, out) =
    @ccall LIB.moec_ep_create(comm::Ptr{moec_comm}, desc::Ptr{moec_ep_desc}, out::Ptr{Ptr{moec_ep}})::Int32

"Drops the caller's reference; the last one gives its memory back: with PEER it waits for the device, and the memory stays until all ranks have freed theirs. Not collective."
moec_ep_free(ep) =
    @ccall LIB.moec_ep_free(ep::Ptr{moec_ep})::Cvoid

"Scheme, range, bytes. Host only."
moec_ep_query(ep, out) =
    @ccall LIB.moec_ep_query(ep::Ptr{moec_ep}, out::Ptr{moec_ep_info})::Int32

"JSON: the scheme and why, ranks, ranges, bytes, PEER's blocks for max_tokens. *need counts the final NUL; buffer may be NULL. Host only. E_WORKSPACE: it is too small; *need is set."
moec_ep_describe(ep, buffer, bytes, need) =
    @ccall LIB.moec_ep_describe(ep::Ptr{moec_ep}, buffer::Ptr{UInt8}, bytes::UInt64, need::Ptr{UInt64})::Int32

"Sends each token to the ranks of its experts, and sets the `out` views of args. Also the backward of combine: x = d_y. Collective; allocates nothing. E_WOULD_SYNC: the stream is captured, with EXACT or without MOEC_COMM_CAPTURE. E_MISMATCH, E_COMM, E_TIMEOUT, E_CALLBACK: as above."
moec_ep_dispatch(ep, args, stream) =
    @ccall LIB.moec_ep_dispatch(ep::Ptr{moec_ep}, args::Ptr{moec_ep_args}, stream::Ptr{Cvoid})::Int32

"Sends the partial rows of the last dispatch home: y [T,H] is their sum. Also the backward of dispatch: y = d_x, and d_guest_weights [G,K] to d_routing_weights [T,K]. T is the dispatch's. Collective; allocates nothing. E_INVALID_STATE: there was no dispatch. E_MISMATCH, E_COMM, E_TIMEOUT, E_CALLBACK, E_WOULD_SYNC: as above."
moec_ep_combine(ep, args, stream) =
    @ccall LIB.moec_ep_combine(ep::Ptr{moec_ep}, args::Ptr{moec_ep_args}, stream::Ptr{Cvoid})::Int32

"Counters, and whether the comm is well. Never waits."
moec_ep_poll(ep, out) =
    @ccall LIB.moec_ep_poll(ep::Ptr{moec_ep}, out::Ptr{moec_ep_state})::Int32
