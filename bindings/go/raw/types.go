// SPDX-License-Identifier: Apache-2.0
// Code generated from moec.h by generate.py; DO NOT EDIT.

package raw

// Of the header that this package was made from.
const (
	HeaderVersionMajor = 0
	HeaderVersionMinor = 1
	HeaderVersionPatch = 0
	HeaderAbiVersion = 0
	HeaderMaxDims = 6
)

const (
	Ok = 0
	SNotReady = 1
	EInvalidArg = -1
	EInvalidState = -2
	EAbi = -3
	EShape = -4
	EDtype = -5
	ELayout = -6
	EDevice = -7
	EUnsupported = -8
	EOutOfMemory = -9
	EWorkspace = -10
	ENoBackend = -11
	EBackendAbi = -12
	EWouldSync = -13
	EWouldAlloc = -14
	ECuda = -15
	EComm = -16
	ETimeout = -17
	ECallback = -18
	EForked = -19
	EOverflow = -20
	EAlias = -21
	EMismatch = -22
	ECorrupt = -23
	EInternal = -99
	F32 = 73730
	F16 = 69634
	Bf16 = 69636
	F64 = 81922
	I8 = 67584
	U8 = 67585
	I32 = 73728
	I64 = 81920
	Bool = 67590
	F8E4m3 = 67594
	F8E5m2 = 67596
	F8E8m0 = 67598
	Cpu = 1
	Cuda = 2
	CudaHost = 3
	CudaManaged = 13
	LogTrace = 0
	LogDebug = 1
	LogInfo = 2
	LogWarn = 3
	LogError = 4
	LogOff = 5
	ContextNoAlloc = 1
	ContextCheckInputs = 2
	ContextProfile = 4
	MathDefault = 0
	MathTf32 = 1
	InputPlain = 0
	InputRmsScaled = 1
	PrecFp32 = 0
	PrecData = 1
	ScoreSoftmax = 0
	ScoreSigmoid = 1
	ScoreSqrtSoftplus = 2
	ScoreIdentity = 3
	SelectTopk = 0
	SelectGroupTopk = 1
	SelectTable = 2
	SelectSparseMixer = 3
	SelectGiven = 4
	SelectRoundRobin = 5
	FillNegInf = 0
	FillZero = 1
	WeightScore = 0
	WeightSoftmaxSelected = 1
	WeightSigmoidSelected = 2
	NormNone = 0
	NormSum = 1
	NormClampSum = 2
	NormP = 3
	SlotByValue = 0
	SlotByExpert = 1
	RouterLogitBias = 1
	RouterSelectBias = 2
	RouterPerExpertScale = 4
	RouterNormIfKGt1 = 8
	RouterJitterX = 16
	GradAccumulate = 1
	GradAccumulateX = 2
	GradSkipIdle = 4
	LossBalanceMixtral = 0
	LossBalanceSwitch = 1
	LossBalanceSequence = 2
	LossZ = 3
	PlanTopk = 0
	PlanExpertChoice = 1
	DropNone = 0
	DropByPosition = 1
	DropByWeight = 2
	PlanCounts = 0
	PlanGroupOffsets = 1
	PlanRowToken = 2
	PlanRowSlot = 3
	PlanRowWeight = 4
	PlanAssignmentRow = 5
	PlanExpertIds = 6
	PlanRoutingWeights = 7
	PlanTotals = 8
	PlanTokenOffsets = 9
	PlanTokenRows = 10
	PlanRowIdMap = 11
	PlanIndexMap = 12
	PlanRoundRobin = 0
	PlanEqualCounts = 1
	GateSplit = 0
	GateThenUp = 1
	UpThenGate = 2
	GateInterleaved = 3
	GateNone = 4
	OutIn = 0
	InOut = 1
	SchemeNone = 0
	SchemeInt8 = 1
	SchemeFp8 = 2
	SchemeCodebook4 = 3
	SchemeMxfp4 = 4
	SchemeNvfp4 = 5
	SchemeInt4 = 6
	SchemeAwq = 7
	SchemeGptq = 8
	SchemeGptqV2 = 9
	SchemeGgufQ80 = 10
	SchemeGgufQ40 = 11
	SchemeGgufQ4K = 12
	SchemeGgufQ6K = 13
	SchemeGgufMxfp4 = 14
	QuantScales2Divides = 1
	WeightsFrozen = 1
	MatrixGateUp = 0
	MatrixGate = 1
	MatrixUp = 2
	MatrixDown = 3
	QuantiseInt8 = 0
	QuantiseInt4 = 1
	QuantiseFp8 = 2
	QuantiseMxfp8 = 3
	QuantiseMxfp4 = 4
	QuantiseNvfp4 = 5
	QuantiseNf4 = 6
	QuantiseFp4 = 7
	QuantiseAsymmetric = 1
	QuantiseNested = 2
	QuantiseScales2Divides = 4
	ActSwiglu = 0
	ActGptoss = 1
	ActClampSwiglu = 2
	ActSwigluClamp = 3
	ActGegluTanh = 4
	ActGegluErf = 5
	ActQuickGeglu = 6
	ActSitu = 7
	ActRelu2 = 8
	ActSilu = 9
	ActIdentity = 10
	WeightOnOutput = 0
	WeightOnActivation = 1
	WeightOnInput = 2
	CombineFp32Slot = 0
	CombineFp32Expert = 1
	CombineDataExpert = 2
	ActFp32Once = 0
	ActPerOp = 1
	SharedNone = 0
	SharedAdd = 1
	SharedSigmoidGate = 2
	SharedSoftmax2 = 3
	SaveNone = 0
	SaveInput = 1
	SavePreact = 2
	SaveAll = 3
	ExpertsPlainWeights = 1
	ExpertsSkipAbsent = 1
	CommDevice = 1
	CommCapture = 2
	EpAuto = 0
	EpGather = 1
	EpPeer = 2
	EpRows = 3
	EpExact = 4
	EpForwardOnly = 1
	EpReport = 0
	EpDropByWeight = 1
	EpAdd = 1
)

