// SPDX-License-Identifier: Apache-2.0

// Package moec runs Mixture-of-Experts layers: routing, plans, grouped experts, forward and
// backward.
//
// Handles are closed with Close (a finalizer is the safety net); failed calls are *Error values.
// T tokens, H hidden, I intermediate, E experts, K experts per token; see moec.h.
package moec

import (
	"runtime"
	"unsafe"

	"moec.dev/moec/raw"
)

// Stream is a cudaStream_t, or 0 on the CPU.
type Stream uintptr

type handle struct {
	raw  uintptr
	free func(uintptr)
	keep []any // what the library borrowed
}

// Close frees the handle; closing twice is harmless. Handles may be closed in any order.
func (h *handle) Close() {
	if h.raw != 0 {
		h.free(h.raw)
		h.raw, h.keep = 0, nil
		runtime.SetFinalizer(h, nil)
	}
}

func newHandle(value uintptr, free func(uintptr), keep ...any) *handle {
	h := &handle{value, free, keep}
	runtime.SetFinalizer(h, (*handle).Close)
	return h
}

// Handle types; each is freed by Close.
type (
	Context struct{ *handle } // a device and its scratch memory
	Plan    struct{ *handle } // the routing of one batch, sorted by expert
	Weights struct{ *handle } // expert matrices, borrowed and pinned
	Experts struct{ *handle } // experts, run on plans
	Layer   struct{ *handle } // router and experts in one call
)

// Adapters (LoRA) of a set of experts; their factors are borrowed and pinned until Close.
type Adapters struct {
	*handle
	count int
}

func create(make func(out unsafe.Pointer) int32) (uintptr, error) {
	out := new(uintptr)
	err := call(func() int32 { return make(unsafe.Pointer(out)) })
	return *out, err
}

func sizeOf[T any](value *T) uint32 { return uint32(unsafe.Sizeof(*value)) }

// NewContext opens the CPU (nil) or the device that desc names; StructSize is filled in.
func NewContext(desc *raw.ContextDesc) (*Context, error) {
	own := new(raw.ContextDesc) // desc may lie in a struct with pointers, which C must not see
	if desc != nil {
		*own = *desc
	}
	own.StructSize = sizeOf(own)
	value, err := create(func(out unsafe.Pointer) int32 {
		return raw.ContextCreate(unsafe.Pointer(
			own), out)
	})
	if err != nil {
		return nil, err
	}
	return &Context{newHandle(value, func(h uintptr) { raw.ContextFree(h) })}, nil
}

// DeviceCount of a type (raw.Cpu, raw.Cuda); 0 without a driver.
func DeviceCount(deviceType int32) (int, error) {
	count := new(int32)
	err := call(func() int32 { return raw.DeviceCount(deviceType, unsafe.Pointer(count)) })
	return int(*count), err
}

// Version of the running library, such as "0.1.0".
func Version() (string, error) {
	if err := loaded(); err != nil {
		return "", err
	}
	return text(raw.VersionString()), nil
}

// Synchronize waits for the work queued on the stream.
func (c *Context) Synchronize(stream Stream) error {
	defer runtime.KeepAlive(c)
	return call(func() int32 { return raw.ContextSync(c.raw, uintptr(stream)) })
}

// NewPlan makes a plan; StructSize is filled in.
func NewPlan(c *Context, desc raw.PlanDesc) (*Plan, error) {
	defer runtime.KeepAlive(c)
	desc.StructSize = sizeOf(&desc)
	value, err := create(func(out unsafe.Pointer) int32 {
		return raw.PlanCreate(c.raw, unsafe.Pointer(&desc), nil, out)
	})
	if err != nil {
		return nil, err
	}
	return &Plan{newHandle(value, func(h uintptr) { raw.PlanFree(h) })}, nil
}

// FromTopK rebuilds the plan from ids [T,K] (int32 or int64) and routing weights [T,K]
// (float32; zero Tensor = 1).
func (p *Plan) FromTopK(expertIDs, routingWeights Tensor, stream Stream) error {
	var pin pins
	defer pin.release()
	defer runtime.KeepAlive(p)
	ids, w := pin.tensor(expertIDs), pin.tensor(routingWeights)
	optional := unsafe.Pointer(&w)
	if w.Dtype == 0 { // no rows of weights have no address, either
		optional = nil
	}
	return call(func() int32 {
		return raw.PlanFromTopk(p.raw, unsafe.Pointer(&ids), optional, uintptr(
			stream))
	})
}

// FromRule rebuilds the plan from ids that a rule gives (raw.PlanRoundRobin: forced balance, for
// benchmarks; raw.PlanEqualCounts: as many rows for each local expert, one after the other) and
// routing weights [T,K] (float32; zero Tensor = 1).
func (p *Plan) FromRule(rule uint32, numTokens int64, routingWeights Tensor, stream Stream) error {
	var pin pins
	defer pin.release()
	defer runtime.KeepAlive(p)
	w := pin.tensor(routingWeights)
	optional := unsafe.Pointer(&w)
	if w.Dtype == 0 {
		optional = nil
	}
	return call(func() int32 {
		return raw.PlanFromRule(p.raw, rule, numTokens, optional, uintptr(stream))
	})
}

// Totals are routed rows, rows in use, dropped rows and the largest group. Waits for the stream.
func (p *Plan) Totals(stream Stream) ([4]int32, error) {
	defer runtime.KeepAlive(p)
	out := new([4]int32)
	err := call(func() int32 {
		return raw.PlanTotalsSync(p.raw, unsafe.Pointer(out), uintptr(stream))
	})
	return *out, err
}
