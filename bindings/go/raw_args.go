// SPDX-License-Identifier: Apache-2.0
// Code generated from moec.h by generate.py; DO NOT EDIT.

package moec

import "moec.dev/moec/raw"

// LayerArgs are the arguments of a forward call. Fields as in moec_layer_args.
type LayerArgs struct {
	// RngOffset: jitter counter of element (0,0); element (t,h) uses + t*H + h
	RngOffset uint64
	// Weights as in moec_layer_args
	Weights *Weights
	// SharedWeights as in moec_layer_args
	SharedWeights *Weights
	// X: in [T,H]
	X Tensor
	// RouterX: in [T,Hr], optional: the router's input when it is not x; where Hr > H the call may
	// take scratch of the context besides its workspace
	RouterX Tensor
	// GateWeight: in [E+Z,H] f32|bf16|f16
	GateWeight Tensor
	// GateBias: in [E+Z], with LOGIT_BIAS; dtype of weight or f32
	GateBias Tensor
	// InputScale: in [H], RMS_SCALED; dtype of weight or f32
	InputScale Tensor
	// SelectBias: in [E+Z] f32, with SELECT_BIAS
	SelectBias Tensor
	// PerExpertScale: in [E+Z], with PER_EXPERT_SCALE; f32|bf16|f16
	PerExpertScale Tensor
	// TokenMask: in [T] u8|bool, optional; 0 = routed nowhere
	TokenMask Tensor
	// Table: in [V,K] i32|i64: SELECT_TABLE
	Table Tensor
	// TokenIDs: in [T] i32|i64: SELECT_TABLE
	TokenIDs Tensor
	// GivenIDs: in [T,K] i32|i64: SELECT_GIVEN
	GivenIDs Tensor
	// SharedGate: in [1,H] or [2,H]; dtype of x or f32
	SharedGate Tensor
	// SharedGateBias: in [2], SOFTMAX2; dtype of x or f32
	SharedGateBias Tensor
	// OutputBias: in [H], optional; dtype of x or f32
	OutputBias Tensor
	// Residual: in [T,H], optional: added; may be y itself
	Residual Tensor
	// Y: out [T,H]
	Y Tensor
	// Logits: out [T,E+Z] f32, optional
	Logits Tensor
	// ExpertIDs: out [T,K] i32, optional
	ExpertIDs Tensor
	// RoutingWeights: out [T,K] f32, optional
	RoutingWeights Tensor
	// Counts: out [E+Z] i32|i64, optional: as moec_route_args
	Counts Tensor
	// Saved: out, unless SAVE_NONE
	Saved []byte
	// SavedOnDevice, instead of Saved, is in the device's memory
	SavedOnDevice DeviceBuffer
	// Workspace: absent = the context's
	Workspace []byte
	// WorkspaceOnDevice, instead of Workspace, is in the device's memory
	WorkspaceOnDevice DeviceBuffer
	// Bound: with an ep: as in moec_ep_args; else 0
	Bound int64
	// Adapters: of the routed experts; NULL = none
	Adapters *Adapters
	// AdapterIDs: in [T] i32, optional: the only adapter of each token, an index into what is
	// bound; any other number = none
	AdapterIDs Tensor
}

func (p *pins) layerArgs(a *LayerArgs) *raw.LayerArgs {
	if a == nil {
		return nil
	}
	out := new(raw.LayerArgs)
	out.StructSize = sizeOf(out)
	out.RngOffset = a.RngOffset
	if a.Weights != nil {
		out.Weights = a.Weights.raw
	}
	if a.SharedWeights != nil {
		out.SharedWeights = a.SharedWeights.raw
	}
	out.X = p.tensor(a.X)
	out.RouterX = p.tensor(a.RouterX)
	out.GateWeight = p.tensor(a.GateWeight)
	out.GateBias = p.tensor(a.GateBias)
	out.InputScale = p.tensor(a.InputScale)
	out.SelectBias = p.tensor(a.SelectBias)
	out.PerExpertScale = p.tensor(a.PerExpertScale)
	out.TokenMask = p.tensor(a.TokenMask)
	out.Table = p.tensor(a.Table)
	out.TokenIds = p.tensor(a.TokenIDs)
	out.GivenIds = p.tensor(a.GivenIDs)
	out.SharedGate = p.tensor(a.SharedGate)
	out.SharedGateBias = p.tensor(a.SharedGateBias)
	out.OutputBias = p.tensor(a.OutputBias)
	out.Residual = p.tensor(a.Residual)
	out.Y = p.tensor(a.Y)
	out.Logits = p.tensor(a.Logits)
	out.ExpertIds = p.tensor(a.ExpertIDs)
	out.RoutingWeights = p.tensor(a.RoutingWeights)
	out.Counts = p.tensor(a.Counts)
	out.Saved = p.buffer(a.Saved, a.SavedOnDevice)
	out.Workspace = p.buffer(a.Workspace, a.WorkspaceOnDevice)
	out.Bound = a.Bound
	if a.Adapters != nil {
		out.Adapters = a.Adapters.raw
	}
	out.AdapterIds = p.tensor(a.AdapterIDs)
	return out
}

