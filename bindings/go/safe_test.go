// SPDX-License-Identifier: Apache-2.0

package moec

import (
	"errors"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"moec.dev/moec/raw"
)

func ones(n int, value float32) []float32 {
	out := make([]float32, n)
	for i := range out {
		out[i] = value
	}
	return out
}

func small(t *testing.T) (*Context, *Layer, *Weights) {
	t.Helper()
	context, err := NewContext(nil)
	if err != nil {
		t.Fatal(err)
	}
	layer, err := NewLayer(context, raw.RouterDesc{NumExperts: 4, TopK: 2},
		raw.ExpertsDesc{NumExperts: 4, TopK: 2, Hidden: 16, Inter: 8, Dtype: raw.F32,
			GateLayout: raw.GateThenUp})
	if err != nil {
		t.Fatal(err)
	}
	weights, err := NewWeights(context, raw.WeightsDesc{NumExperts: 4, Hidden: 16, Inter: 8,
		Dtype: raw.F32, GateLayout: raw.GateThenUp},
		WeightSet{GateUp: Matrix{Data: NewTensor(ones(4*16*16, 0.1), 4, 16, 16)},
			Down: Matrix{Data: NewTensor(ones(4*16*8, 0.1), 4, 16, 8)}})
	if err != nil {
		t.Fatal(err)
	}
	return context, layer, weights
}

func arguments(weights *Weights, y []float32) *LayerArgs {
	return &LayerArgs{Weights: weights, X: NewTensor(ones(5*16, 0.5), 5, 16),
		GateWeight: NewTensor(ones(4*16, 0.1), 4, 16), Y: NewTensor(y, 5, 16)}
}

// Codes 5 with zero point 3 and scale 0.05 are the values 0.1 of small.
func TestCodes(t *testing.T) {
	context, layer, weights := small(t)
	want := make([]float32, 80)
	if err := layer.Forward(arguments(weights, want), 0); err != nil {
		t.Fatal(err)
	}
	fill := func(n int, value int8) []int8 {
		out := make([]int8, n)
		for i := range out {
			out[i] = value
		}
		return out
	}
	quant := &Quant{Scales: NewTensor(ones(4*16, 0.05), 4, 16, 1),
		Zeros: NewTensor(fill(4*16, 3), 4, 16, 1)}
	set := WeightSet{
		GateUp: Matrix{Data: NewTensor(fill(4*16*16, 5), 4, 16, 16), Quant: quant},
		Down:   Matrix{Data: NewTensor(fill(4*16*8, 5), 4, 16, 8), Quant: quant}}
	desc := raw.WeightsDesc{NumExperts: 4, Hidden: 16, Inter: 8, Dtype: raw.F32,
		GateLayout: raw.GateThenUp, GateUpScheme: raw.SchemeInt8, DownScheme: raw.SchemeInt8}
	coded, err := NewWeights(context, desc, set)
	if err != nil {
		t.Fatal(err)
	}
	y := make([]float32, 80)
	if err := layer.Forward(arguments(coded, y), 0); err != nil {
		t.Fatal(err)
	}
	for i := range y {
		if difference := y[i] - want[i]; difference > 1e-6 || difference < -1e-6 {
			t.Fatalf("y[%d] is %g; %g is right", i, y[i], want[i])
		}
	}
	set.Down.Quant = nil
	var failed *Error
	if _, err := NewWeights(context, desc, set); !errors.As(err, &failed) {
		t.Fatalf("%v: codes without scales are refused", err)
	}
}

// Streams are numbers: as Go pointers, values as small as CUDA's stream handles 1 and 2 would be
// fatal under -race (checkptr).
func TestSmallStreamHandles(t *testing.T) {
	context, layer, weights := small(t)
	for stream := Stream(0); stream < 3; stream++ {
		if err := layer.Forward(arguments(weights, make([]float32, 80)), stream); err != nil {
			t.Fatal(err)
		}
		if err := context.Synchronize(stream); err != nil {
			t.Fatal(err)
		}
	}
}

