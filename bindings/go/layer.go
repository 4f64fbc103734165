// SPDX-License-Identifier: Apache-2.0

package moec

import (
	"runtime"
	"unsafe"

	"moec.dev/moec/raw"
)

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
	bound := pin.weightSet(&set)
	err = pin.call(func() int32 { return raw.WeightsBind(value, unsafe.Pointer(bound)) })
	if err != nil {
		weights.Close()
		return nil, err
	}
	return weights, nil
}

// Dequantise writes the values of one expert's matrix (raw.MatrixDown and its like): [N,K], or
// [K,N] where its orientation is IN_OUT; of codes those of the scheme's formula.
func (w *Weights) Dequantise(matrix uint32, expert int, to Tensor, stream Stream) error {
	var pin pins
	defer pin.release()
	defer runtime.KeepAlive(w)
	target := pin.tensor(to)
	return call(func() int32 {
		return raw.WeightsDequantise(w.raw, matrix, int32(expert), unsafe.Pointer(&target),
			uintptr(stream))
	})
}

// NewExperts makes experts that run on plans; StructSize is filled in.
func NewExperts(c *Context, desc raw.ExpertsDesc) (*Experts, error) {
	defer runtime.KeepAlive(c)
	desc.StructSize = sizeOf(&desc)
	value, err := create(func(out unsafe.Pointer) int32 {
		return raw.ExpertsCreate(c.raw, unsafe.Pointer(&desc), out)
	})
	if err != nil {
		return nil, err
	}
	return &Experts{newHandle(value, func(h uintptr) { raw.ExpertsFree(h) })}, nil
}

// Sizes are exact: bytes for T tokens are Base + T * PerToken.
func (e *Experts) Sizes() (raw.ExpertsSizes, error) {
	defer runtime.KeepAlive(e)
	return sizes(func(out unsafe.Pointer) int32 { return raw.ExpertsQuery(e.raw, out) })
}

// SizesWith are those of calls with these adapters.
func (e *Experts) SizesWith(adapters *Adapters) (raw.ExpertsSizes, error) {
	defer runtime.KeepAlive(e)
	defer runtime.KeepAlive(adapters)
	return sizes(func(out unsafe.Pointer) int32 {
		return raw.ExpertsQueryAdapters(e.raw, adapters.raw, out)
	})
}

// Forward runs the experts of a plan.
func (e *Experts) Forward(args *ExpertsArgs, stream Stream) error {
	var pin pins
	defer pin.release()
	defer runtime.KeepAlive(e)
	defer runtime.KeepAlive(args)
	desc := pin.expertsArgs(args)
	return pin.call(func() int32 {
		return raw.ExpertsForward(e.raw, unsafe.Pointer(desc), uintptr(stream))
	})
}

// Backward computes the gradients.
func (e *Experts) Backward(args *ExpertsGradArgs, stream Stream) error {
	var pin pins
	defer pin.release()
	defer runtime.KeepAlive(e)
	defer runtime.KeepAlive(args)
	desc := pin.expertsGradArgs(args)
	return pin.call(func() int32 {
		return raw.ExpertsBackward(e.raw, unsafe.Pointer(desc), uintptr(stream))
	})
}

func sizes(query func(out unsafe.Pointer) int32) (raw.ExpertsSizes, error) {
	out := new(raw.ExpertsSizes)
	out.StructSize = sizeOf(out)
	err := call(func() int32 { return query(unsafe.Pointer(out)) })
	return *out, err
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
	return sizes(func(out unsafe.Pointer) int32 { return raw.LayerQuery(l.raw, out) })
}

// SizesWith are those of calls with these adapters.
func (l *Layer) SizesWith(adapters *Adapters) (raw.ExpertsSizes, error) {
	defer runtime.KeepAlive(l)
	defer runtime.KeepAlive(adapters)
	return sizes(func(out unsafe.Pointer) int32 {
		return raw.LayerQueryAdapters(l.raw, adapters.raw, out)
	})
}

// BytesFor is what size says for T tokens.
func BytesFor(size raw.Size, tokens int) int {
	return int(size.Base + uint64(
		tokens)*size.PerToken)
}

// Forward runs gate, routing, plan and experts.
func (l *Layer) Forward(args *LayerArgs, stream Stream) error {
	var pin pins
	defer pin.release()
	defer runtime.KeepAlive(l)
	defer runtime.KeepAlive(args)
	desc := pin.layerArgs(args)
	return pin.call(func() int32 {
		return raw.LayerForward(l.raw, unsafe.Pointer(desc), uintptr(stream))
	})
}

// Backward computes the gradients.
func (l *Layer) Backward(args *LayerGradArgs, stream Stream) error {
	var pin pins
	defer pin.release()
	defer runtime.KeepAlive(l)
	defer runtime.KeepAlive(args)
	desc := pin.layerGradArgs(args)
	return pin.call(func() int32 {
		return raw.LayerBackward(l.raw, unsafe.Pointer(desc), uintptr(stream))
	})
}
