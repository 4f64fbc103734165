// SPDX-License-Identifier: Apache-2.0

package moec_test

import (
	"fmt"

	"moec.dev/moec"
	"moec.dev/moec/raw"
)

func fill(n int, value float32) []float32 {
	out := make([]float32, n)
	for i := range out {
		out[i] = value
	}
	return out
}

// The body of README.md's program.
func Example() {
	context, _ := moec.NewContext(nil) // the CPU
	layer, _ := moec.NewLayer(context,
		raw.RouterDesc{NumExperts: 8, TopK: 2, Norm: raw.NormSum},
		raw.ExpertsDesc{NumExperts: 8, TopK: 2, Hidden: 64, Inter: 48, Dtype: raw.F32})
	weights, _ := moec.NewWeights(context,
		raw.WeightsDesc{NumExperts: 8, Hidden: 64, Inter: 48, Dtype: raw.F32,
			GateLayout: raw.GateThenUp},
		moec.WeightSet{GateUp: moec.Matrix{Data: moec.NewTensor(fill(8*96*64, 0.01), 8, 96, 64)},
			Down: moec.Matrix{Data: moec.NewTensor(fill(8*64*48, 0.02), 8, 64, 48)}})
	y := make([]float32, 4*64)
	err := layer.Forward(&moec.LayerArgs{Weights: weights,
		X:          moec.NewTensor(fill(4*64, 0.5), 4, 64),
		GateWeight: moec.NewTensor(fill(8*64, 0.1), 8, 64),
		Y:          moec.NewTensor(y, 4, 64)}, 0)
	fmt.Printf("%v %.5f\n", err, y[0])
	// Output: <nil> 0.05695
}

// The program of docs/howto/go.md for a GPU.
func readmeOnADevice() ([]float32, error) {
	context, err := moec.NewContext(&raw.ContextDesc{DeviceType: raw.Cuda}) // DeviceId: which one
	if err != nil {
		return nil, err
	}
	on := func(values []float32, shape ...int) moec.Tensor {
		array, _ := moec.NewDeviceArray[float32](context, 0, shape...) // on the default stream
		array.CopyFrom(values, 0)
		return array.Tensor()
	}
	layer, _ := moec.NewLayer(context, raw.RouterDesc{NumExperts: 8, TopK: 2, Norm: raw.NormSum},
		raw.ExpertsDesc{NumExperts: 8, TopK: 2, Hidden: 64, Inter: 48, Dtype: raw.F32})
	weights, _ := moec.NewWeights(context,
		raw.WeightsDesc{NumExperts: 8, Hidden: 64, Inter: 48, Dtype: raw.F32, GateLayout: raw.GateThenUp},
		moec.WeightSet{GateUp: moec.Matrix{Data: on(fill(8*96*64, 0.01), 8, 96, 64)},
			Down: moec.Matrix{Data: on(fill(8*64*48, 0.02), 8, 64, 48)}})
	y, _ := moec.NewDeviceArray[float32](context, 0, 4, 64) // zeros
	err = layer.Forward(&moec.LayerArgs{Weights: weights, X: on(fill(4*64, 0.5), 4, 64),
		GateWeight: on(fill(8*64, 0.1), 8, 64), Y: y.Tensor()}, 0)
	if err != nil {
		return nil, err
	}
	values := make([]float32, 4*64)
	return values, y.CopyTo(values, 0) // waits for the stream
}

// The program of docs/howto/go.md for codes.
func ExampleQuantise() {
	context, _ := moec.NewContext(nil)
	nf4 := func(n, k int) *moec.Quantised {
		codes, _ := moec.Quantise(context, raw.QuantiseDesc{Kind: raw.QuantiseNf4, Dtype: raw.F32,
			NumExperts: 8, OutFeatures: int64(n), InFeatures: int64(k)},
			moec.NewTensor(fill(8*n*k, 0.02), 8, n, k), 0)
		return codes
	}
	up, down := nf4(48, 64), nf4(64, 48)
	weights, _ := moec.NewWeights(context,
		raw.WeightsDesc{NumExperts: 8, Hidden: 64, Inter: 48, Dtype: raw.F32,
			GateLayout: raw.GateNone, GateUpScheme: up.Scheme, DownScheme: down.Scheme},
		moec.WeightSet{Up: moec.Matrix{Data: up.Codes(), Quant: up.Quant()},
			Down: moec.Matrix{Data: down.Codes(), Quant: down.Quant()}})
	values := make([]float32, 64*48)
	err := weights.Dequantise(raw.MatrixDown, 0, moec.NewTensor(values, 64, 48), 0)
	fmt.Printf("%v %.2f\n", err, values[0])
	// Output: <nil> 0.02
}

func ExampleError() {
	_, err := moec.NewContext(&raw.ContextDesc{NumThreads: -1})
	failure := err.(*moec.Error)
	fmt.Println(failure.Name(), failure.Site)
	// Output: MOEC_E_INVALID_ARG moec_context_create
}
