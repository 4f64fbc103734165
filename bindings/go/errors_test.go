// SPDX-License-Identifier: Apache-2.0

package moec

import (
	"encoding/json"
	"errors"
	"math"
	"os"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"unsafe"

	"moec.dev/moec/raw"
)

// The error cases that every binding runs: tests/errors.json holds one right problem as fields of C
// structs, and rows that say what is broken in which call and what must come back. Fields are found
// at the offsets of bindings/api.json, which the mirror structs must have.

type apiType struct {
	Kind, Name string
	Count      int
	Of         *apiType
}

type apiStruct struct {
	Name   string
	Bytes  uintptr
	Sized  bool
	Fields []struct {
		Name          string
		Offset, Bytes uintptr
		Type          apiType
	}
}

type errorFile struct {
	Structs, Pointers map[string]string
	Values            map[string]int64
	Tensors           map[string][2]any
	Rows              []struct {
		Call, Code, Site string
		Mutation         map[string]any
	}
}

func readTestFile(t *testing.T, path string, out any) {
	t.Helper()
	text, err := os.ReadFile("../../" + path)
	if err == nil {
		err = json.Unmarshal(text, out)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func readStructs(t *testing.T) []apiStruct {
	var api struct{ Structs []apiStruct }
	readTestFile(t, "bindings/api.json", &api)
	return api.Structs
}

func TestLayouts(t *testing.T) {
	structs := readStructs(t)
	if len(structs) != len(raw.Layouts) || len(structs) < 30 {
		t.Fatalf("%d structs; %d are mirrored", len(structs), len(raw.Layouts))
	}
	for i, want := range structs {
		got := reflect.TypeOf(raw.Layouts[i].Value)
		if got.Size() != want.Bytes || got.NumField() != len(want.Fields) {
			t.Errorf("%s has %d bytes; %s %d", got, got.Size(), want.Name, want.Bytes)
		}
		for j, field := range want.Fields {
			if f := got.Field(j); f.Offset != field.Offset || f.Type.Size() != field.Bytes {
				t.Errorf("%s.%s is at %d; %s at %d", got, f.Name, f.Offset, field.Name, field.Offset)
			}
		}
	}
}

// problem holds pinned structs whose calls succeed until a field is mutated.
type problem struct {
	t       *testing.T
	file    *errorFile
	layouts map[string]apiStruct
	structs map[string][]uint64
	pins    pins
	handles [5]uintptr // context, layer, plan, weights, unbound weights
}

func (p *problem) room(bytes int) []uint64 {
	memory := make([]uint64, max(1, (bytes+7)/8))
	p.pins.pinner.Pin(unsafe.SliceData(memory))
	return memory
}

func (p *problem) at(root string) unsafe.Pointer {
	return unsafe.Pointer(unsafe.SliceData(p.structs[root]))
}

func (p *problem) must(err error) {
	p.t.Helper()
	if err != nil {
		p.t.Fatal(err)
	}
}

func newProblem(t *testing.T, file *errorFile, layouts map[string]apiStruct) *problem {
	p := &problem{t: t, file: file, layouts: layouts, structs: map[string][]uint64{}}
	for root, name := range file.Structs {
		p.structs[root] = p.room(int(layouts[name].Bytes))
		if layouts[name].Sized {
			p.put(root+".struct_size", uint64(layouts[name].Bytes))
		}
	}
	for path, value := range file.Values {
		p.put(path, uint64(value))
	}
	for path, entry := range file.Tensors {
		p.tensor(path, entry[0].(string), entry[1].([]any))
	}
	for path, root := range file.Pointers {
		p.put(path, uint64(uintptr(p.at(root))))
	}
	for i, create := range []func(out unsafe.Pointer) int32{
		func(out unsafe.Pointer) int32 { return raw.ContextCreate(nil, out) },
		func(out unsafe.Pointer) int32 { return raw.LayerCreate(p.handles[0], p.at("layer"), out) },
		func(out unsafe.Pointer) int32 { return raw.PlanCreate(p.handles[0], p.at("plan"), nil, out) },
		func(out unsafe.Pointer) int32 { return raw.WeightsCreate(p.handles[0], p.at("weights"), out) },
		func(out unsafe.Pointer) int32 { return raw.WeightsCreate(p.handles[0], p.at("weights"), out) },
	} {
		made := new(uintptr)
		p.must(call(func() int32 { return create(unsafe.Pointer(made)) }))
		p.handles[i] = *made
	}
	p.must(call(func() int32 { return raw.WeightsBind(p.handles[3], p.at("set")) }))
	sizes := new(raw.ExpertsSizes)
	sizes.StructSize = sizeOf(sizes)
	p.must(call(func() int32 { return raw.LayerQuery(p.handles[1], unsafe.Pointer(sizes)) }))
	bytes := BytesFor(sizes.Saved, int(p.get("forward.x.shape[0]")))
	p.put("forward.weights", uint64(p.handles[3]))
	p.put("forward.saved.ptr", uint64(uintptr(unsafe.Pointer(unsafe.SliceData(p.room(bytes))))))
	p.put("forward.saved.bytes", uint64(bytes))
	return p
}

func (p *problem) close() {
	raw.LayerFree(p.handles[1])
	raw.PlanFree(p.handles[2])
	raw.WeightsFree(p.handles[3])
	raw.WeightsFree(p.handles[4])
	raw.ContextFree(p.handles[0])
	p.pins.release()
}

// field finds the bytes and the kind of a field such as "forward.x.shape[1]".
func (p *problem) field(path string) ([]byte, string) {
	parts := strings.Split(path, ".")
	kind := apiType{Name: p.file.Structs[parts[0]]}
	var offset, size uintptr
	for _, part := range parts[1:] {
		name, index, _ := strings.Cut(strings.TrimSuffix(part, "]"), "[")
		found := false
		for _, f := range p.layouts[kind.Name].Fields {
			if f.Name == name {
				offset, size, kind, found = offset+f.Offset, f.Bytes, f.Type, true
				break
			}
		}
		if !found {
			p.t.Fatalf("no field %s", path)
		}
		if i, err := strconv.Atoi(index); err == nil {
			size /= uintptr(kind.Count)
			offset += uintptr(i) * size
			kind = *kind.Of
		}
	}
	return unsafe.Slice((*byte)(unsafe.Add(p.at(parts[0]), offset)), size), kind.Kind
}

func (p *problem) put(path string, value uint64) {
	bytes, _ := p.field(path)
	for i := range bytes {
		bytes[i] = byte(value >> (8 * i))
	}
}

func (p *problem) get(path string) (value uint64) {
	bytes, _ := p.field(path)
	for i, b := range bytes {
		value |= uint64(b) << (8 * i)
	}
	return value
}

func (p *problem) tensor(path, dtype string, shape []any) {
	count := 1
	for i, extent := range shape {
		p.put(path+".shape["+strconv.Itoa(i)+"]", uint64(extent.(float64)))
		count *= int(extent.(float64))
	}
	p.put(path+".data", uint64(uintptr(unsafe.Pointer(unsafe.SliceData(p.room(4*count))))))
	p.put(path+".dtype", map[string]uint64{"f32": raw.F32, "i32": raw.I32}[dtype])
	p.put(path+".ndim", uint64(len(shape)))
	p.put(path+".device_type", raw.Cpu)
}

func (p *problem) mutate(path string, value any) {
	switch v := value.(type) {
	case string:
		if v == "unbound" {
			p.put(path, uint64(p.handles[4]))
		} else {
			p.put(path, p.get(v))
		}
	case float64:
		if _, kind := p.field(path); kind == "float" {
			p.put(path, uint64(math.Float32bits(float32(v))))
		} else {
			p.put(path, uint64(int64(v)))
		}
	}
}

func (p *problem) call(name string) error {
	h, made := p.handles, new(uintptr)
	out, totals := unsafe.Pointer(made), new([4]int32)
	calls := map[string]func() int32{
		"moec_context_create": func() int32 { return raw.ContextCreate(p.at("context"), out) },
		"moec_layer_create":   func() int32 { return raw.LayerCreate(h[0], p.at("layer"), out) },
		"moec_weights_create": func() int32 { return raw.WeightsCreate(h[0], p.at("weights"), out) },
		"moec_weights_bind":   func() int32 { return raw.WeightsBind(h[3], p.at("set")) },
		"moec_plan_create":    func() int32 { return raw.PlanCreate(h[0], p.at("plan"), nil, out) },
		"moec_plan_from_topk": func() int32 { return raw.PlanFromTopk(h[2], p.at("ids"), nil, 0) },
		"moec_plan_totals_sync": func() int32 {
			return raw.PlanTotalsSync(h[2], unsafe.Pointer(totals), 0)
		},
		"moec_layer_forward":  func() int32 { return raw.LayerForward(h[1], p.at("forward"), 0) },
		"moec_layer_backward": func() int32 { return raw.LayerBackward(h[1], p.at("grads"), 0) },
	}
	err := call(calls[name])
	release := map[string]func(uintptr){"moec_context_create": raw.ContextFree,
		"moec_layer_create": raw.LayerFree, "moec_weights_create": raw.WeightsFree,
		"moec_plan_create": raw.PlanFree}
	if free := release[name]; free != nil {
		free(*made)
	}
	return err
}

func errorCases(t *testing.T) (*errorFile, map[string]apiStruct) {
	file, layouts := &errorFile{}, map[string]apiStruct{}
	readTestFile(t, "tests/errors.json", file)
	for _, s := range readStructs(t) {
		layouts[s.Name] = s
	}
	return file, layouts
}

func TestErrorsOfEveryRow(t *testing.T) {
	file, layouts := errorCases(t)
	if len(file.Rows) != 71 {
		t.Fatalf("%d rows; 71 are right", len(file.Rows))
	}
	for _, row := range file.Rows {
		p := newProblem(t, file, layouts)
		if row.Call == "moec_layer_backward" {
			p.must(p.call("moec_layer_forward"))
		}
		for path, value := range row.Mutation {
			p.mutate(path, value)
		}
		var failure *Error
		if err := p.call(row.Call); !errors.As(err, &failure) {
			t.Errorf("%s %v: %v; %s is right", row.Call, row.Mutation, err, row.Code)
		} else if failure.Name() != row.Code || failure.Site != row.Site {
			t.Errorf("%s %v: %v; %s is right", row.Call, row.Mutation, err, row.Code)
		}
		p.close()
	}
}

func TestTheProblemItselfIsRight(t *testing.T) {
	file, layouts := errorCases(t)
	p := newProblem(t, file, layouts)
	defer p.close()
	for _, row := range file.Rows {
		if row.Call != "moec_plan_totals_sync" { // its mistake is the call itself
			p.must(p.call(row.Call))
		}
	}
}
