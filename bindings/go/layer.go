// SPDX-License-Identifier: Apache-2.0

package moec

import (
	"runtime"
	"unsafe"

	"moec.dev/moec/raw"
)

// Matrix is one expert matrix with its optional bias, or their gradients.
type Matrix struct{ Data, Bias Tensor }

// WeightSet holds the matrices of a set of experts (or their gradients) as the descriptor's layout
// says.
type WeightSet struct{ GateUp, Gate, Up, Down Matrix }

func (p *pins) set(s *WeightSet) *raw.WeightSet {
	if s == nil {
		return nil
	}
	matrix := func(m Matrix) raw.Matrix {
		return raw.Matrix{Data: p.tensor(m.Data), Bias: p.tensor(
			m.Bias)}
	}
	out := &raw.WeightSet{GateUp: matrix(s.GateUp), Gate: matrix(s.Gate), Up: matrix(s.Up),
		Down: matrix(s.Down)}
	out.StructSize = sizeOf(out)
	return out
}

// NewWeights borrows the matrices: their memory stays pinned until Close.
func NewWeights(c *Context, desc raw.WeightsDesc, set WeightSet) (*Weights, error) {
	defer runtime.KeepAlive(c)
	desc.StructSize = sizeOf(&desc)
	value, err := create(func(out unsafe.Pointer) int32 {
		return raw.WeightsCreate(c.raw,
			unsafe.Pointer(&desc), out)
	})
	if err != nil {
		return nil, err
	}
	pin := new(pins)
	weights := &Weights{newHandle(value, func(h uintptr) { raw.WeightsFree(h); pin.release() }, set)}
	bound := pin.set(&set)
	if err := call(func() int32 { return raw.WeightsBind(value, unsafe.Pointer(bound)) }); err != nil {
		weights.Close()
		return nil, err
	}
	return weights, nil
}

// NewLayer composes a router and experts; StructSize fields are filled in.
func NewLayer(c *Context, router raw.RouterDesc, experts raw.ExpertsDesc) (*Layer, error) {
	var pin pins
	defer pin.release()
	defer runtime.KeepAlive(c)
	router.StructSize, experts.StructSize = sizeOf(&router), sizeOf(&experts)
	desc := &raw.LayerDesc{Router: address(&pin, &router), Experts: address(&pin, &experts)}
	desc.StructSize = sizeOf(desc)
	value, err := create(func(out unsafe.Pointer) int32 {
		return raw.LayerCreate(c.raw,
			unsafe.Pointer(desc), out)
	})
	if err != nil {
		return nil, err
	}
	return &Layer{newHandle(value, func(h uintptr) { raw.LayerFree(h) })}, nil
}

// Sizes are exact: bytes for T tokens are Base + T * PerToken.
func (l *Layer) Sizes() (raw.ExpertsSizes, error) {
	defer runtime.KeepAlive(l)
	out := new(raw.ExpertsSizes)
	out.StructSize = sizeOf(out)
	err := call(func() int32 { return raw.LayerQuery(l.raw, unsafe.Pointer(out)) })
	return *out, err
}

// BytesFor is what size says for T tokens.
func BytesFor(size raw.Size, tokens int) int {
	return int(size.Base + uint64(
		tokens)*size.PerToken)
}

// LayerArgs are the tensors of a forward call; fields as in moec_layer_args.
type LayerArgs struct {
	Weights, SharedWeights                         *Weights
	X, RouterX, GateWeight, GateBias, InputScale   Tensor
	SelectBias, PerExpertScale, TokenMask          Tensor
	Table, TokenIDs, GivenIDs                      Tensor
	SharedGate, SharedGateBias, OutputBias         Tensor
	Residual, Y, Logits, ExpertIDs, RoutingWeights Tensor
	Counts                                         Tensor
	Saved, Workspace                               []byte
	SavedOnDevice, WorkspaceOnDevice               DeviceBuffer // instead of the above
	RngOffset                                      uint64
}

