// SPDX-License-Identifier: Apache-2.0
//! The golden vectors of Qwen3-MoE through the candle operation: y and the gradients of x and of
//! every parameter, as candle's own backward pass gives them.
use candle_core::{safetensors, Device, Result, Tensor, Var};
use moec_candle::{MoeLayer, Sizes};

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/qwen3_moe.safetensors");
const TOLERANCE: f64 = 2e-5;

/// Worst row of ||got - ref|| / max(||ref row||, 0.01 of the largest row norm).
fn row_error(got: &Tensor, reference: &Tensor) -> Result<f64> {
    let columns = reference.dims()[reference.rank() - 1];
    let rows = |t: &Tensor| t.reshape(((), columns))?.to_vec2::<f32>();
    let norm = |row: &mut dyn Iterator<Item = f64>| row.map(|v| v * v).sum::<f64>().sqrt();
    let (got, reference) = (rows(got)?, rows(reference)?);
    let norms: Vec<f64> =
        reference.iter().map(|r| norm(&mut r.iter().map(|&v| f64::from(v)))).collect();
    let floor = 0.01 * norms.iter().fold(0.0, |a: f64, &b| a.max(b));
    let errors = got.iter().zip(&reference).zip(&norms).map(|((g, r), size)| {
        let error = norm(&mut g.iter().zip(r).map(|(&a, &b)| f64::from(a) - f64::from(b)));
        if error == 0.0 {
            0.0
        } else {
            error / size.max(floor)
        }
    });
    Ok(errors.fold(0.0, |a, b| if b.is_nan() { f64::INFINITY } else { a.max(b) }))
}

fn flat(file: &std::collections::HashMap<String, Tensor>, prefix: &str) -> Result<Tensor> {
    let part = |name: &str| file[&format!("{prefix}.experts.{name}")].flatten_all();
    Tensor::cat(&[part("gate_up_proj")?, part("down_proj")?], 0)
}

#[test]
fn output_and_gradients() -> Result<()> {
    let file = safetensors::load(FILE, &Device::Cpu)?;
    let (experts, double_inter, hidden) = file["p.experts.gate_up_proj"].dims3()?;
    let layer = MoeLayer::new(Sizes { hidden, inter: double_inter / 2, experts, top_k: 3 })?;
    let x = Var::from_tensor(&file["x"])?;
    let gate = Var::from_tensor(&file["p.gate.weight"])?;
    let weights = Var::from_tensor(&flat(&file, "p")?)?;
    let y = layer.forward(&x, &gate, &weights)?;
    let grads = (&y * &file["dout"])?.sum_all()?.backward()?;
    let gradient = |var: &Var| grads.get(var).expect("every argument has a gradient").clone();
    // Rows of the flat parameter as the matrices have them.
    let count = file["p.experts.gate_up_proj"].elem_count();
    let (got, wanted) = (gradient(&weights), flat(&file, "g")?);
    let matrix = |t: &Tensor, first: usize, len: usize, columns: usize| {
        t.narrow(0, first, len)?.reshape(((), columns))
    };
    let rest = wanted.elem_count() - count;
    for (name, got, wanted) in [
        ("y", y.clone(), file["y"].clone()),
        ("x", gradient(&x), file["g.x"].clone()),
        ("gate", gradient(&gate), file["g.gate.weight"].clone()),
        ("gate_up", matrix(&got, 0, count, hidden)?, matrix(&wanted, 0, count, hidden)?),
        (
            "down",
            matrix(&got, count, rest, double_inter / 2)?,
            matrix(&wanted, count, rest, double_inter / 2)?,
        ),
    ] {
        let error = row_error(&got, &wanted)?;
        assert!(error <= TOLERANCE, "{name}: row error {error:.2e}");
    }
    Ok(())
}

/// The operation reads storages in place, so a view with an offset works and a transposed one is
/// refused; and each step sees the weights as they are then.
#[test]
fn views_and_changed_weights() -> Result<()> {
    let file = safetensors::load(FILE, &Device::Cpu)?;
    let (experts, double_inter, hidden) = file["p.experts.gate_up_proj"].dims3()?;
    let layer = MoeLayer::new(Sizes { hidden, inter: double_inter / 2, experts, top_k: 3 })?;
    let (gate, weights) = (&file["p.gate.weight"], Var::from_tensor(&flat(&file, "p")?)?);
    let rows = file["x"].narrow(0, 2, 3)?;
    let y = layer.forward(&rows, gate, &weights)?;
    assert!(row_error(&y, &file["y"].narrow(0, 2, 3)?)? <= TOLERANCE);
    assert!(layer.forward(&file["x"].t()?, gate, &weights).is_err());
    weights.set(&weights.zeros_like()?)?;
    let y = layer.forward(&rows, gate, &weights)?;
    assert_eq!(y.abs()?.sum_all()?.to_scalar::<f32>()?, 0.0);
    Ok(())
}