// Buffer mirrors moec_buffer. All-zero = absent; may start at any byte; lies where the device reaches it (E_DEVICE).
type Buffer struct {
	Ptr uintptr
	Bytes uint64
}

// Size mirrors moec_size.
type Size struct {
	Base uint64
	PerToken uint64
}

// Tensor mirrors moec_tensor.
type Tensor struct {
	// base address in the device's space
	Data uintptr
	// added to data (DLPack's meaning)
	ByteOffset uint64
	DeviceType int32
	DeviceId int32
	Dtype uint32
	Ndim int32
	Shape [6]int64
	// elements; all zero = compact row-major
	Strides [6]int64
}

// Activation mirrors moec_activation.
type Activation struct {
	// moec_activation_kind
	Kind uint32
	// GPTOSS, QUICK_GEGLU: 0 = 1.702
	Alpha float32
	// GPTOSS: 0 = 7.0; CLAMP_SWIGLU, SWIGLU_CLAMP: > 0
	Limit float32
	// QUICK_GEGLU: added to up
	Offset float32
	// SITU: 0 = 4 and 0 = no bound on up
	Beta float32
	// SITU: 0 = 4 and 0 = no bound on up
	LinearBeta float32
	Reserved0 uint32
	Reserved1 uint32
}

// Quant mirrors moec_quant. How the codes of a quantised matrix [N,K] become values; moec_scheme says which of these tensors a scheme reads, the others are absent. Arrays of one tensor an expert have moec_matrix.count entries, without the dimension E, and replace the stacked tensor of their name. Of one block the extents may be left out. No value is read at bind. Gradients have none.
type Quant struct {
	StructSize uint32
	// moec_quant_flags
	Flags uint32
	// [E,N/block_n,K/block_k], rounded up; IN_OUT: [E,K/.., N/..]
	Scales Tensor
	// scales of the scales
	Scales2 Tensor
	// zero points: shape of scales, or packed
	Zeros Tensor
	// [16] f32: the value of each code
	Codebook Tensor
	// [256] f32: the value of each u8 scale
	ScaleBook Tensor
	// [1] f32: added to the scales
	ScaleOffset Tensor
	// [E,K] i32: the block along K of each input (act-order). One that is no block counts as k /
	// block_k
	GroupIndex Tensor
	PerExpertScales uintptr
	PerExpertScales2 uintptr
	PerExpertZeros uintptr
	PerExpertScaleOffset uintptr
	PerExpertGroupIndex uintptr
	// values along N and K that share a scale; 0 = as the scheme says
	BlockN int64
	// values along N and K that share a scale; 0 = as the scheme says
	BlockK int64
	// scales that share an entry of scales2; 0 = as the scheme says
	ScaleBlock int64
}

// Matrix mirrors moec_matrix. One weight matrix of all experts, or its gradient; all-zero = absent.
type Matrix struct {
	// [E,N,K] (OUT_IN) or [E,K,N] (IN_OUT); y = x * W^T + bias; codes: the type and shape that the
	// scheme says
	Data Tensor
	// [E,N], optional
	Bias Tensor
	// instead of data: `count` tensors [N,K] or [K,N]; array copied
	PerExpert uintptr
	// instead of bias: `count` tensors [N]; array copied
	PerExpertBias uintptr
	// E when a per_expert array is given, else 0
	Count int64
	// codes: their scales; NULL = plain values. Copied at bind
	Quant uintptr
}

// ErrorInfo mirrors moec_error_info.
type ErrorInfo struct {
	StructSize uint32
	Flags uint32
	// moec_status of the failing call
	Code int32
	// cudaError_t, errno or a callback's value; 0 if none
	NativeCode int32
	// 1-based argument that is NULL or no such handle or struct; else 0
	ArgIndex int32
	Reserved0 uint32
	// entry point, NUL-terminated
	Site [64]byte
	// what is wrong, both values, what would be right; NUL-terminated
	Message [512]byte
}

// DeviceInfo mirrors moec_device_info.
type DeviceInfo struct {
	StructSize uint32
	Flags uint32
	DeviceType int32
	DeviceId int32
	// CUDA capability; 0 on the CPU
	ComputeMajor int32
	// CUDA capability; 0 on the CPU
	ComputeMinor int32
	// SMs; usable cores on the CPU
	Multiprocessors int32
	// -1 = unknown
	NumaNode int32
	TotalBytes uint64
	FreeBytes uint64
	// arch: instruction set in use, or sm_XX
	Name [128]byte
	// arch: instruction set in use, or sm_XX
	Backend [32]byte
	// arch: instruction set in use, or sm_XX
	Arch [64]byte
}

// Allocator mirrors moec_allocator. Called on the calling thread; must not call moec. alloc returns NULL on failure.
type Allocator struct {
	StructSize uint32
	Flags uint32
	User uintptr
	Alloc uintptr
	// stream: of the last use, or NULL: work on any stream may still use it.
	Release uintptr
}

// ThreadPool mirrors moec_thread_pool.
type ThreadPool struct {
	StructSize uint32
	// >= 1, how many bodies may run at once
	NumThreads int32
	User uintptr
	// Call body(arg, i) for each i in [0, n), in any order, from any threads; return 0 when all
	// are done.
	ParallelFor uintptr
}

// ContextDesc mirrors moec_context_desc.
type ContextDesc struct {
	StructSize uint32
	// moec_context_flags
	Flags uint32
	// 0, 0 = the CPU
	DeviceType int32
	// 0, 0 = the CPU
	DeviceId int32
	// moec_math_mode
	Math uint32
	// CPU: 0 = affinity mask and cgroup quota
	NumThreads int32
	// bytes of scratch the context may hold; 0 = no limit
	WorkspaceLimit uint64
	// NULL = built in
	Allocator uintptr
	// NULL = built in; not with num_threads
	Pool uintptr
}

