// SPDX-License-Identifier: Apache-2.0

package moec_test

import (
	"errors"
	"math"
	"strings"
	"testing"

	"moec.dev/moec"
	"moec.dev/moec/raw"
)

// The layers of quant_cases.json that have adapters, in PEFT's storage and on plain and quantised
// experts: y, d_x, d_routing_weights and the gradients of A and B of one adapter, and of two.
// Shown once to fail: the scales of two adapters exchanged.

type adapterRun struct {
	Reference string
	Adapters  []struct {
		Name  string
		Scale float32
	}
}

const adapterE, adapterH, adapterI = 4, 96, 32

var adapterForm = raw.AdaptersDesc{NumExperts: adapterE, Hidden: adapterH, Inter: adapterI,
	GateLayout: raw.GateThenUp}

// factor is one as PEFT stores it: A [rE,K], which is [E,r,K]; of B [N,rE] element (e, n, j) is in
// column j E + e.
type factor struct {
	name    string
	values  []float32
	columns int
	tensor  moec.Tensor
}

func (f *checkpoint) factor(name string) factor {
	stored, values := f.entries[name].Shape, f.floats(name)
	rows, columns := stored[0], stored[1]
	shape := []int{f.experts, rows / f.experts, columns}
	strides := []int{rows / f.experts * columns, columns, 1}
	if strings.Contains(name, "lora_B") {
		shape = []int{f.experts, rows, columns / f.experts}
		strides = []int{1, columns, f.experts}
	}
	return factor{name, values, columns, moec.StridedTensor(values, shape, strides)}
}

// adapter is one of the file, or its gradients, with its factors.
func (f *checkpoint) adapter(prefix, end string, scale float32) (moec.Adapter, []factor) {
	var all []factor
	matrix := func(name string) moec.Factors {
		a := f.factor(prefix + "." + name + "_proj.lora_A." + end)
		b := f.factor(prefix + "." + name + "_proj.lora_B." + end)
		all = append(all, a, b)
		return moec.Factors{A: a.tensor, B: b.tensor, Scale: scale}
	}
	return moec.Adapter{GateUp: matrix("gate_up"), Down: matrix("down")}, all
}

func (f *checkpoint) adapters(context *moec.Context, run *adapterRun) *moec.Adapters {
	var list []moec.Adapter
	for _, one := range run.Adapters {
		adapter, _ := f.adapter("lora."+one.Name, "weight", one.Scale)
		list = append(list, adapter)
	}
	adapters, err := moec.NewAdapters(context, adapterForm, list)
	if err != nil {
		f.t.Fatal(err)
	}
	return adapters
}

// adapterProblem is what the runs of a file share.
type adapterProblem struct {
	*checkpoint
	experts *moec.Experts
	plan    *moec.Plan
	tokens  int
}

