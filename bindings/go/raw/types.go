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
	GateSplit = 0
	GateThenUp = 1
	UpThenGate = 2
	GateInterleaved = 3
	GateNone = 4
	OutIn = 0
	InOut = 1
	SchemeNone = 0
	SchemeInt8 = 1
	WeightsFrozen = 1
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
	ExpertsSkipAbsent = 1
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
	Data uintptr
	ByteOffset uint64
	DeviceType int32
	DeviceId int32
	Dtype uint32
	Ndim int32
	Shape [6]int64
	Strides [6]int64
}

// Activation mirrors moec_activation.
type Activation struct {
	Kind uint32
	Alpha float32
	Limit float32
	Offset float32
	Beta float32
	LinearBeta float32
	Reserved0 uint32
	Reserved1 uint32
}

// Quant mirrors moec_quant. How the codes of a quantised matrix [N,K] become values; moec_scheme says which of these tensors a scheme reads, the others are absent. Arrays of one tensor an expert have moec_matrix.count entries and replace the stacked tensor of their name. Gradients have none.
type Quant struct {
	StructSize uint32
	Flags uint32
	Scales Tensor
	Scales2 Tensor
	Zeros Tensor
	Codebook Tensor
	ScaleBook Tensor
	ScaleOffset Tensor
	GroupIndex Tensor
	PerExpertScales uintptr
	PerExpertScales2 uintptr
	PerExpertZeros uintptr
	PerExpertScaleOffset uintptr
	PerExpertGroupIndex uintptr
	BlockN int64
	BlockK int64
	ScaleBlock int64
}

// Matrix mirrors moec_matrix. One weight matrix of all experts, or its gradient; all-zero = absent.
type Matrix struct {
	Data Tensor
	Bias Tensor
	PerExpert uintptr
	PerExpertBias uintptr
	Count int64
	Quant uintptr
}

// ErrorInfo mirrors moec_error_info.
type ErrorInfo struct {
	StructSize uint32
	Flags uint32
	Code int32
	NativeCode int32
	ArgIndex int32
	Reserved0 uint32
	Site [64]byte
	Message [512]byte
}

// DeviceInfo mirrors moec_device_info.
type DeviceInfo struct {
	StructSize uint32
	Flags uint32
	DeviceType int32
	DeviceId int32
	ComputeMajor int32
	ComputeMinor int32
	Multiprocessors int32
	NumaNode int32
	TotalBytes uint64
	FreeBytes uint64
	Name [128]byte
	Backend [32]byte
	Arch [64]byte
}

// Allocator mirrors moec_allocator. Called on the calling thread; must not call moec. alloc returns NULL on failure.
type Allocator struct {
	StructSize uint32
	Flags uint32
	User uintptr
	Alloc uintptr
	Release uintptr
}

// ThreadPool mirrors moec_thread_pool.
type ThreadPool struct {
	StructSize uint32
	NumThreads int32
	User uintptr
	ParallelFor uintptr
}

// ContextDesc mirrors moec_context_desc.
type ContextDesc struct {
	StructSize uint32
	Flags uint32
	DeviceType int32
	DeviceId int32
	Math uint32
	NumThreads int32
	WorkspaceLimit uint64
	Allocator uintptr
	Pool uintptr
}

// Stats mirrors moec_stats.
type Stats struct {
	StructSize uint32
	Flags uint32
	Calls uint64
	KernelLaunches uint64
	Allocs uint64
	HostSyncs uint64
	WorkspaceBytes uint64
	WorkspacePeak uint64
	Flops uint64
	NsRoute uint64
	NsPlan uint64
	NsExperts uint64
	NsCombine uint64
}