// Stats mirrors moec_stats.
type Stats struct {
	StructSize uint32
	Flags uint32
	Calls uint64
	KernelLaunches uint64
	// both stay constant in steady state
	Allocs uint64
	// both stay constant in steady state
	HostSyncs uint64
	WorkspaceBytes uint64
	WorkspacePeak uint64
	// of real rows, never padding
	Flops uint64
	// with MOEC_CONTEXT_PROFILE
	NsRoute uint64
	// with MOEC_CONTEXT_PROFILE
	NsPlan uint64
	// with MOEC_CONTEXT_PROFILE
	NsExperts uint64
	// with MOEC_CONTEXT_PROFILE
	NsCombine uint64
	// forwards and backwards of experts, by the path that ran them (moec_experts_describe). A
	// graph counts when it is captured
	PathCpu uint64
	// forwards and backwards of experts, by the path that ran them (moec_experts_describe). A
	// graph counts when it is captured
	PathPortable uint64
	// forwards and backwards of experts, by the path that ran them (moec_experts_describe). A
	// graph counts when it is captured
	PathSm90 uint64
	// forwards and backwards of experts, by the path that ran them (moec_experts_describe). A
	// graph counts when it is captured
	PathFewTokens uint64
	// of these, those that a better path was asked for and did not take
	PathFallbacks uint64
	// dispatches and combines, by moec_ep_scheme
	EpGather uint64
	// dispatches and combines, by moec_ep_scheme
	EpPeer uint64
	// dispatches and combines, by moec_ep_scheme
	EpRows uint64
	// dispatches and combines, by moec_ep_scheme
	EpExact uint64
	// as path_cpu and its like: experts of codes that have few rows
	PathFewRows uint64
}

// RouterDesc mirrors moec_router_desc.
type RouterDesc struct {
	StructSize uint32
	// moec_router_flags
	Flags uint32
	// E >= 1
	NumExperts int32
	// Z >= 0
	NumZeroExperts int32
	// 1 <= K <= E+Z
	TopK int32
	// moec_router_input
	Input uint32
	// RMS_SCALED: 0 = 1e-6
	RmsEps float32
	// multiply x by U(1-j,1+j); 0 = off; < 1
	Jitter float32
	// moec_precision; DATA rounds the logits to data_dtype
	LogitPrecision uint32
	// cap * tanh(z / cap); 0 = off
	LogitSoftcap float32
	// moec_score
	Score uint32
	// moec_precision
	ScorePrecision uint32
	// moec_select
	Selection uint32
	// GROUP_TOPK: num_groups divides E+Z; >= 1
	NumGroups int32
	// GROUP_TOPK: num_groups divides E+Z; >= 1
	TopGroups int32
	// group score = sum of its m best; 0|1 = the best one
	GroupTopM int32
	// moec_group_fill
	GroupFill uint32
	// SPARSE_MIXER threshold; > 0
	MixerEps float32
	// moec_weight_rule
	WeightRule uint32
	// moec_norm
	Norm uint32
	// norm_eps 0 = none; NORM_P: norm_p 0 = 1
	NormEps float32
	// norm_eps 0 = none; NORM_P: norm_p 0 = 1
	NormP float32
	// moec_precision of weight rule and normalisation
	NormPrecision uint32
	// routed scaling factor; 0 = 1
	Scale float32
	// moec_precision of the result
	WeightPrecision uint32
	// moec_slot_order
	SlotOrder uint32
	// dtype of PREC_DATA steps; 0 = fp32
	DataDtype uint32
	Reserved0 uint32
	// jitter: Philox4x32-10 key
	Seed uint64
}

// GateArgs mirrors moec_gate_args.
type GateArgs struct {
	StructSize uint32
	Flags uint32
	// jitter counter of element (0,0); element (t,h) uses + t*H + h
	RngOffset uint64
	// in [T,H] f32|bf16|f16: the router's input
	X Tensor
	// in [E+Z,H] f32|bf16|f16
	Weight Tensor
	// in [E+Z], with LOGIT_BIAS; dtype of weight or f32
	Bias Tensor
	// in [H], RMS_SCALED; dtype of weight or f32
	InputScale Tensor
	// out [T,E+Z] f32; before the soft-cap
	Logits Tensor
	// out [T,H], with jitter: optional, required with JITTER_X; dtype of x
	XJittered Tensor
}

// GateGradArgs mirrors moec_gate_grad_args.
type GateGradArgs struct {
	StructSize uint32
	// moec_grad_flags
	Flags uint32
	// jitter counter of element (0,0); element (t,h) uses + t*H + h
	RngOffset uint64
	// in [T,H] f32|bf16|f16: the router's input
	X Tensor
	// in [E+Z,H] f32|bf16|f16
	Weight Tensor
	// in [H], RMS_SCALED; dtype of weight or f32
	InputScale Tensor
	// in [T,E+Z] f32
	DLogits Tensor
	// out [T,H]; absent = skipped, as every output here
	DX Tensor
	// out [E+Z,H]
	DWeight Tensor
	// out [E+Z]
	DBias Tensor
	// out [H]
	DInputScale Tensor
	// in [T,H], with jitter: optional gradient of x_jittered
	DXJittered Tensor
}

// RouteArgs mirrors moec_route_args.
type RouteArgs struct {
	StructSize uint32
	Flags uint32
	// in [T,E+Z] f32|bf16|f16, before the soft-cap
	Logits Tensor
	// in [E+Z] f32, with SELECT_BIAS
	SelectBias Tensor
	// in [E+Z], with PER_EXPERT_SCALE; f32|bf16|f16
	PerExpertScale Tensor
	// in [T] u8|bool, optional; 0 = routed nowhere
	TokenMask Tensor
	// in [V,K] i32|i64: SELECT_TABLE
	Table Tensor
	// in [T] i32|i64: SELECT_TABLE
	TokenIds Tensor
	// in [T,K] i32|i64: SELECT_GIVEN
	GivenIds Tensor
	// out [T,K] i32; -1 = none
	ExpertIds Tensor
	// out [T,K] f32; 0 where the id is -1
	RoutingWeights Tensor
	// out [T,E+Z] f32, optional
	Scores Tensor
	// out [E+Z] i32|i64, optional: += selections per id; i32 saturates
	Counts Tensor
}

