// SPDX-License-Identifier: Apache-2.0
//! Trains an adapter (LoRA) over a layer whose experts are 4-bit codes (NF4): the adapter learns
//! what the layer lacks, and the codes stay as they are.
//!
//!     cargo run --bin adapter
use moec::*;
use train::{loss_of, random};

const T: usize = 64; // tokens
const H: usize = 64; // hidden: a block of NF4
const I: usize = 64; // intermediate
const E: usize = 8; // experts
const K: usize = 2; // experts per token
const R: usize = 4; // rank
const SCALE: f32 = 2.0; // alpha / rank
const STEPS: usize = 100;
const RATE: f32 = 0.15;
const HERE: Stream = Stream::DEFAULT;

/// A and B of a matrix `[N,K]` of every expert, or their gradients.
struct Factors {
    shapes: [[usize; 3]; 2],
    values: [Vec<f32>; 2],
}

impl Factors {
    fn zeros(out_features: usize, in_features: usize) -> Self {
        let shapes = [[E, R, in_features], [E, out_features, R]];
        Self { shapes, values: shapes.map(|shape| vec![0.0; shape.iter().product()]) }
    }

    /// B begins at 0: the adapter adds nothing at first.
    fn random(out_features: usize, in_features: usize, state: &mut u32) -> Self {
        let mut made = Self::zeros(out_features, in_features);
        made.values[0] = random(made.values[0].len(), 0.1, state);
        made
    }

    fn read(&self) -> [Tensor<'_>; 2] {
        [0, 1].map(|i| Tensor::new(&self.values[i], &self.shapes[i]))
    }

    fn write(&mut self) -> [TensorMut<'_>; 2] {
        let [a, b] = &mut self.values;
        [TensorMut::new(a, &self.shapes[0]), TensorMut::new(b, &self.shapes[1])]
    }

    fn descend(&mut self, gradients: &Self) {
        for (values, gradients) in self.values.iter_mut().zip(&gradients.values) {
            values.iter_mut().zip(gradients).for_each(|(value, d)| *value -= RATE * d);
        }
    }
}

fn main() -> moec::Result<()> {
    let state = &mut 1;
    let (x, gate) = (random(T * H, 1.0, state), random(E * H, 0.2, state));
    let (mut y, mut d_y) = (vec![0.0; T * H], vec![0.0; T * H]);

    let context = Context::cpu()?;
    let nf4 = QuantiseDesc::new().kind(sys::MOEC_QUANTISE_NF4).flags(sys::MOEC_QUANTISE_NESTED);
    let codes_of = |out_features: usize, in_features: usize, state: &mut u32| {
        let values = random(E * out_features * in_features, 0.2, state);
        let form = nf4.num_experts(E as i64).dtype(sys::MOEC_F32);
        let form = form.out_features(out_features as i64).in_features(in_features as i64);
        let source = Tensor::new(&values, &[E, out_features, in_features]);
        Quantised::new(&context, &form, source, HERE) // the values may go
    };
    let (gate_up, down) = (codes_of(2 * I, H, state)?, codes_of(H, I, state)?);
    let (gate_up_quant, down_quant) = (gate_up.quant(), down.quant());
    let form = WeightsDesc::new().num_experts(E as i32).hidden(H as i64).inter(I as i64);
    let form = form.gate_layout(sys::MOEC_GATE_THEN_UP).dtype(sys::MOEC_F32);
    let weights = Weights::new(
        &context,
        &form.gate_up_scheme(gate_up.scheme()).down_scheme(down.scheme()),
        &WeightSet::new()
            .gate_up(gate_up.codes())
            .gate_up_quant(&gate_up_quant)
            .down(down.codes())
            .down_quant(&down_quant),
    )?;
    let frozen = || -> moec::Result<Vec<Vec<u8>>> {
        let arrays = [&gate_up, &down].into_iter().flat_map(|one| {
            let beside = one.arrays().into_iter().map(|(_, tensor)| tensor);
            std::iter::once(one.codes()).chain(beside)
        });
        arrays.map(|tensor| context.read(tensor, HERE)).collect()
    };
    let before = frozen()?;

    let router = RouterDesc::new().num_experts(E as i32).top_k(K as i32).norm(sys::MOEC_NORM_SUM);
    let experts = ExpertsDesc::new().num_experts(E as i32).top_k(K as i32).hidden(H as i64);
    let experts = experts.inter(I as i64).gate_layout(sys::MOEC_GATE_THEN_UP);
    let experts = experts.dtype(sys::MOEC_F32).save(sys::MOEC_SAVE_ALL);
    let layer = Layer::new(&context, &router, &experts)?;
    let form = AdaptersDesc::new().num_experts(E as i32).hidden(H as i64).inter(I as i64);
    let form = form.gate_layout(sys::MOEC_GATE_THEN_UP);
    let mut factors = [Factors::random(2 * I, H, state), Factors::random(H, I, state)];
    let mut d_factors = [Factors::zeros(2 * I, H), Factors::zeros(H, I)];
    let mut saved = vec![];

    let (mut first, mut loss) = (0.0, 0.0);
    for step in 0..STEPS {
        let [[a, b], [down_a, down_b]] = [factors[0].read(), factors[1].read()];
        let adapter = Adapter::new().gate_up(a, b, SCALE).down(down_a, down_b, SCALE);
        let adapters = Adapters::new(&context, &form, &[adapter])?;
        saved.resize(bytes_for(layer.sizes_with(&adapters)?.saved, T), 0);
        let call = || {
            let inputs = LayerCall::new().weights(&weights).adapters(&adapters);
            inputs.x(Tensor::new(&x, &[T, H])).gate_weight(Tensor::new(&gate, &[E, H]))
        };
        let mut forward = call().y(TensorMut::new(&mut y, &[T, H])).saved(&mut saved);
        layer.forward(&mut forward, HERE)?;
        loss = loss_of(H, &x, &y, &mut d_y);
        if step == 0 {
            first = loss;
        }
        let [d_gate_up, d_down] = &mut d_factors;
        let [[a, b], [down_a, down_b]] = [d_gate_up.write(), d_down.write()];
        let grads = [AdapterGrads::new().gate_up(a, b).down(down_a, down_b)];
        let inputs = call().saved(&mut saved);
        let mut backward = LayerGradCall::new()
            .forward(&inputs)
            .d_y(Tensor::new(&d_y, &[T, H]))
            .d_adapters(&grads);
        layer.backward(&mut backward, HERE)?;
        drop(adapters); // the factors are ours again
        factors.iter_mut().zip(&d_factors).for_each(|(factors, d)| factors.descend(d));
    }
    let bytes: usize = before.iter().map(Vec::len).sum();
    println!("loss {first:.4} -> {loss:.4} in {STEPS} steps over {bytes} frozen bytes");
    assert!(loss < first / 2.0);
    assert!(frozen()? == before, "training changed the codes");
    Ok(())
}
