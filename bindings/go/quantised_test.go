// SPDX-License-Identifier: Apache-2.0

package moec_test

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"math"
	"os"
	"reflect"
	"strconv"
	"strings"
	"testing"

	"moec.dev/moec"
	"moec.dev/moec/raw"
)

// Every layer of tests/golden/quant_cases.json from the bytes of its checkpoint: y, d_x and
// d_routing_weights, and the values of down bit for bit. Shown once to fail: the scales of the
// experts in reverse order.

type quantCase struct {
	File             string
	Experts, Weights map[string]any
	Matrices         map[string]struct {
		Data, Bias string
		Quant      map[string]any
	}
	Turned bool
	Runs   []adapterRun // of layers with adapters
}

func quantCases(t *testing.T) (all struct {
	Tolerance       float64
	Cases, Adapters []quantCase
}) {
	readJSON(t, "tests/golden/quant_cases.json", &all)
	return all
}

// checkpoint is a safetensors file; its tensors are views of its bytes.
type checkpoint struct {
	t       *testing.T
	entries map[string]entry
	content []byte
	experts int
}

type entry struct {
	Dtype   string
	Shape   []int
	Offsets [2]int `json:"data_offsets"`
}

var dtypes = map[string]uint32{"F32": raw.F32, "F16": raw.F16, "BF16": raw.Bf16, "I64": raw.I64,
	"I32": raw.I32, "I8": raw.I8, "U8": raw.U8, "F8_E4M3": raw.F8E4m3}

func openCheckpoint(t *testing.T, folder string, c *quantCase) *checkpoint {
	t.Helper()
	content, err := os.ReadFile(root + "tests/golden/" + folder + c.File + ".safetensors")
	if err != nil {
		t.Fatal(err)
	}
	header := 8 + int(binary.LittleEndian.Uint64(content))
	experts := int(c.Weights["num_experts"].(float64))
	file := &checkpoint{t, map[string]entry{}, content[header:], experts}
	var texts map[string]json.RawMessage
	if err := json.Unmarshal(content[8:header], &texts); err != nil {
		t.Fatal(err)
	}
	for name, text := range texts {
		var one entry
		if name != "__metadata__" && json.Unmarshal(text, &one) == nil {
			file.entries[name] = one
		}
	}
	return file
}

func (f *checkpoint) bytes(name string) ([]byte, entry) {
	one, ok := f.entries[name]
	if !ok {
		f.t.Fatalf("no tensor %s", name)
	}
	return f.content[one.Offsets[0]:one.Offsets[1]], one
}

func (f *checkpoint) floats(name string) []float32 {
	data, _ := f.bytes(name)
	out := make([]float32, len(data)/4)
	for i := range out {
		out[i] = math.Float32frombits(binary.LittleEndian.Uint32(data[4*i:]))
	}
	return out
}

// tensor is one of the file in place, or of `NAME#KEY` a number of its JSON text.
func (f *checkpoint) tensor(name string) moec.Tensor {
	name, key, isNumber := strings.Cut(name, "#")
	data, one := f.bytes(name)
	if isNumber {
		var text map[string]any
		if err := json.Unmarshal(data, &text); err != nil {
			f.t.Fatal(err)
		}
		return moec.NewTensor([]float32{float32(text[key].(float64))}, 1)
	}
	return moec.BytesTensor(data, dtypes[one.Dtype], one.Shape...)
}

// set gives a struct's field a tensor, or its list PerExpert... one for each expert.
func (f *checkpoint) set(target any, field, list, name string) {
	to := reflect.ValueOf(target).Elem()
	if !strings.Contains(name, "{e}") {
		to.FieldByName(field).Set(reflect.ValueOf(f.tensor(name)))
		return
	}
	var tensors []moec.Tensor
	for e := 0; e < f.experts; e++ {
		tensors = append(tensors, f.tensor(strings.Replace(name, "{e}", strconv.Itoa(e), 1)))
	}
	to.FieldByName(list).Set(reflect.ValueOf(tensors))
}

