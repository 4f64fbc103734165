// SPDX-License-Identifier: Apache-2.0

package moec

import (
	"fmt"
	"math"
	"runtime"
	"unsafe"

	"moec.dev/moec/raw"
)

// Float16 and its like are the bits of numbers of 16 and 8 bits; E8M0 are powers of two.
type (
	Float16    uint16
	BFloat16   uint16
	Float8E4M3 uint8
	Float8E5M2 uint8
	Float8E8M0 uint8
)

// DevicePtr is an address in a device's memory.
type DevicePtr uintptr

// DeviceBuffer is memory on the context's device; it must stay valid until the work queued with it
// is done.
type DeviceBuffer struct {
	Ptr   DevicePtr
	Bytes int
	owner any // of DeviceArray.Buffer: kept alive
}

// Tensor is a view of an array, row-major unless it has strides; the zero Tensor is "absent".
type Tensor struct {
	desc  raw.Tensor
	owner any            // the slice, kept alive
	first unsafe.Pointer // its first element, pinned during calls
}

// Element is what a tensor may hold.
type Element interface {
	float32 | float64 | Float16 | BFloat16 | Float8E4M3 | Float8E5M2 | Float8E8M0 | int8 | uint8 |
		int32 | int64 | bool
}

func dtypeOf(element any) uint32 {
	switch element.(type) {
	case float32:
		return raw.F32
	case float64:
		return raw.F64
	case Float16:
		return raw.F16
	case BFloat16:
		return raw.Bf16
	case Float8E4M3:
		return raw.F8E4m3
	case Float8E5M2:
		return raw.F8E5m2
	case Float8E8M0:
		return raw.F8E8m0
	case int8:
		return raw.I8
	case uint8:
		return raw.U8
	case int32:
		return raw.I32
	case int64:
		return raw.I64
	}
	return raw.Bool
}

func describe(dtype uint32, deviceType, deviceID int32, shape []int) (raw.Tensor, int) {
	if len(shape) > len(raw.Tensor{}.Shape) {
		panic(fmt.Sprintf("moec: %d dimensions; at most %d", len(shape), len(raw.Tensor{}.Shape)))
	}
	out := raw.Tensor{DeviceType: deviceType, DeviceId: deviceID, Dtype: dtype, Ndim: int32(len(
		shape))}
	count := 1
	for i, extent := range shape {
		out.Shape[i] = int64(extent)
		count *= extent
	}
	return out, count
}

// NewTensor views a slice. It panics if the shape does not have len(data) elements.
func NewTensor[T Element](data []T, shape ...int) Tensor {
	var zero T
	desc, count := describe(dtypeOf(zero), raw.Cpu, 0, shape)
	if count != len(data) {
		panic(fmt.Sprintf("moec: slice has %d elements, shape %v needs %d", len(data), shape, count))
	}
	return Tensor{desc, data, unsafe.Pointer(unsafe.SliceData(data))}
}

// StridedTensor views a slice: element (i, j, ...) is at i strides[0] + j strides[1] + ...; strides
// of 0 alone are those of a compact array. It panics if an element lies outside of data. The
// arguments that may have strides say so in moec.h.
func StridedTensor[T Element](data []T, shape, strides []int) Tensor {
	var zero T
	desc, count := describe(dtypeOf(zero), raw.Cpu, 0, shape)
	if len(strides) != len(shape) {
		panic(fmt.Sprintf("moec: %d strides for shape %v", len(strides), shape))
	}
	room := len(data) - 1
	for i, stride := range strides {
		desc.Strides[i] = int64(stride)
		if steps := shape[i] - 1; count > 0 && steps > 0 {
			if stride < 0 || stride > room/steps {
				panic(fmt.Sprintf("moec: slice has %d elements, shape %v with strides %v needs others",
					len(data), shape, strides))
			}
			room -= stride * steps
		}
	}
	if count > 0 && room < 0 {
		panic(fmt.Sprintf("moec: slice has no element, shape %v needs %d", shape, count))
	}
	return Tensor{desc, data, unsafe.Pointer(unsafe.SliceData(data))}
}

