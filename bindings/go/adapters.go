// SPDX-License-Identifier: Apache-2.0

package moec

import (
	"fmt"
	"runtime"
	"unsafe"

	"moec.dev/moec/raw"
)

// NewAdapters borrows the factors of all of list: their memory stays pinned until Close. Values may
// change between calls. Calls add all of them, or each token's own where AdapterIDs are given;
// StructSize is filled in.
func NewAdapters(c *Context, desc raw.AdaptersDesc, list []Adapter) (*Adapters, error) {
	defer runtime.KeepAlive(c)
	desc.StructSize = sizeOf(&desc)
	value, err := create(func(out unsafe.Pointer) int32 {
		return raw.AdaptersCreate(c.raw, unsafe.Pointer(&desc), out)
	})
	if err != nil {
		return nil, err
	}
	pin := new(pins)
	release := func(h uintptr) { raw.AdaptersFree(h); pin.release() }
	adapters := &Adapters{newHandle(value, release, list), len(list)}
	bound := pin.adapters(list)
	err = call(func() int32 {
		return raw.AdaptersBind(value, unsafe.Pointer(unsafe.SliceData(bound)), int32(len(bound)))
	})
	if err != nil {
		adapters.Close()
		return nil, err
	}
	return adapters, nil
}

// Merge adds Scale B A of all of them to the matrices of plain weights, with one rounding. A copy
// that the library packed before is not changed.
func (a *Adapters) Merge(weights *Weights, stream Stream) error {
	defer runtime.KeepAlive(a)
	defer runtime.KeepAlive(weights)
	return call(func() int32 { return raw.AdaptersMerge(a.raw, weights.raw, uintptr(stream)) })
}

// Unmerge subtracts what Merge added, which gives the values before up to its rounding.
func (a *Adapters) Unmerge(weights *Weights, stream Stream) error {
	defer runtime.KeepAlive(a)
	defer runtime.KeepAlive(weights)
	return call(func() int32 { return raw.AdaptersUnmerge(a.raw, weights.raw, uintptr(stream)) })
}

func (p *pins) adapters(list []Adapter) []raw.Adapter {
	out := make([]raw.Adapter, len(list))
	for i := range list {
		out[i] = *p.adapter(&list[i])
	}
	return out
}

// adapterGrads is the address of a C array; the library reads one for each adapter that is bound.
func (p *pins) adapterGrads(list []Adapter, of *Adapters) uintptr {
	if list == nil {
		return 0
	}
	bound := 0
	if of != nil {
		bound = of.count
	}
	if len(list) != bound {
		message := fmt.Sprintf("DAdapters has %d adapters, and %d are bound; expected one for each",
			len(list), bound)
		p.failed = &Error{Code: raw.EShape, Site: "moec_adapter", Message: message}
		return 0
	}
	if bound == 0 {
		return 0
	}
	return address(p, &p.adapters(list)[0])
}

// adapters of a backward call: those of its own arguments, or of the forward's.
func (a *ExpertsGradArgs) adapters() *Adapters { return a.Adapters }

func (a *LayerGradArgs) adapters() *Adapters {
	if a.Forward == nil {
		return nil
	}
	return a.Forward.Adapters
}