// RouterDesc mirrors moec_router_desc.
type RouterDesc struct {
	StructSize uint32
	Flags uint32
	NumExperts int32
	NumZeroExperts int32
	TopK int32
	Input uint32
	RmsEps float32
	Jitter float32
	LogitPrecision uint32
	LogitSoftcap float32
	Score uint32
	ScorePrecision uint32
	Selection uint32
	NumGroups int32
	TopGroups int32
	GroupTopM int32
	GroupFill uint32
	MixerEps float32
	WeightRule uint32
	Norm uint32
	NormEps float32
	NormP float32
	NormPrecision uint32
	Scale float32
	WeightPrecision uint32
	SlotOrder uint32
	DataDtype uint32
	Reserved0 uint32
	Seed uint64
}

// GateArgs mirrors moec_gate_args.
type GateArgs struct {
	StructSize uint32
	Flags uint32
	RngOffset uint64
	X Tensor
	Weight Tensor
	Bias Tensor
	InputScale Tensor
	Logits Tensor
	XJittered Tensor
}

// GateGradArgs mirrors moec_gate_grad_args.
type GateGradArgs struct {
	StructSize uint32
	Flags uint32
	RngOffset uint64
	X Tensor
	Weight Tensor
	InputScale Tensor
	DLogits Tensor
	DX Tensor
	DWeight Tensor
	DBias Tensor
	DInputScale Tensor
	DXJittered Tensor
}

// RouteArgs mirrors moec_route_args.
type RouteArgs struct {
	StructSize uint32
	Flags uint32
	Logits Tensor
	SelectBias Tensor
	PerExpertScale Tensor
	TokenMask Tensor
	Table Tensor
	TokenIds Tensor
	GivenIds Tensor
	ExpertIds Tensor
	RoutingWeights Tensor
	Scores Tensor
	Counts Tensor
}

// RouteGradArgs mirrors moec_route_grad_args.
type RouteGradArgs struct {
	StructSize uint32
	Flags uint32
	Logits Tensor
	PerExpertScale Tensor
	ExpertIds Tensor
	DRoutingWeights Tensor
	DLogitsIn Tensor
	DLogits Tensor
	DPerExpertScale Tensor
}

// LossArgs mirrors moec_loss_args.
type LossArgs struct {
	StructSize uint32
	Kind uint32
	TopK int32
	Coefficient float32
	SeqLen int64
	Score uint32
	Flags uint32
	Logits uintptr
	DLogits uintptr
	Count int64
	Counts Tensor
	TokenMask Tensor
	Loss Tensor
	DLoss Tensor
}

// PlanDesc mirrors moec_plan_desc.
type PlanDesc struct {
	StructSize uint32
	Flags uint32
	MaxTokens int64
	NumExperts int32
	NumZeroExperts int32
	TopK int32
	Kind uint32
	ExpertBegin int32
	ExpertEnd int32
	Align int32
	Drop uint32
	Capacity int64
	CapacityFactor float32
	Reserved0 uint32
}

// PermuteArgs mirrors moec_permute_args. The plan is built, on the context's device. Each function queues and takes no scratch.
type PermuteArgs struct {
	StructSize uint32
	Flags uint32
	Plan uintptr
	X Tensor
	XScale Tensor
	Rows Tensor
	RowScale Tensor
	RowWeight Tensor
}

// UnpermuteArgs mirrors moec_unpermute_args.
type UnpermuteArgs struct {
	StructSize uint32
	Flags uint32
	Plan uintptr
	Rows Tensor
	RoutingWeights Tensor
	Residual Tensor
	Y Tensor
}

// PermuteGradArgs mirrors moec_permute_grad_args.
type PermuteGradArgs struct {
	StructSize uint32
	Flags uint32
	Plan uintptr
	DRows Tensor
	DRowWeight Tensor
	DX Tensor
	DRoutingWeights Tensor
}

// UnpermuteGradArgs mirrors moec_unpermute_grad_args.
type UnpermuteGradArgs struct {
	StructSize uint32
	Flags uint32
	Plan uintptr
	DY Tensor
	Rows Tensor
	RoutingWeights Tensor
	DRows Tensor
	DRoutingWeights Tensor
}