// widened is a bf16 tensor of the file as float32.
func (f *checkpoint) widened(name string) ([]float32, []int) {
	bits, one := f.bytes(name)
	values := make([]float32, len(bits)/2)
	for i := range values {
		values[i] = math.Float32frombits(uint32(binary.LittleEndian.Uint16(bits[2*i:])) << 16)
	}
	return values, one.Shape
}

func (f *checkpoint) weights(context *moec.Context, c *quantCase) (*moec.Weights, error) {
	var set moec.WeightSet
	for name, m := range c.Matrices {
		if m.Quant == nil { // plain values
			values, shape := f.widened(m.Data)
			matrix := moec.Matrix{Data: moec.NewTensor(values, shape...)}
			reflect.ValueOf(&set).Elem().FieldByName(camel(name)).Set(reflect.ValueOf(matrix))
			continue
		}
		quant, numbers := &moec.Quant{}, map[string]any{}
		for key, value := range m.Quant {
			if text, ok := value.(string); ok {
				f.set(quant, camel(key), "PerExpert"+camel(key), text)
			} else {
				numbers[key] = value
			}
		}
		setFields(f.t, reflect.ValueOf(quant).Elem(), numbers)
		matrix := moec.Matrix{Quant: quant}
		f.set(&matrix, "Data", "PerExpert", m.Data)
		if m.Bias != "" { // bf16, given as f32
			values, shape := f.widened(m.Bias)
			matrix.Bias = moec.NewTensor(values, shape...)
		}
		reflect.ValueOf(&set).Elem().FieldByName(camel(name)).Set(reflect.ValueOf(matrix))
	}
	return moec.NewWeights(context, descriptor[raw.WeightsDesc](f.t, c.Weights), set)
}

// errorsOf runs forward and backward; it returns row errors.
func (f *checkpoint) errorsOf(context *moec.Context, c *quantCase, weights *moec.Weights) (
	map[string]float64, error) {
	desc := descriptor[raw.ExpertsDesc](f.t, c.Experts)
	experts, err := moec.NewExperts(context, desc)
	if err != nil {
		return nil, err
	}
	defer experts.Close()
	sizes, err := experts.Sizes()
	if err != nil {
		return nil, err
	}
	x, tokens := f.tensor("x"), f.entries["x"].Shape[0]
	plan, err := moec.NewPlan(context, raw.PlanDesc{MaxTokens: int64(tokens),
		NumExperts: desc.NumExperts, TopK: desc.TopK})
	if err != nil {
		return nil, err
	}
	defer plan.Close()
	if err := plan.FromTopK(f.tensor("ids"), f.tensor("weights"), 0); err != nil {
		return nil, err
	}
	hidden, slots := int(desc.Hidden), int(desc.TopK)
	y, dX, dWeights := fill(tokens*hidden, float32(math.NaN())),
		fill(tokens*hidden, float32(math.NaN())), fill(tokens*slots, float32(math.NaN()))
	saved := make([]byte, moec.BytesFor(sizes.Saved, tokens))
	err = experts.Forward(&moec.ExpertsArgs{Plan: plan, Weights: weights, X: x, Saved: saved,
		Y: moec.NewTensor(y, tokens, hidden)}, 0)
	if err != nil {
		return nil, err
	}
	err = experts.Backward(&moec.ExpertsGradArgs{Plan: plan, Weights: weights, X: x, Saved: saved,
		DY: f.tensor("dy"), DX: moec.NewTensor(dX, tokens, hidden),
		DRoutingWeights: moec.NewTensor(dWeights, tokens, slots)}, 0)
	return map[string]float64{"y": rowError(y, f.floats("ref.y"), hidden),
		"d_x":               rowError(dX, f.floats("ref.dx"), hidden),
		"d_routing_weights": rowError(dWeights, f.floats("ref.dweights"), slots)}, err
}

