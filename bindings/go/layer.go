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

// Forward runs gate, routing, plan and experts.
func (l *Layer) Forward(args *LayerArgs, stream Stream) error {
	var pin pins
	defer pin.release()
	defer runtime.KeepAlive(l)
	defer runtime.KeepAlive(args)
	desc := pin.layerArgs(args)
	return call(func() int32 { return raw.LayerForward(l.raw, unsafe.Pointer(desc), uintptr(stream)) })
}

// Backward computes the gradients.
func (l *Layer) Backward(args *LayerGradArgs, stream Stream) error {
	var pin pins
	defer pin.release()
	defer runtime.KeepAlive(l)
	defer runtime.KeepAlive(args)
	desc := pin.layerGradArgs(args)
	return call(func() int32 {
		return raw.LayerBackward(l.raw, unsafe.Pointer(desc), uintptr(stream))
	})
}
