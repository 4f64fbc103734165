// SPDX-License-Identifier: Apache-2.0
//! Serves one layer: each line of the input is a batch, tokens of 8 numbers parted by `;`, and each
//! line of the output has their y. What cannot be read or run is answered with `error: ..`, and the
//! next line is served.
//!
//!     echo '1 2 3 4 5 6 7 8; 0 0 1 0 0 0 0 0' | cargo run --bin serve
use moec::*;
use std::io::{BufRead, Write};
use train::random;

const H: usize = 8; // hidden
const I: usize = 16; // intermediate
const E: usize = 4; // experts

fn parse(line: &str) -> std::result::Result<Vec<f32>, String> {
    let mut x = vec![];
    for (token, text) in line.split(';').enumerate() {
        let before = x.len();
        for word in text.split_whitespace() {
            x.push(word.parse().map_err(|_| format!("{word:?} is no number"))?);
        }
        if x.len() - before != H {
            let count = x.len() - before;
            return Err(format!("token {token} has {count} numbers; {H} are expected"));
        }
    }
    Ok(x)
}

struct Server<'a> {
    layer: &'a Layer,
    weights: &'a Weights<'a>,
    gate: &'a [f32],
}

impl Server<'_> {
    fn answer(&self, line: &str) -> std::result::Result<String, String> {
        let x = parse(line)?;
        let tokens = x.len() / H;
        let mut y = vec![0.0; x.len()];
        let mut call = LayerCall::new()
            .weights(self.weights)
            .x(Tensor::new(&x, &[tokens, H]))
            .gate_weight(Tensor::new(self.gate, &[E, H]))
            .y(TensorMut::new(&mut y, &[tokens, H]));
        self.layer.forward(&mut call, Stream::DEFAULT).map_err(|error| error.to_string())?;
        let words =
            |row: &[f32]| row.iter().map(|v| format!("{v:.4}")).collect::<Vec<_>>().join(" ");
        Ok(y.chunks(H).map(words).collect::<Vec<_>>().join("; "))
    }
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let state = &mut 1;
    let (gate, gate_up) = (random(E * H, 0.5, state), random(E * 2 * I * H, 0.5, state));
    let down = random(E * H * I, 0.5, state);
    let context = Context::cpu()?;
    let layer = Layer::new(
        &context,
        &RouterDesc::new().num_experts(E as i32).top_k(2).norm(sys::MOEC_NORM_SUM),
        &ExpertsDesc::new()
            .num_experts(E as i32)
            .top_k(2)
            .hidden(H as i64)
            .inter(I as i64)
            .gate_layout(sys::MOEC_GATE_THEN_UP)
            .dtype(sys::MOEC_F32),
    )?;
    let form = WeightsDesc::new()
        .flags(sys::MOEC_WEIGHTS_FROZEN)
        .num_experts(E as i32)
        .hidden(H as i64)
        .inter(I as i64)
        .gate_layout(sys::MOEC_GATE_THEN_UP)
        .dtype(sys::MOEC_F32);
    let set = WeightSet::new()
        .gate_up(Tensor::new(&gate_up, &[E, 2 * I, H]))
        .down(Tensor::new(&down, &[E, H, I]));
    let weights = Weights::new(&context, &form, &set)?;
    let server = Server { layer: &layer, weights: &weights, gate: &gate };
    let mut out = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        match server.answer(&line?) {
            Ok(y) => writeln!(out, "{y}")?,
            Err(why) => writeln!(out, "error: {why}")?,
        }
        out.flush()?;
    }
    Ok(())
}