// LayerGradArgs are the arguments of a backward call; every absent output is skipped. Fields as
// in moec_layer_grad_args.
type LayerGradArgs struct {
	// Flags: moec_grad_flags
	Flags uint32
	// Forward: the forward call's inputs and saved buffer; no outputs
	Forward *LayerArgs
	// DY: in [T,H]
	DY Tensor
	// DLogitsIn: in [T,E+Z] f32, optional: from auxiliary losses
	DLogitsIn Tensor
	// DX: out [T,H]; without router_x, d_x holds both
	DX Tensor
	// DRouterX: out [T,Hr]; without router_x, d_x holds both
	DRouterX Tensor
	// DGateWeight: out
	DGateWeight Tensor
	// DGateBias: out
	DGateBias Tensor
	// DInputScale: out
	DInputScale Tensor
	// DPerExpertScale: out
	DPerExpertScale Tensor
	// DExpertWeights: out
	DExpertWeights *WeightSet
	// DSharedWeights: out
	DSharedWeights *WeightSet
	// DSharedGate: out
	DSharedGate Tensor
	// DSharedGateBias: out
	DSharedGateBias Tensor
	// DOutputBias: out
	DOutputBias Tensor
	// DResidual: out
	DResidual Tensor
	// DRoutingWeights: out [T,K] f32, optional
	DRoutingWeights Tensor
	// Workspace: absent = the context's
	Workspace []byte
	// WorkspaceOnDevice, instead of Workspace, is in the device's memory
	WorkspaceOnDevice DeviceBuffer
	// DAdapters: out, optional: as moec_experts_grad_args
	DAdapters []Adapter
}

func (p *pins) layerGradArgs(a *LayerGradArgs) *raw.LayerGradArgs {
	if a == nil {
		return nil
	}
	out := new(raw.LayerGradArgs)
	out.StructSize = sizeOf(out)
	out.Flags = a.Flags
	out.Forward = address(p, p.layerArgs(a.Forward))
	out.DY = p.tensor(a.DY)
	out.DLogitsIn = p.tensor(a.DLogitsIn)
	out.DX = p.tensor(a.DX)
	out.DRouterX = p.tensor(a.DRouterX)
	out.DGateWeight = p.tensor(a.DGateWeight)
	out.DGateBias = p.tensor(a.DGateBias)
	out.DInputScale = p.tensor(a.DInputScale)
	out.DPerExpertScale = p.tensor(a.DPerExpertScale)
	out.DExpertWeights = address(p, p.weightSet(a.DExpertWeights))
	out.DSharedWeights = address(p, p.weightSet(a.DSharedWeights))
	out.DSharedGate = p.tensor(a.DSharedGate)
	out.DSharedGateBias = p.tensor(a.DSharedGateBias)
	out.DOutputBias = p.tensor(a.DOutputBias)
	out.DResidual = p.tensor(a.DResidual)
	out.DRoutingWeights = p.tensor(a.DRoutingWeights)
	out.Workspace = p.buffer(a.Workspace, a.WorkspaceOnDevice)
	out.DAdapters = p.adapterGrads(a.DAdapters, a.adapters())
	return out
}