// Every call's error is its own, whatever thread the goroutine was on.
func TestErrorsBelongToTheirCalls(t *testing.T) {
	_, layer, weights := small(t)
	var group sync.WaitGroup
	for worker := 0; worker < 8; worker++ {
		group.Add(1)
		go func(worker int) {
			defer group.Done()
			for i := 0; i < 50; i++ {
				args := arguments(weights, make([]float32, 80))
				want := "MOEC_E_SHAPE"
				if worker%2 == 0 {
					args.X, want = NewTensor(make([]int32, 80), 5, 16), "MOEC_E_DTYPE"
				} else {
					args.X = NewTensor(make([]float32, 75), 5, 15)
				}
				var failure *Error
				err := layer.Forward(args, 0)
				if !errors.As(err, &failure) || failure.Name() != want {
					t.Errorf("%v; %s is right", err, want)
				}
			}
		}(worker)
	}
	group.Wait()
}

func TestBackwardWithoutForward(t *testing.T) {
	_, layer, _ := small(t)
	var failed *Error
	for _, args := range []*LayerGradArgs{nil, {}} {
		if err := layer.Backward(args, 0); !errors.As(err, &failed) {
			t.Fatalf("%v: an error of the library is right", err)
		}
	}
}

func TestClose(t *testing.T) {
	context, layer, weights := small(t)
	context.Close() // in any order: children keep their parents
	args := arguments(weights, make([]float32, 80))
	if err := layer.Forward(args, 0); err != nil {
		t.Fatal(err)
	}
	layer.Close()
	layer.Close()
	var failure *Error
	if err := layer.Forward(args, 0); !errors.As(err, &failure) || failure.Code != raw.EInvalidArg {
		t.Fatalf("%v; E_INVALID_ARG is right", err)
	}
	weights.Close()
}

func TestForgottenHandlesAreFreed(t *testing.T) {
	var freed atomic.Int32
	func() {
		for i := 0; i < 4; i++ {
			newHandle(uintptr(i+1), func(uintptr) { freed.Add(1) })
		}
		_, layer, weights := small(t) // with pinned matrices
		if err := layer.Forward(arguments(weights, make([]float32, 80)), 0); err != nil {
			t.Fatal(err)
		}
	}()
	for i := 0; i < 100 && freed.Load() < 4; i++ {
		runtime.GC()
		time.Sleep(time.Millisecond)
	}
	if freed.Load() != 4 {
		t.Fatalf("%d of 4 handles were freed", freed.Load())
	}
}

// Device addresses are numbers, never read by Go; the CPU refuses them before it reads.
func TestDevicePtr(t *testing.T) {
	_, layer, weights := small(t)
	args := arguments(weights, make([]float32, 80))
	args.X = DeviceTensor[float32](DevicePtr(8), 0, 5, 16)
	var failure *Error
	if err := layer.Forward(args, 0); !errors.As(err, &failure) || failure.Code != raw.EDevice {
		t.Fatalf("%v; E_DEVICE is right", err)
	}
	for _, id := range []int{1 << 32, -1 << 32} {
		if made := DeviceTensor[float32](DevicePtr(8), id, 1); made.desc.DeviceId == 0 {
			t.Errorf("device %d became device 0", id)
		}
	}
}

func TestHalfTypes(t *testing.T) {
	for dtype, tensor := range map[uint32]Tensor{
		raw.F16: NewTensor([]Float16{0x3c00}, 1), raw.Bf16: NewTensor([]BFloat16{0x3f80}, 1),
		raw.I64: NewTensor([]int64{1}, 1), raw.Bool: NewTensor([]bool{true}, 1)} {
		if tensor.desc.Dtype != dtype {
			t.Errorf("dtype %#x; %#x is right", tensor.desc.Dtype, dtype)
		}
	}
}