// RouteGradArgs mirrors moec_route_grad_args.
type RouteGradArgs struct {
	StructSize uint32
	// moec_grad_flags, for d_per_expert_scale
	Flags uint32
	// in [T,E+Z] f32|bf16|f16, before the soft-cap
	Logits Tensor
	// in [E+Z], with PER_EXPERT_SCALE; f32|bf16|f16
	PerExpertScale Tensor
	// in [T,K] i32|i64, from forward
	ExpertIds Tensor
	// in [T,K] f32
	DRoutingWeights Tensor
	// in [T,E+Z] f32, optional: added (auxiliary losses)
	DLogitsIn Tensor
	// out [T,E+Z] f32
	DLogits Tensor
	// out [E+Z], optional
	DPerExpertScale Tensor
}

// LossArgs mirrors moec_loss_args.
type LossArgs struct {
	StructSize uint32
	// moec_loss_kind
	Kind uint32
	// K of the balance losses; 1..E
	TopK int32
	// 0 = 1
	Coefficient float32
	// BALANCE_SEQUENCE: divides T
	SeqLen int64
	// SWITCH, SEQUENCE: moec_score but IDENTITY; all but SOFTMAX by their row sum
	Score uint32
	Flags uint32
	// in, `count` tensors [T,E] f32|bf16|f16, one per layer
	Logits uintptr
	// out, `count` tensors [T,E] f32 (backward): added to
	DLogits uintptr
	// layers; 1 except MIXTRAL
	Count int64
	// in [E] i32|i64, optional, SWITCH: n_e instead of counting
	Counts Tensor
	// in [T] u8|bool, optional: 0 = left out, in each layer
	TokenMask Tensor
	// out [1] f32 (forward)
	Loss Tensor
	// in [1] f32 (backward); absent = 1
	DLoss Tensor
	// optional: the loss is of the tokens of all ranks, whose sums are added in rank order; each
	// rank gets the same loss and the gradient of its own logits. Layers and options are equal on
	// all; T may differ, counts are the rank's own. Collective; errors as moec_comm_sum
	Comm uintptr
}

// PlanDesc mirrors moec_plan_desc.
type PlanDesc struct {
	StructSize uint32
	Flags uint32
	// bound on T; fixes every buffer size
	MaxTokens int64
	// E, all ranks together
	NumExperts int32
	// Z
	NumZeroExperts int32
	// K; EXPERT_CHOICE: 0
	TopK int32
	// moec_plan_kind
	Kind uint32
	// local range; 0, 0 = all
	ExpertBegin int32
	// local range; 0, 0 = all
	ExpertEnd int32
	// rows of each expert rounded up to it; 0|1 = none; power of two
	Align int32
	// moec_drop; needs a capacity
	Drop uint32
	// rows kept per expert; 0 = by capacity_factor or dropless
	Capacity int64
	// capacity = ceil(T*K/E * factor); 0 = off
	CapacityFactor float32
	Reserved0 uint32
}

// PermuteArgs mirrors moec_permute_args. The plan is built, on the context's device. Each function queues and takes no scratch.
type PermuteArgs struct {
	StructSize uint32
	Flags uint32
	Plan uintptr
	// in [T,H] f32|bf16|f16|i32|i8|u8|bool
	X Tensor
	// in [T,S], optional: block scales that travel with the rows
	XScale Tensor
	// out [P,H] as x; padding rows are zero; P >= the plan's, a multiple of its align; the rest is
	// zero
	Rows Tensor
	// out [P,S]
	RowScale Tensor
	// out [P] f32, optional; rows whose weight is exactly 0 are zero
	RowWeight Tensor
}

// UnpermuteArgs mirrors moec_unpermute_args.
type UnpermuteArgs struct {
	StructSize uint32
	Flags uint32
	Plan uintptr
	// in [P,H] f32|bf16|f16
	Rows Tensor
	// in [T,K] f32, optional: merging weights; absent = 1
	RoutingWeights Tensor
	// in [T,H], optional: added; may be y itself
	Residual Tensor
	// out [T,H] as rows; fp32 sum in slot order, one rounding
	Y Tensor
}

// PermuteGradArgs mirrors moec_permute_grad_args.
type PermuteGradArgs struct {
	StructSize uint32
	Flags uint32
	Plan uintptr
	// in [P,H]
	DRows Tensor
	// in [P] f32, optional
	DRowWeight Tensor
	// out [T,H]; fp32 sum in slot order, weight-0 rows included
	DX Tensor
	// out [T,K] f32, optional; 0 where not routed
	DRoutingWeights Tensor
}

// UnpermuteGradArgs mirrors moec_unpermute_grad_args.
type UnpermuteGradArgs struct {
	StructSize uint32
	Flags uint32
	Plan uintptr
	// in [T,H]
	DY Tensor
	// in [P,H], for d_routing_weights
	Rows Tensor
	// in [T,K] f32, optional: as forward
	RoutingWeights Tensor
	// out [P,H]; padding rows are zero
	DRows Tensor
	// out [T,K] f32, optional; 0 where not routed
	DRoutingWeights Tensor
}

