// SPDX-License-Identifier: Apache-2.0

//go:build moec_purego || !cgo

package moec_test

import (
	"math"
	"os"
	"runtime"
	"testing"
	"unsafe"

	"github.com/ebitengine/purego"
	"moec.dev/moec"
	"moec.dev/moec/raw"
)

// The few calls of the CUDA driver that a test needs.
var (
	cuInit                   func(flags uint32) int32
	cuDeviceGet              func(device *int32, ordinal int32) int32
	cuDevicePrimaryCtxRetain func(context *uintptr, device int32) int32
	cuCtxSetCurrent          func(context uintptr) int32
	cuStreamCreate           func(stream *uintptr, flags uint32) int32
	cuMemAlloc               func(address *uint64, bytes uintptr) int32
	cuMemFree                func(address uint64) int32
	cuMemcpyHtoDAsync        func(to uint64, from unsafe.Pointer, bytes, stream uintptr) int32
	cuMemcpyDtoH             func(to unsafe.Pointer, from uint64, bytes uintptr) int32
)

// device is a GPU's memory, from the driver, and a stream of ours.
type device struct {
	t        *testing.T
	driver   uintptr // the primary context
	queue    uintptr
	held     []uint64
	expected []expected
}

type expected struct {
	address uint64
	values  []float32
}

func (d *device) must(status int32, what string) {
	d.t.Helper()
	if status != 0 {
		d.t.Fatalf("%s: CUDA error %d", what, status)
	}
}

func openDevice(t *testing.T) *device {
	if count, err := moec.DeviceCount(raw.Cuda); err != nil || count == 0 {
		if os.Getenv("MOEC_TEST_DEVICE") == "cuda" {
			t.Fatal("no CUDA device ", err)
		}
		t.Skip("no CUDA device ", err)
	}
	library, err := purego.Dlopen("libcuda.so.1", purego.RTLD_NOW|purego.RTLD_GLOBAL)
	if err != nil {
		t.Fatal(err)
	}
	for name, function := range map[string]any{"cuInit": &cuInit, "cuDeviceGet": &cuDeviceGet,
		"cuDevicePrimaryCtxRetain": &cuDevicePrimaryCtxRetain, "cuCtxSetCurrent": &cuCtxSetCurrent,
		"cuStreamCreate": &cuStreamCreate, "cuMemAlloc_v2": &cuMemAlloc,
		"cuMemFree_v2": &cuMemFree, "cuMemcpyHtoDAsync_v2": &cuMemcpyHtoDAsync,
		"cuMemcpyDtoH_v2": &cuMemcpyDtoH} {
		purego.RegisterLibFunc(function, library, name)
	}
	runtime.LockOSThread() // the driver's current context belongs to the thread
	d, ordinal := &device{t: t}, int32(0)
	d.must(cuInit(0), "cuInit")
	d.must(cuDeviceGet(&ordinal, 0), "cuDeviceGet")
	d.must(cuDevicePrimaryCtxRetain(&d.driver, ordinal), "cuDevicePrimaryCtxRetain")
	d.must(cuCtxSetCurrent(d.driver), "cuCtxSetCurrent")
	d.must(cuStreamCreate(&d.queue, 1), "cuStreamCreate")
	return d
}

func (d *device) room(bytes int) uint64 {
	var address uint64
	d.must(cuMemAlloc(&address, uintptr(max(bytes, 1))), "cuMemAlloc")
	d.held = append(d.held, address)
	return address
}

func (d *device) context(t *testing.T) *moec.Context {
	context, err := moec.NewContext(&raw.ContextDesc{DeviceType: raw.Cuda})
	if err != nil {
		t.Fatal(err)
	}
	return context
}

func (d *device) stream() moec.Stream { return moec.Stream(d.queue) }

func (d *device) input(values []float32, shape []int) moec.Tensor {
	address := d.room(4 * len(values))
	// On the stream that reads it: a copy from pageable memory returns before it has landed.
	d.must(cuMemcpyHtoDAsync(address, unsafe.Pointer(unsafe.SliceData(values)),
		uintptr(4*len(values)), d.queue), "cuMemcpyHtoDAsync")
	return moec.DeviceTensor[float32](moec.DevicePtr(address), 0, shape...)
}

func (d *device) output(values []float32, shape []int) moec.Tensor {
	tensor := d.input(values, shape) // NaN, so that what is not written shows
	d.expected = append(d.expected, expected{d.held[len(d.held)-1], values})
	return tensor
}

func (d *device) saved(args *moec.LayerArgs, bytes int) {
	args.SavedOnDevice = moec.DeviceBuffer{Ptr: moec.DevicePtr(d.room(bytes)), Bytes: bytes}
}

func (d *device) collect(t *testing.T, context *moec.Context) {
	if err := context.Synchronize(d.stream()); err != nil {
		t.Fatal(err)
	}
	for _, e := range d.expected {
		d.must(cuMemcpyDtoH(unsafe.Pointer(unsafe.SliceData(e.values)), e.address,
			uintptr(4*len(e.values))), "cuMemcpyDtoH")
	}
	for _, address := range d.held {
		d.must(cuMemFree(address), "cuMemFree")
	}
	d.held, d.expected = nil, nil
}

func TestFamiliesInDeviceArrays(t *testing.T) {
	openDevice(t)
	for _, err := range check(t, &arrays{desc: raw.ContextDesc{DeviceType: raw.Cuda}}) {
		t.Error(err)
	}
}

func TestReadmeOnADevice(t *testing.T) {
	openDevice(t)
	if y, err := readmeOnADevice(); err != nil || math.Abs(float64(y[0])-0.05695) > 1e-5 {
		t.Fatal(y, err)
	}
}

func TestFamiliesInDeviceMemory(t *testing.T) {
	d := openDevice(t)
	for _, err := range check(t, d) {
		t.Error(err)
	}
}
