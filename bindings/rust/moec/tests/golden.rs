// SPDX-License-Identifier: Apache-2.0
//! Every model family of tests/golden/cases.json: y and every gradient that its file has, per row.
//! Shown once to fail: gate and up matrices exchanged are off by more than 0.1.
#[macro_use]
mod support;
use moec::*;
use safetensors::SafeTensors;
use serde_json::Value;
use std::collections::BTreeMap;
use support::*;

fn view(argument: &Argument) -> Tensor<'_> {
    Tensor::new(&argument.values, &argument.shape)
}

fn weight_set(matrices: &Arguments) -> WeightSet<'_> {
    by_name!(
        WeightSet::new(),
        matrices,
        view,
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

/// (tensor, row error) of y, x and every parameter.
fn run(context: &Context, case: &Value) -> Result<Vec<(String, f64)>> {
    let family = case["family"].as_str().unwrap();
    let bytes = std::fs::read(golden(&format!("{family}.safetensors"))).unwrap();
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
        by_name!(call, &inputs, view, gate_weight, gate_bias, select_bias, shared_gate, output_bias)
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
    let file = cases();
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
    let file = cases();
    let named = |c: &&Value| c["family"] == "qwen3_moe";
    let mut case = file["cases"].as_array().unwrap().iter().find(named).unwrap().clone();
    case["weights"]["desc"]["gate_layout"] = sys::MOEC_UP_THEN_GATE.into();
    let context = Context::cpu().unwrap();
    assert!(run(&context, &case).unwrap()[0].1 > 0.1);
}