// WeightsDesc mirrors moec_weights_desc.
type WeightsDesc struct {
	StructSize uint32
	// moec_weights_flags
	Flags uint32
	// El; 1 for a shared expert
	NumExperts int32
	// moec_gate_layout
	GateLayout uint32
	// H
	Hidden int64
	// I
	Inter int64
	// moec_orientation of gate_up, gate and up
	GateUpOrientation uint32
	DownOrientation uint32
	// f32, f16, bf16: of values, and what codes stand for
	Dtype uint32
	// 0 = dtype; or f32
	BiasDtype uint32
	// moec_scheme
	GateUpScheme uint32
	// moec_scheme
	DownScheme uint32
}

// WeightSet mirrors moec_weight_set. The matrices of a set of experts, or their gradients (same shapes; absent ones are skipped).
type WeightSet struct {
	StructSize uint32
	Flags uint32
	// GATE_THEN_UP, UP_THEN_GATE, INTERLEAVED: N = 2I, K = H
	GateUp Matrix
	// SPLIT: N = I, K = H
	Gate Matrix
	// SPLIT, NONE: N = I, K = H
	Up Matrix
	// N = H, K = I
	Down Matrix
}

// WeightsInfo mirrors moec_weights_info.
type WeightsInfo struct {
	StructSize uint32
	Flags uint32
	// bytes of a packed copy here, of codes once they are bound or mapped; 0 = never packed, or
	// not FROZEN
	PackedBytes uint64
	IsBound int32
	IsPacked int32
	IsFrozen int32
	// 0: after packing, the bound memory is not read any more
	NeedsSource int32
	// names layout, type and schemes; "" if not packed
	PackedFormat [64]byte
}

// QuantiseDesc mirrors moec_quantise_desc.
type QuantiseDesc struct {
	StructSize uint32
	// moec_quantise_flags
	Flags uint32
	// moec_quantise_kind
	Kind uint32
	// moec_orientation of the source. NF4 and FP4 keep the order of the source; other codes are
	// OUT_IN
	Orientation uint32
	// of the source: f32, f16, bf16
	Dtype uint32
	// INT8, INT4, FP8: dtype (0) or f32; the arithmetic is of this type, too. Others: 0
	ScaleDtype uint32
	// E
	NumExperts int64
	// N
	OutFeatures int64
	// K
	InFeatures int64
	// 0, or as kind says
	BlockN int64
	// 0, or as kind says
	BlockK int64
}

// QuantiseInfo mirrors moec_quantise_info.
type QuantiseInfo struct {
	StructSize uint32
	Flags uint32
	// type and shape
	Codes Tensor
	// bytes
	Workspace uint64
	// moec_scheme that reads them
	Scheme uint32
	// moec_scheme that reads them
	Reserved0 uint32
}

// QuantiseArgs mirrors moec_quantise_args.
type QuantiseArgs struct {
	StructSize uint32
	// flags: 0
	Flags uint32
	Desc uintptr
	// in [E,N,K]; IN_OUT: [E,K,N]
	Source Tensor
	// out
	Codes Tensor
	// out: its tensors, with memory. Codes are bound with it
	Quant uintptr
	// absent = the context's
	Workspace Buffer
}

// Factors mirrors moec_factors. One term of one matrix [N,K] of every expert, or its gradients: y += scale * (x A^T) B^T; all-zero = absent. Strides may be any that are not negative, those of gradients any with a place for each element. f32, f16 or bf16, which the calls read rounded once to the dtype of x; gradients are f32 or of the type of their factor. Gradients of an expert without rows are 0; of one A for all experts they are summed in the order of the experts.
type Factors struct {
	// [E,r,K], r 1 to 512; [1,r,K], or a stride of 0 along E: of all experts
	A Tensor
	// [E,N,r]
	B Tensor
	// alpha / r, or as it was trained: not 0. Of gradients: 0
	Scale float32
	// 0
	Reserved uint32
}

// Adapter mirrors moec_adapter.
type Adapter struct {
	// N = 2I, in the order of the adapters' gate_layout; K = H
	GateUp Factors
	// N = I, K = H
	Gate Factors
	// N = I, K = H
	Up Factors
	// N = H, K = I
	Down Factors
}

// AdaptersDesc mirrors moec_adapters_desc.
type AdaptersDesc struct {
	StructSize uint32
	Flags uint32
	// El, as in the weights
	NumExperts int32
	// of gate_up's N, need not be the weights'; SPLIT: no gate_up; NONE: up
	GateLayout uint32
	// H
	Hidden int64
	// I
	Inter int64
}

// ExpertsDesc mirrors moec_experts_desc.
type ExpertsDesc struct {
	StructSize uint32
	// moec_experts_desc_flags
	Flags uint32
	// H
	Hidden int64
	// I
	Inter int64
	// Is; 0 without shared expert
	SharedInter int64
	// E, all ranks together
	NumExperts int32
	// Z: ids in [E,E+Z) add w * x
	NumZeroExperts int32
	// K; 0 for EXPERT_CHOICE plans
	TopK int32
	// local range, as in the plan; 0, 0 = all
	ExpertBegin int32
	// local range, as in the plan; 0, 0 = all
	ExpertEnd int32
	// as in the plan
	Align int32
	// EXPERT_CHOICE: El * capacity; else 0
	MaxRowsBase int64
	// only NONE or not: MOEC_GATE_NONE for a plain MLP
	GateLayout uint32
	// of x, y and residual: f32, f16, bf16
	Dtype uint32
	Activation Activation
	SharedActivation Activation
	WeightPosition uint32
	Combine uint32
	ActRounding uint32
	Shared uint32
	Save uint32
	// of the routed sum; 0 = 1
	OutputScale float32
}

