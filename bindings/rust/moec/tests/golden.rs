// SPDX-License-Identifier: Apache-2.0
//! Every model family of tests/golden/cases.json: y and every gradient that its file has, per row.
//! Shown once to fail: gate and up matrices exchanged are off by more than 0.1.
use moec::*;
use safetensors::SafeTensors;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../tests/golden/");

trait Number {
    fn of(value: &Value) -> Self;
}
macro_rules! numbers {
    ($($type:ty),*) => {$(impl Number for $type {
        fn of(value: &Value) -> Self {
            value.as_f64().expect("a number") as $type
        }
    })*};
}
numbers!(i32, i64, u32, f32);

/// Calls the builder's method of each key of a JSON object; a key that is not listed is an error.
macro_rules! by_name {
    ($target:expr, $pairs:expr, $value:expr, $($field:ident),+ $(,)?) => {{
        let mut target = $target;
        for (key, value) in $pairs {
            target = match key.as_str() {
                $(stringify!($field) => target.$field($value(value)),)+
                other => panic!("no field {other}"),
            };
        }
        target
    }};
}

fn object(value: &Value) -> &Map<String, Value> {
    value.as_object().expect("an object")
}

fn activation(value: &Value) -> sys::moec_activation {
    let number = |key: &str| value.get(key).map_or(0.0, |v| v.as_f64().unwrap());
    sys::moec_activation {
        kind: number("kind") as u32,
        alpha: number("alpha") as f32,
        limit: number("limit") as f32,
        offset: number("offset") as f32,
        beta: number("beta") as f32,
        linear_beta: number("linear_beta") as f32,
        reserved0: 0,
        reserved1: 0,
    }
}

fn router_desc(json: &Value) -> RouterDesc {
    by_name!(
        RouterDesc::new(),
        object(json),
        Number::of,
        flags,
        num_experts,
        num_zero_experts,
        top_k,
        logit_precision,
        score,
        score_precision,
        selection,
        num_groups,
        top_groups,
        group_top_m,
        group_fill,
        mixer_eps,
        weight_rule,
        norm,
        norm_eps,
        norm_precision,
        scale,
        weight_precision,
        data_dtype,
    )
}

fn experts_desc(json: &Value) -> ExpertsDesc {
    let (nested, plain): (Vec<_>, Vec<_>) = object(json).iter().partition(|(_, v)| v.is_object());
    let desc = by_name!(
        ExpertsDesc::new(),
        plain,
        Number::of,
        hidden,
        inter,
        shared_inter,
        num_experts,
        num_zero_experts,
        top_k,
        gate_layout,
        dtype,
        weight_position,
        shared,
        save,
    );
    by_name!(desc, nested, activation, activation, shared_activation)
}

fn weights_desc(json: &Value) -> WeightsDesc {
    by_name!(
        WeightsDesc::new(),
        object(json),
        Number::of,
        num_experts,
        gate_layout,
        hidden,
        inter,
        gate_up_orientation,
        down_orientation,
        dtype,
    )
}

fn floats(file: &SafeTensors, name: &str) -> Option<Vec<f32>> {
    let view = file.tensor(name).ok()?;
    let four = |b: &[u8]| f32::from_le_bytes(b.try_into().unwrap());
    Some(view.data().chunks_exact(4).map(four).collect())
}

/// An argument of the layer: the leading part of a parameter of the file, as a shape.
struct Argument {
    shape: Vec<usize>,
    values: Vec<f32>,
    reference: Option<Vec<f32>>,
}

impl Argument {
    fn view(&self) -> Tensor<'_> {
        Tensor::new(&self.values, &self.shape)
    }
}

type Arguments = BTreeMap<String, Argument>;