// ExpertsArgs are the arguments of a forward call of experts on a plan. Fields as in
// moec_experts_args.
type ExpertsArgs struct {
	// Flags: moec_experts_flags
	Flags uint32
	// Plan as in moec_experts_args
	Plan *Plan
	// Weights as in moec_experts_args
	Weights *Weights
	// SharedWeights: with a shared expert; one expert of width shared_inter
	SharedWeights *Weights
	// X: in [T,H]
	X Tensor
	// SharedGate: in [1,H] or [2,H]; dtype of x or f32
	SharedGate Tensor
	// SharedGateBias: in [2], SOFTMAX2; dtype of x or f32
	SharedGateBias Tensor
	// OutputBias: in [H], optional; dtype of x or f32
	OutputBias Tensor
	// Residual: in [T,H], optional: added; may be y itself
	Residual Tensor
	// Y: out [T,H]
	Y Tensor
	// Saved: out, unless SAVE_NONE; written in full. At an address that is no multiple of 4 it
	// takes scratch of its size besides any workspace, in backward, too
	Saved []byte
	// SavedOnDevice, instead of Saved, is in the device's memory
	SavedOnDevice DeviceBuffer
	// Workspace: absent = the context's
	Workspace []byte
	// WorkspaceOnDevice, instead of Workspace, is in the device's memory
	WorkspaceOnDevice DeviceBuffer
	// Adapters: of the routed experts; NULL = none
	Adapters *Adapters
	// AdapterIDs: in [T] i32, optional: the only adapter of each token, an index into what is
	// bound; any other number = none
	AdapterIDs Tensor
}

func (p *pins) expertsArgs(a *ExpertsArgs) *raw.ExpertsArgs {
	if a == nil {
		return nil
	}
	out := new(raw.ExpertsArgs)
	out.StructSize = sizeOf(out)
	out.Flags = a.Flags
	if a.Plan != nil {
		out.Plan = a.Plan.raw
	}
	if a.Weights != nil {
		out.Weights = a.Weights.raw
	}
	if a.SharedWeights != nil {
		out.SharedWeights = a.SharedWeights.raw
	}
	out.X = p.tensor(a.X)
	out.SharedGate = p.tensor(a.SharedGate)
	out.SharedGateBias = p.tensor(a.SharedGateBias)
	out.OutputBias = p.tensor(a.OutputBias)
	out.Residual = p.tensor(a.Residual)
	out.Y = p.tensor(a.Y)
	out.Saved = p.buffer(a.Saved, a.SavedOnDevice)
	out.Workspace = p.buffer(a.Workspace, a.WorkspaceOnDevice)
	if a.Adapters != nil {
		out.Adapters = a.Adapters.raw
	}
	out.AdapterIds = p.tensor(a.AdapterIDs)
	return out
}

// ExpertsGradArgs are those of its backward call; every absent output is skipped. Fields as in
// moec_experts_grad_args.
type ExpertsGradArgs struct {
	// Flags: moec_grad_flags
	Flags uint32
	// Plan as in moec_experts_grad_args
	Plan *Plan
	// Weights as in moec_experts_grad_args
	Weights *Weights
	// SharedWeights as in moec_experts_grad_args
	SharedWeights *Weights
	// X: in [T,H]
	X Tensor
	// SharedGate: in [1,H] or [2,H]; dtype of x or f32
	SharedGate Tensor
	// SharedGateBias: in [2], SOFTMAX2; dtype of x or f32
	SharedGateBias Tensor
	// DY: in [T,H]
	DY Tensor
	// Saved: in
	Saved []byte
	// SavedOnDevice, instead of Saved, is in the device's memory
	SavedOnDevice DeviceBuffer
	// DX: out [T,H]; absent = skipped, as each output
	DX Tensor
	// DRoutingWeights: out [T,K] f32; EXPERT_CHOICE: [P], one a row
	DRoutingWeights Tensor
	// DExpertWeights: out, in the layout of the bound weights; f32 or their dtype; NULL = frozen
	DExpertWeights *WeightSet
	// DSharedWeights: out, in the layout of the bound weights; f32 or their dtype; NULL = frozen
	DSharedWeights *WeightSet
	// DSharedGate: out, f32 or dtype of x
	DSharedGate Tensor
	// DSharedGateBias: out, f32 or dtype of x
	DSharedGateBias Tensor
	// DOutputBias: out, f32 or dtype of x
	DOutputBias Tensor
	// DResidual: out [T,H]
	DResidual Tensor
	// Workspace as in moec_experts_grad_args
	Workspace []byte
	// WorkspaceOnDevice, instead of Workspace, is in the device's memory
	WorkspaceOnDevice DeviceBuffer
	// Adapters: in, as forward
	Adapters *Adapters
	// AdapterIDs: in [T] i32, optional: the only adapter of each token, an index into what is
	// bound; any other number = none
	AdapterIDs Tensor
	// DAdapters: out, optional: the gradients of as many adapters as are bound, each factor where
	// it is given
	DAdapters []Adapter
}