// checkValues compares those of down at the file's indices.
func (f *checkpoint) checkValues(c *quantCase, weights *moec.Weights) {
	desc := descriptor[raw.WeightsDesc](f.t, c.Weights)
	rows, columns := int(desc.Hidden), int(desc.Inter)
	if desc.DownOrientation == raw.InOut {
		rows, columns = columns, rows
	}
	var values []float32
	for e := 0; e < f.experts; e++ {
		matrix := fill(rows*columns, float32(math.NaN()))
		err := weights.Dequantise(raw.MatrixDown, e, moec.NewTensor(matrix, rows, columns), 0)
		if err != nil {
			f.t.Fatal(err)
		}
		values = append(values, matrix...)
	}
	index, _ := f.bytes("dequant.down_proj.index")
	for i, want := range f.floats("dequant.down_proj.value") {
		at := int(binary.LittleEndian.Uint32(index[4*i:]))
		if c.Turned {
			e, row, column := at/(rows*columns), at/rows%columns, at%rows
			at = (e*rows+column)*columns + row
		}
		if math.Float32bits(values[at]) != math.Float32bits(want) {
			f.t.Fatalf("%s: value %d is %g; %g is right", c.File, at, values[at], want)
		}
	}
}

func TestLayersOfCodes(t *testing.T) {
	context := host{}.context(t)
	all := quantCases(t)
	if len(all.Cases) != 19 {
		t.Fatalf("%d cases; 19 are right", len(all.Cases))
	}
	for i := range all.Cases {
		c := &all.Cases[i]
		t.Run(c.File, func(t *testing.T) {
			file := openCheckpoint(t, "quant/", c)
			weights, err := file.weights(context, c)
			if err != nil {
				t.Fatal(err)
			}
			defer weights.Close()
			found, err := file.errorsOf(context, c, weights)
			if err != nil {
				t.Fatal(err)
			}
			for name, e := range found {
				if !(e <= all.Tolerance) {
					t.Errorf("%s: row error %.2e", name, e)
				}
			}
			file.checkValues(c, weights)
		})
	}
}

// Scales of another matrix are refused in the library's words.
func TestWrongScales(t *testing.T) {
	wrong := map[string][2]string{
		"mxfp4_gptoss":         {"ckpt.experts.gate_up_proj_scales", "[4,64,3]; expected [4,96,1]"},
		"bnb_nf4_stack_nested": {"ckpt.experts.gate_up_proj.absmax", "[384]; expected [192]"},
		"fp8_block128_partial": {"x", "[6,136]; expected [2,2,2]"},
		"awq_gemm_g32":         {"ckpt.experts.{e}.up_proj.scales", "[3,32]; expected [1,96]"},
	}
	context := host{}.context(t)
	all := quantCases(t)
	for i := range all.Cases {
		c := &all.Cases[i]
		one, ok := wrong[c.File]
		if !ok {
			continue
		}
		delete(wrong, c.File)
		c.Matrices["down"].Quant["scales"] = one[0]
		_, err := openCheckpoint(t, "quant/", c).weights(context, c)
		var failed *moec.Error
		if !errors.As(err, &failed) || failed.Code != raw.EShape ||
			!strings.Contains(failed.Message, one[1]) {
			t.Errorf("%s: %v", c.File, err)
		}
	}
	if len(wrong) != 0 {
		t.Errorf("%v are no cases", wrong)
	}
}

// Each kind of moec.h: how far a value may be from its source, of the largest.
var kinds = []struct {
	kind, flags uint32
	limit       float64
}{
	{raw.QuantiseInt8, 0, 0.01}, {raw.QuantiseInt8, raw.QuantiseAsymmetric, 0.01},
	{raw.QuantiseInt4, 0, 0.1}, {raw.QuantiseFp8, 0, 0.05}, {raw.QuantiseMxfp8, 0, 0.1},
	{raw.QuantiseMxfp4, 0, 0.3}, {raw.QuantiseNvfp4, 0, 0.2},
	{raw.QuantiseNvfp4, raw.QuantiseScales2Divides, 0.2},
	{raw.QuantiseNf4, raw.QuantiseNested, 0.2}, {raw.QuantiseFp4, 0, 0.25},
}