fn arguments(file: &SafeTensors, json: &Value) -> Arguments {
    let one = |(role, entry): (&String, &Value)| {
        let name = entry["tensor"].as_str().unwrap();
        let extents = entry["shape"].as_array().unwrap();
        let shape: Vec<usize> = extents.iter().map(|n| n.as_u64().unwrap() as usize).collect();
        let mut values = floats(file, &format!("p.{name}")).unwrap();
        values.truncate(shape.iter().product());
        let reference = floats(file, &format!("g.{name}"));
        (role.clone(), Argument { shape, values, reference })
    };
    object(json).iter().map(one).collect()
}

fn weight_set(matrices: &Arguments) -> WeightSet<'_> {
    by_name!(
        WeightSet::new(),
        matrices,
        Argument::view,
        gate_up,
        gate_up_bias,
        gate,
        gate_bias,
        up,
        up_bias,
        down,
        down_bias,
    )
}

/// Room for the gradient of each argument that has one.
fn room(of: &Arguments) -> BTreeMap<String, (Vec<usize>, Vec<f32>)> {
    let wanted = of.iter().filter(|(_, a)| a.reference.is_some());
    wanted.map(|(k, a)| (k.clone(), (a.shape.clone(), vec![f32::NAN; a.values.len()]))).collect()
}

fn out(place: &mut (Vec<usize>, Vec<f32>)) -> TensorMut<'_> {
    TensorMut::new(&mut place.1, &place.0)
}

fn weight_grads(room: &mut BTreeMap<String, (Vec<usize>, Vec<f32>)>) -> WeightGrads<'_> {
    by_name!(
        WeightGrads::new(),
        room,
        out,
        gate_up,
        gate_up_bias,
        gate,
        gate_bias,
        up,
        up_bias,
        down,
        down_bias,
    )
}

/// Worst row of ||got - ref|| / max(||ref row||, 0.01 of the largest row norm); NaN is infinite.
fn row_error(got: &[f32], reference: &[f32], columns: usize) -> f64 {
    let padded = got.iter().chain(std::iter::repeat(&0.0)).take(reference.len());
    let got: Vec<f32> = padded.copied().collect(); // rows of identity experts
    let norm = |row: &[f64]| row.iter().map(|v| v * v).sum::<f64>().sqrt();
    let rows = |values: &[f32]| -> Vec<Vec<f64>> {
        values.chunks(columns).map(|r| r.iter().map(|&v| f64::from(v)).collect()).collect()
    };
    let (got, reference) = (rows(&got), rows(reference));
    let floor = 0.01 * reference.iter().map(|r| norm(r)).fold(0.0, f64::max);
    let error = |(g, r): (&Vec<f64>, &Vec<f64>)| {
        let difference: Vec<f64> = g.iter().zip(r).map(|(a, b)| a - b).collect();
        let error = norm(&difference);
        if error == 0.0 {
            0.0
        } else {
            error / norm(r).max(floor)
        }
    };
    let worst = |a: f64, b: f64| if b.is_nan() { f64::INFINITY } else { a.max(b) };
    got.iter().zip(&reference).map(error).fold(0.0, worst)
}