// WeightsDesc mirrors moec_weights_desc.
type WeightsDesc struct {
	StructSize uint32
	Flags uint32
	NumExperts int32
	GateLayout uint32
	Hidden int64
	Inter int64
	GateUpOrientation uint32
	DownOrientation uint32
	Dtype uint32
	BiasDtype uint32
	GateUpScheme uint32
	DownScheme uint32
}

// WeightSet mirrors moec_weight_set. The matrices of a set of experts, or their gradients (same shapes; each absent one is skipped).
type WeightSet struct {
	StructSize uint32
	Flags uint32
	GateUp Matrix
	Gate Matrix
	Up Matrix
	Down Matrix
}

// WeightsInfo mirrors moec_weights_info.
type WeightsInfo struct {
	StructSize uint32
	Flags uint32
	PackedBytes uint64
	IsBound int32
	IsPacked int32
	IsFrozen int32
	NeedsSource int32
	PackedFormat [64]byte
}

// ExpertsDesc mirrors moec_experts_desc.
type ExpertsDesc struct {
	StructSize uint32
	Flags uint32
	Hidden int64
	Inter int64
	SharedInter int64
	NumExperts int32
	NumZeroExperts int32
	TopK int32
	ExpertBegin int32
	ExpertEnd int32
	Align int32
	MaxRowsBase int64
	GateLayout uint32
	Dtype uint32
	Activation Activation
	SharedActivation Activation
	WeightPosition uint32
	Combine uint32
	ActRounding uint32
	Shared uint32
	Save uint32
	OutputScale float32
}

// ExpertsArgs mirrors moec_experts_args.
type ExpertsArgs struct {
	StructSize uint32
	Flags uint32
	Plan uintptr
	Weights uintptr
	SharedWeights uintptr
	X Tensor
	SharedGate Tensor
	SharedGateBias Tensor
	OutputBias Tensor
	Residual Tensor
	Y Tensor
	Saved Buffer
	Workspace Buffer
}

// ExpertsGradArgs mirrors moec_experts_grad_args.
type ExpertsGradArgs struct {
	StructSize uint32
	Flags uint32
	Plan uintptr
	Weights uintptr
	SharedWeights uintptr
	X Tensor
	SharedGate Tensor
	SharedGateBias Tensor
	DY Tensor
	Saved Buffer
	DX Tensor
	DRoutingWeights Tensor
	DExpertWeights uintptr
	DSharedWeights uintptr
	DSharedGate Tensor
	DSharedGateBias Tensor
	DOutputBias Tensor
	DResidual Tensor
	Workspace Buffer
}

// ExpertsSizes mirrors moec_experts_sizes.
type ExpertsSizes struct {
	StructSize uint32
	Flags uint32
	ForwardWorkspace Size
	BackwardWorkspace Size
	Saved Size
}

// LayerDesc mirrors moec_layer_desc. gate -> route -> plan -> experts in one call, with one saved buffer; the descriptors are copied.
type LayerDesc struct {
	StructSize uint32
	Flags uint32
	Router uintptr
	Experts uintptr
	Drop uint32
	CapacityFactor float32
	Capacity int64
}

// LayerArgs mirrors moec_layer_args.
type LayerArgs struct {
	StructSize uint32
	Flags uint32
	RngOffset uint64
	Weights uintptr
	SharedWeights uintptr
	X Tensor
	RouterX Tensor
	GateWeight Tensor
	GateBias Tensor
	InputScale Tensor
	SelectBias Tensor
	PerExpertScale Tensor
	TokenMask Tensor
	Table Tensor
	TokenIds Tensor
	GivenIds Tensor
	SharedGate Tensor
	SharedGateBias Tensor
	OutputBias Tensor
	Residual Tensor
	Y Tensor
	Logits Tensor
	ExpertIds Tensor
	RoutingWeights Tensor
	Counts Tensor
	Saved Buffer
	Workspace Buffer
}