// Codes of every kind are bound, and read near their source, also from the bytes of a file.
func TestQuantise(t *testing.T) {
	context := host{}.context(t)
	wave := make([]float32, 3*64*32)
	for i := range wave {
		wave[i] = float32(math.Sin(0.11*float64(i)) / 2)
	}
	for _, k := range kinds {
		made := func(n, in int) *moec.Quantised {
			out, err := moec.Quantise(context, raw.QuantiseDesc{Kind: k.kind, Flags: k.flags,
				Dtype: raw.F32, NumExperts: 3, OutFeatures: int64(n), InFeatures: int64(in)},
				moec.NewTensor(wave, 3, n, in), 0)
			if err != nil {
				t.Fatalf("kind %d: %v", k.kind, err)
			}
			return out
		}
		up, down := made(32, 64), made(64, 32)
		read := func(codes moec.Tensor) (values []float32) {
			weights, err := moec.NewWeights(context, raw.WeightsDesc{NumExperts: 3, Hidden: 64,
				Inter: 32, Dtype: raw.F32, GateLayout: raw.GateNone, GateUpScheme: up.Scheme,
				DownScheme: down.Scheme},
				moec.WeightSet{Up: moec.Matrix{Data: up.Codes(), Quant: up.Quant()},
					Down: moec.Matrix{Data: codes, Quant: down.Quant()}})
			if err != nil {
				t.Fatalf("kind %d: %v", k.kind, err)
			}
			defer weights.Close()
			for e := 0; e < 3; e++ {
				matrix := make([]float32, 64*32)
				to := moec.NewTensor(matrix, 64, 32)
				if err := weights.Dequantise(raw.MatrixDown, e, to, 0); err != nil {
					t.Fatal(err)
				}
				values = append(values, matrix...)
			}
			return values
		}
		values := read(down.Codes())
		for i, value := range values {
			if !(math.Abs(float64(value-wave[i])) <= k.limit/2) {
				t.Fatalf("kind %d: %g became %g", k.kind, wave[i], value)
			}
		}
		bytes, err := context.Read(down.Codes(), 0)
		if err != nil {
			t.Fatal(err)
		}
		var shape []int
		for _, extent := range down.Codes().Shape() {
			shape = append(shape, int(extent))
		}
		again := read(moec.BytesTensor(bytes, down.Codes().Dtype(), shape...))
		if !reflect.DeepEqual(again, values) || down.Arrays()[0].Name != "scales" {
			t.Errorf("kind %d: other values from the bytes of a file", k.kind)
		}
		up.Close()
		down.Close()
		if down.Codes().Dtype() != 0 || down.Quant().Scales.Dtype() != 0 {
			t.Error("a closed Quantised has tensors")
		}
	}
}

func TestLists(t *testing.T) {
	context := host{}.context(t)
	list := make([]moec.Tensor, 3)
	for i := range list {
		list[i] = moec.NewTensor(make([]float32, 8), 2, 4)
	}
	var failed *moec.Error
	_, err := moec.NewWeights(context, raw.WeightsDesc{NumExperts: 3, Hidden: 4, Inter: 2,
		Dtype: raw.F32, GateLayout: raw.GateNone}, moec.WeightSet{Up: moec.Matrix{PerExpert: list,
		Quant: &moec.Quant{PerExpertScales: list[:2]}}})
	if !errors.As(err, &failed) || !strings.Contains(failed.Message, "a list has 2 tensors") {
		t.Error(err)
	}
	source := moec.NewTensor(make([]float32, 8*33), 1, 8, 33)
	_, err = moec.Quantise(context, raw.QuantiseDesc{Kind: raw.QuantiseMxfp4, Dtype: raw.F32,
		NumExperts: 1, OutFeatures: 8, InFeatures: 33}, source, 0)
	if !errors.As(err, &failed) || !strings.Contains(failed.Message, "33") {
		t.Error(err)
	}
	_, err = moec.Quantise(context, raw.QuantiseDesc{Kind: raw.QuantiseNf4, Dtype: raw.F32,
		NumExperts: 1, OutFeatures: 8, InFeatures: 64}, source, 0)
	if !errors.As(err, &failed) || failed.Code != raw.EShape || failed.Site != "moec_quantise" {
		t.Error(err)
	}
}
