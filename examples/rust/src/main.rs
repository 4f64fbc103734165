// SPDX-License-Identifier: Apache-2.0
//! Trains one Mixture-of-Experts layer to shift its input: forward, backward, plain gradient steps.
use moec::*;
use train::{loss_of, random};

const T: usize = 64; // tokens
const H: usize = 32; // hidden
const I: usize = 16; // intermediate
const E: usize = 8; // experts
const K: usize = 2; // experts per token
const STEPS: usize = 60;
const RATE: f32 = 0.3;

fn descend(values: &mut [f32], gradient: &[f32]) {
    values.iter_mut().zip(gradient).for_each(|(v, g)| *v -= RATE * g);
}

fn main() -> moec::Result<()> {
    let state = &mut 1;
    let x = random(T * H, 1.0, state);
    let mut gate = random(E * H, 0.2, state);
    let mut gate_up = random(E * 2 * I * H, 0.3, state);
    let mut down = random(E * H * I, 0.3, state);
    let (mut y, mut d_y) = (vec![0.0; T * H], vec![0.0; T * H]);
    let mut d_gate = vec![0.0; gate.len()];
    let (mut d_gate_up, mut d_down) = (vec![0.0; gate_up.len()], vec![0.0; down.len()]);

    let context = Context::cpu()?;
    let (experts, top_k, hidden, inter) = (E as i32, K as i32, H as i64, I as i64);
    let layer = Layer::new(
        &context,
        &RouterDesc::new().num_experts(experts).top_k(top_k).norm(sys::MOEC_NORM_SUM),
        &ExpertsDesc::new()
            .num_experts(experts)
            .top_k(top_k)
            .hidden(hidden)
            .inter(inter)
            .gate_layout(sys::MOEC_GATE_THEN_UP)
            .dtype(sys::MOEC_F32)
            .save(sys::MOEC_SAVE_ALL),
    )?;
    let form = WeightsDesc::new().num_experts(experts).hidden(hidden).inter(inter);
    let form = form.gate_layout(sys::MOEC_GATE_THEN_UP).dtype(sys::MOEC_F32);
    let mut saved = vec![0u8; bytes_for(layer.sizes()?.saved, T)];

    let (mut first, mut loss) = (0.0, 0.0);
    for step in 0..STEPS {
        let set = WeightSet::new()
            .gate_up(Tensor::new(&gate_up, &[E, 2 * I, H]))
            .down(Tensor::new(&down, &[E, H, I]));
        let weights = Weights::new(&context, &form, &set)?;
        let call = || {
            LayerCall::new()
                .weights(&weights)
                .x(Tensor::new(&x, &[T, H]))
                .gate_weight(Tensor::new(&gate, &[E, H]))
        };
        let mut forward = call().y(TensorMut::new(&mut y, &[T, H])).saved(&mut saved);
        layer.forward(&mut forward, Stream::DEFAULT)?;
        loss = loss_of(H, &x, &y, &mut d_y);
        if step == 0 {
            first = loss;
        }
        let d_weights = WeightGrads::new()
            .gate_up(TensorMut::new(&mut d_gate_up, &[E, 2 * I, H]))
            .down(TensorMut::new(&mut d_down, &[E, H, I]));
        let inputs = call().saved(&mut saved);
        let mut backward = LayerGradCall::new()
            .forward(&inputs)
            .d_y(Tensor::new(&d_y, &[T, H]))
            .d_gate_weight(TensorMut::new(&mut d_gate, &[E, H]))
            .d_expert_weights(&d_weights);
        layer.backward(&mut backward, Stream::DEFAULT)?;
        drop(weights); // the matrices are ours again
        descend(&mut gate, &d_gate);
        descend(&mut gate_up, &d_gate_up);
        descend(&mut down, &d_down);
    }
    println!("loss {first:.4} -> {loss:.4} in {STEPS} steps");
    assert!(loss < first / 2.0);
    Ok(())
}