// ExpertsArgs mirrors moec_experts_args.
type ExpertsArgs struct {
	StructSize uint32
	// moec_experts_flags
	Flags uint32
	Plan uintptr
	Weights uintptr
	// with a shared expert; one expert of width shared_inter
	SharedWeights uintptr
	// in [T,H]
	X Tensor
	// in [1,H] or [2,H]; dtype of x or f32
	SharedGate Tensor
	// in [2], SOFTMAX2; dtype of x or f32
	SharedGateBias Tensor
	// in [H], optional; dtype of x or f32
	OutputBias Tensor
	// in [T,H], optional: added; may be y itself
	Residual Tensor
	// out [T,H]
	Y Tensor
	// out, unless SAVE_NONE; written in full. At an address that is no multiple of 4 it takes
	// scratch of its size besides any workspace, in backward, too
	Saved Buffer
	// absent = the context's
	Workspace Buffer
	// of the routed experts; NULL = none
	Adapters uintptr
	// in [T] i32, optional: the only adapter of each token, an index into what is bound; any other
	// number = none
	AdapterIds Tensor
}

// ExpertsGradArgs mirrors moec_experts_grad_args.
type ExpertsGradArgs struct {
	StructSize uint32
	// moec_grad_flags
	Flags uint32
	Plan uintptr
	Weights uintptr
	SharedWeights uintptr
	// in [T,H]
	X Tensor
	// in [1,H] or [2,H]; dtype of x or f32
	SharedGate Tensor
	// in [2], SOFTMAX2; dtype of x or f32
	SharedGateBias Tensor
	// in [T,H]
	DY Tensor
	// in
	Saved Buffer
	// out [T,H]; absent = skipped, as each output
	DX Tensor
	// out [T,K] f32; EXPERT_CHOICE: [P], one a row
	DRoutingWeights Tensor
	// out, in the layout of the bound weights; f32 or their dtype; NULL = frozen
	DExpertWeights uintptr
	// out, in the layout of the bound weights; f32 or their dtype; NULL = frozen
	DSharedWeights uintptr
	// out, f32 or dtype of x
	DSharedGate Tensor
	// out, f32 or dtype of x
	DSharedGateBias Tensor
	// out, f32 or dtype of x
	DOutputBias Tensor
	// out [T,H]
	DResidual Tensor
	Workspace Buffer
	// in, as forward
	Adapters uintptr
	// in [T] i32, optional: the only adapter of each token, an index into what is bound; any other
	// number = none
	AdapterIds Tensor
	// out, optional: the gradients of as many adapters as are bound, each factor where it is given
	DAdapters uintptr
}

// ExpertsSizes mirrors moec_experts_sizes.
type ExpertsSizes struct {
	StructSize uint32
	Flags uint32
	ForwardWorkspace Size
	BackwardWorkspace Size
	Saved Size
}

// LayerDesc mirrors moec_layer_desc. gate -> route -> plan -> experts in one call, with one saved buffer; descriptors are copied.
type LayerDesc struct {
	StructSize uint32
	Flags uint32
	Router uintptr
	// num_experts, num_zero_experts, top_k as in the router
	Experts uintptr
	// moec_drop
	Drop uint32
	// as in moec_plan_desc
	CapacityFactor float32
	Capacity int64
	// optional: the experts lie on the ep's ranks, section 11
	Ep uintptr
}

// LayerArgs mirrors moec_layer_args.
type LayerArgs struct {
	StructSize uint32
	Flags uint32
	// jitter counter of element (0,0); element (t,h) uses + t*H + h
	RngOffset uint64
	Weights uintptr
	SharedWeights uintptr
	// in [T,H]
	X Tensor
	// in [T,Hr], optional: the router's input when it is not x; where Hr > H the call may take
	// scratch of the context besides its workspace
	RouterX Tensor
	// in [E+Z,H] f32|bf16|f16
	GateWeight Tensor
	// in [E+Z], with LOGIT_BIAS; dtype of weight or f32
	GateBias Tensor
	// in [H], RMS_SCALED; dtype of weight or f32
	InputScale Tensor
	// in [E+Z] f32, with SELECT_BIAS
	SelectBias Tensor
	// in [E+Z], with PER_EXPERT_SCALE; f32|bf16|f16
	PerExpertScale Tensor
	// in [T] u8|bool, optional; 0 = routed nowhere
	TokenMask Tensor
	// in [V,K] i32|i64: SELECT_TABLE
	Table Tensor
	// in [T] i32|i64: SELECT_TABLE
	TokenIds Tensor
	// in [T,K] i32|i64: SELECT_GIVEN
	GivenIds Tensor
	// in [1,H] or [2,H]; dtype of x or f32
	SharedGate Tensor
	// in [2], SOFTMAX2; dtype of x or f32
	SharedGateBias Tensor
	// in [H], optional; dtype of x or f32
	OutputBias Tensor
	// in [T,H], optional: added; may be y itself
	Residual Tensor
	// out [T,H]
	Y Tensor
	// out [T,E+Z] f32, optional
	Logits Tensor
	// out [T,K] i32, optional
	ExpertIds Tensor
	// out [T,K] f32, optional
	RoutingWeights Tensor
	// out [E+Z] i32|i64, optional: as moec_route_args
	Counts Tensor
	// out, unless SAVE_NONE
	Saved Buffer
	// absent = the context's
	Workspace Buffer
	// with an ep: as in moec_ep_args; else 0
	Bound int64
	// of the routed experts; NULL = none
	Adapters uintptr
	// in [T] i32, optional: the only adapter of each token, an index into what is bound; any other
	// number = none
	AdapterIds Tensor
}

// LayerGradArgs mirrors moec_layer_grad_args.
type LayerGradArgs struct {
	StructSize uint32
	// moec_grad_flags
	Flags uint32
	// the forward call's inputs and saved buffer; no outputs
	Forward uintptr
	// in [T,H]
	DY Tensor
	// in [T,E+Z] f32, optional: from auxiliary losses
	DLogitsIn Tensor
	// out [T,H]; without router_x, d_x holds both
	DX Tensor
	// out [T,Hr]; without router_x, d_x holds both
	DRouterX Tensor
	// out
	DGateWeight Tensor
	// out
	DGateBias Tensor
	// out
	DInputScale Tensor
	// out
	DPerExpertScale Tensor
	// out
	DExpertWeights uintptr
	// out
	DSharedWeights uintptr
	// out
	DSharedGate Tensor
	// out
	DSharedGateBias Tensor
	// out
	DOutputBias Tensor
	// out
	DResidual Tensor
	// out [T,K] f32, optional
	DRoutingWeights Tensor
	// absent = the context's
	Workspace Buffer
	// out, optional: as moec_experts_grad_args
	DAdapters uintptr
}

