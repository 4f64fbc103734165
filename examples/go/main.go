// SPDX-License-Identifier: Apache-2.0

// Trains one Mixture-of-Experts layer to shift its input: forward, backward, plain gradient steps.
// The slices are bound once and change in place: weights that are not declared frozen are never
// read from a copy.
package main

import (
	"fmt"
	"log"

	"moec.dev/moec"
	"moec.dev/moec/raw"
)

const (
	tokens, hidden, inter = 64, 32, 16
	experts, topK         = 8, 2
	steps                 = 60
	rate                  = 0.3
)

var state uint32 = 1

func random(count int, scale float32) []float32 {
	out := make([]float32, count)
	for i := range out {
		state = state*1664525 + 1013904223
		out[i] = scale * (float32(state>>8)/8388608 - 1)
	}
	return out
}

// lossOf is the mean of (y - target)^2, target[t][h] = x[t][h + 1]; it fills dY.
func lossOf(x, y, dY []float32) float64 {
	sum := 0.0
	for i := range y {
		e := y[i] - x[i/hidden*hidden+(i+1)%hidden]
		sum += float64(e * e)
		dY[i] = 2 * e / tokens
	}
	return sum / float64(len(y))
}

func descend(values, gradient []float32) {
	for i := range values {
		values[i] -= rate * gradient[i]
	}
}

func must[T any](value T, err error) T {
	if err != nil {
		log.Fatal(err)
	}
	return value
}

func matrices(gateUp, down []float32) moec.WeightSet {
	return moec.WeightSet{
		GateUp: moec.Matrix{Data: moec.NewTensor(gateUp, experts, 2*inter, hidden)},
		Down:   moec.Matrix{Data: moec.NewTensor(down, experts, hidden, inter)}}
}

func main() {
	x, gate := random(tokens*hidden, 1), random(experts*hidden, 0.2)
	gateUp, down := random(experts*2*inter*hidden, 0.3), random(experts*hidden*inter, 0.3)
	y, dY := make([]float32, len(x)), make([]float32, len(x))
	dGate := make([]float32, len(gate))
	dGateUp, dDown := make([]float32, len(gateUp)), make([]float32, len(down))

	context := must(moec.NewContext(nil))
	defer context.Close()
	layer := must(moec.NewLayer(context,
		raw.RouterDesc{NumExperts: experts, TopK: topK, Norm: raw.NormSum},
		raw.ExpertsDesc{NumExperts: experts, TopK: topK, Hidden: hidden, Inter: inter,
			GateLayout: raw.GateThenUp, Dtype: raw.F32, Save: raw.SaveAll}))
	defer layer.Close()
	weights := must(moec.NewWeights(context, raw.WeightsDesc{NumExperts: experts, Hidden: hidden,
		Inter: inter, GateLayout: raw.GateThenUp, Dtype: raw.F32}, matrices(gateUp, down)))
	defer weights.Close()

	forward := &moec.LayerArgs{Weights: weights, X: moec.NewTensor(x, tokens, hidden),
		GateWeight: moec.NewTensor(gate, experts, hidden), Y: moec.NewTensor(y, tokens, hidden),
		Saved: make([]byte, moec.BytesFor(must(layer.Sizes()).Saved, tokens))}
	dWeights := matrices(dGateUp, dDown)
	backward := &moec.LayerGradArgs{Forward: forward, DY: moec.NewTensor(dY, tokens, hidden),
		DGateWeight: moec.NewTensor(dGate, experts, hidden), DExpertWeights: &dWeights}

	var first, loss float64
	for step := 0; step < steps; step++ {
		if err := layer.Forward(forward, 0); err != nil {
			log.Fatal(err)
		}
		loss = lossOf(x, y, dY)
		if step == 0 {
			first = loss
		}
		if err := layer.Backward(backward, 0); err != nil {
			log.Fatal(err)
		}
		descend(gate, dGate)
		descend(gateUp, dGateUp)
		descend(down, dDown)
	}
	fmt.Printf("loss %.4f -> %.4f in %d steps\n", first, loss, steps)
	if loss >= first/2 {
		log.Fatal("the loss has not halved")
	}
}
