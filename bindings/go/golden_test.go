// SPDX-License-Identifier: Apache-2.0

package moec_test

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"reflect"
	"strings"
	"testing"
	"unicode"

	"moec.dev/moec"
	"moec.dev/moec/raw"
)

const root = "../../"

func readJSON(t *testing.T, path string, out any) {
	t.Helper()
	text, err := os.ReadFile(root + path)
	if err == nil {
		err = json.Unmarshal(text, out)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// camel is the Go name of a field of moec.h.
func camel(name string) string {
	var out strings.Builder
	for _, part := range strings.Split(name, "_") {
		out.WriteRune(unicode.ToUpper(rune(part[0])))
		out.WriteString(part[1:])
	}
	return out.String()
}

// setFields copies a JSON object into a mirror struct.
func setFields(t *testing.T, target reflect.Value, fields map[string]any) {
	t.Helper()
	for name, value := range fields {
		field := target.FieldByName(camel(name))
		switch v := value.(type) {
		case map[string]any:
			setFields(t, field, v)
		case float64:
			if !field.IsValid() {
				t.Fatalf("no field %s", name)
			}
			field.Set(reflect.ValueOf(v).Convert(field.Type()))
		}
	}
}

func descriptor[T any](t *testing.T, fields map[string]any) T {
	t.Helper()
	var out T
	setFields(t, reflect.ValueOf(&out).Elem(), fields)
	return out
}

// file is a safetensors file of float32 tensors.
type file map[string]struct {
	Shape   []int  `json:"shape"`
	Offsets [2]int `json:"data_offsets"`
	values  []float32
}

func readTensors(t *testing.T, path string) file {
	t.Helper()
	content, err := os.ReadFile(root + path)
	if err != nil {
		t.Fatal(err)
	}
	header := 8 + int(binary.LittleEndian.Uint64(content))
	entries := map[string]json.RawMessage{}
	if err := json.Unmarshal(content[8:header], &entries); err != nil {
		t.Fatal(err)
	}
	out := file{}
	for name, text := range entries {
		entry := out[name]
		if name == "__metadata__" || json.Unmarshal(text, &entry) != nil {
			continue
		}
		data := content[header+entry.Offsets[0] : header+entry.Offsets[1]]
		for i := 0; i+4 <= len(data); i += 4 {
			bits := binary.LittleEndian.Uint32(data[i:])
			entry.values = append(entry.values, math.Float32frombits(bits))
		}
		out[name] = entry
	}
	return out
}

// argument names a tensor of the file: its leading part, as a shape.
type argument struct {
	Tensor string
	Shape  []int
}

type weights struct {
	Desc     map[string]any
	Matrices map[string]argument
}

type goldenCase struct {
	Family          string
	Router, Experts map[string]any
	Inputs          map[string]argument
	Weights         weights
	SharedWeights   *weights `json:"shared_weights"`
}

func (a argument) count() int {
	count := 1
	for _, extent := range a.Shape {
		count *= extent
	}
	return count
}

// comparison is a gradient beside the tensor of the file that it must equal.
type comparison struct {
	name    string
	got     []float32
	columns int
}

// memory is where a case's arrays are: the host's, or a device's.
type memory interface {
	context(t *testing.T) *moec.Context
	stream() moec.Stream
	input(values []float32, shape []int) moec.Tensor
	output(values []float32, shape []int) moec.Tensor // values are there after collect
	saved(args *moec.LayerArgs, bytes int)
	collect(t *testing.T, context *moec.Context)
}

type host struct{}

func (host) context(t *testing.T) *moec.Context {
	context, err := moec.NewContext(&raw.ContextDesc{NumThreads: 2})
	if err != nil {
		t.Fatal(err)
	}
	return context
}
func (host) stream() moec.Stream { return 0 }
func (host) input(values []float32, shape []int) moec.Tensor {
	return moec.NewTensor(values, shape...)
}
func (host) output(values []float32, shape []int) moec.Tensor {
	return moec.NewTensor(values, shape...)
}
func (host) saved(args *moec.LayerArgs, bytes int) { args.Saved = make([]byte, bytes) }
func (host) collect(*testing.T, *moec.Context)     {}

// run holds a case while it is computed.
type run struct {
	t        *testing.T
	file     file
	memory   memory
	compared []comparison
}

func (r *run) input(a argument) moec.Tensor {
	return r.memory.input(r.file["p."+a.Tensor].values[:a.count()], a.Shape)
}

// gradient gives room for the gradient of an argument; absent where the file has none.
func (r *run) gradient(a argument) moec.Tensor {
	name := "g." + a.Tensor
	if _, ok := r.file[name]; !ok {
		return moec.Tensor{}
	}
	got := fill(a.count(), float32(math.NaN()))
	r.compared = append(r.compared, comparison{name, got, a.Shape[len(a.Shape)-1]})
	return r.memory.output(got, a.Shape)
}

func (r *run) set(matrices map[string]argument, of func(argument) moec.Tensor) moec.WeightSet {
	var set moec.WeightSet
	for role, a := range matrices {
		name, isBias := strings.CutSuffix(role, "_bias")
		matrix := reflect.ValueOf(&set).Elem().FieldByName(camel(name)).Addr().Interface()
		if isBias {
			matrix.(*moec.Matrix).Bias = of(a)
		} else {
			matrix.(*moec.Matrix).Data = of(a)
		}
	}
	return set
}

func (r *run) weights(context *moec.Context, w *weights) *moec.Weights {
	if w == nil {
		return nil
	}
	desc := descriptor[raw.WeightsDesc](r.t, w.Desc)
	out, err := moec.NewWeights(context, desc, r.set(w.Matrices, r.input))
	if err != nil {
		r.t.Fatal(err)
	}
	return out
}

// rowError is the worst row of ||got - ref|| / max(||ref row||, 0.01 of the largest row norm).
func rowError(got, ref []float32, columns int) float64 {
	norm := func(values []float64) float64 {
		sum := 0.0
		for _, v := range values {
			sum += v * v
		}
		return math.Sqrt(sum)
	}
	row, difference := make([]float64, columns), make([]float64, columns)
	norms, errors := []float64{}, []float64{}
	largest, worst := 0.0, 0.0
	for first := 0; first < len(ref); first += columns {
		for c := range row {
			row[c], difference[c] = float64(ref[first+c]), -float64(ref[first+c])
			if first+c < len(got) { // beyond: rows of identity experts
				difference[c] += float64(got[first+c])
			}
		}
		norms, errors = append(norms, norm(row)), append(errors, norm(difference))
		largest = math.Max(largest, norm(row))
	}
	for i, e := range errors {
		if e != 0 {
			worst = math.Max(worst, e/math.Max(norms[i], 0.01*largest)) // NaN stays NaN
		}
	}
	return worst
}

// golden runs a case; it returns row errors by tensor, or the library's refusal.
func golden(t *testing.T, at memory, c *goldenCase) (map[string]float64, error) {
	context := at.context(t)
	defer context.Close()
	r := &run{t: t, file: readTensors(t, "tests/golden/"+c.Family+".safetensors"), memory: at}
	shape := r.file["x"].Shape
	y := fill(len(r.file["x"].values), float32(math.NaN()))
	dX := fill(len(y), float32(math.NaN()))
	layer, err := moec.NewLayer(context, descriptor[raw.RouterDesc](t, c.Router),
		descriptor[raw.ExpertsDesc](t, c.Experts))
	if err != nil {
		return nil, err
	}
	defer layer.Close()
	sizes, err := layer.Sizes()
	if err != nil {
		return nil, err
	}
	forward := &moec.LayerArgs{Weights: r.weights(context, &c.Weights),
		SharedWeights: r.weights(context, c.SharedWeights),
		X:             at.input(r.file["x"].values, shape), Y: at.output(y, shape)}
	at.saved(forward, moec.BytesFor(sizes.Saved, shape[0]))
	backward := &moec.LayerGradArgs{Forward: forward,
		DY: at.input(r.file["dout"].values, shape), DX: at.output(dX, shape)}
	for role, a := range c.Inputs {
		field := func(target any, name string) reflect.Value {
			return reflect.ValueOf(target).Elem().FieldByName(name)
		}
		field(forward, camel(role)).Set(reflect.ValueOf(r.input(a)))
		if into := field(backward, "D"+camel(role)); into.IsValid() {
			into.Set(reflect.ValueOf(r.gradient(a)))
		}
	}
	dWeights := r.set(c.Weights.Matrices, r.gradient)
	backward.DExpertWeights = &dWeights
	if c.SharedWeights != nil {
		dShared := r.set(c.SharedWeights.Matrices, r.gradient)
		backward.DSharedWeights = &dShared
	}
	if err := layer.Forward(forward, at.stream()); err != nil {
		return nil, err
	}
	if err := layer.Backward(backward, at.stream()); err != nil {
		return nil, err
	}
	at.collect(t, context)
	r.compared = append(r.compared, comparison{"y", y, shape[1]}, comparison{"g.x", dX, shape[1]})
	out := map[string]float64{}
	for _, one := range r.compared {
		out[one.name] = rowError(one.got, r.file[one.name].values, one.columns)
	}
	for name := range r.file {
		if _, ok := out[name]; !ok && strings.HasPrefix(name, "g.") {
			t.Errorf("%s: %s was not compared", c.Family, name)
		}
	}
	return out, nil
}

type goldenFile struct {
	Tolerance float64
	Cases     []goldenCase
}

func cases(t *testing.T) goldenFile {
	var all goldenFile
	readJSON(t, "tests/golden/cases.json", &all)
	if len(all.Cases) != 34 {
		t.Fatalf("%d cases; 34 are right", len(all.Cases))
	}
	return all
}

// check runs every case; it returns what the library refused.
func check(t *testing.T, at memory) (refused []error) {
	all := cases(t)
	for i := range all.Cases {
		found, err := golden(t, at, &all.Cases[i])
		if err != nil {
			refused = append(refused, fmt.Errorf("%s: %w", all.Cases[i].Family, err))
		}
		for name, e := range found {
			if !(e <= all.Tolerance) {
				t.Errorf("%s %s: row error %.2e", all.Cases[i].Family, name, e)
			}
		}
	}
	return refused
}

func TestFamilies(t *testing.T) {
	for _, err := range check(t, host{}) {
		t.Error(err)
	}
}

// The comparison can fail: gate and up exchanged are seen.
func TestExchangedMatricesAreSeen(t *testing.T) {
	for _, c := range cases(t).Cases {
		if c.Family != "qwen3_moe" {
			continue
		}
		c.Weights.Desc["gate_layout"] = float64(raw.UpThenGate)
		if found, err := golden(t, host{}, &c); err != nil || !(found["y"] > 0.1) {
			t.Errorf("row error %.2e, %v", found["y"], err)
		}
	}
}
