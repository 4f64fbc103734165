// SPDX-License-Identifier: Apache-2.0

package moec

import (
	"runtime"
	"unsafe"

	"moec.dev/moec/raw"
)

// DeviceArray is a compact row-major array on a context's device that the library allocated: a GPU
// needs no other package. Close gives the memory back, after which Tensor is absent.
type DeviceArray[T Element] struct {
	*handle
	context *Context
	view    *Tensor
	shape   []int
}

// NewDeviceArray allocates an array of zeros, written in the order of the stream.
func NewDeviceArray[T Element](c *Context, stream Stream, shape ...int) (*DeviceArray[T], error) {
	defer runtime.KeepAlive(c)
	var zero T
	info, memory := new(raw.DeviceInfo), new(raw.Buffer)
	info.StructSize = sizeOf(info)
	err := call(func() int32 { return raw.ContextDevice(c.raw, unsafe.Pointer(info)) })
	if err != nil {
		return nil, err
	}
	desc, count := describe(dtypeOf(zero), info.DeviceType, info.DeviceId, shape)
	bytes := uint64(count) * uint64(unsafe.Sizeof(zero))
	err = call(func() int32 { return raw.BufferAlloc(c.raw, bytes, unsafe.Pointer(memory)) })
	if err != nil {
		return nil, err
	}
	desc.Data = memory.Ptr
	view := &Tensor{desc: desc}
	owner := newHandle(memory.Ptr, func(uintptr) {
		*view = Tensor{}
		raw.BufferFree(c.raw, unsafe.Pointer(memory)) // refused, and given back, after c.Close
	}, c)
	view.owner = owner
	array := &DeviceArray[T]{owner, c, view, shape}
	return array, array.Zero(stream)
}

// Tensor views the array, for calls to read or write.
func (a *DeviceArray[T]) Tensor() Tensor { return *a.view }

// Buffer views the array as bytes, for SavedOnDevice and WorkspaceOnDevice.
func (a *DeviceArray[T]) Buffer() DeviceBuffer {
	return DeviceBuffer{DevicePtr(a.view.desc.Data), a.bytes(), a.view.owner}
}

func (a *DeviceArray[T]) bytes() int {
	var zero T
	count := int(unsafe.Sizeof(zero))
	for _, extent := range a.shape {
		count *= extent
	}
	return count
}

// CopyFrom copies the slice in, which has been read when it returns.
func (a *DeviceArray[T]) CopyFrom(data []T, stream Stream) error {
	return a.copy(NewTensor(data, a.shape...), *a.view, stream)
}

// CopyTo copies the array out to the slice; waits for the stream.
func (a *DeviceArray[T]) CopyTo(data []T, stream Stream) error {
	return a.copy(*a.view, NewTensor(data, a.shape...), stream)
}

// Zero sets every byte to 0, in the order of the stream.
func (a *DeviceArray[T]) Zero(stream Stream) error {
	defer runtime.KeepAlive(a)
	tensor := a.view.desc
	return call(func() int32 {
		return raw.TensorZero(a.context.raw, unsafe.Pointer(&tensor), uintptr(stream))
	})
}

func (a *DeviceArray[T]) copy(source, target Tensor, stream Stream) error {
	var pin pins
	defer pin.release()
	defer runtime.KeepAlive(a)
	from, to := pin.tensor(source), pin.tensor(target)
	return call(func() int32 {
		return raw.TensorCopy(a.context.raw, unsafe.Pointer(&from), unsafe.Pointer(&to),
			uintptr(stream))
	})
}
