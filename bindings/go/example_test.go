// SPDX-License-Identifier: Apache-2.0

package moec_test

import (
	"fmt"
	"testing"
	"unsafe"

	moec "moec.dev/moec"
	"moec.dev/moec/raw"
)

func fill(n int, value float32) []float32 {
	out := make([]float32, n)
	for i := range out {
		out[i] = value
	}
	return out
}

func layer() (*moec.Context, *moec.Layer, *moec.Weights, error) {
	context, err := moec.NewContext(nil)
	if err != nil {
		return nil, nil, nil, err
	}
	router := raw.RouterDesc{NumExperts: 8, TopK: 2, Norm: raw.NormSum}
	experts := raw.ExpertsDesc{NumExperts: 8, TopK: 2, Hidden: 64, Inter: 48, Dtype: raw.F32}
	form := raw.WeightsDesc{NumExperts: 8, Hidden: 64, Inter: 48, Dtype: raw.F32,
		GateLayout: raw.GateThenUp}
	weights, err := moec.NewWeights(context, form, moec.WeightSet{
		GateUp: moec.Matrix{Data: moec.NewTensor(fill(8*96*64, 0.01), 8, 96, 64)},
		Down:   moec.Matrix{Data: moec.NewTensor(fill(8*64*48, 0.02), 8, 64, 48)}})
	if err != nil {
		return nil, nil, nil, err
	}
	l, err := moec.NewLayer(context, router, experts)
	return context, l, weights, err
}

func Example() {
	_, l, weights, err := layer()
	if err != nil {
		fmt.Println(err)
		return
	}
	defer l.Close()
	y := make([]float32, 4*64)
	err = l.Forward(&moec.LayerArgs{Weights: weights, X: moec.NewTensor(fill(4*64, 0.5), 4, 64),
		GateWeight: moec.NewTensor(fill(8*64, 0.1), 8, 64), Y: moec.NewTensor(y, 4, 64)}, 0)
	fmt.Printf("%v %.5f\n", err, y[0])
	// Output: <nil> 0.05695
}

func TestErrorsCarryTheLibrarysWords(t *testing.T) {
	_, l, weights, err := layer()
	if err != nil {
		t.Fatal(err)
	}
	err = l.Forward(&moec.LayerArgs{Weights: weights, X: moec.NewTensor(fill(4*63, 0.5), 4, 63),
		GateWeight: moec.NewTensor(fill(8*64, 0.1), 8, 64),
		Y:          moec.NewTensor(make([]float32, 4*64), 4, 64)}, 0)
	failure, ok := err.(*moec.Error)
	if !ok || failure.Code != raw.EShape || failure.Site != "moec_layer_forward" {
		t.Fatalf("%v; E_SHAPE of moec_layer_forward is right", err)
	}
}

func TestSmallStreamHandles(t *testing.T) { // checkptr is fatal on Go pointers of small values
	context, _, _, err := layer()
	if err != nil {
		t.Fatal(err)
	}
	if err := context.Synchronize(2); err != nil {
		t.Fatal(err)
	}
}

func TestLayouts(t *testing.T) {
	if size := unsafe.Sizeof(raw.Tensor{}); size != 128 {
		t.Fatalf("Tensor has %d bytes; 128 is right", size)
	}
}
