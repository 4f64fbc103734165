// SPDX-License-Identifier: Apache-2.0

package moec

import (
	"runtime"
	"unsafe"

	"moec.dev/moec/raw"
)

// Quantised is a matrix of codes with its scales, on a context's device, in memory that the library
// allocated. Close gives the memory back, after which its tensors are absent.
type Quantised struct {
	*handle
	// Scheme reads the codes: that of raw.WeightsDesc.
	Scheme uint32
	made   *raw.Quant
	codes  *raw.Tensor
}

// Named is a tensor by its name in moec.h.
type Named struct {
	Name   string
	Tensor Tensor
}

const quantisedAlignment = 256 // more than any element, and a line of memory

// Quantise makes codes of source: [E,N,K], or [E,K,N] where the orientation is IN_OUT. Codes are
// OUT_IN whatever the source, but for NF4 and FP4, which keep its order; StructSize is filled in.
func Quantise(c *Context, desc raw.QuantiseDesc, source Tensor, stream Stream) (*Quantised, error) {
	var pin pins
	defer pin.release()
	defer runtime.KeepAlive(c)
	desc.StructSize = sizeOf(&desc)
	info, quant := new(raw.QuantiseInfo), new(raw.Quant)
	info.StructSize, quant.StructSize = sizeOf(info), sizeOf(quant)
	err := call(func() int32 {
		return raw.QuantiseQuery(c.raw, unsafe.Pointer(&desc), unsafe.Pointer(info),
			unsafe.Pointer(quant))
	})
	if err != nil {
		return nil, err
	}
	codes := &info.Codes
	memory, err := place(c, append([]*raw.Tensor{codes}, tensorsOf(quant)...))
	if err != nil {
		return nil, err
	}
	owner := newHandle(memory.Ptr, func(uintptr) {
		*codes, *quant = raw.Tensor{}, raw.Quant{}
		raw.BufferFree(c.raw, unsafe.Pointer(memory)) // refused, and given back, after c.Close
	}, c)
	made := &Quantised{owner, info.Scheme, quant, codes}
	args := &raw.QuantiseArgs{Desc: address(&pin, &desc), Source: pin.tensor(source), Codes: *codes,
		Quant: address(&pin, quant)}
	args.StructSize = sizeOf(args)
	err = call(func() int32 { return raw.Quantise(c.raw, unsafe.Pointer(args), uintptr(stream)) })
	if err != nil {
		made.Close()
		return nil, err
	}
	return made, nil
}

func tensorsOf(q *raw.Quant) []*raw.Tensor {
	return []*raw.Tensor{&q.Scales, &q.Scales2, &q.Zeros, &q.Codebook, &q.ScaleBook, &q.ScaleOffset}
}

// place allocates memory for those tensors that have a type.
func place(c *Context, tensors []*raw.Tensor) (*raw.Buffer, error) {
	info, memory := new(raw.DeviceInfo), new(raw.Buffer)
	info.StructSize = sizeOf(info)
	err := call(func() int32 { return raw.ContextDevice(c.raw, unsafe.Pointer(info)) })
	if err != nil {
		return nil, err
	}
	total := uint64(0)
	for _, t := range tensors {
		t.Data = uintptr(total) // from the beginning of the memory
		bytes := uint64(Tensor{desc: *t}.bytes())
		total += (bytes + quantisedAlignment - 1) / quantisedAlignment * quantisedAlignment
	}
	err = call(func() int32 { return raw.BufferAlloc(c.raw, total, unsafe.Pointer(memory)) })
	if err != nil {
		return nil, err
	}
	for _, t := range tensors {
		if t.Dtype == 0 {
			t.Data = 0
			continue
		}
		t.Data += memory.Ptr
		t.DeviceType, t.DeviceId = info.DeviceType, info.DeviceId
	}
	return memory, nil
}

// Codes for Matrix.Data.
func (q *Quantised) Codes() Tensor { return q.view(*q.codes) }

func (q *Quantised) view(desc raw.Tensor) Tensor { return Tensor{desc: desc, owner: q.handle} }

// Quant for Matrix.Quant: the scales and what else the scheme reads.
func (q *Quantised) Quant() *Quant {
	m := q.made
	return &Quant{Flags: m.Flags, BlockN: m.BlockN, BlockK: m.BlockK, ScaleBlock: m.ScaleBlock,
		Scales: q.view(m.Scales), Scales2: q.view(m.Scales2), Zeros: q.view(m.Zeros),
		Codebook: q.view(m.Codebook), ScaleBook: q.view(m.ScaleBook),
		ScaleOffset: q.view(m.ScaleOffset)}
}

// Arrays lists what Quant has, for a file.
func (q *Quantised) Arrays() []Named {
	names := []string{"scales", "scales2", "zeros", "codebook", "scale_book", "scale_offset"}
	var out []Named
	for i, tensor := range tensorsOf(q.made) {
		if tensor.Dtype != 0 {
			out = append(out, Named{names[i], q.view(*tensor)})
		}
	}
	return out
}

// Read copies the bytes of a tensor of any device, in their order; waits for the stream.
func (c *Context) Read(tensor Tensor, stream Stream) ([]byte, error) {
	var pin pins
	defer pin.release()
	defer runtime.KeepAlive(c)
	defer runtime.KeepAlive(tensor.owner)
	words := make([]uint64, (tensor.bytes()+7)/8) // aligned for every element
	source := pin.tensor(tensor)
	if len(words) == 0 {
		return nil, nil
	}
	target := source
	target.ByteOffset, target.Strides = 0, [len(target.Strides)]int64{}
	target.DeviceType, target.DeviceId, target.Data = raw.Cpu, 0, address(&pin, &words[0])
	err := call(func() int32 {
		return raw.TensorCopy(c.raw, unsafe.Pointer(&source), unsafe.Pointer(&target), uintptr(stream))
	})
	if err != nil {
		return nil, err
	}
	first := (*byte)(unsafe.Pointer(&words[0]))
	return unsafe.Slice(first, tensor.bytes()), nil
}