func TestPlan(t *testing.T) {
	context, _, _ := small(t)
	plan, err := NewPlan(context, raw.PlanDesc{MaxTokens: 8, NumExperts: 4, TopK: 2})
	if err != nil {
		t.Fatal(err)
	}
	defer plan.Close()
	if err := plan.FromTopK(NewTensor([]int64{0, 1, 2, 3}, 2, 2), Tensor{}, 0); err != nil {
		t.Fatal(err)
	}
	totals, err := plan.Totals(0)
	if err != nil || totals[0] != 4 {
		t.Fatalf("%v routed rows, %v; 4 are right", totals[0], err)
	}
	var failure *Error
	none := NewTensor([]float32(nil), 0, 2) // of other tokens, not absent
	err = plan.FromTopK(NewTensor([]int64{0, 1, 2, 3}, 2, 2), none, 0)
	if !errors.As(err, &failure) || failure.Code != raw.EShape {
		t.Fatalf("%v; E_SHAPE is right", err)
	}
	if err := plan.FromTopK(NewTensor([]int64(nil), 0, 2), none, 0); err != nil {
		t.Fatal(err)
	}
	if err := plan.FromRule(raw.PlanRoundRobin, 8, Tensor{}, 0); err != nil {
		t.Fatal(err)
	}
	if totals, err = plan.Totals(0); err != nil || totals[0] != 16 || totals[3] != 4 {
		t.Fatalf("%v, %v; 16 rows, 4 of each expert, are right", totals, err)
	}
	err = plan.FromRule(raw.PlanEqualCounts, 8, Tensor{}, 0)
	if !errors.As(err, &failure) || failure.Code != raw.EMismatch {
		t.Fatalf("%v; E_MISMATCH is right", err)
	}
}

// A library that cannot be loaded is an *Error like any other, and can be named.
func TestWithoutLibrary(t *testing.T) {
	found := load
	defer func() { load = found }()
	load = func() error { return errors.New("moec: cannot open libmoec.so.0") }
	_, created := NewContext(nil)
	_, asked := Version()
	for _, err := range []error{created, asked} {
		var failure *Error
		if !errors.As(err, &failure) || failure.Code != raw.EAbi || failure.Name() != "MOEC_E_ABI" {
			t.Errorf("%T %v; an *Error with E_ABI is right", err, err)
		}
	}
	if name := (&Error{Code: raw.EShape}).Name(); name != "MOEC_E_ABI" {
		t.Errorf("%s without a library; MOEC_E_ABI is right", name)
	}
}

func TestVersion(t *testing.T) {
	version, err := Version()
	if err != nil || version == "" {
		t.Fatalf("%q %v", version, err)
	}
	if count, err := DeviceCount(raw.Cpu); err != nil || count != 1 {
		t.Fatalf("%d CPUs, %v; 1 is right", count, err)
	}
}

func TestDeviceArray(t *testing.T) {
	context, layer, weights := small(t)
	want, got := make([]float32, 80), make([]float32, 80)
	if err := layer.Forward(arguments(weights, want), 0); err != nil {
		t.Fatal(err)
	}
	x, err := NewDeviceArray[float32](context, 0, 5, 16)
	if err != nil {
		t.Fatal(err)
	}
	y, err := NewDeviceArray[float32](context, 0, 5, 16)
	if err != nil {
		t.Fatal(err)
	}
	if err := x.CopyFrom(ones(80, 0.5), 0); err != nil {
		t.Fatal(err)
	}
	args := arguments(weights, got)
	args.X, args.Y = x.Tensor(), y.Tensor()
	if err := layer.Forward(args, 0); err != nil {
		t.Fatal(err)
	}
	if err := y.CopyTo(got, 0); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(got, want) {
		t.Fatal(got, want)
	}
	if err := y.Zero(0); err != nil {
		t.Fatal(err)
	}
	if err := y.CopyTo(got, 0); err != nil || !slices.Equal(got, make([]float32, 80)) {
		t.Fatal(got, err)
	}
	y.Close()
	y.Close()
	var failure *Error
	if err := y.CopyTo(got, 0); !errors.As(err, &failure) || failure.Code != raw.EInvalidArg {
		t.Fatal(err)
	}
	context.Close() // what is left goes back with the layer
	x.Close()
	if _, err := NewDeviceArray[float32](context, 0, 4); err == nil {
		t.Fatal("an array of a closed context")
	}
}