// CommCallbacks mirrors moec_comm_callbacks. Each returns 0, or MOEC_E_TIMEOUT where its deadline passed, or another value but 0 on failure. They may not call moec. `send` and `recv` never overlap; bytes may be 0.
type CommCallbacks struct {
	StructSize uint32
	// moec_comm_flags
	Flags uint32
	User uintptr
	// recv [N][bytes] = the `send` [bytes] of each rank. Required.
	AllGather uintptr
	// recv[r] = entry [this rank] of the `send` [N][bytes] of rank r. Required.
	AllToAll uintptr
	// The same, with send_bytes[r] at byte send_at[r] for rank r, and recv_bytes[r] from it. EXACT
	// needs it. `unit` divides all of them: counts in units stay small.
	AllToAllV uintptr
	// optional: 0 = well; never waits
	Poll uintptr
	// optional: once, when nothing uses the comm any more
	Release uintptr
	// optional, once, from any thread: what waits for another rank ends, on streams and in the
	// other callbacks, which fail; but for window_close none is called after it
	Abort uintptr
	// optional, all or none: memory that all ranks reach. alloc's is of the current device; open
	// is collective: blocks [N] = where this rank reaches each one's, or NULL; close may follow
	// abort
	WindowAlloc uintptr
	WindowOpen uintptr
	WindowClose uintptr
}

// CommDesc mirrors moec_comm_desc.
type CommDesc struct {
	StructSize uint32
	// flags: 0
	Flags uint32
	// 0 <= rank < size
	Rank int32
	// 0 <= rank < size
	Size int32
}

// EpDesc mirrors moec_ep_desc.
type EpDesc struct {
	StructSize uint32
	// moec_ep_flags
	Flags uint32
	// H; bound on T of one rank
	Hidden int64
	// H; bound on T of one rank
	MaxTokens int64
	// E, of all ranks together
	NumExperts int32
	// Z; their ids stay at home
	NumZeroExperts int32
	// K
	TopK int32
	// moec_ep_scheme
	Scheme uint32
	// of x: f32, f16, bf16
	Dtype uint32
	// of partial rows: dtype (0) or f32
	PartialDtype uint32
	// host [N+1], copied: 0 = b[0] < b[1] < .. = E; NULL = even
	ExpertBegin uintptr
	// ROWS: rows from one rank to another; 0 = max_tokens
	PairRows int64
	// moec_ep_overflow
	Overflow uint32
	// layer: the gradients of experts and their biases are this much; 0 = 1. 1/N beside the mean
	// of DDP. d_y is scaled, and d_x back: exact for powers of two, else a rounding more of each
	GradScale float32
	// PEER: how long a rank waits for another; MOEC_COMM_DEVICE: how long nothing that is queued
	// may end; 0 = 600000
	TimeoutMs uint32
	// PEER: most blocks of a kernel, up to 128; 0 = by the size of the call
	MaxBlocks int32
}

// EpInfo mirrors moec_ep_info.
type EpInfo struct {
	StructSize uint32
	Flags uint32
	// moec_ep_scheme in use
	Scheme uint32
	// of this rank
	ExpertBegin int32
	// of this rank
	ExpertEnd int32
	Reserved0 uint32
	// bound on the guests of a call
	MaxGuests int64
	// bytes of the device that the ep holds
	Memory uint64
}

// EpArgs mirrors moec_ep_args.
type EpArgs struct {
	StructSize uint32
	// flags: moec_ep_call_flags
	Flags uint32
	// T of no rank is larger; equal on all; 0 = max_tokens
	Bound int64
	// in [T,H]
	X Tensor
	// in [T,H], optional, on all ranks or none: goes with x
	XBeside Tensor
	// in [T,K] i32|i64; others than [0,E) go nowhere
	ExpertIds Tensor
	// in [T,K] f32, optional: absent = 1
	RoutingWeights Tensor
	// out [G,H] as x. Rows without an id may hold anything
	Guests Tensor
	// out [G,H], with x_beside
	GuestsBeside Tensor
	// out [G,K] i32; -1 = no expert of this rank
	GuestIds Tensor
	// out [G,K] f32
	GuestWeights Tensor
	// out [G,H] partial_dtype; combine reads what the caller wrote
	Partial Tensor
	// out: T of all ranks; -1: PEER, or MOEC_COMM_DEVICE but EXACT
	TotalTokens int64
	// in [G,K] f32, optional, on all ranks or none
	DGuestWeights Tensor
	// out [T,H] dtype: the sum of partial rows; 0 without any
	Y Tensor
	// out [T,K] f32, with d_guest_weights; 0 where the id is no expert, or the row was dropped
	DRoutingWeights Tensor
}

// EpState mirrors moec_ep_state.
type EpState struct {
	StructSize uint32
	Flags uint32
	// 0, or what broke the ep
	Status int32
	Reserved0 uint32
	// dispatch and combine
	Calls uint64
	// ROWS, EXACT: the pair_rows that would have dropped nothing
	RowsNeeded int64
	// ROWS: of all ranks, those of calls whose work is done
	RowsDropped int64
	// to and from other ranks; 0 with PEER
	BytesSent uint64
	// to and from other ranks; 0 with PEER
	BytesReceived uint64
	// what broke the ep, naming the rank or the call; NUL-terminated
	Message [256]byte
}

// Layout is what the C compiler says: bytes of a struct and offsets of its fields.
type Layout struct {
	Value any
	Bytes uintptr
	Offsets []uintptr
}