/// (tensor, row error) of y, x and every parameter.
fn run(context: &Context, case: &Value) -> Result<Vec<(String, f64)>> {
    let family = case["family"].as_str().unwrap();
    let bytes = std::fs::read(format!("{FOLDER}{family}.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let (x, d_y) = (floats(&file, "x").unwrap(), floats(&file, "dout").unwrap());
    let shape = file.tensor("x").unwrap().shape().to_vec();
    let inputs = arguments(&file, &case["inputs"]);
    let matrices = arguments(&file, &case["weights"]["matrices"]);
    let weights =
        Weights::new(context, &weights_desc(&case["weights"]["desc"]), &weight_set(&matrices))?;
    let shared = case.get("shared_weights");
    let shared_matrices = shared.map_or(Arguments::new(), |s| arguments(&file, &s["matrices"]));
    let shared_weights = shared
        .map(|s| Weights::new(context, &weights_desc(&s["desc"]), &weight_set(&shared_matrices)))
        .transpose()?;
    let layer =
        Layer::new(context, &router_desc(&case["router"]), &experts_desc(&case["experts"]))?;
    let sizes = layer.sizes()?;
    let mut saved = vec![0u8; bytes_for(sizes.saved, shape[0])];
    let call = || {
        let call = LayerCall::new().weights(&weights).x(Tensor::new(&x, &shape));
        let call = match &shared_weights {
            Some(shared) => call.shared_weights(shared),
            None => call,
        };
        by_name!(
            call,
            &inputs,
            Argument::view,
            gate_weight,
            gate_bias,
            select_bias,
            shared_gate,
            output_bias,
        )
    };
    let mut y = vec![f32::NAN; x.len()];
    let mut forward = call().y(TensorMut::new(&mut y, &shape)).saved(&mut saved);
    layer.forward(&mut forward, Stream::DEFAULT)?;

    let (mut d_x, mut d_inputs) = (vec![f32::NAN; x.len()], room(&inputs));
    let (mut d_matrices, mut d_shared) = (room(&matrices), room(&shared_matrices));
    let forward = call().saved(&mut saved);
    let (grads, shared_grads) = (weight_grads(&mut d_matrices), weight_grads(&mut d_shared));
    let backward = LayerGradCall::new()
        .forward(&forward)
        .d_y(Tensor::new(&d_y, &shape))
        .d_x(TensorMut::new(&mut d_x, &shape))
        .d_expert_weights(&grads);
    let backward =
        if shared.is_some() { backward.d_shared_weights(&shared_grads) } else { backward };
    let renamed = d_inputs.iter_mut().map(|(role, place)| (format!("d_{role}"), place));
    let mut backward =
        by_name!(backward, renamed, out, d_gate_weight, d_gate_bias, d_shared_gate, d_output_bias,);
    layer.backward(&mut backward, Stream::DEFAULT)?;

    let expected = |name: &str| floats(&file, name).unwrap();
    let mut errors = vec![
        ("y".to_string(), row_error(&y, &expected("y"), shape[1])),
        ("x".to_string(), row_error(&d_x, &expected("g.x"), shape[1])),
    ];
    for (got, given) in
        [(&d_inputs, &inputs), (&d_matrices, &matrices), (&d_shared, &shared_matrices)]
    {
        for (role, (shape, values)) in got {
            let reference = given[role].reference.as_ref().unwrap();
            errors.push((role.clone(), row_error(values, reference, *shape.last().unwrap())));
        }
    }
    let names = file.names();
    let compared = names.iter().filter(|n| n.starts_with("g.")).count();
    assert_eq!(errors.len(), compared + 1, "{family}: every gradient of the file is compared");
    Ok(errors)
}

#[test]
fn families_forward_and_backward() {
    let text = std::fs::read_to_string(format!("{FOLDER}cases.json")).unwrap();
    let file: Value = serde_json::from_str(&text).unwrap();
    let (cases, tolerance) =
        (file["cases"].as_array().unwrap(), file["tolerance"].as_f64().unwrap());
    assert_eq!(cases.len(), 34);
    let context = Context::new(&ContextDesc::new().num_threads(2)).unwrap();
    for case in cases {
        for (tensor, error) in run(&context, case).unwrap() {
            assert!(error <= tolerance, "{} {tensor}: row error {error:.2e}", case["family"]);
        }
    }
}

#[test]
fn exchanged_matrices_are_seen() {
    let text = std::fs::read_to_string(format!("{FOLDER}cases.json")).unwrap();
    let file: Value = serde_json::from_str(&text).unwrap();
    let named = |c: &&Value| c["family"] == "qwen3_moe";
    let mut case = file["cases"].as_array().unwrap().iter().find(named).unwrap().clone();
    case["weights"]["desc"]["gate_layout"] = sys::MOEC_UP_THEN_GATE.into();
    let context = Context::cpu().unwrap();
    assert!(run(&context, &case).unwrap()[0].1 > 0.1);
}