func newAdapterProblem(t *testing.T, context *moec.Context, c *quantCase) adapterProblem {
	t.Helper()
	file := openCheckpoint(t, "", c)
	p := adapterProblem{checkpoint: file, tokens: file.entries["x"].Shape[0]}
	desc := descriptor[raw.ExpertsDesc](t, c.Experts)
	var err error
	if p.experts, err = moec.NewExperts(context, desc); err != nil {
		t.Fatal(err)
	}
	p.plan, err = moec.NewPlan(context, raw.PlanDesc{MaxTokens: int64(p.tokens),
		NumExperts: desc.NumExperts, TopK: desc.TopK})
	if err == nil {
		err = p.plan.FromTopK(file.tensor("ids"), file.tensor("weights"), 0)
	}
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// y with adapters, or without; and what is saved.
func (p adapterProblem) y(weights *moec.Weights, adapters *moec.Adapters) ([]float32, []byte) {
	sizes, err := p.experts.Sizes()
	if adapters != nil {
		sizes, err = p.experts.SizesWith(adapters)
	}
	y := fill(p.tokens*adapterH, float32(math.NaN()))
	saved := make([]byte, moec.BytesFor(sizes.Saved, p.tokens))
	if err == nil {
		err = p.experts.Forward(&moec.ExpertsArgs{Plan: p.plan, Weights: weights, X: p.tensor("x"),
			Saved: saved, Adapters: adapters, Y: moec.NewTensor(y, p.tokens, adapterH)}, 0)
	}
	if err != nil {
		p.t.Fatal(err)
	}
	return y, saved
}

func (p adapterProblem) compare(got []float32, name string, columns int, tolerance float64) {
	p.t.Helper()
	if e := rowError(got, p.floats(name), columns); !(e <= tolerance) {
		p.t.Errorf("%s: row error %.2e", name, e)
	}
}

func (p adapterProblem) run(weights *moec.Weights, adapters *moec.Adapters, run *adapterRun,
	tolerance float64) {
	y, saved := p.y(weights, adapters)
	slots := p.entries["ids"].Shape[1]
	dX, dWeights := fill(len(y), float32(math.NaN())), fill(p.tokens*slots, float32(math.NaN()))
	var grads []moec.Adapter
	var made []factor
	for _, one := range run.Adapters {
		adapter, factors := p.adapter(run.Reference+"."+one.Name, "grad", 0)
		grads, made = append(grads, adapter), append(made, factors...)
	}
	for _, f := range made {
		copy(f.values, fill(len(f.values), float32(math.NaN())))
	}
	err := p.experts.Backward(&moec.ExpertsGradArgs{Plan: p.plan, Weights: weights,
		X: p.tensor("x"), Saved: saved, DY: p.tensor("dy"), Adapters: adapters, DAdapters: grads,
		DX:              moec.NewTensor(dX, p.tokens, adapterH),
		DRoutingWeights: moec.NewTensor(dWeights, p.tokens, slots)}, 0)
	if err != nil {
		p.t.Fatal(err)
	}
	p.compare(y, run.Reference+".y", adapterH, tolerance)
	p.compare(dX, run.Reference+".dx", adapterH, tolerance)
	p.compare(dWeights, run.Reference+".dweights", slots, tolerance)
	for _, f := range made {
		p.compare(f.values, f.name, f.columns, tolerance)
	}
}

func TestAdapters(t *testing.T) {
	context := host{}.context(t)
	all := quantCases(t)
	if len(all.Adapters) != 2 || len(all.Adapters[0].Runs) != 3 || len(all.Adapters[1].Runs) != 1 {
		t.Fatal("two layers with three runs and one are right")
	}
	for i := range all.Adapters {
		c := &all.Adapters[i]
		for r := range c.Runs {
			run := &c.Runs[r]
			t.Run(c.File+" "+run.Reference, func(t *testing.T) {
				p := newAdapterProblem(t, context, c)
				weights, err := p.weights(context, c)
				if err != nil {
					t.Fatal(err)
				}
				defer weights.Close()
				adapters := p.adapters(context, run)
				defer adapters.Close()
				p.run(weights, adapters, run, all.Tolerance)
			})
		}
	}
}

// Merged adapters give the numbers of those beside the matrices; quantised matrices take none.
func TestMergedAdapters(t *testing.T) {
	context := host{}.context(t)
	all := quantCases(t)
	c := &all.Adapters[0]
	p := newAdapterProblem(t, context, c)
	adapters := p.adapters(context, &c.Runs[2])
	defer adapters.Close()
	weights, err := p.weights(context, c)
	if err == nil {
		err = adapters.Merge(weights, 0)
	}
	if err != nil {
		t.Fatal(err)
	}
	merged, _ := p.y(weights, nil)
	p.compare(merged, "ref_lora_ab.y", adapterH, all.Tolerance)
	if err := adapters.Unmerge(weights, 0); err != nil {
		t.Fatal(err)
	}
	again, _ := p.y(weights, adapters)
	p.compare(again, "ref_lora_ab.y", adapterH, all.Tolerance)

	c = &all.Adapters[1]
	p = newAdapterProblem(t, context, c)
	codes, err := p.weights(context, c)
	if err != nil {
		t.Fatal(err)
	}
	defer codes.Close()
	var failed *moec.Error
	if err := adapters.Merge(codes, 0); !errors.As(err, &failed) ||
		failed.Code != raw.EUnsupported || failed.Site != "moec_adapters_merge" {
		t.Errorf("merged into codes: %v", err)
	}
}

func TestWrongAdapters(t *testing.T) {
	context := host{}.context(t)
	c := &quantCases(t).Adapters[1]
	p := newAdapterProblem(t, context, c)
	right, _ := p.adapter("lora.a", "weight", 2)
	a, b := right.Down.A, right.Down.B
	for words, wrong := range map[string]moec.Adapter{
		"list[0].down.a":          {Down: moec.Factors{A: b, B: a, Scale: 2}},
		"list[0].up.a":            {Up: moec.Factors{A: a, B: b, Scale: 2}},
		"list[0].down.scale is 0": {Down: moec.Factors{A: a, B: b}},
	} {
		_, err := moec.NewAdapters(context, adapterForm, []moec.Adapter{wrong})
		var failed *moec.Error
		if !errors.As(err, &failed) || failed.Site != "moec_adapters_bind" ||
			!strings.Contains(failed.Message, words) {
			t.Errorf("%s: %v", words, err)
		}
	}
	if _, err := moec.NewAdapters(context, adapterForm, nil); err == nil {
		t.Error("a set of no adapters is taken")
	}
	// As many gradients as adapters: the library could not know.
	adapters := p.adapters(context, &c.Runs[0])
	err := p.experts.Backward(&moec.ExpertsGradArgs{Plan: p.plan, Adapters: adapters,
		DAdapters: make([]moec.Adapter, 2)}, 0)
	var failed *moec.Error
	if !errors.As(err, &failed) || failed.Code != raw.EShape ||
		!strings.Contains(failed.Message, "DAdapters has 2 adapters, and 1 are bound") {
		t.Error(err)
	}
	defer func() {
		if recover() == nil {
			t.Error("strides that leave the slice are taken")
		}
	}()
	moec.StridedTensor(make([]float32, 6), []int{2, 3}, []int{3, 2})
}