func (p *pins) layer(a *LayerArgs) *raw.LayerArgs {
	if a == nil {
		return nil
	}
	out := &raw.LayerArgs{
		RngOffset: a.RngOffset, X: p.tensor(a.X), RouterX: p.tensor(a.RouterX),
		GateWeight: p.tensor(a.GateWeight), GateBias: p.tensor(a.GateBias), InputScale: p.tensor(
			a.InputScale),
		SelectBias: p.tensor(a.SelectBias), PerExpertScale: p.tensor(a.PerExpertScale),
		TokenMask: p.tensor(a.TokenMask), Table: p.tensor(a.Table), TokenIds: p.tensor(a.TokenIDs),
		GivenIds: p.tensor(a.GivenIDs), SharedGate: p.tensor(a.SharedGate),
		SharedGateBias: p.tensor(a.SharedGateBias), OutputBias: p.tensor(a.OutputBias),
		Residual: p.tensor(a.Residual), Y: p.tensor(a.Y), Logits: p.tensor(a.Logits),
		ExpertIds: p.tensor(a.ExpertIDs), RoutingWeights: p.tensor(a.RoutingWeights),
		Counts: p.tensor(a.Counts), Saved: p.buffer(a.Saved, a.SavedOnDevice),
		Workspace: p.buffer(a.Workspace, a.WorkspaceOnDevice),
	}
	if a.Weights != nil {
		out.Weights = a.Weights.raw
	}
	if a.SharedWeights != nil {
		out.SharedWeights = a.SharedWeights.raw
	}
	out.StructSize = sizeOf(out)
	return out
}

// Forward runs gate, routing, plan and experts.
func (l *Layer) Forward(args *LayerArgs, stream Stream) error {
	var pin pins
	defer pin.release()
	defer runtime.KeepAlive(l)
	defer runtime.KeepAlive(args)
	desc := pin.layer(args)
	return call(func() int32 { return raw.LayerForward(l.raw, unsafe.Pointer(desc), uintptr(stream)) })
}

// LayerGradArgs are the tensors of a backward call; every absent output is skipped.
type LayerGradArgs struct {
	Forward                                 *LayerArgs // inputs and saved buffer of the forward call
	Flags                                   uint32     // raw.GradAccumulate, ...
	DY, DLogitsIn                           Tensor
	DX, DRouterX, DGateWeight, DGateBias    Tensor
	DInputScale, DPerExpertScale            Tensor
	DExpertWeights, DSharedWeights          *WeightSet
	DSharedGate, DSharedGateBias            Tensor
	DOutputBias, DResidual, DRoutingWeights Tensor
	Workspace                               []byte
	WorkspaceOnDevice                       DeviceBuffer // instead of the above
}

func (p *pins) grads(a *LayerGradArgs) *raw.LayerGradArgs {
	if a == nil {
		return nil
	}
	out := &raw.LayerGradArgs{
		Flags: a.Flags, Forward: address(p, p.layer(a.Forward)),
		DY: p.tensor(a.DY), DLogitsIn: p.tensor(a.DLogitsIn), DX: p.tensor(a.DX),
		DRouterX: p.tensor(a.DRouterX), DGateWeight: p.tensor(a.DGateWeight),
		DGateBias: p.tensor(a.DGateBias), DInputScale: p.tensor(a.DInputScale),
		DPerExpertScale: p.tensor(a.DPerExpertScale),
		DExpertWeights:  address(p, p.set(a.DExpertWeights)),
		DSharedWeights:  address(p, p.set(a.DSharedWeights)),
		DSharedGate:     p.tensor(a.DSharedGate), DSharedGateBias: p.tensor(a.DSharedGateBias),
		DOutputBias: p.tensor(a.DOutputBias), DResidual: p.tensor(a.DResidual),
		DRoutingWeights: p.tensor(a.DRoutingWeights),
		Workspace:       p.buffer(a.Workspace, a.WorkspaceOnDevice),
	}
	out.StructSize = sizeOf(out)
	return out
}

// Backward computes the gradients.
func (l *Layer) Backward(args *LayerGradArgs, stream Stream) error {
	var pin pins
	defer pin.release()
	defer runtime.KeepAlive(l)
	defer runtime.KeepAlive(args)
	desc := pin.grads(args)
	return call(func() int32 {
		return raw.LayerBackward(l.raw, unsafe.Pointer(desc), uintptr(stream))
	})
}