func (p *pins) expertsGradArgs(a *ExpertsGradArgs) *raw.ExpertsGradArgs {
	if a == nil {
		return nil
	}
	out := new(raw.ExpertsGradArgs)
	out.StructSize = sizeOf(out)
	out.Flags = a.Flags
	if a.Plan != nil {
		out.Plan = a.Plan.raw
	}
	if a.Weights != nil {
		out.Weights = a.Weights.raw
	}
	if a.SharedWeights != nil {
		out.SharedWeights = a.SharedWeights.raw
	}
	out.X = p.tensor(a.X)
	out.SharedGate = p.tensor(a.SharedGate)
	out.SharedGateBias = p.tensor(a.SharedGateBias)
	out.DY = p.tensor(a.DY)
	out.Saved = p.buffer(a.Saved, a.SavedOnDevice)
	out.DX = p.tensor(a.DX)
	out.DRoutingWeights = p.tensor(a.DRoutingWeights)
	out.DExpertWeights = address(p, p.weightSet(a.DExpertWeights))
	out.DSharedWeights = address(p, p.weightSet(a.DSharedWeights))
	out.DSharedGate = p.tensor(a.DSharedGate)
	out.DSharedGateBias = p.tensor(a.DSharedGateBias)
	out.DOutputBias = p.tensor(a.DOutputBias)
	out.DResidual = p.tensor(a.DResidual)
	out.Workspace = p.buffer(a.Workspace, a.WorkspaceOnDevice)
	if a.Adapters != nil {
		out.Adapters = a.Adapters.raw
	}
	out.AdapterIds = p.tensor(a.AdapterIDs)
	out.DAdapters = p.adapterGrads(a.DAdapters, a.adapters())
	return out
}

// WeightSet holds the matrices of a set of experts, or their gradients, as the descriptor's
// layout says. Fields as in moec_weight_set.
type WeightSet struct {
	// GateUp: GATE_THEN_UP, UP_THEN_GATE, INTERLEAVED: N = 2I, K = H
	GateUp Matrix
	// Gate: SPLIT: N = I, K = H
	Gate Matrix
	// Up: SPLIT, NONE: N = I, K = H
	Up Matrix
	// Down: N = H, K = I
	Down Matrix
}

func (p *pins) weightSet(a *WeightSet) *raw.WeightSet {
	if a == nil {
		return nil
	}
	out := new(raw.WeightSet)
	out.StructSize = sizeOf(out)
	out.GateUp = *p.matrix(&a.GateUp)
	out.Gate = *p.matrix(&a.Gate)
	out.Up = *p.matrix(&a.Up)
	out.Down = *p.matrix(&a.Down)
	return out
}

// Adapter holds the terms of one adapter (LoRA), or their gradients. Fields as in moec_adapter.
type Adapter struct {
	// GateUp: N = 2I, in the order of the adapters' gate_layout; K = H
	GateUp Factors
	// Gate: N = I, K = H
	Gate Factors
	// Up: N = I, K = H
	Up Factors
	// Down: N = H, K = I
	Down Factors
}

func (p *pins) adapter(a *Adapter) *raw.Adapter {
	if a == nil {
		return nil
	}
	out := new(raw.Adapter)
	out.GateUp = *p.factors(&a.GateUp)
	out.Gate = *p.factors(&a.Gate)
	out.Up = *p.factors(&a.Up)
	out.Down = *p.factors(&a.Down)
	return out
}

// Matrix is one expert matrix with its optional bias, or their gradients. Fields as in
// moec_matrix.
type Matrix struct {
	// Data: [E,N,K] (OUT_IN) or [E,K,N] (IN_OUT); y = x * W^T + bias; codes: the type and shape
	// that the scheme says
	Data Tensor
	// Bias: [E,N], optional
	Bias Tensor
	// PerExpert: instead of data: `count` tensors [N,K] or [K,N]; array copied
	PerExpert []Tensor
	// PerExpertBias: instead of bias: `count` tensors [N]; array copied
	PerExpertBias []Tensor
	// Quant: codes: their scales; NULL = plain values. Copied at bind
	Quant *Quant
}

