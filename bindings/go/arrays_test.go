// SPDX-License-Identifier: Apache-2.0

package moec_test

import (
	"testing"

	"moec.dev/moec"
	"moec.dev/moec/raw"
)

// arrays is memory that the library allocates on the device of desc.
type arrays struct {
	desc    raw.ContextDesc
	t       *testing.T
	made    *moec.Context
	outputs []output
}

type output struct {
	array  *moec.DeviceArray[float32]
	values []float32
}

func (a *arrays) must(err error) {
	a.t.Helper()
	if err != nil {
		a.t.Fatal(err)
	}
}

func (a *arrays) context(t *testing.T) *moec.Context {
	context, err := moec.NewContext(&a.desc)
	a.t, a.made, a.outputs = t, context, nil
	a.must(err)
	return context
}
func (a *arrays) stream() moec.Stream { return 0 }
func (a *arrays) array(values []float32, shape []int) *moec.DeviceArray[float32] {
	array, err := moec.NewDeviceArray[float32](a.made, 0, shape...)
	a.must(err)
	a.must(array.CopyFrom(values, 0))
	return array
}
func (a *arrays) input(values []float32, shape []int) moec.Tensor {
	return a.array(values, shape).Tensor()
}
func (a *arrays) output(values []float32, shape []int) moec.Tensor {
	array := a.array(values, shape) // NaN, so that what is not written shows
	a.outputs = append(a.outputs, output{array, values})
	return array.Tensor()
}
func (a *arrays) saved(args *moec.LayerArgs, bytes int) {
	saved, err := moec.NewDeviceArray[uint8](a.made, 0, bytes)
	a.must(err)
	args.SavedOnDevice = saved.Buffer()
}
func (a *arrays) collect(*testing.T, *moec.Context) {
	for _, o := range a.outputs {
		a.must(o.array.CopyTo(o.values, 0))
		o.array.Close()
	}
}

func TestFamiliesInArraysOfTheLibrary(t *testing.T) {
	for _, err := range check(t, &arrays{}) {
		t.Error(err)
	}
}