// LayerGradArgs mirrors moec_layer_grad_args.
type LayerGradArgs struct {
	StructSize uint32
	Flags uint32
	Forward uintptr
	DY Tensor
	DLogitsIn Tensor
	DX Tensor
	DRouterX Tensor
	DGateWeight Tensor
	DGateBias Tensor
	DInputScale Tensor
	DPerExpertScale Tensor
	DExpertWeights uintptr
	DSharedWeights uintptr
	DSharedGate Tensor
	DSharedGateBias Tensor
	DOutputBias Tensor
	DResidual Tensor
	DRoutingWeights Tensor
	Workspace Buffer
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
	{Stats{}, 96, []uintptr{0, 4, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88}},
	{RouterDesc{}, 120, []uintptr{0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60, 64, 68, 72, 76, 80, 84, 88, 92, 96, 100, 104, 108, 112}},
	{GateArgs{}, 784, []uintptr{0, 4, 8, 16, 144, 272, 400, 528, 656}},
	{GateGradArgs{}, 1168, []uintptr{0, 4, 8, 16, 144, 272, 400, 528, 656, 784, 912, 1040}},
	{RouteArgs{}, 1416, []uintptr{0, 4, 8, 136, 264, 392, 520, 648, 776, 904, 1032, 1160, 1288}},
	{RouteGradArgs{}, 904, []uintptr{0, 4, 8, 136, 264, 392, 520, 648, 776}},
	{LossArgs{}, 568, []uintptr{0, 4, 8, 12, 16, 24, 28, 32, 40, 48, 56, 184, 312, 440}},
	{PlanDesc{}, 64, []uintptr{0, 4, 8, 16, 20, 24, 28, 32, 36, 40, 44, 48, 56, 60}},
	{PermuteArgs{}, 656, []uintptr{0, 4, 8, 16, 144, 272, 400, 528}},
	{UnpermuteArgs{}, 528, []uintptr{0, 4, 8, 16, 144, 272, 400}},
	{PermuteGradArgs{}, 528, []uintptr{0, 4, 8, 16, 144, 272, 400}},
	{UnpermuteGradArgs{}, 656, []uintptr{0, 4, 8, 16, 144, 272, 400, 528}},
	{WeightsDesc{}, 56, []uintptr{0, 4, 8, 12, 16, 24, 32, 36, 40, 44, 48, 52}},
	{WeightSet{}, 1160, []uintptr{0, 4, 8, 296, 584, 872}},
	{WeightsInfo{}, 96, []uintptr{0, 4, 8, 16, 20, 24, 28, 32}},
	{ExpertsDesc{}, 160, []uintptr{0, 4, 8, 16, 24, 32, 36, 40, 44, 48, 52, 56, 64, 68, 72, 104, 136, 140, 144, 148, 152, 156}},
	{ExpertsArgs{}, 832, []uintptr{0, 4, 8, 16, 24, 32, 160, 288, 416, 544, 672, 800, 816}},
	{ExpertsGradArgs{}, 1360, []uintptr{0, 4, 8, 16, 24, 32, 160, 288, 416, 544, 560, 688, 816, 824, 832, 960, 1088, 1216, 1344}},
	{ExpertsSizes{}, 56, []uintptr{0, 4, 8, 24, 40}},
	{LayerDesc{}, 40, []uintptr{0, 4, 8, 16, 24, 28, 32}},
	{LayerArgs{}, 2624, []uintptr{0, 4, 8, 16, 24, 32, 160, 288, 416, 544, 672, 800, 928, 1056, 1184, 1312, 1440, 1568, 1696, 1824, 1952, 2080, 2208, 2336, 2464, 2592, 2608}},
	{LayerGradArgs{}, 1712, []uintptr{0, 4, 8, 16, 144, 272, 400, 528, 656, 784, 912, 1040, 1048, 1056, 1184, 1312, 1440, 1568, 1696}},
}