func (p *pins) matrix(a *Matrix) *raw.Matrix {
	if a == nil {
		return nil
	}
	out := new(raw.Matrix)
	out.Data = p.tensor(a.Data)
	out.Bias = p.tensor(a.Bias)
	out.PerExpert = p.tensors(a.PerExpert)
	out.PerExpertBias = p.tensors(a.PerExpertBias)
	out.Quant = address(p, p.quant(a.Quant))
	out.Count = p.count(a.lists())
	return out
}

func (a *Matrix) lists() [][]Tensor {
	if a == nil {
		return nil
	}
	out := [][]Tensor{a.PerExpert, a.PerExpertBias}
	out = append(out, a.Quant.lists()...)
	return out
}

// Factors are A and B of one matrix: y += Scale * (x A^T) B^T; or their gradients. Fields as in
// moec_factors.
type Factors struct {
	// A: [E,r,K], r 1 to 512; [1,r,K], or a stride of 0 along E: of all experts
	A Tensor
	// B: [E,N,r]
	B Tensor
	// Scale: alpha / r, or as it was trained: not 0. Of gradients: 0
	Scale float32
}

func (p *pins) factors(a *Factors) *raw.Factors {
	if a == nil {
		return nil
	}
	out := new(raw.Factors)
	out.A = p.tensor(a.A)
	out.B = p.tensor(a.B)
	out.Scale = a.Scale
	return out
}

// Quant says how the codes of a matrix become values; its scheme says which arrays. Fields as in
// moec_quant.
type Quant struct {
	// Flags: moec_quant_flags
	Flags uint32
	// Scales: [E,N/block_n,K/block_k], rounded up; IN_OUT: [E,K/.., N/..]
	Scales Tensor
	// Scales2: scales of the scales
	Scales2 Tensor
	// Zeros: zero points: shape of scales, or packed
	Zeros Tensor
	// Codebook: [16] f32: the value of each code
	Codebook Tensor
	// ScaleBook: [256] f32: the value of each u8 scale
	ScaleBook Tensor
	// ScaleOffset: [1] f32: added to the scales
	ScaleOffset Tensor
	// GroupIndex: [E,K] i32: the block along K of each input (act-order). One that is no block
	// counts as k / block_k
	GroupIndex Tensor
	// PerExpertScales as in moec_quant
	PerExpertScales []Tensor
	// PerExpertScales2 as in moec_quant
	PerExpertScales2 []Tensor
	// PerExpertZeros as in moec_quant
	PerExpertZeros []Tensor
	// PerExpertScaleOffset as in moec_quant
	PerExpertScaleOffset []Tensor
	// PerExpertGroupIndex as in moec_quant
	PerExpertGroupIndex []Tensor
	// BlockN: values along N and K that share a scale; 0 = as the scheme says
	BlockN int64
	// BlockK: values along N and K that share a scale; 0 = as the scheme says
	BlockK int64
	// ScaleBlock: scales that share an entry of scales2; 0 = as the scheme says
	ScaleBlock int64
}

func (p *pins) quant(a *Quant) *raw.Quant {
	if a == nil {
		return nil
	}
	out := new(raw.Quant)
	out.StructSize = sizeOf(out)
	out.Flags = a.Flags
	out.Scales = p.tensor(a.Scales)
	out.Scales2 = p.tensor(a.Scales2)
	out.Zeros = p.tensor(a.Zeros)
	out.Codebook = p.tensor(a.Codebook)
	out.ScaleBook = p.tensor(a.ScaleBook)
	out.ScaleOffset = p.tensor(a.ScaleOffset)
	out.GroupIndex = p.tensor(a.GroupIndex)
	out.PerExpertScales = p.tensors(a.PerExpertScales)
	out.PerExpertScales2 = p.tensors(a.PerExpertScales2)
	out.PerExpertZeros = p.tensors(a.PerExpertZeros)
	out.PerExpertScaleOffset = p.tensors(a.PerExpertScaleOffset)
	out.PerExpertGroupIndex = p.tensors(a.PerExpertGroupIndex)
	out.BlockN = a.BlockN
	out.BlockK = a.BlockK
	out.ScaleBlock = a.ScaleBlock
	return out
}

func (a *Quant) lists() [][]Tensor {
	if a == nil {
		return nil
	}
	out := [][]Tensor{a.PerExpertScales, a.PerExpertScales2, a.PerExpertZeros, a.PerExpertScaleOffset, a.PerExpertGroupIndex}
	return out
}