// Layouts lists every struct of moec.h; the tests compare.
var Layouts = []Layout{
	{Buffer{}, 16, []uintptr{0, 8}},
	{Size{}, 16, []uintptr{0, 8}},
	{Tensor{}, 128, []uintptr{0, 8, 16, 20, 24, 28, 32, 80}},
	{Activation{}, 32, []uintptr{0, 4, 8, 12, 16, 20, 24, 28}},
	{Quant{}, 968, []uintptr{0, 4, 8, 136, 264, 392, 520, 648, 776, 904, 912, 920, 928, 936, 944, 952, 960}},
	{Matrix{}, 288, []uintptr{0, 128, 256, 264, 272, 280}},
	{ErrorInfo{}, 600, []uintptr{0, 4, 8, 12, 16, 20, 24, 88}},
	{DeviceInfo{}, 272, []uintptr{0, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 176, 208}},
	{Allocator{}, 32, []uintptr{0, 4, 8, 16, 24}},
	{ThreadPool{}, 24, []uintptr{0, 4, 8, 16}},
	{ContextDesc{}, 48, []uintptr{0, 4, 8, 12, 16, 20, 24, 32, 40}},
	{Stats{}, 176, []uintptr{0, 4, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120, 128, 136, 144, 152, 160, 168}},
	{RouterDesc{}, 120, []uintptr{0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60, 64, 68, 72, 76, 80, 84, 88, 92, 96, 100, 104, 108, 112}},
	{GateArgs{}, 784, []uintptr{0, 4, 8, 16, 144, 272, 400, 528, 656}},
	{GateGradArgs{}, 1168, []uintptr{0, 4, 8, 16, 144, 272, 400, 528, 656, 784, 912, 1040}},
	{RouteArgs{}, 1416, []uintptr{0, 4, 8, 136, 264, 392, 520, 648, 776, 904, 1032, 1160, 1288}},
	{RouteGradArgs{}, 904, []uintptr{0, 4, 8, 136, 264, 392, 520, 648, 776}},
	{LossArgs{}, 576, []uintptr{0, 4, 8, 12, 16, 24, 28, 32, 40, 48, 56, 184, 312, 440, 568}},
	{PlanDesc{}, 64, []uintptr{0, 4, 8, 16, 20, 24, 28, 32, 36, 40, 44, 48, 56, 60}},
	{PermuteArgs{}, 656, []uintptr{0, 4, 8, 16, 144, 272, 400, 528}},
	{UnpermuteArgs{}, 528, []uintptr{0, 4, 8, 16, 144, 272, 400}},
	{PermuteGradArgs{}, 528, []uintptr{0, 4, 8, 16, 144, 272, 400}},
	{UnpermuteGradArgs{}, 656, []uintptr{0, 4, 8, 16, 144, 272, 400, 528}},
	{WeightsDesc{}, 56, []uintptr{0, 4, 8, 12, 16, 24, 32, 36, 40, 44, 48, 52}},
	{WeightSet{}, 1160, []uintptr{0, 4, 8, 296, 584, 872}},
	{WeightsInfo{}, 96, []uintptr{0, 4, 8, 16, 20, 24, 28, 32}},
	{QuantiseDesc{}, 64, []uintptr{0, 4, 8, 12, 16, 20, 24, 32, 40, 48, 56}},
	{QuantiseInfo{}, 152, []uintptr{0, 4, 8, 136, 144, 148}},
	{QuantiseArgs{}, 296, []uintptr{0, 4, 8, 16, 144, 272, 280}},
	{Factors{}, 264, []uintptr{0, 128, 256, 260}},
	{Adapter{}, 1056, []uintptr{0, 264, 528, 792}},
	{AdaptersDesc{}, 32, []uintptr{0, 4, 8, 12, 16, 24}},
	{ExpertsDesc{}, 160, []uintptr{0, 4, 8, 16, 24, 32, 36, 40, 44, 48, 52, 56, 64, 68, 72, 104, 136, 140, 144, 148, 152, 156}},
	{ExpertsArgs{}, 968, []uintptr{0, 4, 8, 16, 24, 32, 160, 288, 416, 544, 672, 800, 816, 832, 840}},
	{ExpertsGradArgs{}, 1504, []uintptr{0, 4, 8, 16, 24, 32, 160, 288, 416, 544, 560, 688, 816, 824, 832, 960, 1088, 1216, 1344, 1360, 1368, 1496}},
	{ExpertsSizes{}, 56, []uintptr{0, 4, 8, 24, 40}},
	{LayerDesc{}, 48, []uintptr{0, 4, 8, 16, 24, 28, 32, 40}},
	{LayerArgs{}, 2768, []uintptr{0, 4, 8, 16, 24, 32, 160, 288, 416, 544, 672, 800, 928, 1056, 1184, 1312, 1440, 1568, 1696, 1824, 1952, 2080, 2208, 2336, 2464, 2592, 2608, 2624, 2632, 2640}},
	{LayerGradArgs{}, 1720, []uintptr{0, 4, 8, 16, 144, 272, 400, 528, 656, 784, 912, 1040, 1048, 1056, 1184, 1312, 1440, 1568, 1696, 1712}},
	{CommCallbacks{}, 88, []uintptr{0, 4, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80}},
	{CommDesc{}, 16, []uintptr{0, 4, 8, 12}},
	{EpDesc{}, 80, []uintptr{0, 4, 8, 16, 24, 28, 32, 36, 40, 44, 48, 56, 64, 68, 72, 76}},
	{EpInfo{}, 40, []uintptr{0, 4, 8, 12, 16, 20, 24, 32}},
	{EpArgs{}, 1560, []uintptr{0, 4, 8, 16, 144, 272, 400, 528, 656, 784, 912, 1040, 1168, 1176, 1304, 1432}},
	{EpState{}, 312, []uintptr{0, 4, 8, 12, 16, 24, 32, 40, 48, 56}},
}