// elementBytes of a dtype, which has the bits of an element in its bits 8 to 15.
func elementBytes(dtype uint32) int { return int(dtype>>8&0xff) / 8 }

// BytesTensor views the bytes of an array of a type such as raw.F8E4m3, as a checkpoint's file has
// them. It panics if the shape has another number of bytes.
func BytesTensor(data []byte, dtype uint32, shape ...int) Tensor {
	desc, count := describe(dtype, raw.Cpu, 0, shape)
	if bytes := count * elementBytes(dtype); bytes != len(data) {
		panic(fmt.Sprintf("moec: %d bytes, shape %v needs %d", len(data), shape, bytes))
	}
	return Tensor{desc, data, unsafe.Pointer(unsafe.SliceData(data))}
}

// Dtype is one of raw.F32 and its like; 0 = absent.
func (t Tensor) Dtype() uint32 { return t.desc.Dtype }

// Shape of the tensor.
func (t Tensor) Shape() []int64 { return t.desc.Shape[:t.desc.Ndim] }

func (t Tensor) bytes() int {
	count := elementBytes(t.desc.Dtype)
	for _, extent := range t.Shape() {
		count *= int(extent)
	}
	return count
}

// DeviceTensor views device memory, which must stay valid until the work queued with it is done.
func DeviceTensor[T Element](data DevicePtr, deviceID int, shape ...int) Tensor {
	var zero T
	id := min(max(deviceID, math.MinInt32), math.MaxInt32) // no device's: the library refuses it
	desc, _ := describe(dtypeOf(zero), raw.Cuda, int32(id), shape)
	desc.Data = uintptr(data)
	return Tensor{desc: desc}
}

// Pins hold Go memory in place while C has its address.
type pins struct {
	pinner runtime.Pinner
	failed error // of what cannot be passed
}

// call is call, unless something cannot be passed.
func (p *pins) call(function func() int32) error {
	if p.failed != nil {
		return p.failed
	}
	return call(function)
}

func (p *pins) release() { p.pinner.Unpin() }

func (p *pins) tensor(t Tensor) raw.Tensor {
	if t.first != nil {
		p.pinner.Pin(t.first)
		t.desc.Data = uintptr(t.first)
	}
	return t.desc
}

// tensors is the address of a C array of them.
func (p *pins) tensors(list []Tensor) uintptr {
	out := make([]raw.Tensor, len(list))
	for i, t := range list {
		out[i] = p.tensor(t)
	}
	if len(out) == 0 {
		return 0
	}
	return address(p, &out[0])
}

// count is the length of all lists of a matrix that are not empty.
func (p *pins) count(lists [][]Tensor) int64 {
	count := 0
	for _, list := range lists {
		if count != 0 && len(list) != 0 && len(list) != count {
			message := fmt.Sprintf("a list has %d tensors, another one of its matrix %d; both need one "+
				"for each expert", len(list), count)
			p.failed = &Error{Code: raw.EInvalidArg, Site: "moec_matrix", Message: message}
		}
		count = max(count, len(list))
	}
	return int64(count)
}

func (p *pins) buffer(b []byte, onDevice DeviceBuffer) raw.Buffer {
	if len(b) == 0 {
		return raw.Buffer{Ptr: uintptr(onDevice.Ptr), Bytes: uint64(onDevice.Bytes)}
	}
	first := unsafe.Pointer(unsafe.SliceData(b))
	p.pinner.Pin(first)
	return raw.Buffer{Ptr: uintptr(first), Bytes: uint64(len(b))}
}

// address pins a struct of ours and gives its address for a field of another.
func address[T any](p *pins, value *T) uintptr {
	if value == nil {
		return 0
	}
	p.pinner.Pin(value)
	return uintptr(unsafe.Pointer(value))
}
